package tenure

import (
	"bytes"
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
)

// A Guard is a right that a write can depend on: a [*Term], or a Claim of package claims. Only
// types of this module implement it.
type Guard interface {
	// Fence returns what a store has to check. It does no I/O. The fence is nil if there is no
	// lease to lose: see [Traits]. The error is [ErrInvalid] if there is no right, and
	// [ErrLost] if the right is known to be lost.
	Fence() (*objects.Fence, error)
}

// Fence implements [Guard].
func (t *Term) Fence() (*objects.Fence, error) {
	switch {
	case t == nil || t.id == "":
		return nil, fmt.Errorf("%w: no term or claim is given; see TermFromContext", ErrInvalid)
	case t.local():
		return nil, nil
	}
	if over := t.over(); errors.Is(over, ErrLost) { // after any other cause the record may still stand, and the store decides
		return nil, fmt.Errorf("term of %s: %w", t.key, over)
	}
	return &objects.Fence{
		ID:     objects.ID(t.key),
		Record: t.payload,
		Server: func() string { return t.at.vouchedBy().Server },
		Renew:  t.renewNow,
		OnFailover: func(compare func(context.Context, objects.Lineage) error) {
			t.comparison.Store((*comparison)(&compare))
		},
		Idle:    max(2*t.trusted, time.Minute), // long enough for any func that is alive
		Yield:   t.giveWay,
		Refused: t.fencedOut,
	}, nil
}

// fencedOut ends a term whose record is not, or no longer, the lease's. Current is the record that
// stands in its place; nil: none. ReadErr is why that record could not be read.
func (t *Term) fencedOut(current *objects.Row, readErr error) error {
	switch {
	case readErr != nil:
		t.end(ErrLost)
		return fmt.Errorf("%w (its record can't be read: %w)", ErrLost, readErr)
	case current == nil:
		return t.lostTo(&lostError{key: t.key})
	default:
		return t.lostToRecord(objectOf(*current))
	}
}

// lostToRecord ends a term, and returns an error with the record that stands in place of its own.
func (t *Term) lostToRecord(now Object) error {
	holding, _ := decodeHolding(now, 0) // one that can't be decoded is held by unknown
	return t.lostTo(&lostError{key: t.key, to: &holding})
}

// guardOf returns the guard, or the right for which the func runs that ctx comes from.
func guardOf(ctx context.Context, guard Guard) Guard {
	if guard == nil {
		guard, _ = ctx.Value(objects.Right).(Guard)
	}
	return guard
}

// fenceOf returns the fence of a guard; nil if there is no lease to lose.
func fenceOf(op string, guard Guard) (*objects.Fence, error) {
	if objects.IsNil(guard) {
		return nil, fmt.Errorf("tenure: %s: %w: no term or claim is given; see TermFromContext", op, ErrInvalid)
	}
	fence, err := guard.Fence()
	if err != nil {
		return nil, fmt.Errorf("tenure: %s: %w", op, err)
	}
	return fence, nil
}

// Fencer is implemented by stores that can make their writes depend on a right: all stores of
// this module except [Static]. The database itself refuses the write; the statement recordFence of
// internal/pgobjects and the query of that name in internal/sqliteobjects say by what.
type Fencer interface {
	// Fence returns the same store, except that its PutIf and DeleteIf succeed only while the
	// guard's right stands; otherwise they return [ErrLost] and write nothing. A [*Term]'s
	// right stands while the object under [Term.Key] has [Term.Record] as its payload; the
	// fenced store refuses to write that object. The transaction of the write checks this, in
	// such a way that no takeover can commit between the check and the write. In a store
	// that has lineages, they return [ErrMoved] on a server on which the right was not renewed yet.
	//
	// A nil term, or one that comes neither from a [Lease] nor from a [Coordinator], is
	// [ErrInvalid]. A store that is already fenced, or that does not know the guard, returns
	// [errors.ErrUnsupported]. For a term of a single replica, which has no record, Fence
	// returns the store unchanged.
	Fence(guard Guard) (Store, error)
}

