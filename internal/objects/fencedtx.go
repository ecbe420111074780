package objects

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
)

// FencedTx runs fn in a transaction of db that ends with a fence statement. It returns fn's
// error, or that of the transaction.
func FencedTx(ctx context.Context, db *sql.DB, opts *sql.TxOptions, fence string, args []any, fn func(tx *sql.Tx) error) (fnErr, err error) {
	tx, err := db.BeginTx(ctx, opts)
	if err != nil {
		return nil, err
	}
	defer tx.Rollback() // also after a panic
	if err := fn(tx); err != nil {
		return err, nil
	}
	_, err = tx.ExecContext(ctx, fence, args...) // the last statement, since it locks the record
	if errors.Is(err, sql.ErrTxDone) && ctx.Err() == nil {
		return nil, fmt.Errorf("fn has ended the transaction itself, so its writes were not fenced: %w", err)
	}
	if err == nil {
		err = tx.Commit()
	}
	return nil, err
}
