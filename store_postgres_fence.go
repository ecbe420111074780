package tenure

import (
	"context"
	"errors"
	"fmt"
	"strconv"

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
// a takeover wait for it. Commit and Rollback are Fenced's: in fn they are
// errors. A transaction that idles for longer than the holder's trust lasts is
// ended by the server, lest a holder that is paused in fn keeps its row locks.
//
// The transaction has the isolation level that is the session's default. Above
// READ COMMITTED the server ends it with a serialization failure (40001)
// if the lease was renewed since its first statement; then try again, or use
// READ COMMITTED.
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
	setup, err := s.setup(ctx)
	if err != nil {
		return opError(ctx, "fenced by", term.key, s.explain(err))
	}
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return opError(ctx, "fenced by", term.key, s.explain(err))
	}
	defer conn.Release() // closes it if it is still in a transaction

	tx, err := beginFenced(ctx, conn, term, setup)
	if err != nil {
		return opError(ctx, "fenced by", term.key, s.explain(err))
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
	batch.Queue(s.sql.setLockTimeout, lockTimeout(ctx))
	s.queueFence(batch, term)
	batch.Queue("COMMIT")
	err = conn.SendBatch(ctx, batch).Close()
	if err == nil {
		return nil
	}
	if isFencedOut(err) {
		_ = tx.Rollback(ctx)
		return s.fencedOut(ctx, term)
	}
	if sqlState(err) == "40001" {
		err = fmt.Errorf("above READ COMMITTED, a renewal since the transaction's first statement ends it; try again: %w", err)
	}
	return opError(ctx, "fenced by", term.key, s.explain(err))
}

// beginFenced begins a transaction in one round trip. The timeout is set by a
// utility statement, which takes no snapshot: fn may still choose an isolation
// level.
func beginFenced(ctx context.Context, conn *pgxpool.Conn, term *Term, setup *postgresSetup) (pgx.Tx, error) {
	idle := term.trusted.Milliseconds()
	if setup.idleTimeoutMS > 0 {
		idle = min(idle, setup.idleTimeoutMS)
	}
	batch := &pgx.Batch{}
	batch.BeginTx(pgx.TxOptions{})
	batch.Queue("SET LOCAL idle_in_transaction_session_timeout = " + strconv.FormatInt(max(1, idle), 10))
	results := conn.SendBatch(ctx, batch)
	err := results.Close()
	return results.Tx(), err
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
func (s *PostgresStore) queueFence(batch *pgx.Batch, term *Term) {
	batch.Queue(s.sql.fence, term.key.Type, term.key.ID, term.payload)
}

// isFencedOut recognises the failure of the check: it divides by zero.
func isFencedOut(err error) bool { return sqlState(err) == "22012" }

// fencedOut returns the error for a term whose check failed, and says to whom it
// was lost if that can be read.
func (s *PostgresStore) fencedOut(ctx context.Context, term *Term) error {
	now, err := s.Get(ctx, term.key)
	if err != nil && !errors.Is(err, ErrNotFound) {
		s.cfg.Logger.Debug("holder of the lost lease not read", "lease", term.key.String(), "error", err)
	}
	return term.fencedOut(now)
}
