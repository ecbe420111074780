package tenure

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
)

// Fenced runs fn in a transaction whose writes, on whatever tables of this
// database, commit only if the term is still the lease's. Otherwise it returns
// [ErrLost] and nothing is written. An error or panic of fn rolls back and is
// passed on. After an error of the connection during the commit, the writes may
// have been committed or not, as after any commit, but never after another
// term began.
//
// Nothing is locked on the lease while fn runs, so that neither the renewals nor
// a takeover wait for it; only deferred constraints, which run with the commit,
// hold them up. A transaction that idles for a minute, or for two TTLs if that is longer, is ended
// by the server, lest a holder that is paused in fn keeps its row locks.
//
// fn must use tx and not the store, must not end the transaction itself (Commit
// and Rollback are errors), and should return the first error of a statement.
// It may choose another isolation level by its first statement. Above READ
// COMMITTED the server ends the transaction with a serialization failure (40001)
// if the lease was renewed since; then try again.
func (s *PostgresStore) Fenced(ctx context.Context, term *Term, fn func(tx pgx.Tx) error) error {
	if err := term.fences("fenced"); err != nil {
		return err
	}
	if fn == nil {
		return fmt.Errorf("tenure: fenced: %w: fn is nil", ErrInvalid)
	}
	if term.local() {
		return pgx.BeginFunc(ctx, s.pool, fn)
	}
	fail := func(err error) error { return opError(ctx, "fenced by", term.key, s.explain(err)) }
	setup, err := s.setup(ctx)
	if err != nil {
		return fail(err)
	}
	began := time.Now()
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return fail(err)
	}
	fnErr, err := s.fencedTx(ctx, conn, term, setup.fencedIdle(term), fn)
	if failed := cmp.Or(err, fnErr); sqlState(failed) == readOnlyState {
		s.heard(ctx, s.pool, began, failed)
	}
	switch sqlState(err) {
	case divisionByZeroState, idleTimeoutState: // at the latter the server had rolled back before it heard of the check
		err = s.fencedOut(ctx, term, err)
	case serializationFailureState:
		err = fmt.Errorf("above READ COMMITTED, whatever was written since the transaction's first statement may end it, a renewal too; try again: %w", err)
	}
	if err != nil {
		return fail(err)
	}
	return fnErr
}

// fencedTx runs fn between the begin and the checked commit, and gives the
// connection back: to read on, one of the pool's others need not be free. An
// error is of fn, or of what is around it.
func (s *PostgresStore) fencedTx(ctx context.Context, conn *pgxpool.Conn, term *Term, idle time.Duration, fn func(pgx.Tx) error) (fnErr, err error) {
	defer conn.Release() // closes it if it is still in a transaction
	// Sent as one simple query; no snapshot is taken, so that fn may still choose
	// an isolation level.
	tx, err := conn.BeginTx(ctx, pgx.TxOptions{BeginQuery: fmt.Sprintf(
		"BEGIN; SET LOCAL idle_in_transaction_session_timeout = %d", idle.Milliseconds())})
	if err != nil {
		return nil, err
	}
	inTransaction := func() bool { return conn.Conn().PgConn().TxStatus() != 'I' }
	defer func() { // also where fn panics
		if inTransaction() {
			_ = tx.Rollback(ctx) // where ctx has ended it closes the connection
			return
		}
		// The transaction has ended, and tx does not know. With a context that
		// has ended it sends nothing, and refuses whoever has kept it.
		ended, cancel := context.WithCancel(ctx)
		cancel()
		_ = tx.Commit(ended)
	}()
	if err := fn(fencedTx{tx}); err != nil {
		return err, nil
	}
	if !inTransaction() {
		return nil, fmt.Errorf("%w: fn has ended the transaction, and what it wrote was not fenced", ErrInvalid)
	}
	// One round trip: a holder that is paused has sent either nothing of it or all
	// of it, so that its lock on the lease never waits for its client.
	batch := &pgx.Batch{}
	s.queueFence(ctx, batch, term)
	batch.Queue("COMMIT")
	term.giveWay(ctx)
	return nil, conn.SendBatch(ctx, batch).Close()
}

// fencedIdle returns how long a fenced transaction may idle: long enough for any
// fn that is alive, unless the session allows less anyway.
func (setup *postgresSetup) fencedIdle(term *Term) time.Duration {
	idle := min(max(2*term.trusted, time.Minute), math.MaxInt32*time.Millisecond)
	if setup.idleTimeout > 0 {
		idle = min(idle, setup.idleTimeout)
	}
	return idle
}

