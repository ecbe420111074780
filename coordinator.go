package tenure

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
	"github.com/tenurelib/tenure/internal/report"
)

// The causes with which a job's context ends, besides [ErrLost] and [ErrDeadline]. The job
// finds them with [context.Cause].
var (
	// ErrResigned says that the term was given up by [Coordinator.Resign], or at the
	// request of another process, see [Lease.RequestRelease].
	ErrResigned = errors.New("lease resigned")

	// ErrShutdown says that the context of [Coordinator.Run] is done.
	ErrShutdown = errors.New("replica is shutting down")

	// ErrJobEnded says that one of the job's funcs returned or panicked during the term.
	ErrJobEnded = errors.New("job ended")
)

// CoordinatorConfig configures a [Coordinator]. The zero value is ready to use.
type CoordinatorConfig struct {
	// Watch and Reconcile are the job. Both run, each in its own goroutine, from the start
	// of a term until their context ends; [context.Cause] tells why it did, and
	// [TermFromContext] which term it is. If one of them returns or panics earlier, the
	// term is over: the other's context ends, the lease is released, and after a pause
	// this replica competes again.
	//
	// Either or both may be nil. If both are, the replica only holds the lease, for a
	// program that asks [Coordinator.IsHolder] before each of its steps.
	Watch     func(ctx context.Context) error
	Reconcile func(ctx context.Context) error

	// RenewInterval is the time between renewals. Default TTL/3.
	RenewInterval time.Duration

	// AcquireInterval is the longest time between a standby's attempts while it can't
	// expect to be woken by a release: if the store is not a [Watcher], its watch is not
	// live, or an error occurred, and with [Observed] unless the watch is a
	// [ChangeSubscription]. After an [ErrSetup] it is longer.
	// A replica whose term has ended stays away for one AcquireInterval, or for two if it
	// resigned or its job ended. Default TTL/6, and at most 10s.
	AcquireInterval time.Duration

	// RenewDeadline is how long the job may run without a renewal. The rest of
	// TTL − Margin is the time that the job has to return. Default 2/3 of the TTL.
	RenewDeadline time.Duration

	// Check, if set, returns nil if this replica is healthy. It is called before the
	// replica competes, with [RoleStandby], and before each renewal, with [RoleHolder], or
	// with [RoleConfirming] if the job has not begun yet. An unhealthy standby does not
	// compete. An unhealthy holder does not renew; after CheckFailures failures in a row,
	// or at the RenewDeadline, its term ends with [ErrUnhealthy], the lease is released
	// once the job has returned, and the replica stays away, longer each time, so that a
	// healthy one wins.
	//
	// Check must return when its context ends, after CheckTimeout at the latest, or it
	// counts as failed. It should be quick, because a standby that is woken by a release
	// calls it before it competes. It must not panic.
	Check         func(ctx context.Context, role Role) error
	CheckTimeout  time.Duration // default (RenewDeadline − RenewInterval)/2
	CheckFailures int           // default 1

	// Confirmations is how many renewals must succeed after a takeover before the job
	// begins. Default 0. A takeover is a steal from a holder that has not released the
	// lease; an acquire of a free lease has nothing to confirm. If a replica releases the
	// lease before it has confirmed the takeover, the next holder confirms it.
	Confirmations int

	// FencePredecessor, if set, is called after a takeover and its confirmations, before
	// the job begins: to cut off the power, the disk or the address of a holder that
	// vanished. It is called again until it returns nil or the term is over. When it has
	// failed for a TTL, another replica gets the lease, and has to fence the same holders;
	// this one stays away as if its Check had failed.
	//
	// It must be safe to call for a holder that is already cut off, because a replica that
	// did not finish leaves its predecessors to the next one. It is also called for a
	// holder with this replica's own name, after a crash and restart, unless
	// AssumeUniqueHolder is set. It must return when its context ends, as a job must: with
	// the term, or after ten TTLs.
	FencePredecessor func(ctx context.Context, prev Holding) error

	// Logger gets one line for each acquire, loss and release, and for what goes wrong.
	// Nothing waits for it, see [Trace]. Default: the lease's.
	Logger *slog.Logger

	// Trace, if set, is told what happens.
	Trace *Trace
}

// ObservedConfig returns the configs of a lease and its coordinator with which no clock
// decides who may hold the lease: the holder renews once per interval, and a standby takes
// over that has itself seen it miss this many renewals, 2 or more. So the TTL is interval ×
// missed. The job then begins after the confirmations, one per interval. The caller sets
// the rest, above all the job. Values that no lease can have are [ErrInvalid].
//
// See [Observed]. If the holder's wall clock jumps, its term may end early, and no more.
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

// longestAcquireInterval is the default for long TTLs, so that a passing error of the store,
// or a lost hint, does not cost more.
const longestAcquireInterval = 10 * time.Second

