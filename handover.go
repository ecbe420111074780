package tenure

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/record"
)

// Release ends the term, deletes its record in one call to the store, and wakes the
// standbys, so that another replica may begin at once. It returns [ErrLost] if the lease
// was already another's, or gone. After any other error the record may still stand: Release
// may be called again, and the next acquire by this lease removes it first.
//
// On Postgres it does not wait for the disk: if the database crashes at that moment, the
// record stands again and expires.
//
// Call it only after the job has returned.
func (l *Lease) Release(ctx context.Context, term *Term) error { return l.release(ctx, term, 0) }

// release is Release, except that it offers the lease for this long to the replica that a
// request has named, if there is one.
func (l *Lease) release(ctx context.Context, term *Term, offerFor time.Duration) error {
	if err := term.isFor("release", l.cfg.Key); err != nil {
		return err
	}
	term.end(ErrLost)
	if term.local() {
		return nil
	}
	for range 3 {
		err := l.vacate(ctx, term, offerFor)
		if errors.Is(err, ErrConflict) {
			if err = l.reread(ctx, term); err == nil {
				continue // a renewal whose answer was lost had landed, or a request
			}
		}
		return l.releaseResult(ctx, term, offerFor, err)
	}
	l.memory.addOrphan(orphan{term: term, offerFor: offerFor, releaseFailed: true}, l.cfg.TTL)
	return fmt.Errorf("tenure: release %s: another write came first, three times: %w", l.cfg.Key, ErrConflict)
}

// vacate deletes a term's record, or replaces it by an offer, and wakes the standbys.
func (l *Lease) vacate(ctx context.Context, term *Term, offerFor time.Duration) error {
	offer := term.offer(offerFor)
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

// releaseResult judges the error of a release.
func (l *Lease) releaseResult(ctx context.Context, term *Term, offerFor time.Duration, err error) error {
	var lost *LostError
	switch {
	case errors.As(err, &lost) && term.hasOffered(lost.To): // the answer to an earlier try was lost
		wakeAll(ctx, l.store, l.cfg.Key)
		return nil
	case err == nil || errors.Is(err, ErrLost):
		return err
	case !errors.Is(err, ErrNotFound):
		l.memory.addOrphan(orphan{term: term, offerFor: offerFor, releaseFailed: true}, l.cfg.TTL)
		term.deleteSent.Store(true)
		return err
	case term.deleteSent.Load(): // gone by a release whose answer was lost
		return nil
	default:
		return &LostError{Key: l.cfg.Key}
	}
}

// removeOrphan releases a record that was just read if it is an orphan of this lease, to the
// replica for which it was meant if there is one. It reports whether it did.
func (l *Lease) removeOrphan(ctx context.Context, by caller, read reading) (removed bool, err error) {
	o, ok := l.memory.orphan(read.holding.Term)
	if !ok {
		return false, nil
	}
	if !l.recognises(o.term, o.term.currentVersion(), read) { // a copy of this process goes on with it
		l.memory.dropOrphan(o.term.id)
		return false, nil
	}
	if err := ctx.Err(); err != nil {
		return false, err
	}
	ctx, cancel := by.write(ctx)
	defer cancel()
	if err := l.release(ctx, o.term, o.offerFor); err != nil && !errors.Is(err, ErrLost) {
		return false, err
	}
	return true, nil
}

// RequestRelease asks the holder, through the store, to release the lease, as
// [Coordinator.Resign] does within its process. It returns when the request is stored. The
// holder's coordinator obeys when it is woken, or at its next renewal. A holder that has
// vanished does not, and its lease expires as it would have without the request; nor does a
// holder without a [Coordinator]. [ErrNotFound] says that nobody holds the lease,
// [errors.ErrUnsupported] that its record was written by another program.
//
// Any process that can write to the store may ask; its Lease need not compete.
func (l *Lease) RequestRelease(ctx context.Context) error { return l.RequestHandover(ctx, "") }

// RequestHandover is [Lease.RequestRelease] in favour of a replica, named by its Holder. For
// a while only that one may begin a term, then any: for 5/4 of the old holder's
// AcquireInterval, but at least a second and at most the TTL. It returns nil if that replica
// already holds the lease. A later request replaces an earlier one that was not obeyed yet.
func (l *Lease) RequestHandover(ctx context.Context, to string) error {
	if err := cmp.Or(objects.ValidText("replica", to), validHolder(to)); err != nil {
		return fmt.Errorf("tenure: request release of %s: %w", l.cfg.Key, err)
	}
	for tries := 1; ; tries++ {
		err := l.request(ctx, to)
		if err == nil {
			return nil
		}
		if tries == 5 || !errors.Is(err, ErrConflict) { // a renewal may come first
			return fmt.Errorf("tenure: request release: %w", err)
		}
	}
}

// request writes a request into the record as it stands.
func (l *Lease) request(ctx context.Context, to string) error {
	read, err := l.look(ctx, caller{})
	if err != nil {
		return err
	}
	obj, holding, pending := read.Object, read.holding, read.stored.Request()
	switch {
	case holding.isOffer():
		return fmt.Errorf("%s is %s: %w", l.cfg.Key, holding.how(), ErrNotFound)
	case to != "" && holding.Holder == to && pending == nil:
		return nil
	case holding.Term == "":
		return fmt.Errorf("%s is held by a program that cannot be asked: %w", l.cfg.Key, errors.ErrUnsupported)
	}
	if pending == nil || pending.To != to {
		obj.Labels = read.stored.WithRequest(holding.Term, to)
		if _, err := l.store.PutIf(objects.WithLeaseCall(ctx), obj, MatchVersion(obj.Version)); err != nil {
			return err
		}
	}
	wakeAll(ctx, l.store, l.cfg.Key) // if that fails, the holder finds it at its next renewal
	return nil
}
