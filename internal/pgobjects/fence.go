package pgobjects

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pgconns"
)

// Fenced runs fn in a transaction that commits only if the fence holds. It returns the error of fn,
// or else that of the transaction around it. The session may allow the transaction to idle for less
// time than the fence does.
func (t *Table) Fenced(ctx context.Context, fence *objects.Fence, fn func(tx pgx.Tx) error) (fnErr, err error) {
	limited, cancel := objects.Limited(ctx)
	defer cancel()
	find := t.setups.get
	if fence.OfKey() {
		find = t.setups.claiming
	}
	found, err := find(limited)
	if err != nil {
		return nil, t.setups.explain(err)
	}
	check, err := t.checkOf(limited, found, fence)
	if err != nil {
		return nil, err
	}
	idle := min(fence.Idle, math.MaxInt32*time.Millisecond)
	if found.idleTimeout > 0 {
		idle = min(idle, found.idleTimeout)
	}
	conn, err := t.conns.Pool.Acquire(ctx)
	if err != nil {
		return nil, t.setups.explain(err)
	}
	fnErr, err = fencedTx(ctx, conn, check.Statement, fence, idle, fn)
	check.renewed(ctx, err) // for the next call: fn was called
	t.conns.LeaveReadOnly(err, fnErr)
	switch state := pgconns.SQLState(err); {
	case state == pgconns.StateLockNotAvailable && fence.Claim == nil:
		limited, cancel := objects.Limited(ctx)
		defer cancel()
		err = t.explainLocked(limited, fence.ID, err)
	case isRefusal(err), state == pgconns.StateIdleTimeout: // after the latter the server rolled back before the check arrived
		err = t.fencedOut(ctx, fence, err)
	case state == pgconns.StateSerializationFailure:
		err = fmt.Errorf("above READ COMMITTED, whatever was written since the transaction's first statement may end it, a renewal too; try again: %w", err)
	}
	return fnErr, t.setups.explain(err)
}

// fencedTx runs fn in a transaction that ends with the check of the fence. It releases the
// connection before it returns, because the caller reads more afterwards and the pool may have
// no other free connection.
func fencedTx(ctx context.Context, conn *pgxpool.Conn, check pgconns.Statement, fence *objects.Fence, idle time.Duration, fn func(pgx.Tx) error) (fnErr, err error) {
	fnErr, _, err = funcTx(ctx, conn, idle, nil, fn, func(batch *pgx.Batch) {
		fence.Yield(ctx)
		pgconns.LimitLockWait(ctx, batch)
		check.Queue(batch, new(error))
	})
	return fnErr, err
}

// A setting that is local to a transaction ends with it, even if another transaction follows at
// once (COMMIT AND CHAIN, or COMMIT; BEGIN). The mark therefore shows whether the transaction is
// still the one in which fn began. Setting it takes no snapshot, so fn may still choose an
// isolation level.
const (
	markTx     = `SET LOCAL tenure.transaction = 'begun'`
	checkTx    = `SELECT CASE mark WHEN 'begun' THEN 1 ELSE ('` + txEnded + `' || mark)::int END FROM coalesce(current_setting('tenure.transaction', true), '') mark`
	txEnded    = "tenure: the transaction in which fn began has ended"
	errTxEnded = "fn has ended the transaction itself, so what it wrote before and after that was not one write (after PREPARE TRANSACTION, its locks stay until it is ended)"
)