func (cfg CoordinatorConfig) withDefaults(lease LeaseConfig) (CoordinatorConfig, error) {
	cfg.RenewInterval = cmp.Or(cfg.RenewInterval, lease.TTL/3)
	cfg.AcquireInterval = cmp.Or(cfg.AcquireInterval, min(lease.TTL/6, longestAcquireInterval))
	cfg.RenewDeadline = cmp.Or(cfg.RenewDeadline, lease.TTL*2/3)
	cfg.Logger = cmp.Or(cfg.Logger, lease.Logger)
	cfg.Trace = cmp.Or(cfg.Trace, &noTrace)
	given, renewing := cfg, cfg.RenewDeadline-cfg.RenewInterval
	cfg.CheckTimeout = cmp.Or(cfg.CheckTimeout, renewing/2)
	cfg.CheckFailures = cmp.Or(cfg.CheckFailures, 1)

	var errs []error
	refuse := func(when bool, format string, args ...any) {
		if when {
			errs = append(errs, fmt.Errorf("%w: "+format, append([]any{ErrInvalid}, args...)...))
		}
	}
	refuse(cfg.RenewInterval < 0, "RenewInterval %v is negative", cfg.RenewInterval)
	refuse(cfg.AcquireInterval < 0 || cfg.AcquireInterval > maximumTTL,
		"AcquireInterval %v is not between 0 and %v", cfg.AcquireInterval, maximumTTL)
	refuse(given.CheckTimeout != 0 && cfg.Check == nil, "CheckTimeout is %v, and Check is nil", given.CheckTimeout)
	refuse(given.CheckFailures != 0 && cfg.Check == nil, "CheckFailures is %d, and Check is nil", given.CheckFailures)
	refuse(given.CheckTimeout < 0 || given.CheckTimeout > 0 && given.CheckTimeout >= renewing,
		"CheckTimeout %v is not between 0 and RenewDeadline less RenewInterval, %v: there would be no time for the renewal",
		cfg.CheckTimeout, renewing)
	refuse(cfg.CheckFailures < 0, "CheckFailures %d is negative", cfg.CheckFailures)
	refuse(cfg.Confirmations < 0, "Confirmations %d is negative", cfg.Confirmations)
	least := lease.TTL / 30 // for a renewal and its repetition, and for a job to return
	refuse(renewing < least, "RenewDeadline %v is not at least %v above RenewInterval %v", cfg.RenewDeadline, least, cfg.RenewInterval)
	refuse(lease.TTL-lease.Margin-cfg.RenewDeadline < least,
		"RenewDeadline %v is not at least %v below TTL %v less Margin %v: the job would have no time to return",
		cfg.RenewDeadline, least, lease.TTL, lease.Margin)
	return cfg, errors.Join(errs...)
}

// Coordinator runs a job while its replica holds the lease. The package documentation shows
// its states. All methods are safe for concurrent use.
type Coordinator struct {
	lease        *Lease
	cfg          CoordinatorConfig
	caller       caller        // how it calls the lease
	longestSleep time.Duration // of anything that depends on the trust in a term
	single       bool          // there is no lease to lose

	monitor  monitor
	running  atomic.Bool
	panicked atomic.Pointer[JobPanic] // of the logger or the trace, since Run began
	term     atomic.Pointer[Term]     // while its job runs and has not been told to return

	checks    checks
	headStart pace.HeadStart // for Run's goroutine, as is unhealthy
	unhealthy pace.Doubling

	mu     sync.Mutex // guards the fields below
	keeper *keeper    // of the term held; nil for a standby
	resign *resignation
}

// longestCall limits a call to the store, however long the TTL is, because a shutdown waits
// that long for a store that hangs.
const longestCall = 10 * time.Second

// NewCoordinator returns a coordinator for a lease. It does no I/O and starts nothing. An
// [ErrInvalid] names everything that is wrong with the config.
func NewCoordinator(lease *Lease, cfg CoordinatorConfig) (*Coordinator, error) {
	if lease == nil {
		return nil, fmt.Errorf("tenure: new coordinator: %w: lease is nil", ErrInvalid)
	}
	cfg, err := cfg.withDefaults(lease.cfg)
	if err != nil {
		return nil, fmt.Errorf("tenure: new coordinator: %w", err)
	}
	logger, reports := report.Logger(cfg.Logger)
	return &Coordinator{
		lease: lease,
		cfg:   cfg,
		caller: caller{
			// Two calls may hang, one after the other, between the time for a renewal and
			// the renew deadline.
			timeout:  min((cfg.RenewDeadline-cfg.RenewInterval)/2, longestCall),
			confirms: cfg.Confirmations > 0 || cfg.FencePredecessor != nil,
		},
		// Timers stand still while the machine is suspended, so a goroutine that
		// sleeps looks at both clocks again, early enough that the Margin covers the delay.
		longestSleep: max(lease.cfg.Margin/2, 10*time.Millisecond),

		single: isExclusive(lease.store),
		checks: checks{check: cfg.Check, timeout: cfg.CheckTimeout},
		monitor: monitor{
			lease: lease.cfg.Key, replica: lease.cfg.Holder, logger: logger, trace: cfg.Trace, reports: reports,
			state: state{since: time.Now()},
		},
	}, nil
}

