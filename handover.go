package tenure

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tenurelib/tenure/internal/clock"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/record"
)

// Release ends the term, deletes its record with one call to the store, and wakes the
// standbys, so that another replica may begin at once. It returns [ErrLost] if another replica
// already had the lease, or if the record was gone. After any other error the record may still
// stand: Release may be called again, and the next acquire by this lease first removes the
// record.
//
// On Postgres it does not wait for the disk: if the database crashes at that moment, the record
// may come back, and then expires.
//
// Call it only after the job has returned.
func (l *Lease) Release(ctx context.Context, term *Term) error { return l.release(ctx, term, 0) }

// release is Release, but if a request has named a replica, it offers the lease to that replica
// for this long.
func (l *Lease) release(ctx context.Context, term *Term, offerFor time.Duration) error {
	if err := term.isFor("release", l.cfg.Key); err != nil {
		return err
	}
	term.end(ErrLost)
	if term.local() {
		l.traits.Alone.end(term)
		return nil
	}
	for range 3 {
		err := l.vacate(ctx, term, offerFor)
		if errors.Is(err, ErrConflict) {
			if err = l.reread(ctx, term); err == nil {
				continue // a renewal whose answer was lost had landed, or a request had
			}
		}
		return l.releaseResult(ctx, term, offerFor, err)
	}
	l.memory.AddOrphan(term.id, orphan{term, offerFor}, true, l.cfg.TTL)
	return fmt.Errorf("tenure: release %s: another write came first, three times: %w", l.cfg.Key, ErrConflict)
}

// ReleaseDead releases the lease if its record was written by a process of the witness with this name: see package
// witness. Call it only when all processes of that witness are dead. The call may come late, and may be repeated: it
// never releases the term of a process with another witness, or without one.
//
// It reports whether it has released the lease. False without an error means that the record is gone, or names another
// witness or none. [ErrHeld] means that it leaves a term of that witness to expire: one that began less than minAge
// ago, so that a job that crashes its process doesn't crash one replica after the other; one that another process has
// resumed; or one in a database whose failover has not settled. After any other error the record may stand; call it
// again.
func (l *Lease) ReleaseDead(ctx context.Context, witness string, minAge time.Duration) (released bool, err error) {
	if witness == "" {
		return false, fmt.Errorf("tenure: release dead %s: %w: the witness has no name", l.cfg.Key, ErrInvalid)
	}
	if err := objects.ValidDuration("minAge", max(minAge, 0), "time.Second"); err != nil {
		return false, fmt.Errorf("tenure: release dead %s: %w", l.cfg.Key, err)
	}
	for range 3 { // a renewal that was on its way may come first
		r, err := l.look(ctx, caller{})
		h := &r.holding
		switch {
		case errors.Is(err, ErrNotFound) || err == nil && (h.isOffer() || h.witness != witness):
			return false, nil
		case err != nil:
			return false, err
		case r.settlesIn(l) > 0:
			return false, l.heldError(r)
		case h.resumed:
			return false, fmt.Errorf("tenure: release dead %s: %w: the term was resumed by another process", l.cfg.Key, ErrHeld)
		}
		// The process ran on this kernel, whose clock has stamped the beginning of the term.
		if age := clock.From(ctx)().Wall.Sub(h.AcquiredAt); minAge > 0 && age < minAge {
			return false, fmt.Errorf("tenure: release dead %s: %w: the term of %s was only %v old", l.cfg.Key, ErrHeld, h.Holder, age.Round(time.Millisecond))
		}
		dead := &Term{
			key: l.cfg.Key, id: h.Term, holder: h.Holder, payload: r.Payload,
			at: position{version: r.Version, on: r.on, vouched: Lineage{Mark: r.stored.Mark()}}, resumed: &Object{Name: r.Name},
		}
		if before := h.unconfirmed; before != nil {
			dead.predecessors.Store(&before)
		}
		if err := l.vacate(ctx, dead, 0); !errors.Is(err, ErrConflict) && !errors.Is(err, ErrNotFound) {
			return err == nil, err
		}
	}
	return false, fmt.Errorf("tenure: release dead %s: another write came first, three times: %w", l.cfg.Key, ErrConflict)
}

// abandon releases a term that has just begun and cannot be used. Otherwise the other replicas
// would have to wait for its TTL.
func (l *Lease) abandon(ctx context.Context, term *Term) {
	term.end(ErrLost)
	if l.vacate(ctx, term, 0) != nil {
		l.memory.AddOrphan(term.id, orphan{term: term}, false, l.cfg.TTL)
	}
}

