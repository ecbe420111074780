package tenure

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
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
// Any process that can write to the store may ask; its Lease need not compete. The record of a
// session of package claims is [ErrInvalid].
func (l *Lease) RequestRelease(ctx context.Context) error { return l.RequestHandover(ctx, "") }

// RequestHandover is [Lease.RequestRelease] in favour of a replica, named by its Holder. For
// a while only that one may begin a term, then any: for 5/4 of the old holder's
// AcquireInterval, but at least a second and at most the TTL. It returns nil if that replica
// already holds the lease. A later request replaces an earlier one that was not obeyed yet.
func (l *Lease) RequestHandover(ctx context.Context, to string) error {
	err := cmp.Or(objects.ValidText("replica", to), validHolder(to))
	if l.cfg.Key.Type == objects.SessionType {
		err = fmt.Errorf("%w: a session of package claims is not handed over: request the release of its keys", ErrInvalid)
	}
	if err != nil {
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

// Resign ends the current term, if there is one, and returns when the job has returned and
// the lease is released. The replica then stays away for long enough that another can win.
// An error says that the lease could not be released, or that ctx was done first; the
// resignation stands all the same.
//
// A job that resigns passes its own context, or it would wait for itself to return.
func (c *Coordinator) Resign(ctx context.Context) error { return c.ResignFor(ctx, 0) }

// ResignFor is [Coordinator.Resign] with the least time for which this replica stays away
// after the release. A handover to it by name, see [Lease.RequestHandover], brings it back
// earlier. If it is called several times in one term, the first call's time counts.
func (c *Coordinator) ResignFor(ctx context.Context, away time.Duration) error {
	if away < 0 {
		return fmt.Errorf("tenure: resign %s: %w: away %v is negative", c.lease.cfg.Key, ErrInvalid, away)
	}
	resign := c.askToResign(away)
	if resign == nil {
		return nil
	}
	select {
	case <-resign.done:
		return resign.err
	case <-ctx.Done():
		return fmt.Errorf("tenure: resign %s: %w", c.lease.cfg.Key, ctx.Err())
	}
}

// askToResign returns the resignation from the current term; nil if there is no term.
func (c *Coordinator) askToResign(away time.Duration) *resignation {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.keeper != nil && c.resign == nil {
		c.resign = &resignation{away: away, done: make(chan struct{})}
		c.keeper.end(ErrResigned)
	}
	return c.resign
}

// resignation is how Resign reaches the goroutine that owns the term.
type resignation struct {
	away time.Duration // the least time to stay away
	done chan struct{} // closed when the term is over
	err  error         // of the release; set before done is closed
}

// release releases the lease, unless it is already another's. If a request has named a
// replica, the lease is offered to that one for long enough that it finds out by polling.
func (c *Coordinator) release(term *Term, cause error) error {
	if isLoss(cause) && errors.Is(cause, ErrLost) {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), c.caller.timeout)
	defer cancel()
	offerFor := min(max(c.cfg.AcquireInterval*5/4, time.Second), c.lease.cfg.TTL)
	for {
		err := c.lease.release(ctx, term, offerFor)
		switch {
		case err == nil:
			c.monitor.released(term, cause)
			return nil
		case errors.Is(err, ErrLost):
			c.monitor.notReleased(term, cause, err)
			return nil
		case !pace.Sleep(ctx, pace.Jitter(c.caller.timeout/10)):
			c.monitor.notReleased(term, cause, err)
			return err
		}
	}
}

// longestStayAway is how many TTLs an unhealthy replica stays away at most.
const longestStayAway = 4

// stayAway returns how long this replica does not compete after a term.
func (c *Coordinator) stayAway(term *Term, cause error, resign *resignation) time.Duration {
	every, least := c.cfg.AcquireInterval, time.Duration(0)
	if resign != nil || errors.Is(cause, ErrResigned) {
		least = 2 * pace.Jitter(every)
	}
	if resign != nil {
		least = max(least, resign.away)
	}
	switch {
	case errors.Is(cause, ErrUnhealthy):
		// Even the first time for longer than after a resignation, so that it does not win
		// again when a healthy replica was asked to hand over.
		away := c.unhealthy.Next(time.Since(term.AcquiredAt()), 3*every, longestStayAway*c.lease.cfg.TTL)
		return max(least, pace.Jitter(away))
	case errors.Is(cause, ErrJobEnded):
		return max(least, 2*pace.Jitter(every)) // every standby tries first
	default:
		return max(least, pace.Jitter(every))
	}
}