// Run competes for the lease and runs the job for each term that it gets, until ctx is done.
// Then it tells the job to return, waits until it has, releases the lease, and returns nil.
// No error of the store ends it, except that a SQLite file on which another process competes,
// one of the two without Shared, is [ErrSetup] at once.
//
// If the job, the Logger or the Trace panics, Run ends the term, releases the lease, and then
// panics with a [*JobPanic]. To call Run while it is running is [ErrInvalid].
func (c *Coordinator) Run(ctx context.Context) error {
	ctx, hints, done, err := c.begin(ctx)
	if err != nil {
		return fmt.Errorf("tenure: run: %w", err)
	}
	defer done()
	for pause := time.Duration(0); ; {
		if ctx.Err() != nil {
			return nil
		}
		standby := standby{c: c, hints: hints}
		term := standby.run(ctx, pause)
		if term == nil {
			return nil
		}
		resign, cause := c.hold(ctx, term, hints)
		pause = c.stayAway(term, cause, resign)
	}
}

// Hold is [Coordinator.Run] for a term that the caller has acquired or resumed with the
// coordinator's lease: it renews the term and runs the job, until the term is over or ctx is done, tells the
// job to return, waits until it has, and releases the lease. It returns nil if that was
// because ctx was done, else why the term was over. It does not compete for another term.
//
// No two coordinators may hold one term.
func (c *Coordinator) Hold(ctx context.Context, term *Term) error {
	if err := term.isFor("hold", c.lease.cfg.Key); err != nil {
		return err
	}
	if cfg := c.lease.cfg; !term.local() && term.trusted < cfg.TTL-cfg.Margin {
		return fmt.Errorf("tenure: hold %s: %w: the TTL in the term's record is shorter than the lease's %v, for which the coordinator's intervals are meant",
			cfg.Key, ErrInvalid, cfg.TTL)
	}
	ctx, hints, done, err := c.begin(ctx)
	if err != nil {
		return fmt.Errorf("tenure: hold: %w", err)
	}
	defer done()
	if _, cause := c.hold(ctx, term, hints); !errors.Is(cause, ErrShutdown) {
		return fmt.Errorf("tenure: hold %s: %w", c.lease.cfg.Key, cause)
	}
	return nil
}

// begin prepares to hold the lease, until done is called. The context that it returns also ends
// when the logger or the trace panics, and then done panics.
func (c *Coordinator) begin(ctx context.Context) (_ context.Context, hints Subscription, done func(), err error) {
	if !c.running.CompareAndSwap(false, true) {
		return nil, nil, nil, fmt.Errorf("%w: the coordinator is running", ErrInvalid)
	}
	c.headStart.Gives = false
	unuse, err := c.useStore(ctx)
	if err != nil {
		c.running.Store(false)
		return nil, nil, nil, err
	}
	hints = noHints{}
	if !c.single {
		hints = subscribe(c.lease.store, c.lease.cfg.Key)
	}
	ctx, cancel := context.WithCancel(ctx)
	ignorePanics := c.monitor.reports.PassOn(func(p *report.Panic) {
		c.panicked.CompareAndSwap(nil, &JobPanic{Value: p.Value, Stack: p.Stack, of: "the logger or the trace"})
		cancel()
	})
	return ctx, hints, func() {
		hints.Stop()
		unuse()
		c.checks.calls.Wait()
		c.monitor.reports.Flush()
		ignorePanics()
		cancel()
		panicked := c.panicked.Swap(nil)
		c.running.Store(false)
		if panicked == nil {
			return
		}
		if ofJob := recover(); ofJob != nil { // which matters more
			panic(ofJob)
		}
		panic(panicked)
	}, nil
}

// useStore makes sure that no other process believes that it alone uses the store, nor this
// one wrongly, until done is called.
func (c *Coordinator) useStore(ctx context.Context) (done func(), err error) {
	file, ok := c.lease.store.(interface {
		use(context.Context) (func(), error)
	})
	for ok {
		asking, cancel := context.WithTimeout(ctx, c.caller.timeout)
		done, err := file.use(asking)
		cancel()
		if err == nil || errors.Is(err, objects.ErrInUse) {
			return done, err
		}
		c.monitor.failed("the store cannot be used, trying again", err)
		if !pace.Sleep(ctx, pace.Jitter(c.cfg.AcquireInterval)) {
			break
		}
	}
	return func() {}, nil
}

