package pgobjects

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure/internal/objects"
)

// Looks up the next session and kind in the index, and not at each row. Only what is counted is
// read one by one, in the index as well.
const claimCounts = `
	WITH RECURSIVE named AS (
		(SELECT session, kind FROM {claims} WHERE session IS NOT NULL ORDER BY session, kind LIMIT 1)
		UNION ALL
		SELECT next.session, next.kind FROM named CROSS JOIN LATERAL (
			SELECT c.session, c.kind FROM {claims} c WHERE (c.session, c.kind) > (named.session, named.kind)
			ORDER BY c.session, c.kind LIMIT 1) next)
	SELECT session, kind, (
		SELECT count(*) FROM (SELECT FROM {claims} c WHERE c.session = named.session AND c.kind = named.kind LIMIT $1) counted)
	FROM named`

// Counts returns how many rows name each session, by kind, and counts up to most of each. Sessions
// are in order, and so are the kinds of each.
func (c *Claims) Counts(ctx context.Context, most int, limit time.Duration) (counts []objects.ClaimCount, err error) {
	err = c.query(ctx, limit, func(s *claimStatements) string { return s.counts }, []any{most}, func(rows pgx.Rows) error {
		var n objects.ClaimCount
		err := rows.Scan(&n.Session, &n.Kind, &n.Claims)
		counts = append(counts, n)
		return err
	})
	return counts, err
}
