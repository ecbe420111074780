package tenure

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// keeper renews one term in a goroutine of its own, so that nothing else waits
// for a renewal that hangs.
type keeper struct {
	lost      chan error            // why the term cannot be kept, or is not to be; at most three
	confirmed chan struct{}         // closed after as many renewals as a confirmation takes
	winding   atomic.Bool           // the job has been told to return: nothing is checked any more
	unfit     atomic.Pointer[error] // of the last check; nil: it went well
	cancel    context.CancelFunc
	done      sync.WaitGroup
}

// newKeeper returns a keeper that does not renew yet.
func (c *Coordinator) newKeeper(term *Term) *keeper {
	k := &keeper{lost: make(chan error, 3)}
	if c.mustConfirm(term) && c.cfg.Confirmations > 0 {
		k.confirmed = make(chan struct{})
	}
	return k
}

// startKeeper begins to renew. A term without a lease needs that not: its keeper
// waits to be stopped.
func (c *Coordinator) startKeeper(k *keeper, term *Term, hints Watch) {
	var ctx context.Context
	ctx, k.cancel = context.WithCancel(context.Background())
	if term.local() {
		return
	}
	k.done.Go(func() {
		if err := c.keep(ctx, term, k, hints); err != nil {
			k.lost <- err
		}
	})
}

// stop ends the renewing and returns when no renewal is under way any more. It
// may be called twice.
func (k *keeper) stop() {
	k.cancel()
	k.done.Wait()
}

// late returns why a term was not renewed in time.
func (k *keeper) late() error {
	if unfit := k.unfit.Load(); unfit != nil {
		return *unfit
	}
	return ErrDeadline
}

// keep renews until ctx is done, then returns nil, or until the term is over,
// then returns why. Errors of the store are only a reason to try again soon. A hint
// is one to renew at once: the record may carry a request, or be gone.
func (c *Coordinator) keep(ctx context.Context, term *Term, k *keeper, hints Watch) error {
	next := c.untilRenewal(term)
	var vain vainHints
	woken, ok := false, true
	for failures, unfit, renewals := 0, 0, 0; ; {
		deaf := vain.after(woken, c.cfg.RenewInterval)
		if failures > 0 || unfit > 0 || k.confirmed != nil && renewals < c.cfg.Confirmations {
			deaf = next // what counts is the time between renewals
		}
		if woken, ok = c.awaitRenewal(ctx, term, hints, deaf, next); !ok {
			return nil
		}
		if err := term.over(); err != nil {
			return err
		}
		err := c.checkHolder(ctx, k)
		if err == nil {
			unfit = 0
			err = c.renew(ctx, term)
		} else if unfit++; unfit == c.cfg.CheckFailures && ctx.Err() == nil {
			k.lost <- err
			k.winding.Store(true) // and the lease is renewed until the job has returned
			next = 0
			continue
		}
		if over := term.over(); over != nil {
			return over
		}
		if request := term.asked.Load(); request != nil && request.To != term.Holder() && !k.winding.Swap(true) {
			k.lost <- request.cause()
		}
		if err == nil {
			if renewals++; k.confirmed != nil && renewals == c.cfg.Confirmations && !k.winding.Load() {
				close(k.confirmed)
			}
			failures = 0
			next = c.untilRenewal(term)
			continue
		}
		if ctx.Err() == nil {
			c.renewalFailed(term, err)
		}
		next = c.retryPause(failures)
		failures++
	}
}

// untilRenewal returns when the next renewal is due.
func (c *Coordinator) untilRenewal(term *Term) time.Duration {
	return c.cfg.RenewInterval - term.sinceRenewal()
}

// awaitRenewal is awaitHint for a keeper. Where the machine was suspended meanwhile, a
// renewal that is overdue by then is not waited for any longer.
func (c *Coordinator) awaitRenewal(ctx context.Context, term *Term, hints Watch, deaf, wait time.Duration) (woken, ok bool) {
	inTime := c.untilRenewal(term) > 0 // otherwise it is tried again, after a pause
	for {
		step := min(wait, c.longestSleep())
		woken, ok := awaitHint(ctx, hints, deaf, step)
		wait, deaf = wait-step, deaf-step
		if woken || !ok || wait <= 0 || inTime && c.untilRenewal(term) <= 0 {
			return woken, ok
		}
	}
}

// longestRetryPause is the most between two tries, however long the TTL is.
const longestRetryPause = 5 * time.Second

// retryPause returns how long to wait after so many failures in a row before this
// one: from a sixteenth of the RenewInterval to half of it.
func (c *Coordinator) retryPause(failures int) time.Duration {
	return jitter(min(c.cfg.RenewInterval/16<<min(failures, 3), longestRetryPause))
}

func (c *Coordinator) renew(ctx context.Context, term *Term) error {
	ctx, cancel := context.WithTimeout(ctx, min(c.callTimeout(), term.Remaining()))
	defer cancel()
	began, deadline := time.Now(), term.Deadline()
	if err := c.lease.Renew(ctx, term); err != nil {
		return err
	}
	c.renewed(term, began, deadline)
	return nil
}
