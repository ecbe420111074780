package tenure

import (
	"errors"
	"fmt"

	"github.com/tenurelib/tenure/internal/objects"
)

// Fencer is implemented by stores that can make their writes depend on a term.
// All stores of this module do.
type Fencer interface {
	// Fence returns the same store, whose PutIf and DeleteIf succeed only while
	// the object under [Term.Key], which they refuse to write, has [Term.Record]
	// as its payload. That is decided in the transaction of the write, in such a
	// way that no takeover can commit between the decision and the write.
	// Otherwise they return [ErrLost] and write nothing.
	//
	// A term that is nil, or not one of a [Lease], is [ErrInvalid]. A store
	// that is fenced already is [errors.ErrUnsupported]. A term of a single
	// replica, which has no record, gets the store as it is.
	Fence(term *Term) (Store, error)
}

var errFencedTwice = fmt.Errorf("tenure: fence: %w: the store is fenced already", errors.ErrUnsupported)

// fences refuses a term that no write can depend on.
func (t *Term) fences(op string) error {
	if t == nil || t.id == "" {
		return fmt.Errorf("tenure: %s: %w: no term is given; see TermFromContext", op, ErrInvalid)
	}
	if over := t.over(); !t.local() && errors.Is(over, ErrLost) {
		return fmt.Errorf("tenure: %s by %s: %w", op, t.key, over) // known already; for all others the store decides
	}
	return nil
}

// fence returns what a store needs to know of the term; nil for none, and for a local
// one, which has no lease to lose.
func (t *Term) fence() *objects.Fence {
	if t == nil || t.local() {
		return nil
	}
	return &objects.Fence{ID: objects.ID(t.key), Record: t.payload, Yield: t.giveWay}
}

// fenceFor refuses a fenced write to the record that its fence depends on.
func (t *Term) fenceFor(key Key) error {
	if t != nil && key == t.key {
		return fmt.Errorf("%w: the lease's own object can't be written through its fence", ErrInvalid)
	}
	return nil
}

// Fence returns the same store, whose PutIf and DeleteIf write only while the
// term is still the lease's: otherwise they return [ErrLost] and nothing is
// written, however long this process was paused before. The lease must be in
// that same store. Each is one round trip, as without.
//
// It is for code that is written against [Store]. [PostgresStore.Fenced] and
// [SQLiteStore.Fenced] are for writes to tables of one's own.
//
// A term of a single replica, which has no lease to lose, gets the store as it
// is. A store that is no [Fencer] is [errors.ErrUnsupported].
func Fence(store Store, term *Term) (Store, error) {
	if store == nil {
		return nil, fmt.Errorf("tenure: fence: %w: store is nil", ErrInvalid)
	}
	if err := term.fences("fence"); err != nil {
		return nil, err
	}
	if term.local() {
		return store, nil
	}
	fencer, ok := store.(Fencer)
	if !ok {
		return nil, fmt.Errorf("tenure: fence: %w: %T is no Fencer", errors.ErrUnsupported, store)
	}
	return fencer.Fence(term)
}

// fencedOut ends a term of which the store says that its record is not, or no
// longer, the lease's. The object is what stands instead; the zero value where
// nothing does.
func (t *Term) fencedOut(now Object) error {
	if now.Version == 0 {
		return t.lostTo(&LostError{Key: t.key})
	}
	holding, _ := decodeHolding(now, 0) // undecodable is held by unknown
	return t.lostTo(&LostError{Key: t.key, To: &holding})
}

// FenceError returns the error of a transaction as [ErrLost] if a statement of
// [PostgresStore.FenceStatement] or [SQLiteStore.FenceStatement] has ended it, whatever
// the driver; any other error, and nil, as it is. The driver's error stays reachable.
func FenceError(err error) error {
	if err == nil {
		return nil
	}
	if objects.IsFenceFailure(err) {
		return fmt.Errorf("%w: %w", ErrLost, err)
	}
	return err
}
