package pgobjects

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure/internal/objects"
)

// One plain SELECT has one snapshot, so a session without a record is gone: see [objects.Claim].
const claimList = `
	SELECT c.kind, c.id, c.session, c.token, false, {now_us}
	FROM {claims} c JOIN {objects} o ON o.object_type = '` + objects.SessionType + `' AND o.id = c.session
	WHERE c.kind = ANY($1)`

const claimForget = `
	DELETE FROM {claims} WHERE ctid = ANY (ARRAY(
		SELECT ctid FROM {claims} WHERE kind = $1 AND session IS NULL LIMIT {prune_at_most} FOR UPDATE SKIP LOCKED))`

// List returns the rows of some kinds whose sessions have records, and the time by the server's
// clock, which is zero if there are none.
func (c *Claims) List(ctx context.Context, kinds []string, limit time.Duration) (claims []objects.Claim, at time.Time, err error) {
	var nowUS int64
	err = c.query(ctx, limit, c.table.setups.names.in(claimList), []any{kinds}, func(rows pgx.Rows) error {
		var r objects.Claim
		err := rows.Scan(&r.Kind, &r.ID, &r.Session, &r.Token, &r.Gone, &nowUS)
		claims = append(claims, r)
		return err
	})
	if err != nil || len(claims) == 0 {
		return nil, time.Time{}, err
	}
	return claims, time.UnixMicro(nowUS), nil
}

// Forget deletes the free rows of a kind.
func (c *Claims) Forget(ctx context.Context, kind string, limit time.Duration) error {
	return c.query(ctx, limit, c.table.setups.names.in(claimForget), []any{kind}, func(pgx.Rows) error { return nil })
}
