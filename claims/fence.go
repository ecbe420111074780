package claims

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/reach"
)

// longestIdle is how long a fenced transaction on Postgres may idle.
const longestIdle = time.Minute

// FencedPostgres runs fn in a transaction of the store's pool that commits only if nobody else
// has claimed the key since, nor was it freed. Otherwise it returns [tenure.ErrLost] and nothing
// is written. What [tenure.PostgresStore.Fenced] says of fn holds here as well; nothing is
// locked while fn runs, and renewals wait for nothing. It needs no session: any process
// that was given the claim may write under it.
func FencedPostgres(ctx context.Context, store *tenure.PostgresStore, c Claim, fn func(tx pgx.Tx) error) error {
	fence, err := fenceFor(c, store != nil, fn != nil)
	if err != nil {
		return err
	}
	fnErr, err := reach.Postgres(store).Fenced(ctx, fence, longestIdle, fn)
	if err != nil {
		return fmt.Errorf("tenure: fenced by %s: %w", c, err)
	}
	return fnErr
}

// FencedSQLite is [FencedPostgres] on SQLite, where fn is called only if the claim stands. What
// [tenure.SQLiteStore.Fenced] says of fn holds here as well: nobody else can write to the
// database while it runs.
func FencedSQLite(ctx context.Context, store *tenure.SQLiteStore, c Claim, fn func(tx *sql.Tx) error) error {
	fence, err := fenceFor(c, store != nil, fn != nil)
	if err != nil {
		return err
	}
	var fnErr error
	err = reach.SQLite(store).Fenced(ctx, fence, func(tx *sql.Tx) error {
		fnErr = fn(tx)
		return fnErr
	})
	switch {
	case fnErr != nil:
		return fnErr
	case err != nil:
		return fmt.Errorf("tenure: fenced by %s: %w", c, err)
	}
	return nil
}

// FenceStatement returns a statement that fails, and its transaction with it, unless the claim
// stands: for transactions by database/sql, an ORM or another driver. [tenure.FenceError] makes
// its failure [tenure.ErrLost]. It must be the last statement before COMMIT; any earlier, it
// keeps the key from being freed until then. In a transaction of its own it protects nothing.
// It does no I/O, but for a Postgres store that has done nothing yet, as [tenure.PostgresStore.FenceStatement]
// says.
func FenceStatement(store tenure.Store, c Claim) (query string, args []any, err error) {
	fence, err := fenceFor(c, !objects.IsNil(store), true)
	if err != nil {
		return "", nil, err
	}
	switch s := store.(type) {
	case *tenure.PostgresStore:
		query, args, err = reach.Postgres(s).FenceStatement(fence)
	case *tenure.SQLiteStore:
		query, args = reach.SQLite(s).FenceStatement(fence)
	default:
		err = fmt.Errorf("%w: %T has no table of claims", errors.ErrUnsupported, store)
	}
	if err != nil {
		return "", nil, fmt.Errorf("tenure: fence statement: %w", err)
	}
	return query, args, nil
}

// FencedTx is [tenure.FencedTx] for a claim: it runs fn in a transaction of db, by whatever
// driver, that commits only if the claim stands. db must be the database of the store.
func FencedTx(ctx context.Context, store tenure.Store, c Claim, db *sql.DB, opts *sql.TxOptions, fn func(tx *sql.Tx) error) error {
	if _, err := fenceFor(c, !objects.IsNil(store) && db != nil, fn != nil); err != nil {
		return err
	}
	if s, ok := store.(*tenure.PostgresStore); ok { // by ctx, and before there is a transaction
		if _, err := reach.Postgres(s).Place(ctx); err != nil {
			return fmt.Errorf("tenure: fenced by %s: %w", c, err)
		}
	}
	fence, args, err := FenceStatement(store, c)
	if err != nil {
		return err
	}
	fnErr, err := objects.FencedTx(ctx, db, opts, fence, args, fn)
	if fnErr != nil {
		return fnErr
	}
	if err != nil {
		return fmt.Errorf("tenure: fenced by %s: %w", c, tenure.FenceError(err))
	}
	return nil
}

// Fence returns the same store, whose PutIf and DeleteIf write only while the claim stands, as
// [tenure.Fence] does for a term: otherwise they return [tenure.ErrLost] and nothing is written.
// It is for code that is written against [tenure.Store]. It does no I/O. A store that is fenced
// already, or has no table of claims, is [errors.ErrUnsupported].
func Fence(store tenure.Store, c Claim) (tenure.Store, error) {
	fence, err := fenceFor(c, !objects.IsNil(store), true)
	if err != nil {
		return nil, err
	}
	var fenced any
	switch store.(type) {
	case *tenure.PostgresStore:
		fenced, err = reach.FencePostgres(store, fence)
	case *tenure.SQLiteStore:
		fenced, err = reach.FenceSQLite(store, fence)
	default:
		err = fmt.Errorf("tenure: fence: %w: %T has no table of claims", errors.ErrUnsupported, store)
	}
	if err != nil {
		return nil, err
	}
	return fenced.(tenure.Store), nil
}

func fenceFor(c Claim, store, fn bool) (*objects.Fence, error) {
	err := errors.Join(c.Key.Validate(), objects.ValidText("session", c.Session))
	switch {
	case !store:
		err = fmt.Errorf("%w: store or db is nil", tenure.ErrInvalid)
	case !fn:
		err = fmt.Errorf("%w: fn is nil", tenure.ErrInvalid)
	case c.Session == "" || c.Token <= 0:
		err = fmt.Errorf("%w: no claim is given", tenure.ErrInvalid)
	}
	if err != nil {
		return nil, fmt.Errorf("tenure: fenced by a claim: %w", err)
	}
	row := c.row()
	return &objects.Fence{ID: objects.ID(c.Key), Claim: &row, Yield: func(context.Context) {}}, nil
}