// funcTx runs a caller's func in a transaction: after what first does, and before the statements
// that last adds, which are sent with COMMIT; either may be nil. It returns the error of fn, or
// else that of the transaction, and whether COMMIT was sent. It releases the connection.
func funcTx(ctx context.Context, conn *pgxpool.Conn, idle time.Duration, first func(context.Context, pgx.Tx) error, fn func(pgx.Tx) error, last func(*pgx.Batch)) (fnErr error, sent bool, err error) {
	defer conn.Release() // closes it if it is still in a transaction
	// Sent as one simple query.
	limited, cancel := objects.Limited(ctx) // not for fn, nor for what its COMMIT entails
	defer cancel()
	tx, err := conn.BeginTx(limited, pgx.TxOptions{BeginQuery: fmt.Sprintf(
		"BEGIN; SET LOCAL idle_in_transaction_session_timeout = %d; %s", idle.Milliseconds(), markTx)})
	if err != nil {
		return nil, false, err
	}
	status := func() byte { return conn.Conn().PgConn().TxStatus() }
	defer func() { // even if fn panics
		if status() != 'I' {
			_ = tx.Rollback(ctx) // closes the connection if ctx has ended
			return
		}
		// The transaction has ended, but tx does not know that. Given a context that has
		// ended, it sends nothing and rejects further use by code that kept it.
		ended, cancel := context.WithCancel(ctx)
		cancel()
		_ = tx.Commit(ended)
	}()
	if first != nil {
		if err := first(limited, tx); err != nil {
			return nil, false, err
		}
	}
	if err := fn(unendingTx{tx}); err != nil {
		return err, false, nil
	}
	switch status() {
	case 'I':
		return nil, false, fmt.Errorf("%w: %s", objects.ErrInvalid, errTxEnded)
	case 'E':
		return nil, false, fmt.Errorf("fn has not returned the error of a statement: %w", pgx.ErrTxCommitRollback)
	}
	// One round trip: a fence, which is the last statement, locks the record or row only until COMMIT,
	// even if the process is paused. FinishWith locks its rows before fn instead; there the server's limit
	// on idle transactions ends the transaction of a paused process.
	batch := &pgx.Batch{}
	batch.Queue(checkTx)
	if last != nil {
		last(batch)
	}
	batch.Queue("COMMIT")
	err = conn.SendBatch(ctx, batch).Close()
	if err != nil && strings.Contains(err.Error(), txEnded) {
		err = fmt.Errorf("%w: %s: %w", objects.ErrInvalid, errTxEnded, err)
	}
	return nil, true, err
}

// unendingTx is a transaction that fn can't commit or roll back.
type unendingTx struct{ pgx.Tx }

var errEnding = fmt.Errorf("tenure: fenced: %w: the transaction is committed or rolled back when fn returns", objects.ErrInvalid)

func (unendingTx) Commit(context.Context) error   { return errEnding }
func (unendingTx) Rollback(context.Context) error { return errEnding }

// FenceStatement returns a statement that fails unless the fence holds; for a nil fence it always
// succeeds. If it is not yet known in which schemas the tables are, FenceStatement finds out.
func (t *Table) FenceStatement(fence *objects.Fence) (query string, args []any, err error) {
	if fence == nil {
		return "SELECT 1", nil, nil
	}
	if fence.OfRow() {
		r, err := t.rows.Of(fence.Claim)
		if err != nil {
			return "", nil, err
		}
		return r.FenceStatement(fence.Claim)
	}
	n, err := t.placed()
	if err != nil {
		return "", nil, err
	}
	query, args = fence.Statement(recordFence, claimFence, recordFenceArgs)
	return n.in(query), args, nil
}

// PutStatement returns a statement that replaces an object, and fails unless the object is at a
// version. It does I/O only where FenceStatement does.
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
	ctx, cancel := context.WithTimeout(context.Background(), lookAtMost)
	defer cancel()
	return t.place(ctx)
}

// Place finds out in which schemas the tables of a fence's statement are, unless that is known already.
func (t *Table) Place(ctx context.Context, fence *objects.Fence) error {
	if fence.OfRow() {
		r, err := t.rows.Of(fence.Claim)
		if err == nil {
			_, err = r.place(ctx)
		}
		return err
	}
	_, err := t.place(ctx)
	return err
}

func (t *Table) place(ctx context.Context) (names, error) {
	found, err := t.setups.get(ctx)
	if err != nil {
		return names{}, t.setups.explain(err)
	}
	return found.placed, nil
}

// check checks that a fence holds, as the last statement of a transaction. If it does not hold, the
// statement fails, and the transaction with it.
type check struct {
	pgconns.Statement
	rows  *Rows // of the fence's claim; nil: it is in a table of the library
	setup *rowSetup
}

func (t *Table) checkOf(ctx context.Context, found *setup, fence *objects.Fence) (*check, error) {
	if !fence.OfRow() {
		text, args := fence.Statement(recordFence, claimFence, recordFenceArgs)
		return &check{Statement: pgconns.Statement{SQL: found.in(text), Args: args}}, nil
	}
	r, err := t.rows.Of(fence.Claim)
	if err != nil {
		return nil, err
	}
	s, err := r.ready(ctx, lookAtMost)
	if err != nil {
		return nil, err
	}
	return &check{pgconns.Statement{SQL: s.texts.In(rowFence), Args: rowArgs(fence.Claim)}, r, s}, nil
}

