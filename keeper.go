package tenure

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure/internal/health"
	"github.com/tenurelib/tenure/internal/logtext"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
	"github.com/tenurelib/tenure/internal/record"
)

const (
	// longestRetryPause limits the pause between two attempts, however long the TTL is.
	longestRetryPause = 5 * time.Second

	// longestFencing is how many TTLs one call of FencePredecessor may last.
	longestFencing = 10
)

// base is what the roles of a replica share.
type base struct {
	lease        *Lease
	cfg          CoordinatorConfig
	caller       caller        // how this replica calls the lease
	longestSleep time.Duration // of anything that depends on the trust in a term
	turns        *Turns        // which take the place of the lease; nil: there is a lease
	monitor      monitor
	health       health.Check
	working      atomic.Pointer[Term] // nil unless its job runs and has not been told to return
}

// ask returns nil if this replica is healthy enough for a role, and otherwise an
// [ErrUnhealthy].
func (b *base) ask(ctx context.Context, role Role) error {
	if b.cfg.Check == nil {
		return nil
	}
	answered, err := b.health.Ask(ctx, func(ctx context.Context) error {
		err := logtext.Sound(b.cfg.Check(ctx, role))
		if err != nil {
			err = fmt.Errorf("%w: %w", ErrUnhealthy, err) // here, because the caller's Error method may block, too
		}
		return err
	})
	if !answered {
		return fmt.Errorf("%w: the check has not returned: %w", ErrUnhealthy, context.DeadlineExceeded)
	}
	return err
}

// release releases the lease, unless another replica has it already. If a request has named a
// replica, release offers the lease to that one, long enough for it to find out. Live says
// whether the release wakes the standbys.
func (b *base) release(term *Term, cause error, live bool) error {
	if isLoss(cause) && errors.Is(cause, ErrLost) {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), b.caller.timeout)
	defer cancel()
	offerFor := min(b.offerFor(live), b.lease.cfg.TTL)
	for {
		err := b.lease.release(ctx, term, offerFor)
		switch {
		case err == nil:
			b.monitor.released(term, cause)
			return nil
		case errors.Is(err, ErrLost):
			b.monitor.notReleased(term, cause, err)
			return nil
		case !pace.Sleep(ctx, pace.Jitter(b.caller.timeout/10)):
			b.monitor.notReleased(term, cause, err)
			return err
		}
	}
}

// offerFor returns how long only the requested replica may take the lease. If there is no such
// replica, the lease stays free for that long.
func (b *base) offerFor(live bool) time.Duration {
	enough := time.Second
	if b.cfg.Check != nil { // the replica asks its own Check first
		enough += b.cfg.CheckTimeout
	}
	if !live { // it has to poll
		enough = max(enough, b.cfg.AcquireInterval*5/4)
	}
	return enough
}

// join makes sure, until leave is called, that neither this process nor another one wrongly believes
// that it is the only one to use the store.
func (b *base) join(ctx context.Context) (leave func(), err error) {
	join := b.lease.traits.Join
	for join != nil {
		asking, cancel := context.WithTimeout(ctx, b.caller.timeout)
		leave, err := join(asking)
		cancel()
		if err == nil || errors.Is(err, objects.ErrInUse) || objects.IsClosed(err) {
			return leave, err
		}
		b.monitor.logFailure("failed to use the store; retrying", err)
		if !pace.Sleep(ctx, pace.Jitter(b.cfg.AcquireInterval)) {
			break
		}
	}
	return func() {}, nil
}

// keeper renews one term in a goroutine of its own, so that nothing else waits while a renewal
// hangs.
type keeper struct {
	*base
	term  *Term
	hints Subscription

	over     context.Context         // done when the term has to end; the first cause counts
	end      context.CancelCauseFunc // never blocks
	stopping atomic.Bool             // the job has been told to return, so there are no more checks
	checkErr atomic.Pointer[error]   // of the last check; nil: there was none

	toConfirm int           // renewals that must still succeed; only for the goroutine that renews
	counted   time.Time     // when the last renewal that counted was sent; at first, the last one of all
	confirmed chan struct{} // closed when toConfirm reaches 0; nil: it was 0 from the start

	stopRenewing context.CancelFunc
	done         sync.WaitGroup
	urged        sync.Mutex // held during a renewal that a fenced write waits for
}

// newKeeper returns a keeper that does not renew yet.
func newKeeper(b *base, term *Term, hints Subscription) *keeper {
	k := &keeper{base: b, term: term, hints: hints}
	k.over, k.end = context.WithCancelCause(context.Background())
	if term.unconfirmed() != nil && b.cfg.Confirmations > 0 {
		k.toConfirm, k.counted, k.confirmed = b.cfg.Confirmations, term.lastAttempt().Mono, make(chan struct{})
	}
	return k
}

// start begins to renew. A local term has nothing to renew, so its keeper only waits to be
// stopped.
func (k *keeper) start() {
	var ctx context.Context // without the caller's values, because renewals outlive the caller's trace
	ctx, k.stopRenewing = context.WithCancel(context.Background())
	if k.term.local() {
		return
	}
	renew := renewer(func(caller context.Context) error { return k.renewFor(ctx, caller) })
	k.term.renewer.Store(&renew)
	k.done.Go(func() {
		if err := k.keep(ctx); err != nil {
			k.end(err)
		}
	})
}

