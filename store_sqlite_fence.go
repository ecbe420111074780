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
// over while fn runs, so it must be short beside the TTL.
func (s *SQLiteStore) Fenced(ctx context.Context, term *Term, fn func(tx *sql.Tx) error) error {
	if term == nil {
		return fmt.Errorf("tenure: fenced: %w: term is nil", ErrInvalid)
	}
	if over := term.over(); errors.Is(over, ErrLost) {
		return over
	}
	var fnErr error
	err := s.inTx(ctx, func(tx *sql.Tx) error {
		if !term.local() {
			// A caller's database may begin its transactions without the write
			// lock. Taken by the first statement, it keeps all from writing that
			// the check could miss.
			if _, err := tx.ExecContext(ctx, s.sql.lock); err != nil {
				return err
			}
			if err := s.checkFence(ctx, tx, term); err != nil {
				return err
			}
		}
		fnErr = fn(tx)
		return fnErr
	})
	if err == nil || fnErr != nil {
		return fnErr
	}
	if errors.Is(err, ErrLost) {
		return err
	}
	return opError(ctx, "fenced by", term.key, sqliteError(err))
}

// Fence implements [Fencer].
func (s *SQLiteStore) Fence(term *Term) (Store, error) { return &fencedSQLite{s, term}, nil }

type fencedSQLite struct {
	*SQLiteStore
	term *Term
}

func (s *fencedSQLite) PutIf(ctx context.Context, obj Object, cond WriteCondition) (Object, error) {
	return s.putIf(ctx, obj, cond, s.term)
}

func (s *fencedSQLite) DeleteIf(ctx context.Context, key Key, version int64) error {
	return s.deleteIf(ctx, key, version, s.term)
}

// checkFence returns [ErrLost] where a term's record does not stand any more. The
// transaction must have the write lock, or a takeover could come between.
func (s *SQLiteStore) checkFence(ctx context.Context, tx *sql.Tx, term *Term) error {
	var held int
	err := tx.QueryRowContext(ctx, s.sql.fence, term.key.Type, term.key.ID, term.payload).Scan(&held)
	if !errors.Is(err, sql.ErrNoRows) {
		return err
	}
	now, err := s.get(ctx, tx, term.key)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return err
	}
	return term.fencedOut(now)
}