// renewed reports whether the statement has been made anew, because err shows that the user's table has
// changed since it was checked. The transaction, which has changed nothing, can be sent again.
func (c *check) renewed(ctx context.Context, err error) bool {
	if c.rows == nil {
		return false
	}
	s := c.rows.changed(ctx, c.setup, lookAtMost, err)
	if s == nil {
		return false
	}
	c.setup, c.SQL = s, s.texts.In(rowFence)
	return true
}

// isRefusal reports whether a transaction failed because its fence did not hold, or does not hold on this server.
func isRefusal(err error) bool { return err != nil && (objects.IsFenceFailure(err) || isMoved(err)) }

// fencedOut explains the failure of a transaction that the server has rolled back: it
// returns the fence's own error unless the fence still holds.
func (t *Table) fencedOut(ctx context.Context, fence *objects.Fence, cause error) error {
	if isMoved(cause) {
		return t.Moved(ctx, fence, cause)
	}
	now, stands, err := t.read(ctx, fence)
	switch {
	case err == nil && stands && !isRefusal(cause): // it idled too long
		return cause
	case err == nil && stands: // it was renewed here since
		return fmt.Errorf("%w (%w)", objects.ErrMoved, cause)
	case err == nil && t.isElsewhere(ctx, fence): // or may be
		return t.Moved(ctx, fence, cause)
	case err == nil:
		return fence.Refused(now, nil)
	case isRefusal(cause): // lost, but nothing is known of the current holder
		return fence.Refused(nil, err)
	default:
		return cause
	}
}

// Moved returns the error of a fence whose right was not renewed on this server. It has that done first, if this process
// renews the right, so that the next attempt succeeds.
func (t *Table) Moved(ctx context.Context, fence *objects.Fence, cause error) error {
	return fmt.Errorf("%w (%w)", objects.ErrMoved, cmp.Or(t.Renew(ctx, fence), cause))
}

// Renew renews what a fence depends on, if this process does that.
func (t *Table) Renew(ctx context.Context, fence *objects.Fence) (err error) {
	if fence.Claim != nil {
		_, err = t.renewals.Renew(ctx, fence.Claim.Session)
	} else {
		_, err = fence.Renew(ctx)
	}
	return err
}

// isElsewhere reports whether the table is now on another server than at the last renewal of the fence's lease. If the record is
// missing there, its holder may write it again.
func (t *Table) isElsewhere(ctx context.Context, fence *objects.Fence) bool {
	if fence.Server == nil || fence.Server() == "" {
		return false
	}
	on, err := t.Lineage(ctx)
	return err != nil || on.Server != fence.Server()
}

// stands reports whether the row of a claim carries it, and its session has a record.
func (t *Table) stands(ctx context.Context, c *objects.Claim) (bool, error) {
	row, _, err := t.rowOf(ctx, c)
	if err != nil || row.Session != c.Session || row.Token != c.Token {
		return false, err
	}
	_, err = t.Get(objects.WithLeaseCall(ctx), objects.ID{Type: objects.SessionType, ID: c.Session})
	if errors.Is(err, objects.ErrNotFound) {
		return false, nil
	}
	return err == nil, err
}

// rowOf returns the row of a claim as it is.
func (t *Table) rowOf(ctx context.Context, c *objects.Claim) (row objects.Claim, exists bool, err error) {
	var in objects.ClaimStore = &t.claims
	if c.Row {
		if in, err = t.rows.Of(c); err != nil {
			return row, false, err
		}
	}
	rows, err := in.Look(ctx, c.Kind, []string{c.ID}, time.Minute)
	if err != nil || len(rows) != 1 {
		return row, false, err
	}
	return rows[0], true, nil
}

// read reports whether what a fence depends on stands, and returns the current record.
func (t *Table) read(ctx context.Context, fence *objects.Fence) (now *objects.Row, stands bool, err error) {
	if fence.Claim != nil {
		stands, err := t.stands(ctx, fence.Claim)
		return nil, stands, err
	}
	switch now, err := t.Get(objects.WithLeaseCall(ctx), fence.ID); {
	case err == nil:
		return &now, bytes.Equal(now.Payload, fence.Record), nil
	case errors.Is(err, objects.ErrNotFound):
		return nil, false, nil
	default:
		return nil, false, err
	}
}
