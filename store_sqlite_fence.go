package tenure

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
)

// Fenced runs fn in a transaction whose writes, on whatever tables of this
// database, commit only if the term is still the lease's. Otherwise it returns
// [ErrLost], and fn is not called. An error or panic of fn rolls back and is
// passed on.
//
// The transaction holds the database's one write lock: nobody renews or takes
// over while fn runs, so it must be short beside the TTL. fn must use tx and not
// the store, must not end the transaction itself, and must return the first error
// of a statement: after some, SQLite has rolled back, and what follows would be
// written outside the transaction, unfenced.
func (s *SQLiteStore) Fenced(ctx context.Context, term *Term, fn func(tx *sql.Tx) error) error {
	if err := term.fences("fenced"); err != nil {
		return err
	}
	if fn == nil {
		return fmt.Errorf("tenure: fenced: %w: fn is nil", ErrInvalid)
	}
	if term.local() {
		return s.transact(ctx, "", fn)
	}
	var fnErr error
	err := s.transactChecked(ctx, func(tx *sql.Tx, check *sql.Stmt) error {
		if err := s.checkFence(ctx, tx, check, term); err != nil {
			return err
		}
		fnErr = fn(tx)
		return fnErr
	})
	if err == nil || fnErr != nil {
		return fnErr
	}
	return opError(ctx, "fenced by", term.key, sqliteError(err))
}

// FenceStatement returns a statement that fails unless the term is still the lease's:
// for programs that write by an ORM, or in transactions of their own, where
// [SQLiteStore.Fenced] does not fit. [FenceError] recognises the failure, after which the
// caller must roll back. It does no I/O.
//
// It takes the database's write lock, so it may stand anywhere in a transaction: from
// then on nobody can take the lease over until the transaction ends, and nobody can
// renew it either. In a transaction of its own it protects nothing.
//
// A term that is known to be over is [ErrLost]. One of a single replica, which has no
// lease to lose, gets a statement that always succeeds.
func (s *SQLiteStore) FenceStatement(term *Term) (query string, args []any, err error) {
	if err := term.fences("fence statement"); err != nil {
		return "", nil, err
	}
	if term.local() {
		return "SELECT 1", nil, nil
	}
	return s.sql.fenceStatement, []any{term.key.Type, term.key.ID, term.payload}, nil
}

// Fence implements [Fencer].
func (s *SQLiteStore) Fence(term *Term) (Store, error) {
	if err := term.fences("fence"); err != nil {
		return nil, err
	}
	if term.local() {
		return s, nil
	}
	return &fencedSQLite{s, term}, nil
}

type fencedSQLite struct {
	*SQLiteStore
	term *Term
}

func (s *fencedSQLite) Fence(*Term) (Store, error) { return nil, errFencedTwice }

func (s *fencedSQLite) PutIf(ctx context.Context, obj Object, cond WriteCondition) (Object, error) {
	return s.putIf(ctx, obj, cond, s.term)
}

func (s *fencedSQLite) DeleteIf(ctx context.Context, key Key, version int64) error {
	return s.deleteIf(ctx, key, version, s.term)
}

func (s *fencedSQLite) DeleteAndWake(ctx context.Context, key Key, version int64) error {
	return s.deleteAndWake(ctx, key, version, s.term)
}

// transactChecked runs fn in a transaction that has the write lock, and passes it the
// fence's check. That is prepared before the transaction, which may use the only
// connection.
func (s *SQLiteStore) transactChecked(ctx context.Context, fn func(*sql.Tx, *sql.Stmt) error) error {
	check, err := s.fenceCheck(ctx)
	if err != nil {
		return err
	}
	return s.transact(ctx, s.sql.lock, func(tx *sql.Tx) error { return fn(tx, tx.StmtContext(ctx, check)) })
}

// fenceCheck returns the fence's check. It is prepared once, because parsing it costs more
// than running it. Calls that need it at the same moment each prepare one, and the first
// is kept: a call must not wait for another whose context allows more time.
func (s *SQLiteStore) fenceCheck(ctx context.Context) (*sql.Stmt, error) {
	if check := s.check.Load(); check != nil {
		return check, nil
	}
	var check *sql.Stmt
	err := whenSQLiteFree(ctx, func() (err error) {
		check, err = s.db.PrepareContext(ctx, s.sql.fence)
		return err
	})
	if err != nil {
		return nil, err
	}
	if !s.check.CompareAndSwap(nil, check) {
		check.Close()
	}
	return s.check.Load(), nil
}

// checkFence returns [ErrLost] where a term's record does not stand any more. The
// transaction must have the write lock, or a takeover could come between.
func (s *SQLiteStore) checkFence(ctx context.Context, tx *sql.Tx, check *sql.Stmt, term *Term) error {
	var held int
	err := check.QueryRowContext(ctx, term.key.Type, term.key.ID, term.payload).Scan(&held)
	if !errors.Is(err, sql.ErrNoRows) {
		return err
	}
	now, err := s.get(ctx, tx, term.key)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return err
	}
	return term.fencedOut(now)
}