// Fence returns the same store, except that its PutIf and DeleteIf write only while the term is
// still the lease's, or the claim stands. Otherwise they return [ErrLost] and write nothing,
// however long this process was paused before. They return [ErrMoved], and write nothing, if the database has failed
// over, or was restarted, and the term was not renewed there yet: retry. A term that a [Coordinator] holds is renewed
// first. The lease or the claim must be in that same store. A fenced write takes one round trip, like any other. Use Fence for code that is
// written against [Store]; for writes to tables of your own, use [PostgresStore.Fenced] or
// [SQLiteStore.Fenced].
//
// For a term of a single replica, which has no lease to lose, Fence returns the store unchanged.
// The error is [errors.ErrUnsupported] if the store is not a [Fencer], if it is already fenced,
// if the guard is a claim and the store knows only terms, as natstenure's does, or if the store
// can't make a write depend on another object, as natstenure's can't in a key-value bucket.
func Fence(store Store, guard Guard) (Store, error) {
	if objects.IsNil(store) {
		return nil, fmt.Errorf("tenure: fence: %w: store is nil", ErrInvalid)
	}
	if fence, err := fenceOf("fence", guard); err != nil {
		return nil, err
	} else if fence == nil {
		return store, nil
	}
	fencer, ok := objects.As[Fencer](store)
	if !ok {
		return nil, fmt.Errorf("tenure: fence: %w: %T is not a Fencer, and has no method Unwrap() tenure.Store that returns one", errors.ErrUnsupported, store)
	}
	return fencer.Fence(guard)
}

// SQLStore is implemented by stores whose statements a program can run in its own transactions:
// [PostgresStore] and [SQLiteStore].
type SQLStore interface {
	Store

	// FenceStatement returns a statement that makes its transaction fail, unless the guard's right stands. Use it where
	// Fenced does not fit: with database/sql, an ORM, as in the [example for GORM], or a driver other than pgx.
	// [FenceError] recognises the failure, after which the caller must roll back; on a database other than Postgres and
	// SQLite, the text of the error has to contain "tenure: the term is over; records that stand: ".
	//
	// On Postgres it must be the last statement before COMMIT, in the same database. An earlier one protects as
	// well, but its lock on the lease's record delays the holder's own renewals until the transaction
	// ends, so a long transaction ends its own term. PREPARE TRANSACTION must not follow it: no process could renew the
	// lease or take it over until the prepared transaction has ended, even after a restart of the server. Above READ
	// COMMITTED the server may end the transaction with a serialization failure because the lease was renewed after its
	// first statement; then try again. The statement names the table's schema. If [PostgresConfig.Schema] is empty and the
	// store has not been used yet, FenceStatement looks the schema up, for up to 5 s; otherwise it does no I/O.
	//
	// On SQLite it may stand anywhere in the transaction. It takes the database's write lock: from then on, until
	// the transaction ends, no process can take the lease over or renew it.
	//
	// In a transaction of its own the statement protects nothing. A term that is known to be over is [ErrLost]. For the
	// term of a single replica, which has no lease to lose, the statement always succeeds.
	//
	// [example for GORM]: https://github.com/tenurelib/tenure/blob/main/examples/integrations/gorm_test.go
	FenceStatement(guard Guard) (query string, args []any, err error)

	// PutStatement returns a statement that writes an existing object if it is at that version. Otherwise the statement
	// fails, and its transaction, which must be rolled back, with it. It is for a transaction that also writes other tables
	// of the same database, with any driver. It does I/O only where FenceStatement does. It neither creates an object nor
	// wakes its watches.
	PutStatement(obj Object, version int64) (query string, args []any, err error)
}

