package objects

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
)

// FencedTx runs fn in a transaction of db that ends with a fence statement. It returns fn's error
// or the transaction's.
func FencedTx(ctx context.Context, db *sql.DB, opts *sql.TxOptions, fence string, args []any, fn func(tx *sql.Tx) error) (fnErr, err error) {
	tx, err := db.BeginTx(ctx, opts)
	if err != nil {
		return nil, err
	}
	defer tx.Rollback() // also after a panic
	if fnErr, err := InOneTx(ctx, tx, fn); fnErr != nil || err != nil {
		return fnErr, err
	}
	limited, cancel := Limited(ctx)
	defer cancel()
	if _, err := tx.ExecContext(limited, fence, args...); err != nil { // the last statement, since it locks the record
		return nil, err
	}
	return nil, tx.Commit()
}

// InOneTx runs fn in tx, and returns its error, or an error that says that fn has ended the
// transaction. Drivers do not notice that if fn sends COMMIT or ROLLBACK as SQL. A savepoint ends
// with its transaction, even if another transaction follows at once.
func InOneTx(ctx context.Context, tx *sql.Tx, fn func(tx *sql.Tx) error) (fnErr, err error) {
	if _, err := tx.ExecContext(ctx, "SAVEPOINT tenure_func"); err != nil {
		return nil, err
	}
	if err := fn(tx); err != nil {
		return err, nil
	}
	_, err = tx.ExecContext(ctx, "RELEASE SAVEPOINT tenure_func")
	if err != nil && ctx.Err() == nil && isTxGone(err) {
		err = fmt.Errorf("fn has ended the transaction itself, or has not returned the error of a statement, so its writes were not fenced: %w", err)
	}
	return nil, err
}

// isTxGone reports whether database/sql or the database says that the savepoint, or its transaction, is gone or has failed. Other errors are
// those of the connection. Drivers have no code in common for it, and each database names what it misses.
func isTxGone(err error) bool {
	text := strings.ToLower(err.Error())
	return errors.Is(err, sql.ErrTxDone) || strings.Contains(text, "savepoint") || strings.Contains(text, "transaction is aborted")
}
