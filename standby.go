package tenure

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"
)

// headStart is the most that a standby that yields to others waits before it looks.
const headStart = 4 * time.Millisecond

// standby competes for the lease, at first after a pause. It returns nil once
// ctx is done.
func (c *Coordinator) standby(ctx context.Context, pause time.Duration, hints Watch) *Term {
	if !c.rest(ctx, pause, hints) {
		return nil
	}
	var vain vainHints
	var seen string // the term that stood last
	var looked time.Time
	for woken := false; ; {
		yields := woken && c.yields
		if yields && !sleep(ctx, rand.N(headStart)) {
			return nil
		}
		var term *Term
		var began time.Time
		err := c.check(ctx, Standby)
		if err == nil {
			began = time.Now()
			term, err = c.acquire(ctx, woken && !yields)
		}
		switch unfit := errors.Is(err, ErrUnhealthy); {
		case !unfit:
			looked = time.Now()
		case !c.single && (time.Since(looked) > c.lease.cfg.TTL || c.lease.leftAnything()):
			// So that its status does not show a holder that is gone, and so that nothing
			// that it has left behind keeps the others waiting.
			looked = time.Now()
			_, _ = c.look(ctx)
		}
		if err == nil && ctx.Err() != nil {
			c.giveBack(term, ErrShutdown)
			return nil
		}
		if err == nil && c.untilDeadline(term) <= 0 {
			// A job would be told to return as it begins, with too little trust left
			// for the time that it may take.
			c.giveBack(term, ErrDeadline)
			err = fmt.Errorf("tenure: acquire %s: the answer took %v: %w", c.lease.cfg.Key, time.Since(term.AcquiredAt()), ErrDeadline)
		}
		if err == nil {
			return term
		}
		if ctx.Err() != nil {
			return nil
		}
		pause, news := c.notAcquired(err, hints.Live()), false
		if held := (*HeldError)(nil); errors.As(err, &held) {
			news = held.Holding.Term != seen
			if woken && news {
				// Where a try takes longer than a head start, a look after it comes too early
				// to spare one.
				c.yields = time.Since(began) <= headStart
			}
			seen = held.Holding.Term
		}
		deaf := vain.after(woken && !news, c.cfg.AcquireInterval)
		if errors.Is(err, ErrSetup) || errors.Is(err, ErrUnhealthy) || errors.Is(err, ErrDeadline) {
			deaf = pause // who may not acquire, or is too slow to, need not hear when to
		}
		var ok bool
		if woken, ok = awaitHint(ctx, hints, deaf, pause); !ok {
			return nil
		}
	}
}

// rest waits for so long before this replica competes again, or until the lease is
// left to it by name. It returns false once ctx is done.
func (c *Coordinator) rest(ctx context.Context, pause time.Duration, hints Watch) bool {
	if c.single {
		return sleep(ctx, pause)
	}
	end := time.Now().Add(pause)
	deaf := 5 * time.Millisecond // one look for our own release, most likely, and what others make of it
	look := c.restingLook(hints, nil)
	var vain vainHints
	for {
		// A release that has failed is done first, and the others get their time from
		// then on: this replica must not be back before they have seen it.
		owed, wait := c.lease.owesRelease(), min(look, time.Until(end))
		if owed {
			wait = min(look, jitter(c.cfg.AcquireInterval/4))
		}
		woken, ok := awaitHint(ctx, hints, deaf, wait)
		if !ok || time.Until(end) <= 0 && !owed {
			return ok
		}
		mine, err := c.look(ctx)
		if mine {
			return true
		}
		if owed && !c.lease.owesRelease() {
			if back := time.Now().Add(jitter(c.cfg.AcquireInterval)); back.After(end) {
				end = back
			}
		}
		deaf, look = vain.after(woken, c.cfg.AcquireInterval), c.restingLook(hints, err)
	}
}

// restingLook returns how long a replica that does not compete waits until it looks,
// unless woken, after a look that went so.
func (c *Coordinator) restingLook(hints Watch, err error) time.Duration {
	switch {
	case err != nil: // it may have been woken for what it has not seen
		return jitter(c.cfg.AcquireInterval / 4)
	case !hints.Live():
		return jitter(c.cfg.AcquireInterval)
	default:
		return c.lease.cfg.TTL
	}
}

// look reads who holds the lease, without competing for it, and removes what this
// replica has left behind. It reports whether the lease is left to this replica by
// name: that it is left to any is no reason to come back.
func (c *Coordinator) look(ctx context.Context) (mine bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, c.callTimeout())
	defer cancel()
	holding, err := c.lease.Read(ctx)
	switch {
	case errors.Is(err, ErrNotFound):
		c.noteHolder(nil)
		return false, nil
	case err != nil:
		return false, err
	}
	if c.lease.isLeftover(holding) {
		if err := c.lease.removeLeftover(ctx, holding); err != nil {
			return false, err
		}
		c.noteHolder(nil)
		return false, nil
	}
	c.noteHolder(&holding)
	return holding.Offered && holding.Holder == c.lease.cfg.Holder, nil
}

func (c *Coordinator) acquire(ctx context.Context, likelyFree bool) (*Term, error) {
	if c.single {
		return newLocalTerm(c.lease.cfg.Key, c.lease.cfg.Holder, c.lastToken()), nil
	}
	// A shutdown does not end a write: an acquire that is cut off halfway may leave a
	// record of a term that nobody holds, and all would have to wait for its TTL.
	writes, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.callTimeout())
	defer cancel()
	reads, cancelReads := context.WithTimeout(ctx, c.callTimeout())
	defer cancelReads()
	began := time.Now()
	term, err := c.lease.acquireOrSteal(reads, writes, likelyFree || c.lease.lastSeen() == nil)
	if err == nil {
		term.unconfirmed.Store(c.mustConfirm(term))
	}
	c.attempted(began, err)
	return term, err
}

// notAcquired returns how long to wait after a failed attempt, unless woken.
func (c *Coordinator) notAcquired(err error, wakes bool) time.Duration {
	pause := jitter(c.cfg.AcquireInterval)
	var held *HeldError
	if errors.As(err, &held) {
		c.sawHolder(held.Holding)
		if held.canExpireIn <= 0 {
			return pause
		}
		if !held.byAge { // each standby has watched it since a moment of its own
			return min(pause, held.canExpireIn)
		}
		// A few ms apart, lest all standbys write at once; and a few ms late, lest
		// they come just before a renewal that is on its way.
		expiry := held.canExpireIn + 2*time.Millisecond + rand.N(4*time.Millisecond)
		if wakes {
			// A release would wake us, and nothing else matters before; but what
			// deletes the record without a word, where its TTL is another's.
			return min(expiry, c.lease.cfg.TTL)
		}
		return min(pause, expiry)
	}
	if errors.Is(err, ErrUnhealthy) {
		c.report("replica is not fit to compete", err)
		return pause
	}
	c.report("lease cannot be acquired", err)
	if errors.Is(err, ErrSetup) { // needs a person, or a password that is rotated
		pause = max(pause, jitter(min(c.lease.cfg.TTL, time.Minute)))
	}
	return pause
}
