package tenure

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure/internal/pace"
)

// The causes for which a job's context ends, besides [ErrLost] and
// [ErrDeadline]. A job finds them by [context.Cause].
var (
	// ErrResigned says that the term was given up by [Coordinator.Resign], or on
	// the request of another process, see [Lease.RequestRelease].
	ErrResigned = errors.New("lease resigned")

	// ErrShutdown says that the context of [Coordinator.Run] is done.
	ErrShutdown = errors.New("coordinator shuts down")

	// ErrJobEnded says that one of the job's funcs returned or panicked while
	// the term lasted.
	ErrJobEnded = errors.New("job ended")
)

// CoordinatorConfig configures a [Coordinator]. The zero value serves.
type CoordinatorConfig struct {
	// Watch and Reconcile are the job. Both run, each in its own goroutine,
	// from the start of a term until their context ends; either may be nil.
	// [context.Cause] tells why it ended, [TermFromContext] for which term they
	// run. If one returns or panics before, the term is over: the other's
	// context ends, the lease is released, and after a pause this replica
	// competes again.
	//
	// Where both are nil the replica only holds the lease, for a program that asks
	// [Coordinator.IsHolder] at each step of its own.
	Watch     func(ctx context.Context) error
	Reconcile func(ctx context.Context) error

	// RenewInterval is the time from one renewal to the next. Default TTL/3.
	RenewInterval time.Duration

	// AcquireInterval is the longest time from one attempt of a standby to the
	// next where it cannot expect to be woken by a release: on a store that is no
	// [Watcher], while its watch is not live, after an error, or with [Observed];
	// after an [ErrSetup] it is longer. A replica whose term has ended stays away
	// for as long, and for twice as long if it resigned or its job ended. Default
	// TTL/6, and 10s at most.
	AcquireInterval time.Duration

	// RenewDeadline is how long the job may go on without a renewal. What is
	// left of TTL − Margin behind it is the time the job has to return. Default
	// 2/3 of the TTL.
	RenewDeadline time.Duration

	// Check, where set, tells whether this replica is fit, by nil. It is asked
	// before this replica competes, with the role [RoleStandby], and before each
	// renewal, with [RoleHolder], or [RoleConfirming] before the job has begun. A standby
	// that is not fit does not compete. A holder is not renewed until it is fit;
	// after CheckFailures in a row, or at the RenewDeadline, its term ends with
	// [ErrUnhealthy], the lease is released once the job has returned, and this
	// replica stays away, each time for longer, so that a healthy one wins.
	//
	// Check must return when its context ends, after CheckTimeout at the latest;
	// one that does not counts as failed. A standby that is woken by a release
	// competes after its check, so it should be quick. It must not panic.
	Check         func(ctx context.Context, role Role) error
	CheckTimeout  time.Duration // default (RenewDeadline − RenewInterval)/2
	CheckFailures int           // default 1

	// Confirmations is how many renewals must succeed after a takeover before the
	// job begins. Default 0. A takeover is a steal from a holder that has not
	// released the lease; there is nothing to confirm after a release, nor where
	// nobody held it. Where a replica gives the lease back before it has confirmed, the
	// next one confirms.
	Confirmations int

	// FencePredecessor, where set, is called after a takeover and its
	// confirmations, before the job begins: to cut off the power, the disk or the
	// address of a holder that vanished. It is called again until it returns nil,
	// or the term is over. Where it has failed for a TTL the lease is given to another
	// replica, which has to fence the same holders, and this one stays away as one
	// whose Check has failed. Where a replica that had taken the lease over did not get
	// that far, it is called for those whom that one was to fence, too, so it must bear
	// to be called for a holder that is cut off already; and for one of its own name,
	// where a replica crashed and was started anew, unless AssumeUniqueHolder is set. It must
	// return when its context ends, as a job must: with the term, or after ten TTLs.
	FencePredecessor func(ctx context.Context, prev Holding) error

	// Logger gets one line per acquire, loss and release, and what goes wrong.
	// Default the lease's.
	Logger *slog.Logger

	// Trace, where set, is told what happens.
	Trace *Trace
}