// vacate deletes a term's record, or replaces it with an offer, and wakes the standbys.
func (l *Lease) vacate(ctx context.Context, term *Term, offerFor time.Duration) error {
	_, on := term.at.last()
	is, err := l.lineage(ctx)
	if err != nil {
		return err
	}
	settling, current := l.absentSettlesIn(is) > 0, term.at.vouchedIn(is)
	// The record is from before a failover. Another term may have begun since, and its record been lost: after this one
	// was over, or had been released by a write whose answer was lost.
	if settling && !current && (!term.trustLasts() || term.deleteSent.Load()) {
		return fmt.Errorf("tenure: release %s: a failover of the database has not settled: %w", l.cfg.Key, ErrHeld)
	}
	offer := term.offer(offerFor, settling || term.confirms && !is.isWhole())
	version, _ := term.at.last()
	if offer == nil {
		return l.remove(ctx, version, on)
	}
	obj := Object{Key: l.cfg.Key, Name: l.cfg.Name, Payload: offer.Encode()}
	if term.resumed != nil {
		obj.Name = term.resumed.Name
	}
	if predecessors := term.unconfirmed(); predecessors != nil {
		obj.Labels = record.WithUnconfirmed(nil, offer.Term, recorded(predecessors))
	}
	if on.Mark == is.Mark { // otherwise the next replica that looks decides
		obj.Labels = record.WithLineage(obj.Labels, offer.Term, on.Mark, "")
	}
	_, err = l.put(ctx, obj, IfVersion(version).OnServer(on.Server, 0))
	if err == nil || !objects.Refusal(err) {
		l.wake(ctx)
	}
	return err
}

// releaseResult interprets the error of a release.
func (l *Lease) releaseResult(ctx context.Context, term *Term, offerFor time.Duration, err error) error {
	var lost *lostError
	switch {
	case errors.As(err, &lost) && term.hasOffered(lost.to): // the answer to an earlier try was lost
		l.wake(ctx)
		return nil
	case err == nil || errors.Is(err, ErrLost):
		return err
	case !errors.Is(err, ErrNotFound):
		l.memory.AddOrphan(term.id, orphan{term, offerFor}, true, l.cfg.TTL)
		term.deleteSent.Store(true)
		return err
	case term.deleteSent.Load(): // gone by a release whose answer was lost
		return nil
	default:
		return &lostError{key: l.cfg.Key}
	}
}

// removeOrphan releases a record that was just read, if it is an orphan of this lease: to the
// replica that its release named, if there is one. It reports whether it did.
func (l *Lease) removeOrphan(ctx context.Context, by caller, read reading) (removed bool, err error) {
	o, ok := l.memory.Orphan(read.holding.Term)
	if !ok || read.settlesIn(l) > 0 { // its TTL may be the longest that is known
		return false, nil
	}
	if known, _ := o.term.at.last(); !l.recognises(o.term, known, read) { // a copy of this process continues the term
		l.memory.DropOrphan(o.term.id)
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
// vanished does not obey, and its lease expires as it would have without the request; a holder
// without a [Coordinator] does not obey either. [ErrNotFound] means that no replica holds the
// lease, and [errors.ErrUnsupported] that another program wrote its record.
//
// Any process that can write to the store may ask; its Lease need not compete. For the record of
// a session of package claims, the error is [ErrInvalid].
func (l *Lease) RequestRelease(ctx context.Context) error { return l.RequestHandover(ctx, "") }

// RequestHandover is [Lease.RequestRelease] in favour of a replica, named by its Holder. For a
// while only that replica may begin a term; after that any replica may. That time is a second,
// plus the old holder's CheckTimeout if it has a Check; it is 5/4 of the old holder's
// AcquireInterval if that is longer and the store can't wake replicas; and it is at most the TTL.
// The library does not know which replicas stand by: if none has the name, no replica holds the
// lease for that long. RequestHandover returns nil if that replica already holds the lease. A
// later request replaces an earlier one that has not been obeyed yet.
func (l *Lease) RequestHandover(ctx context.Context, to string) error {
	err := objects.ValidName("replica", to)
	if l.cfg.Key.Type == objects.SessionType {
		err = fmt.Errorf("%w: a session of package claims is not handed over: request the release of its keys", ErrInvalid)
	}
	if err != nil {
		return fmt.Errorf("tenure: request release of %s: %w", l.cfg.Key, err)
	}
	for tries := 1; ; tries++ {
		err := l.request(ctx, to, "")
		if err == nil {
			return nil
		}
		if tries == 5 || !errors.Is(err, ErrConflict) { // a renewal may come first
			return fmt.Errorf("tenure: request release: %w", err)
		}
	}
}

// request writes a request into the record as it stands. If term is not empty, it is for that term only.
func (l *Lease) request(ctx context.Context, to, term string) error {
	read, err := l.look(ctx, caller{})
	if err != nil {
		return err
	}
	obj, holding, pending := read.Object, read.holding, read.stored.Request()
	switch {
	case term != "" && holding.Term != term:
		return nil
	case holding.isOffer():
		return fmt.Errorf("%s is %s: %w", l.cfg.Key, holding.how(), ErrNotFound)
	case to != "" && holding.Holder == to && pending == nil:
		return nil
	case holding.Term == "":
		return fmt.Errorf("%s is held by a program that cannot be asked: %w", l.cfg.Key, errors.ErrUnsupported)
	}
	if pending == nil || pending.To != to {
		obj.Labels = read.stored.WithRequest(holding.Term, to)
		if _, err := l.put(ctx, obj, IfVersion(obj.Version).OnServer(read.on.Server, 0)); err != nil {
			return err
		}
	}
	l.wake(ctx) // if that fails, the holder finds the request at its next renewal
	return nil
}
