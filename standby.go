package tenure

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
)

// standby is the role of a replica that does not hold the lease: it rests, and then it competes.
// Only Run's goroutine uses it.
type standby struct {
	*base
	hints     Subscription
	headStart pace.HeadStart
	unhealthy pace.Doubling
	wish      wish

	over error // an [ErrClosed]: why this replica can compete no more; or nil

	// The fields below are of the current stay.
	spurious pace.Limiter
	woken    bool          // by a hint
	took     time.Duration // of the last attempt to acquire
	lastTerm string        // the ID of the term that was last seen
	lastLook time.Time     // when the record was last read
}

// run rests and competes. It returns a term, or nil once ctx is done.
func (s *standby) run(ctx context.Context, pause time.Duration) *Term {
	s.spurious, s.woken, s.lastTerm, s.lastLook, s.wish.term = pace.Limiter{}, false, "", time.Time{}, ""
	if s.rest(ctx, pause) {
		return s.compete(ctx)
	}
	return nil
}

// leave is called when this replica ceases to be a standby and has no term. It removes an orphan, because the other
// replicas would have to wait until that expires.
func (s *standby) leave(ctx context.Context) {
	if s.lease.memory.HasOrphans() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.caller.timeout)
		defer cancel()
		_, _ = s.look(ctx)
	}
}

// compete returns a term, or nil once ctx is done or the store is closed for good.
func (s *standby) compete(ctx context.Context) *Term {
	for {
		term, err := s.try(ctx)
		if term != nil || ctx.Err() != nil || s.isOver(err) {
			return term
		}
		if !s.await(ctx, s.waitAfter(ctx, err)) {
			return nil
		}
	}
}

// isOver reports whether an error of the store is final, so that this replica can compete no more. [Coordinator.Run]
// returns it.
func (s *standby) isOver(err error) bool {
	if objects.IsClosed(err) {
		s.monitor.logFailure("the store is closed for good; no longer competing", err)
		s.over = objects.Closed(err)
	}
	return s.over != nil
}

// await waits for the next attempt. It returns false once ctx is done. Where the hints deliver
// changes, most of them are renewals; after a renewal await keeps waiting, counting from it.
func (s *standby) await(ctx context.Context, w wait) (ok bool) {
	for {
		if s.woken, ok = pace.Await(ctx, s.hints.C(), w.ignoreHints, w.longest); !ok || !s.woken {
			return ok
		}
		held := s.lease.heldAfter(s.hints)
		if held == nil {
			return true
		}
		s.sees(&held.Holding)
		s.lastTerm, s.lastLook = held.Holding.Term, time.Now()
		w = s.after(held)
	}
}

// try is one attempt to get the lease.
func (s *standby) try(ctx context.Context) (*Term, error) {
	yielded := false
	if s.woken {
		var ok bool
		if yielded, ok = s.headStart.Give(ctx); !ok {
			return nil, ctx.Err()
		}
	}
	if err := s.ask(ctx, RoleStandby); err != nil {
		if s.turns == nil && (time.Since(s.lastLook) > s.lease.cfg.TTL || s.lease.memory.HasOrphans()) {
			// Otherwise Status could show a holder that is gone, and an orphan of this
			// replica could keep the others waiting.
			s.lastLook = time.Now()
			_, _ = s.look(ctx)
		}
		return nil, err
	}
	term, err := s.acquire(ctx, s.woken && !yielded)
	s.lastLook = time.Now()
	switch {
	case err != nil:
		return nil, err
	case ctx.Err() != nil:
		cause := ErrShutdown
		if errors.Is(context.Cause(ctx), ErrResigned) { // it stands down
			cause = ErrResigned
		}
		s.release(term, cause, s.hints.Live())
		return nil, ctx.Err()
	case term.sinceRenewal() >= s.cfg.RenewDeadline:
		// The job would be told to return as soon as it began, with less time left than it
		// may take.
		s.release(term, ErrDeadline, s.hints.Live())
		return nil, fmt.Errorf("tenure: acquire %s: the answer took %v: %w", s.lease.cfg.Key, term.sinceRenewal(), ErrDeadline)
	}
	return term, nil
}

func (s *standby) acquire(ctx context.Context, likelyFree bool) (*Term, error) {
	if s.turns != nil {
		return s.turns.begin(s.lease.cfg.Key, s.lease.cfg.Holder)
	}
	began := time.Now()
	term, err := s.lease.acquire(ctx, s.caller, likelyFree, true)
	s.took = time.Since(began)
	s.monitor.attempted(s.took, err)
	return term, err
}

