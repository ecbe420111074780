package pgobjects

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure/internal/objects"
)

// One plain SELECT has one snapshot, so a session without a record is gone: see [objects.Claim].
// A row for each claim would take a third longer.
const claimList = `
	SELECT c.kind, c.session, array_agg(c.id), array_agg(c.token), {now_us}
	FROM {claims} c JOIN {objects} o ON o.object_type = '` + objects.SessionType + `' AND o.id = c.session
	WHERE c.kind = ANY($1) GROUP BY c.kind, c.session`

const claimForget = `
	DELETE FROM {claims} WHERE ctid = ANY (ARRAY(
		SELECT ctid FROM {claims} WHERE kind = $1 AND session IS NULL LIMIT {prune_at_most} FOR UPDATE SKIP LOCKED))`

// OfKinds returns the rows of some kinds whose sessions have records, and the time by the server's
// clock, which is zero if there are none.
func (c *Claims) OfKinds(ctx context.Context, kinds []string, limit time.Duration) (claims []objects.Claim, at time.Time, err error) {
	var nowUS int64
	err = c.query(ctx, limit, func(s *claimStatements) string { return s.list }, []any{kinds}, func(rows pgx.Rows) error {
		var kind, session string
		var ids []string
		var tokens []int64
		if err := rows.Scan(&kind, &session, &ids, &tokens, &nowUS); err != nil {
			return err
		}
		for i, id := range ids {
			claims = append(claims, objects.Claim{Kind: kind, ID: id, Session: session, Token: tokens[i]})
		}
		return nil
	})
	if err != nil || len(claims) == 0 {
		return nil, time.Time{}, err
	}
	return claims, time.UnixMicro(nowUS), nil
}

// Forget deletes the free rows of a kind.
func (c *Claims) Forget(ctx context.Context, kind string, limit time.Duration) error {
	return c.query(ctx, limit, func(s *claimStatements) string { return s.forget }, []any{kind}, func(pgx.Rows) error { return nil })
}
