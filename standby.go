package tenure

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/tenurelib/tenure/internal/pace"
)

// standby is the role of a replica that does not hold the lease: it rests, and then
// competes. It belongs to Run's goroutine.
type standby struct {
	c        *Coordinator
	hints    Subscription
	spurious pace.Limiter
	woken    bool          // by a hint
	took     time.Duration // the last attempt to acquire
	seen     string        // the term that stood last
	looked   time.Time     // when the record was last read
}

// run rests and competes. It returns a term, or nil once ctx is done.
func (s *standby) run(ctx context.Context, pause time.Duration) *Term {
	if s.rest(ctx, pause) {
		if term := s.compete(ctx); term != nil {
			return term
		}
	}
	if s.c.lease.memory.hasOrphans() { // otherwise the others would wait until it expires
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.c.caller.timeout)
		defer cancel()
		_, _ = s.look(ctx)
	}
	return nil
}

// compete returns a term, or nil once ctx is done.
func (s *standby) compete(ctx context.Context) *Term {
	for {
		term, err := s.try(ctx)
		if term != nil || ctx.Err() != nil {
			return term
		}
		wait := s.waitAfter(err)
		var ok bool
		if s.woken, ok = pace.Await(ctx, s.hints.C(), wait.ignoreHints, wait.longest); !ok {
			return nil
		}
	}
}

// try is one attempt.
func (s *standby) try(ctx context.Context) (*Term, error) {
	c, yielded := s.c, false
	if s.woken {
		var ok bool
		if yielded, ok = c.headStart.Give(ctx); !ok {
			return nil, ctx.Err()
		}
	}
	if err := c.checks.ask(ctx, RoleStandby); err != nil {
		if !c.single && (time.Since(s.looked) > c.lease.cfg.TTL || c.lease.memory.hasOrphans()) {
			// So that its status does not show a holder that is gone, and so that nothing
			// that it has left behind keeps the others waiting.
			s.looked = time.Now()
			_, _ = s.look(ctx)
		}
		return nil, err
	}
	term, err := s.acquire(ctx, s.woken && !yielded)
	s.looked = time.Now()
	switch {
	case err != nil:
		return nil, err
	case ctx.Err() != nil:
		c.giveBack(term, ErrShutdown)
		return nil, ctx.Err()
	case term.sinceRenewal() >= c.cfg.RenewDeadline:
		// A job would be told to return as it begins, with too little trust left
		// for the time that it may take.
		c.giveBack(term, ErrDeadline)
		return nil, fmt.Errorf("tenure: acquire %s: the answer took %v: %w", c.lease.cfg.Key, term.sinceRenewal(), ErrDeadline)
	}
	return term, nil
}

func (s *standby) acquire(ctx context.Context, likelyFree bool) (*Term, error) {
	c := s.c
	if c.single {
		return newLocalTerm(c.lease.cfg.Key, c.lease.cfg.Holder, c.monitor.lastToken()), nil
	}
	began := time.Now()
	term, err := c.lease.acquire(ctx, c.caller, likelyFree || c.lease.memory.lastSeen() == nil, true)
	s.took = time.Since(began)
	c.monitor.attempted(s.took, err)
	return term, err
}

// waitAfter notes why an attempt has failed, and returns how to wait for the next.
func (s *standby) waitAfter(err error) wait {
	c, news := s.c, false
	if held := (*HeldError)(nil); errors.As(err, &held) {
		c.monitor.log().Debug("lease is held", "holder", held.Holding.Holder)
		c.monitor.storeAnswered()
		if held.Holding.Version != 0 { // otherwise it was gone before it was read
			c.monitor.sawHolder(&held.Holding)
		}
		news = held.Holding.Term != s.seen
		s.seen = held.Holding.Term
		if s.woken && news {
			c.headStart.CameSecond(s.took)
		}
	} else if errors.Is(err, ErrUnhealthy) {
		c.monitor.failed("replica is not fit to compete", err)
	} else {
		c.monitor.failed("lease cannot be acquired", err)
	}
	wait := afterAttempt(err, c.cfg.AcquireInterval, c.lease.cfg.TTL, s.hints.Live())
	wait.ignoreHints = max(wait.ignoreHints, s.spurious.IgnoreFor(s.woken && !news, c.cfg.AcquireInterval))
	return wait
}

