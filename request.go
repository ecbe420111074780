package tenure

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/google/uuid"
)

// requestLabel is the label of a lease's object by which its holder is asked to
// release it. It lasts until the next renewal.
const requestLabel = "tenure.release"

// releaseRequest is what stands in that label. To write it makes a new version of
// the object, and a new age; but a request is no renewal, and must not make the
// lease of a holder that has vanished last longer. So it says how old the renewal
// before it was.
type releaseRequest struct {
	To      string `json:"to,omitempty"` // the replica that is to be next; empty: any
	Version int64  `json:"version"`      // of the last renewal
	AgeMS   int64  `json:"age_ms"`       // of the last renewal, shortly before the request was written
}

// cause is why the term ends whose holder obeys.
func (r *releaseRequest) cause() error {
	if r.To == "" {
		return fmt.Errorf("%w: on request", ErrResigned)
	}
	return fmt.Errorf("%w: on request, in favour of %s", ErrResigned, r.To)
}

// requestIn returns the request that stands in an object, or nil.
func requestIn(obj Object) *releaseRequest {
	text, ok := obj.Labels[requestLabel]
	if !ok {
		return nil
	}
	var r releaseRequest
	if json.Unmarshal([]byte(text), &r) != nil || r.AgeMS < 0 || r.Version <= 0 || r.Version >= obj.Version {
		return nil
	}
	return &r
}

// renewalIn returns the version of the last renewal.
func renewalIn(obj Object) int64 {
	if request := requestIn(obj); request != nil {
		return request.Version
	}
	return obj.Version
}

// RequestRelease asks the holder, through the store, to give the lease up: as
// [Coordinator.Resign] would in its process. It returns when the request is
// stored. The holder's coordinator obeys as soon as it is woken, or at its next
// renewal. A holder that has vanished doesn't, and its lease expires as it would
// have without the request. [ErrNotFound] says that nobody holds the lease,
// [errors.ErrUnsupported] that its record was written by another program.
//
// Any process may ask that can write to the store; its Lease need not compete.
func (l *Lease) RequestRelease(ctx context.Context) error { return l.RequestHandover(ctx, "") }

// RequestHandover is [Lease.RequestRelease], and names the replica, by its Holder,
// that shall be next. For 5/4 of the old holder's AcquireInterval it alone may begin
// a term, then any. It returns nil where that replica holds the lease already.
func (l *Lease) RequestHandover(ctx context.Context, to string) error {
	if err := validText("replica", to); err != nil {
		return fmt.Errorf("tenure: request release of %s: %w", l.cfg.Key, err)
	}
	var err error
	for range 5 { // renewals come in between
		if err = l.request(ctx, to); !errors.Is(err, ErrConflict) {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("tenure: request release: %w", err)
	}
	wakeAll(ctx, l.store, l.cfg.Key) // or it is found at the next renewal
	return nil
}

// request writes a request into the record as it stands.
func (l *Lease) request(ctx context.Context, to string) error {
	obj, err := l.look(ctx)
	if err != nil {
		return err
	}
	holding := l.decode(obj)
	if holding.Term == "" {
		return fmt.Errorf("%s is held by a program that cannot be asked: %w", l.cfg.Key, errors.ErrUnsupported)
	}
	if to != "" && holding.Holder == to {
		return nil
	}
	text, err := json.Marshal(releaseRequest{To: to, Version: renewalIn(obj), AgeMS: max(0, holding.Age).Milliseconds()})
	if err != nil {
		return err
	}
	obj.Labels = maps.Clone(obj.Labels)
	if obj.Labels == nil {
		obj.Labels = make(map[string]string)
	}
	obj.Labels[requestLabel] = string(text)
	_, err = l.store.PutIf(leaseCall(ctx), obj, MatchVersion(obj.Version))
	return err
}

// offerTo makes the record that stands after a term whose holder leaves the lease
// to one replica: until it expires, no other takes it.
func offerTo(replica string, lasts time.Duration) record {
	return record{
		Holder:       replica,
		AcquiredAtMS: time.Now().UnixMilli(),
		Term:         uuid.NewString(),
		TTLMS:        max(1, lasts.Milliseconds()),
		Offered:      true,
	}
}

// expired makes the record that stands after a term whose predecessor may still be
// at work, as if that term had not been: the next is a takeover from the same
// predecessor.
func expired(prev *Holding) record {
	r := record{
		Holder: prev.Holder,
		Term:   prev.Term,
		TTLMS:  1, // less than that of any term, so the bytes are not those of the old record
	}
	if !prev.AcquiredAt.IsZero() {
		r.AcquiredAtMS = prev.AcquiredAt.UnixMilli()
	}
	return r
}

// replacing returns a func that ends a term as Release does, but puts a record in
// the place of its own.
func (l *Lease) replacing(r record, labels map[string]string) func(context.Context, *Term) error {
	obj := l.object(r.encode())
	obj.Labels = labels
	return func(ctx context.Context, term *Term) error { return l.replace(ctx, term, r, obj) }
}

func (l *Lease) replace(ctx context.Context, term *Term, r record, obj Object) error {
	term.end(ErrLost)
	for range 2 {
		_, err := l.store.PutIf(leaseCall(ctx), obj, MatchVersion(term.currentVersion()))
		if errors.Is(err, ErrConflict) {
			if err = l.reread(ctx, term); err == nil {
				continue // a renewal had landed whose answer was lost, or a request
			}
		}
		if lost := (*LostError)(nil); errors.As(err, &lost) && r.is(lost.To) {
			err = nil // the answer of a try before was lost
		}
		if err == nil || !answered(err) {
			wakeAll(ctx, l.store, l.cfg.Key)
		}
		if err != nil && !errors.Is(err, ErrLost) {
			l.leave(term.id)
		}
		return err
	}
	l.leave(term.id)
	return fmt.Errorf("tenure: release %s: another write came first, twice: %w", l.cfg.Key, ErrConflict)
}