// stop ends the renewing, and returns when no renewal is under way.
func (k *keeper) stop() {
	k.stopRenewing()
	k.done.Wait()
	k.term.renewer.Store(nil)
	k.urged.Lock() // until the last renewal that a fenced write waits for has ended
	defer k.urged.Unlock()
}

// renewFor renews at once, for a fenced write on a server on which the term was not renewed yet. One renewal serves all
// that wait for it.
func (k *keeper) renewFor(ctx, caller context.Context) error {
	asked := time.Now()
	k.urged.Lock()
	defer k.urged.Unlock()
	if ctx.Err() != nil || k.term.lastAttempt().Mono.After(asked) {
		return nil
	}
	ctx, cancel := context.WithCancel(ctx) // without the caller's values, as every renewal
	defer cancel()
	defer context.AfterFunc(caller, cancel)()
	return k.renew(ctx)
}

// overdueCause returns why the term was not renewed in time.
func (k *keeper) overdueCause() error {
	if err := k.checkErr.Load(); err != nil && *err != nil {
		return *err
	}
	return ErrDeadline
}

// keep renews until ctx is done, and then returns nil, or until the term is over, and then
// returns why. After an error of the store it retries soon. A hint makes it renew at once: the
// record may contain a request, or be gone.
func (k *keeper) keep(ctx context.Context) error {
	next := k.untilRenewal()
	var spurious pace.Limiter
	woken, ok := false, true
	for failures, failedChecks := 0, 0; ; {
		ignoreFor := spurious.IgnoreFor(woken, k.cfg.RenewInterval)
		if failures > 0 || failedChecks > 0 || k.toConfirm > 0 {
			ignoreFor = next // the time between renewals counts
		}
		lead := k.checkLead()
		if failures > 0 || failedChecks > 0 {
			lead = 0
		}
		if woken, ok = k.await(ctx, ignoreFor, next-lead); !ok {
			return nil
		}
		if err := k.term.over(); err != nil {
			return err
		}
		var err error
		if failures == 0 || failedChecks > 0 || k.checkLead() == 0 { // a renewal is repeated without another long check
			err = k.check(ctx)
		}
		if left := k.untilRenewal(); err == nil && lead > 0 && !woken && left > 0 {
			if woken, ok = k.await(ctx, ignoreFor-max(0, next-lead), left); !ok {
				return nil
			}
		}
		began := time.Now()
		if err == nil {
			failedChecks = 0
			err = k.renew(ctx)
		} else if failedChecks++; failedChecks == k.cfg.CheckFailures && ctx.Err() == nil {
			k.end(err)
			k.stopping.Store(true) // the lease is still renewed until the job has returned
			next = 0
			continue
		}
		if over := k.term.over(); over != nil {
			return over
		}
		if request := k.term.request.Load(); request != nil && request.To != k.term.Holder() && !k.stopping.Swap(true) {
			k.end(requestCause(request))
		}
		if err == nil {
			k.countConfirmation(began)
			failures, next = 0, k.untilRenewal()
			continue
		}
		if ctx.Err() == nil {
			k.monitor.renewalFailed(k.term, err)
		}
		next = k.retryPause(failures)
		failures++
	}
}

// untilRenewal returns how long it is until the next renewal is due.
func (k *keeper) untilRenewal() time.Duration {
	return k.cfg.RenewInterval - k.term.sinceRenewal()
}

// checkLead returns how long before a renewal is due its check begins. Otherwise a long check
// would use up the time for the renewal and its repetition.
func (k *keeper) checkLead() time.Duration {
	return max(0, k.cfg.CheckTimeout-(k.cfg.RenewDeadline-k.cfg.RenewInterval)/2)
}

// untilDeadline returns how long it is until the job is told to return unless a renewal succeeds.
func (k *keeper) untilDeadline() time.Duration {
	return k.cfg.RenewDeadline - k.term.sinceRenewal()
}

// retryPause returns how long to wait after a failure that followed this number of others. Towards
// the renew deadline the attempts come closer together: each costs one statement, and the term is
// at stake.
func (k *keeper) retryPause(failures int) time.Duration {
	pause := pace.Retry(k.cfg.RenewInterval, longestRetryPause, failures)
	if left := k.untilDeadline(); left > 0 {
		pause = min(pause, pace.Jitter(max(left/4, k.cfg.RenewInterval/64)))
	}
	return pause
}

// renewalTimeout returns how long an attempt may take. One that hangs leaves half of the time until
// the renew deadline for others, because the store may be back without answering it.
func (k *keeper) renewalTimeout() time.Duration {
	timeout := k.caller.timeout
	if left := k.untilDeadline(); left > 0 {
		timeout = min(timeout, max(left/2, timeout/8))
	}
	return min(timeout, k.term.Remaining())
}

