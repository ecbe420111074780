package tenure

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure/internal/pace"
)

// ErrUnhealthy says that a term is over because [CoordinatorConfig.Check] failed, or
// because FencePredecessor did for too long.
var ErrUnhealthy = errors.New("replica is unhealthy")

const (
	// longestRetryPause is the most between two tries, however long the TTL is.
	longestRetryPause = 5 * time.Second

	// longestFencing is the most TTLs for which one call of FencePredecessor may last.
	longestFencing = 10
)

// keeper renews one term in a goroutine of its own, so that nothing else waits
// for a renewal that hangs.
type keeper struct {
	c     *Coordinator
	term  *Term
	hints Subscription

	over      context.Context         // done when the term is to end; the first cause counts
	end       context.CancelCauseFunc // never blocks
	confirmed chan struct{}           // closed after as many renewals as a confirmation takes; nil: it takes none
	winding   atomic.Bool             // the job has been told to return: nothing is checked any more
	unfit     atomic.Pointer[error]   // of the last check; nil: it went well

	stopRenewing context.CancelFunc
	done         sync.WaitGroup
}

// newKeeper returns a keeper that does not renew yet.
func newKeeper(c *Coordinator, term *Term, hints Subscription) *keeper {
	k := &keeper{c: c, term: term, hints: hints}
	k.over, k.end = context.WithCancelCause(context.Background())
	if term.unconfirmed() != nil && c.cfg.Confirmations > 0 {
		k.confirmed = make(chan struct{})
	}
	return k
}

// start begins to renew. A local term has nothing to renew; its keeper just waits to
// be stopped.
func (k *keeper) start() {
	var ctx context.Context
	ctx, k.stopRenewing = context.WithCancel(context.Background())
	if k.term.local() {
		return
	}
	k.done.Go(func() {
		if err := k.keep(ctx); err != nil {
			k.end(err)
		}
	})
}

// stop ends the renewing and returns when no renewal is under way any more. It
// may be called twice.
func (k *keeper) stop() {
	k.stopRenewing()
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
func (k *keeper) keep(ctx context.Context) error {
	c, term := k.c, k.term
	next := k.untilRenewal()
	var spurious pace.Limiter
	woken, ok := false, true
	counted := term.AcquiredAt()
	for failures, unfit, renewals := 0, 0, 0; ; {
		ignoreFor := spurious.IgnoreFor(woken, c.cfg.RenewInterval)
		if failures > 0 || unfit > 0 || k.confirmed != nil && renewals < c.cfg.Confirmations {
			ignoreFor = next // what counts is the time between renewals
		}
		if woken, ok = k.await(ctx, ignoreFor, next); !ok {
			return nil
		}
		if err := term.over(); err != nil {
			return err
		}
		began := time.Now()
		err := k.check(ctx)
		if err == nil {
			unfit = 0
			err = k.renew(ctx)
		} else if unfit++; unfit == c.cfg.CheckFailures && ctx.Err() == nil {
			k.end(err)
			k.winding.Store(true) // and the lease is renewed until the job has returned
			next = 0
			continue
		}
		if over := term.over(); over != nil {
			return over
		}
		if request := term.request.Load(); request != nil && request.To != term.Holder() && !k.winding.Swap(true) {
			k.end(requestCause(request))
		}
		if err == nil {
			// A wall clock that is set ahead makes a renewal come early; the time that a
			// confirmation takes has passed only by the monotonic clock.
			if began.Sub(counted) >= c.cfg.RenewInterval {
				counted = began
				if renewals++; k.confirmed != nil && renewals == c.cfg.Confirmations && !k.winding.Load() {
					close(k.confirmed)
				}
			}
			failures = 0
			next = k.untilRenewal()
			continue
		}
		if ctx.Err() == nil {
			c.monitor.renewalFailed(term, err)
		}
		next = k.retryPause(failures)
		failures++
	}
}

// untilRenewal returns when the next renewal is due.
func (k *keeper) untilRenewal() time.Duration {
	return k.c.cfg.RenewInterval - k.term.sinceRenewal()
}

// retryPause returns how long to wait after so many failures in a row before this one.
func (k *keeper) retryPause(failures int) time.Duration {
	return pace.Retry(k.c.cfg.RenewInterval, longestRetryPause, failures)
}

// await waits for at most longest, or until a hint comes. Where the machine was
// suspended meanwhile, a renewal that is overdue by then is not waited for any longer.
func (k *keeper) await(ctx context.Context, ignoreFor, longest time.Duration) (woken, ok bool) {
	inTime := k.untilRenewal() > 0 // otherwise it is tried again, after a pause
	for {
		// The goroutine that owns the term looks more often.
		step := min(longest, max(k.c.longestSleep, k.c.cfg.RenewInterval/4))
		woken, ok := pace.Await(ctx, k.hints.C(), ignoreFor, step)
		longest, ignoreFor = longest-step, ignoreFor-step
		if woken || !ok || longest <= 0 || inTime && k.untilRenewal() <= 0 {
			return woken, ok
		}
	}
}

func (k *keeper) renew(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, min(k.c.caller.timeout, k.term.Remaining()))
	defer cancel()
	began, trustLeft := time.Now(), k.term.Remaining()
	if err := k.c.lease.Renew(ctx, k.term); err != nil {
		return err
	}
	k.c.monitor.renewed(k.term, began, trustLeft)
	return nil
}

