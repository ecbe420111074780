package sqliteobjects

import (
	"context"
	"database/sql"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
)

const (
	claimList = `
		SELECT c.kind, c.id, c.session, c.token, 0
		FROM {claims} c JOIN {objects} o ON o.object_type = '` + objects.SessionType + `' AND o.id = c.session
		WHERE c.kind IN (SELECT value FROM json_each(?1))`
	claimForget = `
		DELETE FROM {claims} WHERE rowid IN (SELECT rowid FROM {claims} WHERE kind = ?1 AND session IS NULL LIMIT 1000)`
)

// OfKinds returns the rows of some kinds whose sessions have records, and the time, which is zero
// if there are none.
func (c *Claims) OfKinds(ctx context.Context, kinds []string, limit time.Duration) (claims []objects.Claim, at time.Time, err error) {
	claims, err = c.read(ctx, limit, c.sql.list, list(kinds))
	if err != nil || len(claims) == 0 {
		return nil, time.Time{}, err
	}
	return claims, time.Now(), nil
}

// Forget deletes the free rows of a kind.
func (c *Claims) Forget(ctx context.Context, kind string, limit time.Duration) error {
	return c.write(ctx, limit, func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, c.sql.forget, kind)
		return err
	})
}