// ObservedConfig returns the configs of a lease and of its coordinator in which
// no clock decides who may hold: the holder renews once per interval, and a
// standby that has itself watched it miss so many renewals takes over. So the TTL
// is interval × missed, missed being 2 or more. The job then begins after so many
// confirmations, each one interval. The caller sets the rest, the job first of
// all. An interval or a number that no lease can have is [ErrInvalid].
//
// See [Observed]. A wall clock of the holder that jumps can only end its term early.
func ObservedConfig(interval time.Duration, missed, confirmations int) (LeaseConfig, CoordinatorConfig, error) {
	var err error
	switch {
	case interval <= 0:
		err = fmt.Errorf("interval %v is not positive", interval)
	case missed < 2:
		err = fmt.Errorf("missed %d is not 2 or more", missed)
	case interval > maximumTTL/time.Duration(missed):
		err = fmt.Errorf("interval %v × missed %d is more than %v", interval, missed, maximumTTL)
	case confirmations < 0:
		err = fmt.Errorf("confirmations %d is negative", confirmations)
	}
	if err != nil {
		return LeaseConfig{}, CoordinatorConfig{}, fmt.Errorf("tenure: ObservedConfig: %w: %w", ErrInvalid, err)
	}
	return LeaseConfig{TTL: interval * time.Duration(missed), Expiry: Observed},
		CoordinatorConfig{RenewInterval: interval, Confirmations: confirmations}, nil
}

// longestAcquireInterval is the default where the TTL is long: an error of the store
// that passes, or a hint that is lost, should not cost more.
const longestAcquireInterval = 10 * time.Second

func (cfg CoordinatorConfig) withDefaults(lease LeaseConfig) (CoordinatorConfig, error) {
	if cfg.RenewInterval == 0 {
		cfg.RenewInterval = lease.TTL / 3
	}
	if cfg.AcquireInterval == 0 {
		cfg.AcquireInterval = min(lease.TTL/6, longestAcquireInterval)
	}
	if cfg.RenewDeadline == 0 {
		cfg.RenewDeadline = lease.TTL * 2 / 3
	}
	if cfg.Logger == nil {
		cfg.Logger = lease.Logger
	}
	if cfg.Trace == nil {
		cfg.Trace = &noTrace
	}
	given := cfg
	if cfg.CheckTimeout == 0 {
		cfg.CheckTimeout = (cfg.RenewDeadline - cfg.RenewInterval) / 2
	}
	if cfg.CheckFailures == 0 {
		cfg.CheckFailures = 1
	}

	var errs []error
	refuse := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("%w: "+format, append([]any{ErrInvalid}, args...)...))
	}
	if cfg.RenewInterval < 0 {
		refuse("RenewInterval %v is negative", cfg.RenewInterval)
	}
	if cfg.AcquireInterval < 0 || cfg.AcquireInterval > maximumTTL {
		refuse("AcquireInterval %v is not between 0 and %v", cfg.AcquireInterval, maximumTTL)
	}
	if given.CheckTimeout != 0 && cfg.Check == nil {
		refuse("CheckTimeout is %v, and Check is nil", given.CheckTimeout)
	}
	if given.CheckFailures != 0 && cfg.Check == nil {
		refuse("CheckFailures is %d, and Check is nil", given.CheckFailures)
	}
	if given.CheckTimeout < 0 || given.CheckTimeout > 0 && given.CheckTimeout >= cfg.RenewDeadline-cfg.RenewInterval {
		refuse("CheckTimeout %v is not between 0 and RenewDeadline less RenewInterval, %v: there would be no time for the renewal",
			cfg.CheckTimeout, cfg.RenewDeadline-cfg.RenewInterval)
	}
	if cfg.CheckFailures < 0 {
		refuse("CheckFailures %d is negative", cfg.CheckFailures)
	}
	if cfg.Confirmations < 0 {
		refuse("Confirmations %d is negative", cfg.Confirmations)
	}
	least := lease.TTL / 30 // for a renewal and its repetition, and for a job to return
	if cfg.RenewDeadline-cfg.RenewInterval < least {
		refuse("RenewDeadline %v is not at least %v above RenewInterval %v", cfg.RenewDeadline, least, cfg.RenewInterval)
	}
	if lease.TTL-lease.Margin-cfg.RenewDeadline < least {
		refuse("RenewDeadline %v is not at least %v below TTL %v less Margin %v: the job would have no time to return",
			cfg.RenewDeadline, least, lease.TTL, lease.Margin)
	}
	return cfg, errors.Join(errs...)
}