// await waits for at most longest, or until a hint comes. If the renewal becomes overdue
// meanwhile because the machine was suspended, it stops waiting.
func (k *keeper) await(ctx context.Context, ignoreFor, longest time.Duration) (woken, ok bool) {
	wasDue := k.untilRenewal() <= 0 // then this is the pause before the next attempt
	end := time.Now().Add(longest)  // timers are late, and a late renewal comes just after a standby's look
	for {
		// The coordinator, which ends the job, reads the clocks more often.
		step := min(longest, pace.UntilTick(max(k.longestSleep, k.cfg.RenewInterval/4)))
		woken, ok := pace.Await(ctx, k.hints.C(), ignoreFor, step)
		longest, ignoreFor = time.Until(end), ignoreFor-step
		woken = woken && !k.isOwnRenewal()
		if woken || !ok || longest <= 0 || !wasDue && k.untilRenewal() <= 0 {
			return woken, ok
		}
	}
}

// isOwnRenewal reports whether a hint only tells what this replica itself has written. Otherwise
// the keeper would answer its own renewals with renewals, forever.
func (k *keeper) isOwnRenewal() bool {
	change, ok := lastChange(k.hints)
	if !ok {
		return false
	}
	if v := change.Object.Version; v != 0 && v < k.term.Token() { // from before the term
		return true
	}
	return !change.Deleted && bytes.Equal(change.Object.Payload, k.term.payload) && stored(change.Object).Request() == nil
}

func (k *keeper) renew(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, k.renewalTimeout())
	defer cancel()
	k.term.longRun.Store(k.monitor.longRun(k.lease.cfg.TTL))
	began, trustLeft := time.Now(), k.term.Remaining()
	if err := k.lease.Renew(ctx, k.term); err != nil {
		return err
	}
	k.monitor.renewed(k.term, began, trustLeft)
	if is, recordLost := k.term.at.takeFailover(); is {
		k.monitor.keptOver(k.term, recordLost)
	}
	return nil
}

// requestCause returns the cause of a term that ends on request.
func requestCause(r *record.Request) error {
	if r.To == "" {
		return fmt.Errorf("%w: on request", ErrResigned)
	}
	return fmt.Errorf("%w: on request, in favour of %s", ErrResigned, r.To)
}

// check asks whether this replica is healthy, unless the job has been told to return.
func (k *keeper) check(ctx context.Context) error {
	if k.stopping.Load() {
		return nil
	}
	role := RoleHolder
	if k.working.Load() == nil {
		role = RoleConfirming
	}
	err := k.ask(ctx, role)
	k.checkErr.Store(&err)
	return err
}

// countConfirmation counts a renewal that has succeeded, if the takeover must be confirmed.
// Renewals come early if the wall clock is set ahead, so they count only when they are an
// interval apart by the monotonic clock.
func (k *keeper) countConfirmation(began time.Time) {
	if k.toConfirm == 0 || began.Sub(k.counted) < k.cfg.RenewInterval {
		return
	}
	k.counted = began
	if k.toConfirm--; k.toConfirm == 0 && !k.stopping.Load() {
		close(k.confirmed)
	}
}

// confirm returns nil once the term's predecessors are certainly gone. It runs like one of
// the job's funcs: its context ends with the term.
func (k *keeper) confirm(ctx context.Context) error {
	began, predecessors := time.Now(), k.term.unconfirmed()
	if k.confirmed != nil {
		select {
		case <-k.confirmed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if k.cfg.FencePredecessor != nil {
		for _, prev := range predecessors {
			if err := k.fencePredecessor(ctx, prev); err != nil {
				return err
			}
		}
	}
	last := predecessors[len(predecessors)-1]
	k.monitor.log().Info("takeover confirmed", "predecessor", last.Holder, "token", k.term.Token(), "took", time.Since(began))
	// Renew at once, because the record still says that the takeover is unconfirmed: if this
	// replica crashed now, a predecessor that has since recovered would be fenced again.
	k.term.confirm()
	if err := k.renew(ctx); err != nil {
		k.monitor.renewalFailed(k.term, err)
	}
	return nil
}

// fencePredecessor calls the user's func until it succeeds, until ctx is done, or until it has
// failed for so long that another replica may do better.
func (k *keeper) fencePredecessor(ctx context.Context, prev Holding) error {
	patience := k.lease.cfg.TTL
	attempts, cancel := context.WithTimeout(ctx, longestFencing*patience)
	defer cancel()
	for began, failures := time.Now(), 0; ; failures++ {
		prev.Labels = maps.Clone(prev.Labels) // the record's, and the caller may change them
		err := logtext.Sound(k.cfg.FencePredecessor(attempts, prev))
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case time.Since(began) >= patience:
			return fmt.Errorf("%w: predecessor %s not fenced for %v: %w", ErrUnhealthy, prev.Holder, time.Since(began).Round(time.Millisecond), err)
		}
		k.monitor.logFailure("failed to fence predecessor; retrying", err)
		if !pace.Sleep(ctx, pace.Retry(k.cfg.RenewInterval, longestRetryPause, failures)) {
			return ctx.Err()
		}
	}
}
