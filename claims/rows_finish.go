package claims

import (
	"context"
	"database/sql"
	"errors"

	"github.com/jackc/pgx/v5"
)

// FinishPostgres finishes rows, and what fn writes is written with it: the rows are freed and
// [RowsConfig.Done] is set, then fn is called, and all of it is one transaction of the store's pool. If one of the
// claims has ended, it returns a [*LostError] that lists them, fn is not called and nothing is
// written. What [tenure.PostgresStore.Fenced] says of fn holds here as well; fn may
// delete the rows. The rows are locked until it returns.
//
// It goes by the database alone, so it also finishes claims by value: those that were passed
// on, or are another session's. A func of [Rows.Do] finishes its row last, because others may
// take it from then on. It needs no session.
//
// If the connection breaks during COMMIT, it asks the database what became of the transaction; an
// error that says "unknown" is returned if that fails too. Then another call finds out: it is a [*LostError] if
// the first succeeded.
func (r *Rows) FinishPostgres(ctx context.Context, claims []Claim, fn func(tx pgx.Tx) error) error {
	return errors.ErrUnsupported
}

// FinishSQLite is FinishPostgres on SQLite. Nobody else can write to the database while fn runs, so it must be short beside the TTL.
func (r *Rows) FinishSQLite(ctx context.Context, claims []Claim, fn func(tx *sql.Tx) error) error {
	return errors.ErrUnsupported
}

// FinishTx is FinishPostgres in a transaction of db, by whatever driver. db must be the database of the
// store. If opts ask for more than READ COMMITTED, it is tried again when the rows were
// changed meanwhile.
func (r *Rows) FinishTx(ctx context.Context, claims []Claim, db *sql.DB, opts *sql.TxOptions, fn func(tx *sql.Tx) error) error {
	return errors.ErrUnsupported
}

// Finish is FinishPostgres or FinishSQLite with nothing to write but [RowsConfig.Done]. Calls at
// the same time share a statement, on any store.
func (r *Rows) Finish(ctx context.Context, claims ...Claim) error { return errors.ErrUnsupported }

// FinishStatement returns a statement that finishes a row or fails, and its transaction with it: for
// transactions by an ORM or another driver. [tenure.FenceError] makes its failure
// [tenure.ErrLost]. It should be the first statement, and the transaction short: it keeps the row locked until COMMIT. It
// does no I/O. The session learns of it when [Rows.Do] returns or the claim is released.
func (r *Rows) FinishStatement(c Claim) (query string, args []any, err error) {
	return "", nil, errors.ErrUnsupported
}
