package tenure

import (
	"context"
	"sync/atomic"
	"time"
)

// keeper renews one term in a goroutine of its own, so that nothing else waits
// for a renewal that hangs.
type keeper struct {
	lost      chan error            // why the term cannot be kept, or is not to be; at most two
	confirmed chan struct{}         // closed after as many renewals as a confirmation takes
	winding   atomic.Bool           // the job has been told to return: nothing is checked any more
	unfit     atomic.Pointer[error] // of the last check; nil: it went well
	cancel    context.CancelFunc
	done      chan struct{}
}

// startKeeper begins to renew. A term without a lease needs none: its keeper
// waits to be stopped.
func (c *Coordinator) startKeeper(term *Term) *keeper {
	ctx, cancel := context.WithCancel(context.Background())
	k := &keeper{lost: make(chan error, 2), cancel: cancel, done: make(chan struct{})}
	if c.cfg.Confirmations > 0 {
		k.confirmed = make(chan struct{})
	}
	if term.local() {
		close(k.done)
		return k
	}
	go func() {
		defer close(k.done)
		if err := c.keep(ctx, term, k); err != nil {
			k.lost <- err
		}
	}()
	return k
}

// stop ends the renewing and returns when no renewal is under way any more. It
// may be called twice.
func (k *keeper) stop() {
	k.cancel()
	<-k.done
}

// late returns why a term was not renewed in time.
func (k *keeper) late() error {
	if unfit := k.unfit.Load(); unfit != nil {
		return *unfit
	}
	return ErrDeadline
}

// keep renews until ctx is done, then returns nil, or until the term is over,
// then returns why. Errors of the store are only a reason to try again soon.
func (c *Coordinator) keep(ctx context.Context, term *Term, k *keeper) error {
	next := time.Until(term.lastAttempt().Add(c.cfg.RenewInterval))
	for failures, unfit, renewals := 0, 0, 0; sleep(ctx, next); {
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
		if err == nil {
			if renewals++; renewals == c.cfg.Confirmations && !k.winding.Load() {
				close(k.confirmed)
			}
			failures = 0
			next = time.Until(term.lastAttempt().Add(c.cfg.RenewInterval))
			continue
		}
		if ctx.Err() == nil {
			c.renewalFailed(term, err)
		}
		next = c.retryPause(failures)
		failures++
	}
	return nil
}

// retryPause returns how long to wait after so many failures in a row before this
// one: from a sixteenth of the RenewInterval to half of it.
func (c *Coordinator) retryPause(failures int) time.Duration {
	return jitter(c.cfg.RenewInterval / 16 << min(failures, 3))
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
