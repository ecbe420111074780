package pgobjects

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pgconns"
)

// Fenced runs fn in a transaction that commits only if the fence holds. It returns the
// error of fn, or otherwise that of the transaction around it. The transaction may be idle
// for at most idle, or less if the session allows less.
func (t *Table) Fenced(ctx context.Context, fence *objects.Fence, idle time.Duration, fn func(tx pgx.Tx) error) (fnErr, err error) {
	find := t.setups.get
	if fence.Claim != nil {
		find = t.setups.claiming
	}
	found, err := find(ctx)
	if err != nil {
		return nil, t.setups.explain(err)
	}
	idle = min(idle, math.MaxInt32*time.Millisecond)
	if found.idleTimeout > 0 {
		idle = min(idle, found.idleTimeout)
	}
	began := time.Now()
	conn, err := t.conns.Pool.Acquire(ctx)
	if err != nil {
		return nil, t.setups.explain(err)
	}
	fnErr, err = t.fencedTx(ctx, conn, checkFence(found, fence), fence, idle, fn)
	if failed := cmp.Or(err, fnErr); pgconns.IsReadOnly(failed) {
		t.conns.NoteResult(ctx, t.conns.Pool, began, failed)
	}
	switch state := pgconns.SQLState(err); {
	case isRefusal(err), state == pgconns.StateIdleTimeout: // after the latter the server rolled back before the check arrived
		err = t.fencedOut(ctx, fence, err)
	case state == pgconns.StateSerializationFailure:
		err = fmt.Errorf("above READ COMMITTED, whatever was written since the transaction's first statement may end it, a renewal too; try again: %w", err)
	}
	return fnErr, t.setups.explain(err)
}

// fencedTx runs fn between BEGIN and the checked commit, and releases the connection
// before it returns, because the caller reads more afterwards and the pool may have no
// other free connection.
func (t *Table) fencedTx(ctx context.Context, conn *pgxpool.Conn, check pgconns.Statement, fence *objects.Fence, idle time.Duration, fn func(pgx.Tx) error) (fnErr, err error) {
	defer conn.Release() // closes it if it is still in a transaction
	// Sent as one simple query; it takes no snapshot, so fn may still choose an isolation
	// level.
	tx, err := conn.BeginTx(ctx, pgx.TxOptions{BeginQuery: fmt.Sprintf(
		"BEGIN; SET LOCAL idle_in_transaction_session_timeout = %d", idle.Milliseconds())})
	if err != nil {
		return nil, err
	}
	inTransaction := func() bool { return conn.Conn().PgConn().TxStatus() != 'I' }
	defer func() { // even if fn panics
		if inTransaction() {
			_ = tx.Rollback(ctx) // closes the connection if ctx has ended
			return
		}
		// The transaction has ended, but tx does not know that. Given a context that has
		// ended it sends nothing, and rejects further use by anyone who kept it.
		ended, cancel := context.WithCancel(ctx)
		cancel()
		_ = tx.Commit(ended)
	}()
	if err := fn(unendingTx{tx}); err != nil {
		return err, nil
	}
	if !inTransaction() {
		return nil, fmt.Errorf("%w: fn has ended the transaction, and what it wrote was not fenced", objects.ErrInvalid)
	}
	// One round trip: a holder that is paused has sent either all of this or nothing, so
	// its lock on the lease never waits for the client.
	fence.Yield(ctx)
	batch := &pgx.Batch{}
	pgconns.LimitLockWait(ctx, batch)
	check.Queue(batch, new(error))
	batch.Queue("COMMIT")
	return nil, conn.SendBatch(ctx, batch).Close()
}

// unendingTx is a transaction that fn can't commit or roll back.
type unendingTx struct{ pgx.Tx }

var errEnding = fmt.Errorf("tenure: fenced: %w: the transaction is committed or rolled back when fn returns", objects.ErrInvalid)

func (unendingTx) Commit(context.Context) error   { return errEnding }
func (unendingTx) Rollback(context.Context) error { return errEnding }

// FenceStatement returns a statement that fails unless the fence holds. Only if nothing has yet
// found out in which schema the tables are, it does.
func (t *Table) FenceStatement(fence *objects.Fence) (query string, args []any, err error) {
	n, err := t.placed()
	if err != nil {
		return "", nil, err
	}
	if fence.Claim != nil {
		return n.in(claimFence), claimArgs(fence.Claim), nil
	}
	return n.in(recordFence), recordArgs(fence), nil
}

func recordArgs(fence *objects.Fence) []any { return []any{fence.ID.Type, fence.ID.ID, fence.Record} }

// PutStatement returns a statement that replaces an object, or fails unless it is at a
// version. Of I/O it does what FenceStatement does.
func (t *Table) PutStatement(obj objects.Row, version int64) (query string, args []any, err error) {
	n, err := t.placed()
	if err != nil {
		return "", nil, err
	}
	return n.in(`
		WITH written AS (` + replace + ` AND {version} = $6::bigint RETURNING 1)
		SELECT CASE count(*) WHEN 1 THEN 1 ELSE ('` + objects.PutConflict + `' || count(*))::int END FROM written`),
		append(columns(obj), version), nil
}

// placed returns the names of the tables with their schemas, because the caller's transaction may
// have another search_path, and temporary tables.
func (t *Table) placed() (names, error) {
	if t.cfg.Schema != "" {
		return t.setups.names, nil
	}
	if found := t.setups.told.Load(); found != nil {
		return found.placed, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), placeAtMost)
	defer cancel()
	return t.Place(ctx)
}

// Place finds out in which schemas the tables are, unless that is known.
func (t *Table) Place(ctx context.Context) (names, error) {
	found, err := t.setups.get(ctx)
	if err != nil {
		return names{}, t.setups.explain(err)
	}
	return found.placed, nil
}

// checkFence checks that a fence holds, as the last statement of a transaction. If it does
// not hold, the check fails, and the transaction with it.
func checkFence(found *setup, fence *objects.Fence) pgconns.Statement {
	if fence.Claim != nil {
		return pgconns.Statement{SQL: found.claims.fence, Args: claimArgs(fence.Claim)}
	}
	return pgconns.Statement{SQL: found.sql.fence, Args: recordArgs(fence)}
}

// isRefusal reports whether a transaction failed because its fence did not hold.
func isRefusal(err error) bool { return err != nil && objects.IsFenceFailure(err) }

// fencedOut explains the failure of a transaction that the server has rolled back: it
// returns an [*objects.FencedOut] unless the fence still holds.
func (t *Table) fencedOut(ctx context.Context, fence *objects.Fence, cause error) error {
	if fence.Claim != nil {
		return t.claims.fencedOut(ctx, fence.Claim, cause)
	}
	now, err := t.Get(ctx, fence.ID)
	switch {
	case err == nil && bytes.Equal(now.Payload, fence.Record): // it idled too long
		return cause
	case err == nil:
		return &objects.FencedOut{Now: &now}
	case errors.Is(err, objects.ErrNotFound):
		return &objects.FencedOut{}
	case isRefusal(cause): // lost, but the current holder is unknown
		return &objects.FencedOut{Cause: err}
	default:
		return cause
	}
}