// wait is how a standby waits for its next attempt.
type wait struct {
	longest     time.Duration
	ignoreHints time.Duration // at first
}

// afterAttempt decides how to wait after an attempt that has failed. Live says whether
// hints can be expected.
func afterAttempt(err error, interval, ttl time.Duration, live bool) wait {
	held := (*HeldError)(nil)
	pause := pace.Jitter(interval)
	switch {
	case errors.As(err, &held) && held.canExpireIn <= 0:
		return wait{longest: pause} // another replica was quicker
	case errors.As(err, &held) && !held.byAge: // each standby has watched it since a moment of its own
		return wait{longest: min(pause, held.canExpireIn)}
	case errors.As(err, &held):
		// A few ms apart, so that not all standbys write at once; and a few ms late, so
		// that they don't come just before a renewal that is on its way.
		expiry := held.canExpireIn + 2*time.Millisecond + rand.N(4*time.Millisecond)
		if live {
			// A release would wake us, and nothing else matters before; except what
			// deletes the record without a hint, where its TTL is another's.
			return wait{longest: min(expiry, ttl)}
		}
		return wait{longest: min(pause, expiry)}
	case errors.Is(err, ErrSetup): // needs a person
		pause = max(pause, pace.Jitter(min(ttl, time.Minute)))
		return wait{longest: pause, ignoreHints: pause}
	case errors.Is(err, ErrUnhealthy), errors.Is(err, ErrDeadline):
		return wait{longest: pause, ignoreHints: pause} // it may not hold, or is too slow to
	default:
		return wait{longest: pause}
	}
}

// rest waits for so long before this replica competes again, or until the lease is
// left to it by name. It returns false once ctx is done.
func (s *standby) rest(ctx context.Context, pause time.Duration) bool {
	c := s.c
	if c.single {
		return pace.Sleep(ctx, pause)
	}
	end := time.Now().Add(pause)
	ignoreFor := 5 * time.Millisecond // one look for our own release, most likely, and what others make of it
	look := s.nextLook(nil)
	for {
		// A release that has failed is done first, and the others get their time from
		// then on: this replica must not be back before they have seen it.
		owed, wait := c.lease.memory.owesRelease(), min(look, time.Until(end))
		if owed {
			wait = min(look, pace.Jitter(c.cfg.AcquireInterval/4))
		}
		woken, ok := pace.Await(ctx, s.hints.C(), ignoreFor, wait)
		if !ok || time.Until(end) <= 0 && !owed {
			return ok
		}
		mine, err := s.look(ctx)
		if mine {
			return true
		}
		if owed && !c.lease.memory.owesRelease() {
			if back := time.Now().Add(pace.Jitter(c.cfg.AcquireInterval)); back.After(end) {
				end = back
			}
		}
		ignoreFor, look = s.spurious.IgnoreFor(woken, c.cfg.AcquireInterval), s.nextLook(err)
	}
}

// nextLook returns how long a replica that rests waits until it looks, unless woken,
// after a look that went so.
func (s *standby) nextLook(err error) time.Duration {
	switch {
	case err != nil: // it may have been woken for what it has not seen
		return pace.Jitter(s.c.cfg.AcquireInterval / 4)
	case !s.hints.Live():
		return pace.Jitter(s.c.cfg.AcquireInterval)
	default:
		return s.c.lease.cfg.TTL
	}
}

// look reads who holds the lease, without competing for it, and removes what this
// replica has left behind. It reports whether the lease is left to this replica by
// name: that it is left to any is no reason to come back.
func (s *standby) look(ctx context.Context) (mine bool, err error) {
	c, by := s.c, s.c.caller
	obj, err := c.lease.look(ctx, by)
	if err == nil {
		var removed bool
		if removed, err = c.lease.removeOrphan(ctx, by, obj); removed {
			err = ErrNotFound
		}
	}
	switch {
	case errors.Is(err, ErrNotFound):
		c.monitor.sawHolder(nil)
		return false, nil
	case err != nil:
		return false, err
	}
	holding := c.lease.decode(obj)
	c.monitor.sawHolder(&holding)
	return holding.isOffer() && holding.OfferedTo == c.lease.cfg.Holder, nil
}
