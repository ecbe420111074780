package tenure

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/record"
)

// Release ends the term, deletes its record, in one call to the store, and wakes
// the standbys, so that another replica may begin at once. It returns [ErrLost] where
// the lease was another's already, or gone. After any other error the record may still
// stand: Release may be called again, and the next acquire by this lease removes it first.
//
// On Postgres it does not wait for the disk: where the database crashes at that
// moment the record stands again, and expires.
//
// Call it only after the job has returned.
func (l *Lease) Release(ctx context.Context, term *Term) error { return l.release(ctx, term, 0) }

// release is Release, but leaves the lease for so long to the replica that a request
// has named, if one has: 0 is to nobody.
func (l *Lease) release(ctx context.Context, term *Term, leave time.Duration) error {
	if err := l.owns("release", term); err != nil {
		return err
	}
	term.end(ErrLost)
	if term.local() {
		return nil
	}
	for range 3 {
		err := l.giveUp(ctx, term, leave)
		if errors.Is(err, ErrConflict) {
			if err = l.reread(ctx, term); err == nil {
				continue // a renewal had landed whose answer was lost, or a request
			}
		}
		return l.released(ctx, term, leave, err)
	}
	l.leave(leftover{term: term, leave: leave, release: true})
	return fmt.Errorf("tenure: release %s: another write came first, again and again: %w", l.cfg.Key, ErrConflict)
}

// giveUp deletes a term's record, or puts an offer in its place, and wakes the standbys.
func (l *Lease) giveUp(ctx context.Context, term *Term, leave time.Duration) error {
	offer := term.offer(leave)
	if offer == nil {
		return deleteAndWake(objects.WithLeaseCall(ctx), l.store, l.cfg.Key, term.currentVersion())
	}
	obj := Object{Key: l.cfg.Key, Name: l.cfg.Name, Payload: offer.Encode()}
	if predecessors := term.unconfirmed(); predecessors != nil {
		obj.Labels = record.WithUnconfirmed(nil, offer.Term, recorded(predecessors))
	}
	_, err := l.store.PutIf(objects.WithLeaseCall(ctx), obj, MatchVersion(term.currentVersion()))
	if err == nil || !objects.Answered(err) {
		wakeAll(ctx, l.store, l.cfg.Key)
	}
	return err
}

// released judges how a release ended.
func (l *Lease) released(ctx context.Context, term *Term, leave time.Duration, err error) error {
	var lost *LostError
	switch {
	case errors.As(err, &lost) && term.hasOffered(lost.To): // the answer of a try before was lost
		wakeAll(ctx, l.store, l.cfg.Key)
		return nil
	case err == nil || errors.Is(err, ErrLost):
		return err
	case !errors.Is(err, ErrNotFound):
		l.leave(leftover{term: term, leave: leave, release: true})
		term.deleteSent.Store(true)
		return err
	case term.deleteSent.Load(): // gone by a release whose answer was lost
		return nil
	default:
		return &LostError{Key: l.cfg.Key}
	}
}

// leftover is a term whose record this lease may have left in the store although
// nobody relies on it: its acquire or its release failed without a clear answer. Such
// a record is never taken up again. It is removed, which wakes the others: one that
// was taken up again and again would stay young, and keep the lease from a replica
// that could hold it.
type leftover struct {
	term    *Term
	leave   time.Duration // see [Lease.release]
	release bool          // that failed; otherwise an acquire
	at      time.Time
}

// leave notes a term that may stand in the store although nobody relies on it.
func (l *Lease) leave(left leftover) {
	const most = 64 // a store that is down makes one at each attempt
	left.at = time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.leftover = slices.DeleteFunc(l.leftover, func(o leftover) bool { return o.term.id == left.term.id })
	if len(l.leftover) == most {
		l.leftover = l.leftover[1:]
	}
	l.leftover = append(l.leftover, left)
}

// hasExpired reports whether a leftover's record has expired by now, like any record
// that nobody renews.
func (l *Lease) hasExpired(o leftover) bool { return time.Since(o.at) > l.cfg.TTL }

// leftoverOf returns the leftover of a term.
func (l *Lease) leftoverOf(term string) (o leftover, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.IndexFunc(l.leftover, func(o leftover) bool { return o.term.id == term })
	if i < 0 {
		return o, false
	}
	return l.leftover[i], true
}

// removeLeftover removes a record that was just read, if it is a leftover of this lease,
// or leaves it to the replica to which it was to be handed over. It reports whether
// the record is gone.
func (l *Lease) removeLeftover(ctx context.Context, by caller, obj Object) (removed bool, err error) {
	h, _ := decodeHolding(obj, l.cfg.TTL)
	o, ok := l.leftoverOf(h.Term)
	if !ok {
		return false, nil
	}
	if !l.recognises(o.term, o.term.currentVersion(), obj) { // a copy of this process goes on with it
		l.mu.Lock()
		l.leftover = slices.DeleteFunc(l.leftover, func(o leftover) bool { return o.term.id == h.Term })
		l.mu.Unlock()
		return false, nil
	}
	if err := ctx.Err(); err != nil {
		return false, err
	}
	ctx, cancel := by.write(ctx)
	defer cancel()
	if err := l.release(ctx, o.term, o.leave); err != nil && !errors.Is(err, ErrLost) {
		return false, err
	}
	return true, nil
}

