package tenure

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
)

// A Guard is a right that a write can depend on: a [*Term], or a Claim of package claims. Only
// types of this module implement it.
type Guard interface {
	// Fence returns what a store has to check, without any I/O; nil if there is nothing to lose,
	// see [Exclusive]. No right is [ErrInvalid], and one that is known to be lost is [ErrLost].
	Fence() (*objects.Fence, error)
}

// Fence implements [Guard].
func (t *Term) Fence() (*objects.Fence, error) {
	switch {
	case t == nil || t.id == "":
		return nil, fmt.Errorf("%w: no term is given; see TermFromContext", ErrInvalid)
	case t.local():
		return nil, nil
	}
	if over := t.over(); errors.Is(over, ErrLost) { // for all others the store decides
		return nil, fmt.Errorf("term of %s: %w", t.key, over)
	}
	return &objects.Fence{
		ID:      objects.ID(t.key),
		Record:  t.payload,
		Idle:    max(2*t.trusted, time.Minute), // long enough for any func that is alive
		Yield:   t.giveWay,
		Refused: t.fencedOut,
	}, nil
}

// fencedOut ends a term whose record is not, or no longer, the lease's. Now is what stands in
// its place; nil: nothing. Why says why that is not known.
func (t *Term) fencedOut(now *objects.Row, why error) error {
	switch {
	case why != nil:
		t.end(ErrLost)
		return fmt.Errorf("%w (its record can't be read: %w)", ErrLost, why)
	case now == nil:
		return t.lostTo(&LostError{Key: t.key})
	default:
		return t.lostToRecord(objectOf(*now))
	}
}

// lostToRecord ends a term, and says which record stands in place of its own.
func (t *Term) lostToRecord(now Object) error {
	holding, _ := decodeHolding(now, 0) // one that can't be decoded is held by unknown
	return t.lostTo(&LostError{Key: t.key, To: &holding})
}

// fenceOf returns the fence of a guard; nil if there is nothing to lose.
func fenceOf(op string, guard Guard) (*objects.Fence, error) {
	if guard == nil {
		return nil, fmt.Errorf("tenure: %s: %w: no term or claim is given; see TermFromContext", op, ErrInvalid)
	}
	fence, err := guard.Fence()
	if err != nil {
		return nil, fmt.Errorf("tenure: %s: %w", op, err)
	}
	return fence, nil
}

// Fencer is implemented by stores that can make their writes depend on a right. All stores
// of this module do, except that of [Static].
type Fencer interface {
	// Fence returns the same store, whose PutIf and DeleteIf succeed only while the guard's
	// right stands: for a [*Term], while the object under [Term.Key], which they refuse to
	// write, has [Term.Record] as its payload. That is decided in the transaction of the
	// write, in such a way that no takeover can commit between the decision and the write.
	// Otherwise they return [ErrLost] and write nothing.
	//
	// No term, or one that is not of a [Lease], is [ErrInvalid]. A store that is fenced
	// already, and a guard that the store does not know, is [errors.ErrUnsupported]. For a term
	// of a single replica, which has no record, Fence returns the store as it is.
	Fence(guard Guard) (Store, error)
}

// Fence returns the same store, whose PutIf and DeleteIf write only while the term is still
// the lease's, or the claim stands: otherwise they return [ErrLost] and nothing is written,
// however long this process was paused before. The lease or the claim must be in that same
// store. A fenced write takes one round trip, like any other. Use Fence for code that is
// written against [Store]; for writes to tables of your own, use [PostgresStore.Fenced] or
// [SQLiteStore.Fenced].
//
// For a term of a single replica, which has no lease to lose, Fence returns the store as it
// is. A store that is not a [Fencer], or is fenced already, is [errors.ErrUnsupported], as is one
// that knows only terms, like that of natstenure, for a claim.
func Fence(store Store, guard Guard) (Store, error) {
	if objects.IsNil(store) {
		return nil, fmt.Errorf("tenure: fence: %w: store is nil", ErrInvalid)
	}
	if fence, err := fenceOf("fence", guard); err != nil {
		return nil, err
	} else if fence == nil {
		return store, nil
	}
	fencer, ok := store.(Fencer)
	if !ok {
		return nil, fmt.Errorf("tenure: fence: %w: %T is not a Fencer", errors.ErrUnsupported, store)
	}
	return fencer.Fence(guard)
}

// SQLStore is implemented by stores in a database that the transactions of other programs can
// share: [PostgresStore] and [SQLiteStore].
type SQLStore interface {
	Store

	// FenceStatement returns a statement that fails any transaction which ends with it,
	// unless the guard's right stands. [FenceError] recognises the failure on
	// Postgres and SQLite; on another database, the text of the error has to contain
	// "tenure: the term is over; records that stand: ".
	FenceStatement(guard Guard) (query string, args []any, err error)

	// PutStatement returns a statement that writes an object that exists, if it is at that
	// version, and that fails otherwise, and its transaction with it.
	PutStatement(obj Object, version int64) (query string, args []any, err error)
}

