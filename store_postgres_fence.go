package tenure

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Fenced runs fn in a transaction whose writes, on whatever tables of this
// database, commit only if the term is still the lease's. Otherwise it returns
// [ErrLost] and nothing is written. An error or panic of fn rolls back and is
// passed on. After an error of the connection during the commit, the writes may
// have been committed or not, as after any commit, but never after another
// term began.
//
// Nothing is locked on the lease while fn runs, so that neither the renewals nor
// a takeover wait for it. Commit and Rollback are Fenced's: in fn they are
// errors. A transaction that idles for a minute, or for two TTLs if that is longer,
// is ended by the server, lest a holder that is paused in fn keeps its row locks.
//
// fn may choose another isolation level by its first statement. Above READ
// COMMITTED the server ends the transaction with a serialization failure (40001)
// if the lease was renewed since; then try again.
func (s *PostgresStore) Fenced(ctx context.Context, term *Term, fn func(tx pgx.Tx) error) error {
	if term == nil {
		return fmt.Errorf("tenure: fenced: %w: term is nil", ErrInvalid)
	}
	if term.local() {
		return pgx.BeginFunc(ctx, s.pool, fn)
	}
	if over := term.over(); errors.Is(over, ErrLost) {
		return over // known already; the check at the end decides for all others
	}
	fail := func(err error) error { return opError(ctx, "fenced by", term.key, s.explain(err)) }
	setup, err := s.setup(ctx)
	if err != nil {
		return fail(err)
	}
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return fail(err)
	}
	defer conn.Release() // closes it if it is still in a transaction
	// Sent as one simple query; no snapshot is taken, so that fn may still choose
	// an isolation level.
	tx, err := conn.BeginTx(ctx, pgx.TxOptions{BeginQuery: fmt.Sprintf(
		"BEGIN; SET LOCAL idle_in_transaction_session_timeout = %d", setup.fencedIdle(term).Milliseconds())})
	if err != nil {
		return fail(err)
	}
	// Where fn panics too. Where ctx has ended this closes the connection, to the
	// same effect.
	defer func() {
		if conn.Conn().PgConn().TxStatus() != 'I' {
			_ = tx.Rollback(ctx)
		}
	}()
	if err := fn(fencedTx{tx}); err != nil {
		return err
	}
	if conn.Conn().PgConn().TxStatus() == 'I' {
		return fmt.Errorf("tenure: fenced by %s: %w: fn has ended the transaction, and what it wrote was not fenced", term.key, ErrInvalid)
	}
	// One round trip: a holder that is paused has sent either nothing of it or all
	// of it, so that its lock on the lease never waits for its client.
	batch := &pgx.Batch{}
	s.queueFence(ctx, batch, term)
	batch.Queue("COMMIT")
	err = conn.SendBatch(ctx, batch).Close()
	switch sqlState(err) {
	case fencedOutState:
		_ = tx.Rollback(ctx)
		return s.fencedOut(ctx, term, err)
	case idleTimeoutState: // the server had rolled back before it heard of the check
		return s.fencedOut(ctx, term, err)
	case serializationFailureState:
		err = fmt.Errorf("above READ COMMITTED, a renewal since the transaction's first statement ends it; try again: %w", err)
	}
	if err != nil {
		return fail(err)
	}
	return nil
}

// fencedIdle returns how long a fenced transaction may idle: long enough for any
// fn that is alive, unless the session allows less anyway.
func (setup *postgresSetup) fencedIdle(term *Term) time.Duration {
	idle := max(2*term.trusted, time.Minute)
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

// Fence implements [Fencer].
func (s *PostgresStore) Fence(term *Term) (Store, error) { return &fencedPostgres{s, term}, nil }

type fencedPostgres struct {
	*PostgresStore
	term *Term
}

func (s *fencedPostgres) PutIf(ctx context.Context, obj Object, cond WriteCondition) (Object, error) {
	return s.putIf(ctx, obj, cond, s.term)
}

func (s *fencedPostgres) DeleteIf(ctx context.Context, key Key, version int64) error {
	return s.deleteIf(ctx, key, version, s.term)
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
	fencedOutState            = "22012" // the check divides by the number of records
	idleTimeoutState          = "25P03"
	serializationFailureState = "40001"
)

// fencedOut returns the error for a term whose transaction the server has rolled
// back: [ErrLost], and to whom, unless the record is still the term's.
func (s *PostgresStore) fencedOut(ctx context.Context, term *Term, cause error) error {
	now, err := s.Get(ctx, term.key)
	switch {
	case err == nil && bytes.Equal(now.Payload, term.payload), // it idled too long
		err != nil && !errors.Is(err, ErrNotFound) && sqlState(cause) != fencedOutState:
		return opError(ctx, "fenced by", term.key, s.explain(cause))
	}
	return term.fencedOut(now)
}