// owesRelease reports whether a release has failed whose record may still stand.
func (l *Lease) owesRelease() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.ContainsFunc(l.leftover, func(o leftover) bool { return o.release && !l.hasExpired(o) })
}

// leftAnything reports whether anything may stand that this lease has left behind.
func (l *Lease) leftAnything() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.ContainsFunc(l.leftover, func(o leftover) bool { return !l.hasExpired(o) })
}

// requestCause is why the term ends whose holder does what it was asked.
func requestCause(r *record.Request) error {
	if r.To == "" {
		return fmt.Errorf("%w: on request", ErrResigned)
	}
	return fmt.Errorf("%w: on request, in favour of %s", ErrResigned, r.To)
}

// RequestRelease asks the holder, through the store, to give the lease up: as
// [Coordinator.Resign] would in its process. It returns when the request is
// stored. The holder's coordinator obeys as soon as it is woken, or at its next
// renewal. A holder that has vanished doesn't, and its lease expires as it would
// have without the request; nor does one that has no [Coordinator]. [ErrNotFound]
// says that nobody holds the lease, [errors.ErrUnsupported] that its record was
// written by another program.
//
// Any process may ask that can write to the store; its Lease need not compete.
func (l *Lease) RequestRelease(ctx context.Context) error { return l.RequestHandover(ctx, "") }

// RequestHandover is [Lease.RequestRelease], and names the replica, by its Holder,
// that shall be next. For a time it alone may begin a term, then any: for 5/4 of the
// old holder's AcquireInterval, a second at least, the TTL at most. It returns nil
// where that replica holds the lease already. A later request replaces an earlier
// one that was not obeyed yet.
func (l *Lease) RequestHandover(ctx context.Context, to string) error {
	if err := cmp.Or(objects.ValidText("replica", to), validHolder(to)); err != nil {
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
	return nil
}

// request writes a request into the record as it stands.
func (l *Lease) request(ctx context.Context, to string) error {
	obj, err := l.look(ctx, caller{})
	if err != nil {
		return err
	}
	holding, stands := l.decode(obj), stored(obj).Request()
	switch {
	case holding.isOffer():
		return fmt.Errorf("%s is %s: %w", l.cfg.Key, holding.how(), ErrNotFound)
	case to != "" && holding.Holder == to && stands == nil:
		return nil
	case holding.Term == "":
		return fmt.Errorf("%s is held by a program that cannot be asked: %w", l.cfg.Key, errors.ErrUnsupported)
	}
	if stands == nil || stands.To != to {
		obj.Labels = stored(obj).WithRequest(holding.Term, to)
		if _, err := l.store.PutIf(objects.WithLeaseCall(ctx), obj, MatchVersion(obj.Version)); err != nil {
			return err
		}
	}
	wakeAll(ctx, l.store, l.cfg.Key) // where that fails, it is found at the next renewal
	return nil
}

// predecessors returns the holders that may still be at work when this lease takes
// over a record: its own, unless that gave it up, and those of which that one was not
// sure; but not this replica itself. Of one holder the last term counts.
func (l *Lease) predecessors(h Holding) []Holding {
	others := slices.Clone(h.unconfirmed)
	if !h.isOffer() {
		others = slices.DeleteFunc(others, func(p Holding) bool { return p.Holder == h.Holder && maps.Equal(p.Labels, h.Labels) })
		others = append(others, h)
	}
	return slices.DeleteFunc(others, l.own)
}

// own reports whether a record is of a term of this replica, whose job has returned.
func (l *Lease) own(h Holding) bool {
	l.mu.Lock()
	begun := h.Term != "" && h.Term == l.begun && h.Term != l.copied
	l.mu.Unlock()
	_, left := l.leftoverOf(h.Term)
	return begun || left || l.reclaims(h)
}

// mayTake reports whether the record need not expire before this lease takes it
// over.
func (l *Lease) mayTake(holding Holding) bool { return l.reclaims(holding) || l.offered(holding) }

func (l *Lease) offered(h Holding) bool {
	return h.isOffer() && (h.OfferedTo == l.cfg.Holder || h.OfferedTo == "")
}

// reclaims reports whether the record is one that an earlier life of this replica
// has left. That it names the same holder does not tell: it may be the term that
// this very lease has begun, or begins in another goroutine.
func (l *Lease) reclaims(holding Holding) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.cfg.AssumeUniqueHolder && holding.Term != "" && holding.Term != l.begun && !slices.Contains(l.sent, holding.Term) &&
		holding.Holder == l.cfg.Holder
}