// FencedTx runs fn in a transaction of db that commits only if the term is still the lease's, or
// the claim stands. A nil guard is the term or the claim for which the func runs that ctx comes from. The right must be in
// this store, also that of ctx. If it does not stand, FencedTx returns [ErrLost] and nothing is written. After a failover or a
// restart of the database it returns [ErrMoved] and nothing is written, unless the term was renewed there: retry.
//
// Use it with database/sql and any driver. db must be the store's database; FencedTx returns [ErrInvalid] if
// it finds that it is not. opts are those of BeginTx, and may be nil; with the DB of a [SQLiteStore],
// FencedTx is [SQLiteStore.Fenced], and ignores opts unless they say ReadOnly. An error or panic of fn rolls back and is
// passed on. If the connection fails during the commit, the writes may have been committed or not, as with any commit, but
// never after another term began.
//
// fn must use tx, must not end the transaction itself, and must return the first error of a
// statement. If fn sends COMMIT as SQL, the writes before it are not fenced, and FencedTx returns
// an error. fn runs within a savepoint, so on Postgres only opts can choose the isolation level.
// Above READ COMMITTED a database may end the transaction with a serialization failure because
// the lease was renewed in the meantime; then try again. On SQLite, from fn's first write, or from
// its beginning with the store's own DB, until the transaction ends, no process can renew the lease or take it over.
func FencedTx(ctx context.Context, store SQLStore, guard Guard, db *sql.DB, opts *sql.TxOptions, fn func(tx *sql.Tx) error) error {
	switch {
	case objects.IsNil(store):
		return fmt.Errorf("tenure: fenced transaction: %w: store is nil", ErrInvalid)
	case db == nil:
		return fmt.Errorf("tenure: fenced transaction: %w: db is nil", ErrInvalid)
	case fn == nil:
		return fmt.Errorf("tenure: fenced transaction: %w: fn is nil", ErrInvalid)
	}
	guard = guardOf(ctx, guard)
	if own, ok := objects.As[*SQLiteStore](Store(store)); ok && own.DB() == db && (opts == nil || !opts.ReadOnly) {
		// A transaction that reads before it asks for the write lock is refused it while another has it.
		return own.Fenced(ctx, guard, fn)
	}
	fence, err := fenceOf("fenced transaction", guard)
	if err != nil {
		return err
	}
	ofServer, placed := objects.As[interface {
		place(context.Context, *objects.Fence) error
		renew(context.Context, *objects.Fence) error
	}](Store(store))
	if placed = placed && fence != nil; placed {
		// Under ctx, and before there is a transaction, because FenceStatement takes no
		// context.
		if err := ofServer.place(ctx, fence); err != nil {
			return fencedBy(ctx, fence, err)
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
	switch {
	case placed && errors.Is(err, ErrMoved):
		if renewErr := ofServer.renew(ctx, fence); renewErr != nil {
			err = fmt.Errorf("%w (%w)", err, renewErr)
		}
	case errors.Is(err, ErrLost):
		if term, ok := guard.(*Term); ok {
			err = term.refusedByStatement(ctx, store, err)
		}
	}
	return fencedBy(ctx, fence, err)
}

// refusedByStatement returns the error of a transaction that the term's statement has refused, in
// a database that should be the lease's.
func (t *Term) refusedByStatement(ctx context.Context, store Store, refusal error) error {
	obj, err := store.Get(objects.WithLeaseCall(ctx), t.key)
	if err == nil || errors.Is(err, ErrNotFound) {
		if on, lookErr := store.Lineage(ctx); lookErr != nil || on.Server != t.at.vouchedBy().Server {
			_, _ = t.renewNow(ctx)
			return fmt.Errorf("%w (%w)", ErrMoved, cmp.Or(lookErr, refusal))
		}
	}
	switch {
	case err == nil && bytes.Equal(obj.Payload, t.payload):
		return fmt.Errorf("%w: the lease stands, so db is not the database that has it (%v)", ErrInvalid, refusal)
	case err == nil:
		return t.lostToRecord(obj)
	case errors.Is(err, ErrNotFound):
		return t.lostTo(&lostError{key: t.key})
	}
	t.end(ErrLost) // the holder is unknown
	return refusal
}

// fencedBy adds to the error of a fenced transaction the right that it depended on. Unless the right is lost,
// the fence has refused nothing, and the text must not read as if it had.
func fencedBy(ctx context.Context, fence *objects.Fence, err error) error {
	if err == nil || fence == nil {
		return err
	}
	op := "fenced by"
	if !errors.Is(err, ErrLost) {
		op = "failed to run a transaction fenced by"
	}
	return opError(ctx, op, Key(fence.ID), err)
}

// FenceError recognises, with any driver, the error of a transaction that a statement of
// [SQLStore.FenceStatement] has made fail, and returns an [ErrLost] that wraps it; or an [ErrMoved], if the term was not renewed yet after a failover or a restart of the
// database. It returns any other error, and nil, unchanged.
func FenceError(err error) error {
	switch {
	case err == nil:
		return nil
	case objects.IsMoved(err):
		return fmt.Errorf("%w: %w", ErrMoved, err)
	case objects.IsFenceFailure(err):
		return fmt.Errorf("%w: %w", ErrLost, err)
	}
	return err
}
