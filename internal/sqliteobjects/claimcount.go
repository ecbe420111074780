package sqliteobjects

import (
	"context"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
)

// Looks up the next session and kind in the index, and not at each row: a comparison of pairs
// would walk all rows of a session. Only what is counted is read one by one, in the index as well.
const claimCounts = `
	WITH RECURSIVE named(session, kind) AS (
		SELECT * FROM (SELECT session, kind FROM {claims} WHERE session IS NOT NULL ORDER BY session, kind LIMIT 1)
		UNION ALL
		SELECT next.session, next.kind FROM named CROSS JOIN {claims} next ON next.rowid = coalesce(
			(SELECT c.rowid FROM {claims} c WHERE c.session = named.session AND c.kind > named.kind ORDER BY c.kind LIMIT 1),
			(SELECT c.rowid FROM {claims} c WHERE c.session > named.session ORDER BY c.session, c.kind LIMIT 1)))
	SELECT session, kind, (
		SELECT count(*) FROM (SELECT 1 FROM {claims} c WHERE c.session = named.session AND c.kind = named.kind LIMIT ?1))
	FROM named`

// Counts returns how many rows name each session, by kind, and counts up to most of each. Sessions
// are in order, and so are the kinds of each.
func (c *Claims) Counts(ctx context.Context, most int, limit time.Duration) (counts []objects.ClaimCount, err error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	rows, err := c.table.db.QueryContext(ctx, c.sql.counts, most)
	if err != nil {
		return nil, explain(err)
	}
	defer rows.Close()
	for rows.Next() {
		var n objects.ClaimCount
		if err := rows.Scan(&n.Session, &n.Kind, &n.Claims); err != nil {
			return nil, explain(err)
		}
		counts = append(counts, n)
	}
	return counts, explain(rows.Err())
}