// IsHolder reports whether this replica holds the lease and its job has not been told to
// return. It does no I/O. It turns false by itself when the trust in the term ends, whatever
// else hangs.
func (c *Coordinator) IsHolder() bool {
	term := c.term.Load()
	return term != nil && term.Valid()
}

// hold runs the job for one term. It returns after the job has returned and the lease is
// released, with the cause, and with the resignation if there was one.
func (c *Coordinator) hold(ctx context.Context, term *Term, hints Subscription) (resign *resignation, cause error) {
	keeper, job := newKeeper(c, term, hints), newJob(ctx, term, c)
	c.enterTerm(keeper)
	keeper.start()
	cause = ErrJobEnded // if anything below panics, the term ends in order all the same
	defer func() { resign = c.endTerm(term, keeper, job, cause) }()
	if term.unconfirmed() != nil {
		job.start(confirmName, keeper.confirm)
	} else {
		c.startJob(term, job)
	}
	cause = c.untilOver(ctx, term, keeper, job)
	return nil, cause
}

// endTerm tells the job to return, waits until it has, and releases the lease. It returns the
// resignation that ended the term, if there was one.
func (c *Coordinator) endTerm(term *Term, keeper *keeper, job *job, cause error) *resignation {
	keeper.stopping.Store(true)
	c.term.Store(nil)
	job.cancel(cause) // before anything is said about it
	c.monitor.termEnding(term, cause)
	c.awaitJob(term, keeper, job)
	c.monitor.jobReturned(term, cause)
	keeper.stop()
	resign := c.leaveTerm(c.release(term, cause, keeper.hints.Live()))
	if job.panicked != nil {
		panic(job.panicked)
	}
	// Otherwise two unhealthy replicas could hand the lease back and forth forever.
	c.headStart.Gives = !errors.Is(cause, ErrResigned)
	return resign
}

func (c *Coordinator) enterTerm(keeper *keeper) {
	c.mu.Lock()
	c.keeper = keeper
	c.mu.Unlock()
	c.monitor.termBegan(keeper.term)
}

// leaveTerm is called when nothing remains to be done for the term: the lease is released,
// or err says why not. It returns the resignation that ended the term, if there was one.
func (c *Coordinator) leaveTerm(err error) *resignation {
	c.mu.Lock()
	resign := c.resign
	c.keeper, c.resign = nil, nil
	c.mu.Unlock()
	c.monitor.termEnded()
	if resign != nil {
		resign.err = err
		close(resign.done)
	}
	return resign
}

func (c *Coordinator) startJob(term *Term, job *job) {
	c.term.Store(term)
	c.monitor.jobBegins(term)
	job.alone = c.cfg.Watch == nil || c.cfg.Reconcile == nil
	job.start("watch", c.cfg.Watch)
	job.start("reconcile", c.cfg.Reconcile)
}

// untilOver returns why the term is over.
func (c *Coordinator) untilOver(ctx context.Context, term *Term, keeper *keeper, job *job) error {
	for {
		next, err := c.untilCheck(term, keeper)
		if err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ErrShutdown
		case <-keeper.over.Done():
			return context.Cause(keeper.over)
		case r := <-job.results:
			job.finished(r)
			if !r.isConfirmation() {
				c.monitor.funcReturned(r)
				return r.cause
			}
			if _, err := c.untilCheck(term, keeper); err != nil {
				return err // the term ended at the same moment
			}
			c.startJob(term, job)
		case <-time.After(next): // waits for no I/O: it fires even while a renewal hangs
		}
	}
}

// untilCheck returns how long untilOver may sleep before it looks again, or why the term is
// over.
func (c *Coordinator) untilCheck(term *Term, keeper *keeper) (time.Duration, error) {
	if err := term.over(); err != nil {
		return 0, err
	}
	if term.local() {
		return time.Hour, nil
	}
	untilDeadline := c.cfg.RenewDeadline - term.sinceRenewal()
	if untilDeadline <= 0 {
		return 0, keeper.overdueCause()
	}
	return min(untilDeadline, c.longestSleep), nil
}

// awaitJob returns when the job has returned. If that takes longer than the trust allows, it
// reports the job and lets the lease expire: another replica may take it, but this one does
// not compete before its job has returned.
func (c *Coordinator) awaitJob(term *Term, keeper *keeper, job *job) {
	told := time.Now()
	allowed := time.NewTimer(c.lease.cfg.TTL - c.lease.cfg.Margin - c.cfg.RenewDeadline)
	defer allowed.Stop()
	for job.running > 0 {
		select {
		case r := <-job.results:
			job.finished(r)
		case <-allowed.C:
			keeper.stopRenewing()
			c.monitor.jobStuck(term, time.Since(told))
		}
	}
}