// check asks whether this replica is fit to be renewed, unless the job has been told
// to return.
func (k *keeper) check(ctx context.Context) error {
	if k.winding.Load() {
		return nil
	}
	role := RoleHolder
	if k.c.term.Load() == nil {
		role = RoleConfirming
	}
	err := k.c.checks.ask(ctx, role)
	if err != nil {
		k.unfit.Store(&err)
	} else {
		k.unfit.Store(nil)
	}
	return err
}

// confirm returns nil when the predecessors of the term are surely gone. It runs as a
// job's funcs do: its context ends with the term.
func (k *keeper) confirm(ctx context.Context) error {
	began, predecessors := time.Now(), k.term.unconfirmed()
	if k.confirmed != nil {
		select {
		case <-k.confirmed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if k.c.cfg.FencePredecessor != nil {
		for _, prev := range predecessors {
			if err := k.fencePredecessor(ctx, prev); err != nil {
				return err
			}
		}
	}
	last := predecessors[len(predecessors)-1]
	k.c.monitor.log().Info("takeover confirmed", "predecessor", last.Holder, "token", k.term.Token(), "took", time.Since(began))
	// Renewed at once, for the record still says that it is not: if this replica
	// crashes, a predecessor that has recovered is not fenced again.
	k.term.confirm()
	if err := k.renew(ctx); err != nil {
		k.c.monitor.renewalFailed(k.term, err)
	}
	return nil
}

// fencePredecessor calls the caller's func until it succeeds, or ctx is done; or until
// it has failed for so long that another replica may do better.
func (k *keeper) fencePredecessor(ctx context.Context, prev Holding) error {
	patience := k.c.lease.cfg.TTL
	attempts, cancel := context.WithTimeout(ctx, longestFencing*patience)
	defer cancel()
	for began, failures := time.Now(), 0; ; failures++ {
		prev.Labels = maps.Clone(prev.Labels) // the record's, and the caller may change them
		err := k.c.cfg.FencePredecessor(attempts, prev)
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case time.Since(began) >= patience:
			return fmt.Errorf("%w: predecessor %s not fenced for %v: %w", ErrUnhealthy, prev.Holder, time.Since(began).Round(time.Millisecond), err)
		}
		k.c.monitor.failed("predecessor not fenced, trying again", err)
		if !pace.Sleep(ctx, k.retryPause(failures)) {
			return ctx.Err()
		}
	}
}

// checks runs the caller's Check, one at a time. One that ignores the end of its
// context counts as failed, and until it has returned no other begins. It belongs to
// whichever goroutine checks: never two at once.
type checks struct {
	check   func(context.Context, Role) error // nil: every replica is fit
	timeout time.Duration
	running chan struct{} // closed when the last has returned; nil before the first
}

// ask returns nil where this replica is fit for a role. Its error is [ErrUnhealthy].
func (c *checks) ask(ctx context.Context, role Role) error {
	if c.check == nil {
		return nil
	}
	if !c.idle() {
		return fmt.Errorf("%w: the check before has not returned", ErrUnhealthy)
	}
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	returned, result := make(chan struct{}), make(chan error, 1)
	c.running = returned
	go func() {
		defer close(returned)
		result <- c.check(ctx, role)
	}()
	select {
	case err := <-result:
		if err != nil {
			return fmt.Errorf("%w: %w", ErrUnhealthy, err)
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%w: the check has not answered: %w", ErrUnhealthy, ctx.Err())
	}
}

func (c *checks) idle() bool {
	if c.running == nil {
		return true
	}
	select {
	case <-c.running:
		return true
	default:
		return false
	}
}

// wait returns when no check runs.
func (c *checks) wait() {
	if c.running != nil {
		<-c.running
	}
}