// Coordinator runs a job while its replica holds the lease:
//
//	            acquire | steal
//	standby ------------------> holding ----> stopping ----> standby, or return on shutdown
//	   ^  try fails: wait           |  lost | deadline | unhealthy | job ended | resign | shutdown
//	   +--------------------+       +-> 1 end the job's context, with its cause
//	                                    2 wait until the job has returned, still renewing
//	                                    3 release
//
// After a steal the job begins once the takeover is confirmed, where that is asked
// for; all else holds from the steal on.
//
// All methods are safe for concurrent use.
type Coordinator struct {
	lease        *Lease
	cfg          CoordinatorConfig
	caller       caller        // how it calls the store
	longestSleep time.Duration // of whatever goes by the trust in a term
	single       bool

	monitor monitor
	running atomic.Bool
	term    atomic.Pointer[Term] // while its job runs and has not been told to stop

	checks    checks
	headStart pace.HeadStart // of Run's goroutine, as is the next
	unhealthy pace.Doubling

	mu     sync.Mutex // guards the fields below
	keeper *keeper    // of the term held; nil for a standby
	resign *resignation
}

// longestCall is the most that a call to the store may take, however long the TTL is:
// so long does a shutdown wait for a store that hangs.
const longestCall = 10 * time.Second

// NewCoordinator returns a coordinator for a lease. It does no I/O and starts
// nothing. An [ErrInvalid] names everything that is wrong with the config.
func NewCoordinator(lease *Lease, cfg CoordinatorConfig) (*Coordinator, error) {
	if lease == nil {
		return nil, fmt.Errorf("tenure: new coordinator: %w: lease is nil", ErrInvalid)
	}
	cfg, err := cfg.withDefaults(lease.cfg)
	if err != nil {
		return nil, fmt.Errorf("tenure: new coordinator: %w", err)
	}
	return &Coordinator{
		lease: lease,
		cfg:   cfg,
		caller: caller{
			// Between the time for a renewal and the renew deadline two calls can hang, one
			// after the other.
			timeout:  min((cfg.RenewDeadline-cfg.RenewInterval)/2, longestCall),
			confirms: cfg.Confirmations > 0 || cfg.FencePredecessor != nil,
		},
		// A timer stands still while the machine is suspended, so each stretch ends with a
		// look at both clocks, early enough that the Margin covers it.
		longestSleep: max(lease.cfg.Margin/2, 10*time.Millisecond),

		single: isExclusive(lease.store),
		checks: checks{check: cfg.Check, timeout: cfg.CheckTimeout},
		monitor: monitor{
			lease: lease.cfg.Key, replica: lease.cfg.Holder, logger: cfg.Logger, trace: cfg.Trace,
			state: state{since: time.Now()},
		},
	}, nil
}

// Run competes for the lease and runs the job for each term that it gets, until
// ctx is done. Then it tells the job to return, waits until it has, releases
// the lease, and returns nil. No error of the store ends it.
//
// If the job panics, Run releases the lease and then panics with a [*JobPanic].
// A coordinator runs once at a time: a second Run meanwhile is [ErrInvalid].
func (c *Coordinator) Run(ctx context.Context) error {
	if !c.running.CompareAndSwap(false, true) {
		return fmt.Errorf("tenure: run: %w: the coordinator is running", ErrInvalid)
	}
	defer c.running.Store(false)
	defer c.checks.wait()
	c.headStart.Gives = false
	var hints Subscription = noHints{}
	if !c.single {
		hints = subscribe(c.lease.store, c.lease.cfg.Key)
	}
	defer hints.Stop()
	for pause := time.Duration(0); ; {
		if ctx.Err() != nil {
			return nil
		}
		standby := standby{c: c, hints: hints}
		term := standby.run(ctx, pause)
		if term == nil {
			return nil
		}
		pause = c.hold(ctx, term, hints)
	}
}

// IsHolder reports whether this replica holds the lease and its job has not been
// told to stop. It does no I/O. It turns false by itself when the term's trust
// ends, whatever else is stuck.
func (c *Coordinator) IsHolder() bool {
	term := c.term.Load()
	return term != nil && term.Valid()
}