// FencedTx runs fn in a transaction of db that commits only if the term is still the lease's, or
// the claim stands. Otherwise it returns [ErrLost] and nothing is written. Use it with
// database/sql and any driver; db must be the database of the store, and [ErrInvalid] is
// returned if it turns out that it is not. opts are those of BeginTx, and may be nil. An error
// or panic of fn rolls back and is passed on. After an error of the connection during the
// commit, the writes may have been committed or not, as after any commit, but never after
// another term began.
//
// fn must use tx, must not end the transaction itself, and must return the first error of a
// statement. What precedes a COMMIT that fn sends as SQL is not fenced; FencedTx then returns an
// error. fn runs within a savepoint, so on Postgres the isolation level can be chosen only by opts.
// Above READ COMMITTED a database may end the transaction with a serialization failure because
// the lease was renewed since; then try again. On SQLite nobody can renew the lease or take it
// over from fn's first write until the end of the transaction.
func FencedTx(ctx context.Context, store SQLStore, guard Guard, db *sql.DB, opts *sql.TxOptions, fn func(tx *sql.Tx) error) error {
	switch {
	case objects.IsNil(store):
		return fmt.Errorf("tenure: fenced transaction: %w: store is nil", ErrInvalid)
	case db == nil:
		return fmt.Errorf("tenure: fenced transaction: %w: db is nil", ErrInvalid)
	case fn == nil:
		return fmt.Errorf("tenure: fenced transaction: %w: fn is nil", ErrInvalid)
	}
	fence, err := fenceOf("fenced transaction", guard)
	if err != nil {
		return err
	}
	if s, ok := store.(interface{ place(context.Context) error }); ok && fence != nil {
		// By ctx, and before there is a transaction: FenceStatement has no context.
		if err := s.place(ctx); err != nil {
			return fmt.Errorf("tenure: fenced transaction: %w", err)
		}
	}
	statement, args, err := store.FenceStatement(guard)
	if err != nil {
		return err
	}
	fnErr, err := objects.FencedTx(ctx, db, opts, statement, args, fn)
	if fnErr != nil {
		return fnErr
	}
	err = FenceError(err)
	if term, ok := guard.(*Term); ok && errors.Is(err, ErrLost) {
		err = term.refusedByStatement(ctx, store, err)
	}
	return fencedBy(ctx, fence, err)
}

// refusedByStatement says what became of a term whose statement has refused a transaction of a
// database that is said to have the lease.
func (t *Term) refusedByStatement(ctx context.Context, store Store, refusal error) error {
	obj, err := store.Get(ctx, t.key)
	switch {
	case err == nil && bytes.Equal(obj.Payload, t.payload):
		return fmt.Errorf("%w: the lease stands, so db is not the database that has it (%v)", ErrInvalid, refusal)
	case err == nil:
		return t.lostToRecord(obj)
	case errors.Is(err, ErrNotFound):
		return t.lostTo(&LostError{Key: t.key})
	}
	t.end(ErrLost) // nothing is known of who holds it now
	return refusal
}

// fencedBy says on which right a transaction depended that has failed.
func fencedBy(ctx context.Context, fence *objects.Fence, err error) error {
	if err == nil || fence == nil {
		return err
	}
	return opError(ctx, "fenced by", Key(fence.ID), err)
}

// FenceError returns the error of a transaction as [ErrLost] if a statement of
// [PostgresStore.FenceStatement] or [SQLiteStore.FenceStatement] has ended it, whatever the
// driver; it returns any other error, and nil, as it is. The driver's error stays reachable.
func FenceError(err error) error {
	if err == nil || !objects.IsFenceFailure(err) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrLost, err)
}

// A Gate keeps former holders away from a resource outside the database. Call Admit under the
// lock, or in the transaction, of the operation that it guards: a gate cannot stop a write that
// passed it and is still under way.
//
// A gate is for the tokens of one lease; those of two don't compare. The zero value is
// ready to use, and admits any term's token until it has seen one. It forgets what it has
// seen when its process ends: a resource that outlives the process keeps the token beside
// its data, as the example shows in SQL. A Gate is safe for concurrent use, and must not
// be copied after its first use.
type Gate struct {
	highest atomic.Int64
}

// Admit returns nil for a fencing token that is not below the highest seen, and [ErrLost]
// for one that is: its term is over, because a later one has been here. A token that is
// not positive is [ErrInvalid].
func (g *Gate) Admit(token int64) error {
	if token <= 0 {
		return fmt.Errorf("tenure: gate: %w: token %d is not positive", ErrInvalid, token)
	}
	for {
		highest := g.highest.Load()
		if token < highest {
			return fmt.Errorf("tenure: gate: %w: token %d is below %d", ErrLost, token, highest)
		}
		if g.highest.CompareAndSwap(highest, token) {
			return nil
		}
	}
}