// waitAfter notes why an attempt has failed, and returns how to wait for the next one.
func (s *standby) waitAfter(ctx context.Context, err error) wait {
	isNew := false
	if held := (*HeldError)(nil); errors.As(err, &held) {
		s.monitor.log().Debug("lease is held", "holder", held.Holding.Holder)
		s.monitor.storeAnswered()
		if held.settlesIn > 0 {
			s.monitor.awaitsFailover(held.settlesIn)
		}
		if held.Holding.Version != 0 { // otherwise the record was gone before it was read
			s.sees(&held.Holding)
		}
		s.askForHandover(ctx)
		isNew = held.Holding.Term != s.lastTerm
		s.lastTerm = held.Holding.Term
		if s.woken && isNew {
			s.headStart.CameSecond(s.took)
		}
	} else if errors.Is(err, ErrUnhealthy) {
		s.monitor.logFailure("replica is unhealthy and does not compete", err)
		s.wish.term = ""
	} else {
		s.monitor.logFailure("failed to acquire lease", err)
	}
	wait := s.after(err)
	wait.ignoreHints = max(wait.ignoreHints, s.spurious.IgnoreFor(s.woken && !isNew, s.cfg.AcquireInterval))
	return wait
}

func (s *standby) after(err error) wait {
	w := afterAttempt(err, s.cfg.AcquireInterval, s.lease.cfg.TTL, s.hints.Live(), followsChanges(s.hints))
	if s.wish.term != "" && errors.Is(err, ErrHeld) {
		w.longest = min(w.longest, time.Until(s.wish.due))
	}
	return w
}

// wish is a standby's wish to hold the lease in place of its holder, see [CoordinatorConfig.Outranks].
type wish struct {
	term   string        // of the holder; empty: there is no wish
	due    time.Time     // when it has lasted for long enough
	settle time.Duration // how long it must last; doubles with each request
	asked  []time.Time   // within the last hour
}

const (
	longestSettle = time.Hour
	manyRequests  = 3 // in an hour
)

// sees notes who holds the lease; nil: no replica does.
func (s *standby) sees(holder *Holding) {
	s.monitor.sawHolder(holder)
	w := &s.wish
	switch {
	case s.cfg.Outranks == nil || s.turns != nil:
	case holder == nil || holder.Term == "" || holder.isOffer() || holder.Holder == s.lease.cfg.Holder || !s.cfg.Outranks(*holder):
		w.term = ""
	case holder.Term != w.term:
		w.settle = max(w.settle, s.cfg.Settle)
		w.term, w.due = holder.Term, time.Now().Add(w.settle)
	}
}

// askForHandover asks the holder to hand over to this replica if the wish has lasted for long enough. The last
// attempt has called Check, and has read who holds the lease.
func (s *standby) askForHandover(ctx context.Context) {
	w := &s.wish
	if w.term == "" || time.Until(w.due) > 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, s.caller.timeout)
	defer cancel()
	if err := s.lease.request(ctx, s.lease.cfg.Holder, w.term); err != nil {
		s.monitor.logFailure("failed to ask for a handover to this replica; retrying", err)
		w.due = time.Now().Add(pace.Jitter(s.cfg.AcquireInterval))
		return
	}
	now := time.Now()
	w.settle = min(2*w.settle, max(longestSettle, s.cfg.Settle))
	w.due = now.Add(w.settle)
	s.monitor.log().Info("asked for a handover to this replica, which outranks the holder", "again_in", w.settle)
	w.asked = slices.DeleteFunc(append(w.asked, now), func(at time.Time) bool { return now.Sub(at) > time.Hour })
	if len(w.asked) == manyRequests {
		s.monitor.log().Warn("this replica has asked for the lease several times within an hour: do two replicas outrank each other, or does its job fail?")
	}
}

// held notes how long a term has lasted. A long one resets the time between requests.
func (w *wish) held(d time.Duration) {
	if d > w.settle {
		w.settle = 0
	}
}

// wait is how a standby waits for its next attempt.
type wait struct {
	longest     time.Duration
	ignoreHints time.Duration // at first
}

// afterAttempt decides how to wait after a failed attempt. Lease.takeOver decides whether an
// attempt may steal the lease. Live says whether hints can be expected, and follows whether each
// renewal is one.
func afterAttempt(err error, interval, ttl time.Duration, live, follows bool) wait {
	held := (*HeldError)(nil)
	pause := pace.Jitter(interval)
	switch {
	case errors.As(err, &held) && held.canExpireIn <= 0:
		return wait{longest: pause} // another replica was faster
	case errors.As(err, &held) && !held.byAge && !follows: // each standby first saw it at a different time
		return wait{longest: min(pause, held.canExpireIn)}
	case errors.As(err, &held):
		// A few ms apart, so that the standbys don't all write at once, and a few ms late,
		// so that they don't come just before a renewal that is on its way.
		expiry := held.canExpireIn + 2*time.Millisecond + rand.N(4*time.Millisecond)
		if live {
			// A release would wake us, so there is no need to look earlier. But the record
			// may be deleted without a hint, and its TTL is the holder's choice.
			return wait{longest: min(expiry, ttl)}
		}
		return wait{longest: min(pause, expiry)}
	case errors.Is(err, ErrSetup): // a person has to act
		pause = max(pause, pace.Jitter(min(ttl, time.Minute)))
		return wait{longest: pause, ignoreHints: pause}
	case errors.Is(err, ErrUnhealthy), errors.Is(err, ErrDeadline):
		return wait{longest: pause, ignoreHints: pause} // this replica must not hold the lease, or is too slow to
	default:
		return wait{longest: pause}
	}
}