// hold runs the job for one term. It returns, with the pause before this replica
// competes again, after the job has returned and the lease was given back.
func (c *Coordinator) hold(ctx context.Context, term *Term, hints Subscription) (pause time.Duration) {
	keeper := newKeeper(c, term, hints)
	c.enterTerm(keeper)
	keeper.start()
	job := newJob(ctx, jobScope{term, c})
	if term.unconfirmed() != nil {
		job.start(confirmName, keeper.confirm)
	} else {
		c.startJob(term, job)
	}

	cause := c.untilOver(ctx, term, keeper, job)
	keeper.stopping.Store(true)
	c.term.Store(nil)
	c.monitor.termOver(term, cause)
	job.cancel(cause)
	c.awaitJob(term, keeper, job)
	c.monitor.jobReturned(term, cause)
	keeper.stop()
	err := c.giveBack(term, cause)
	resign := c.leaveTerm(err)
	if job.panicked != nil {
		panic(job.panicked)
	}
	// Or two replicas that are sick may hand the lease to each other for ever.
	c.headStart.Gives = !errors.Is(cause, ErrResigned)
	return c.stayAway(term, cause, resign)
}

func (c *Coordinator) enterTerm(keeper *keeper) {
	c.mu.Lock()
	c.keeper = keeper
	c.mu.Unlock()
	c.monitor.termBegan(keeper.term)
}

// leaveTerm is called when nothing is left to do for the term held: the lease was given
// back, or err says why not. It returns whose resignation that was, nil where it was none.
func (c *Coordinator) leaveTerm(err error) *resignation {
	c.mu.Lock()
	resign := c.resign
	c.keeper, c.resign = nil, nil
	c.mu.Unlock()
	c.monitor.termLeft()
	if resign != nil {
		resign.err = err
		close(resign.over)
	}
	return resign
}

func (c *Coordinator) startJob(term *Term, job *job) {
	c.term.Store(term)
	c.monitor.jobBegins(term)
	job.start("watch", c.cfg.Watch)
	job.start("reconcile", c.cfg.Reconcile)
}

// untilOver returns why the term is over.
func (c *Coordinator) untilOver(ctx context.Context, term *Term, keeper *keeper, job *job) error {
	// This timer stands behind no I/O: it fires while a renewal hangs.
	deadline := time.NewTimer(c.untilDeadline(term))
	defer deadline.Stop()
	for {
		select {
		case <-ctx.Done():
			return ErrShutdown
		case <-keeper.over.Done():
			return context.Cause(keeper.over)
		case r := <-job.results:
			job.took(r)
			if !r.confirmed() {
				return r.cause()
			}
			if _, err := c.timeLeft(term, keeper); err != nil {
				return err // both came at once
			}
			c.startJob(term, job)
		case <-deadline.C:
			left, err := c.timeLeft(term, keeper)
			if err != nil {
				return err
			}
			deadline.Reset(left)
		}
	}
}

// timeLeft returns how long untilOver may sleep before it looks again, or why the term
// is over.
func (c *Coordinator) timeLeft(term *Term, keeper *keeper) (time.Duration, error) {
	if err := term.over(); err != nil {
		return 0, err
	}
	left := c.untilDeadline(term)
	if left <= 0 {
		return 0, keeper.overdueCause()
	}
	return left, nil
}

// untilDeadline returns how long untilOver may sleep before it looks again; 0 or
// less: the term was not renewed in time.
func (c *Coordinator) untilDeadline(term *Term) time.Duration {
	if term.local() {
		return time.Hour
	}
	return min(c.cfg.RenewDeadline-term.sinceRenewal(), c.longestSleep)
}

// awaitJob returns when the job has. A job that takes longer than the trust
// allows is reported, and its lease is left to expire: this replica does not
// compete meanwhile, and another one may.
func (c *Coordinator) awaitJob(term *Term, keeper *keeper, job *job) {
	told := time.Now()
	allowed := time.NewTimer(c.lease.cfg.TTL - c.lease.cfg.Margin - c.cfg.RenewDeadline)
	defer allowed.Stop()
	for job.running > 0 {
		select {
		case r := <-job.results:
			job.took(r)
		case <-allowed.C:
			keeper.stopRenewing()
			c.monitor.jobStuck(term, time.Since(told))
		}
	}
}