// fencedTx is what fn gets: a transaction that it cannot end by itself.
type fencedTx struct{ pgx.Tx }

var errFencedTx = fmt.Errorf("tenure: fenced: %w: the transaction is committed or rolled back when fn returns", ErrInvalid)

func (fencedTx) Commit(context.Context) error   { return errFencedTx }
func (fencedTx) Rollback(context.Context) error { return errFencedTx }

// FenceStatement returns a statement that fails, and its transaction with it, unless the
// term is still the lease's: for programs that write by database/sql, an ORM or another
// driver than pgx, where [PostgresStore.Fenced] does not fit. [FenceError] recognises the
// failure. It does no I/O.
//
// It must be the last statement before COMMIT, in the same database. Any earlier, it
// protects as well, but its lock on the lease's record holds up the holder's own
// renewals until the transaction ends, so a long transaction ends its own term. In a
// transaction of its own it protects nothing. Above READ COMMITTED the server may end the
// transaction with a serialization failure (40001) because the lease was renewed since
// its first statement; then try again.
//
// A term that is known to be over is [ErrLost]. One of a single replica, which has no
// lease to lose, gets a statement that always succeeds.
func (s *PostgresStore) FenceStatement(term *Term) (query string, args []any, err error) {
	if err := term.fences("fence statement"); err != nil {
		return "", nil, err
	}
	if term.local() {
		return "SELECT 1", nil, nil
	}
	tables := s.tables
	if found := s.found.Load(); found != nil { // the caller's search_path may be another
		tables = newPostgresTables(found.schema, s.cfg.Table)
	}
	// The text is not cast before the rows are counted, as a constant would be.
	return tables.in(`
		SELECT CASE count(*) WHEN 1 THEN 1 ELSE ('` + fenceLost + `' || count(*))::int END FROM (
			SELECT 1 FROM {objects} WHERE object_type = $1 AND id = $2 AND payload = $3 FOR SHARE) held`),
		[]any{term.key.Type, term.key.ID, term.payload}, nil
}

// Fence implements [Fencer].
func (s *PostgresStore) Fence(term *Term) (Store, error) {
	if err := term.fences("fence"); err != nil {
		return nil, err
	}
	if term.local() {
		return s, nil
	}
	return &fencedPostgres{s, term}, nil
}

type fencedPostgres struct {
	*PostgresStore
	term *Term
}

func (s *fencedPostgres) Fence(*Term) (Store, error) { return nil, errFencedTwice }

func (s *fencedPostgres) PutIf(ctx context.Context, obj Object, cond WriteCondition) (Object, error) {
	return s.putIf(ctx, obj, cond, s.term)
}

func (s *fencedPostgres) DeleteIf(ctx context.Context, key Key, version int64) error {
	return s.deleteIf(ctx, key, version, s.term, false)
}

func (s *fencedPostgres) DeleteAndWake(ctx context.Context, key Key, version int64) error {
	return s.deleteIf(ctx, key, version, s.term, true)
}

// queueFence queues the check that a term's record still stands, as the last
// statement of its transaction. It fails, and the transaction with it, where
// the record does not.
func (s *PostgresStore) queueFence(ctx context.Context, batch *pgx.Batch, term *Term) {
	if limit := lockTimeout(ctx); limit.Valid {
		batch.Queue(s.sql.setLockTimeout, limit)
	}
	batch.Queue(s.sql.fence, term.key.Type, term.key.ID, term.payload)
}

const (
	divisionByZeroState       = "22012" // how a check fails, and its transaction with it
	idleTimeoutState          = "25P03"
	serializationFailureState = "40001"
)

// fencedOut returns what the failure of a transaction, which the server has
// rolled back, says of its term: [ErrLost], and to whom, unless the record is
// still the term's.
func (s *PostgresStore) fencedOut(ctx context.Context, term *Term, cause error) error {
	now, err := s.Get(ctx, term.key)
	switch {
	case err == nil && bytes.Equal(now.Payload, term.payload): // it idled too long
		return cause
	case err == nil || errors.Is(err, ErrNotFound):
		return term.fencedOut(now)
	case sqlState(cause) == divisionByZeroState: // lost, but nobody can say to whom
		term.end(ErrLost)
		return fmt.Errorf("%w (to whom, cannot be read: %w)", ErrLost, err)
	default:
		return cause
	}
}