// rest waits before this replica competes again: for the pause, or until the lease is offered
// to this replica by name. A replica that rests until it is asked ignores an offer that it finds
// at its first look. rest returns false once ctx is done, or the store is closed for good.
func (s *standby) rest(ctx context.Context, pause time.Duration) bool {
	if s.turns != nil {
		return pace.Sleep(ctx, pause)
	}
	end := time.Now().Add(pause)
	ignoreFor := 5 * time.Millisecond // then one look covers our own release and the others' reaction
	look, old := s.nextLook(nil), int64(0)
	first := pause == untilAsked
	if first {
		look = ignoreFor
	}
	for {
		// A failed release is retried first, and the others' time counts from then on: this
		// replica must not come back before they have seen the release.
		pending, wait := s.lease.memory.ReleasePending(), min(look, time.Until(end))
		if pending {
			wait = min(look, pace.Jitter(s.cfg.AcquireInterval/4))
		}
		woken, ok := pace.Await(ctx, s.hints.C(), ignoreFor, wait)
		if !ok || time.Until(end) <= 0 && !pending {
			return ok
		}
		if woken && !pending && !first {
			if held := s.lease.heldAfter(s.hints); held != nil { // a renewal changes nothing here
				s.sees(&held.Holding)
				continue
			}
		}
		offer, err := s.look(ctx)
		switch {
		case s.isOver(err):
			return false
		case first && err == nil:
			first, old = false, offer
		case offer != 0 && offer != old:
			return true
		}
		if pending && !s.lease.memory.ReleasePending() {
			if back := time.Now().Add(pace.Jitter(s.cfg.AcquireInterval)); back.After(end) {
				end = back
			}
		}
		ignoreFor, look = s.spurious.IgnoreFor(woken, s.cfg.AcquireInterval), s.nextLook(err)
	}
}

// nextLook returns how long a resting replica waits for its next look unless it is woken, given
// the error of the last look.
func (s *standby) nextLook(err error) time.Duration {
	switch {
	case err != nil: // it may have been woken for something that it has not seen
		return pace.Jitter(s.cfg.AcquireInterval / 4)
	case !s.hints.Live():
		return pace.Jitter(s.cfg.AcquireInterval)
	default:
		return s.lease.cfg.TTL
	}
}

// look reads who holds the lease without competing for it, and removes an orphan of this
// replica. If the lease is offered to this replica by name, it returns the version of the offer;
// an offer to any replica is no reason to come back early.
func (s *standby) look(ctx context.Context) (offer int64, err error) {
	read, err := s.lease.look(ctx, s.caller)
	if err == nil {
		var removed bool
		if removed, err = s.lease.removeOrphan(ctx, s.caller, read); removed {
			err = ErrNotFound
		}
	}
	switch {
	case errors.Is(err, ErrNotFound):
		s.sees(nil)
		return 0, nil
	case err != nil:
		return 0, err
	}
	s.sees(&read.holding)
	if read.holding.isOffer() && read.holding.OfferedTo == s.lease.cfg.Holder {
		offer = read.Version
	}
	return offer, nil
}

// resignation is how Resign reaches Run's goroutine, which owns the term.
type resignation struct {
	done chan struct{} // closed when the term is over
	err  error         // of the release; set before done is closed
}

// untilAsked is how long a replica that stands down rests, unless it is woken.
const untilAsked = time.Duration(math.MaxInt64)

// longestStayAway is the number of TTLs for which an unhealthy replica stays away at most.
const longestStayAway = 4

// stayAway returns how long this replica does not compete after a term.
func (s *standby) stayAway(term *Term, cause error, resign *resignation) time.Duration {
	s.wish.held(time.Since(term.AcquiredAt()))
	// Otherwise two unhealthy replicas could hand the lease back and forth forever.
	s.headStart.Gives = !errors.Is(cause, ErrResigned)
	every, least := s.cfg.AcquireInterval, time.Duration(0)
	if resign != nil || errors.Is(cause, ErrResigned) {
		least = 2 * pace.Jitter(every)
	}
	switch {
	case errors.Is(cause, ErrUnhealthy):
		// Even the first time this is longer than after a resignation, so that this replica
		// does not win again when a healthy one was asked to hand over.
		away := s.unhealthy.Next(time.Since(term.AcquiredAt()), 3*every, longestStayAway*s.lease.cfg.TTL)
		return max(least, pace.Jitter(away))
	case errors.Is(cause, ErrJobEnded):
		return max(least, 2*pace.Jitter(every)) // every standby tries first
	default:
		return max(least, pace.Jitter(every))
	}
}
