package tenure

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure/internal/health"
	"github.com/tenurelib/tenure/internal/pace"
	"github.com/tenurelib/tenure/internal/report"
)

// Coordinator runs a job while its replica holds a lease. The package documentation shows
// its states. All methods are safe for concurrent use.
type Coordinator struct {
	base
	running  atomic.Bool
	panicked atomic.Pointer[report.Panic] // of the logger or the trace, since Run began

	mu     sync.Mutex // guards the fields below; taken before the monitor's
	keeper *keeper    // of the term held; nil for a standby
	resign *resignation
	down   bool               // the replica stands down
	out    bool               // the replica is drained
	rested func()             // is called when it is drained and has nothing left; may be called again
	turn   context.CancelFunc // ends what it does as a standby, because down or out has changed; nil: it is not a standby
}

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
	return &Coordinator{rested: func() {}, base: base{
		lease: lease,
		cfg:   cfg,
		caller: caller{
			// Between the time for a renewal and the renew deadline, two calls may hang,
			// one after the other.
			timeout:  min((cfg.RenewDeadline-cfg.RenewInterval)/2, longestCall),
			confirms: cfg.Confirmations > 0 || cfg.FencePredecessor != nil,
		},
		// Timers stand still while the machine is suspended. A goroutine that sleeps
		// therefore wakes to read both clocks, often enough that the Margin covers the delay.
		longestSleep: max(lease.cfg.Margin/2, 10*time.Millisecond),

		turns:  lease.traits.Alone,
		health: health.Check{Timeout: cfg.CheckTimeout},
		monitor: monitor{
			lease: lease.cfg.Key, replica: lease.cfg.Holder, logger: logger, trace: cmp.Or(cfg.Trace, new(Trace)), reports: reports,
			state: state{role: RoleStandby, since: time.Now()},
		},
	}}, nil
}

// Config returns the config of the coordinator with its defaults filled in.
func (c *Coordinator) Config() CoordinatorConfig { return c.cfg }

// Run competes for the lease and runs the job for each term that it gets, until ctx is done.
// Then it tells the job to return, waits until it has, releases the lease, and returns nil.
// No error of the store ends it, with two exceptions: Run returns [ErrSetup] at once if another
// process competes on the same SQLite file and one of the two is not Shared, and [ErrClosed] if
// the store is closed for good, once a term that it held is over.
//
// If the job, the Logger or the Trace panics, Run ends the term, releases the lease, and then
// panics with an error that has the stack and wraps the panic's value if that is an error. A second
// call while Run is running returns [ErrInvalid].
func (c *Coordinator) Run(ctx context.Context) error {
	ctx, hints, done, err := c.begin(ctx, c.cfg.Drain)
	if err != nil {
		return fmt.Errorf("tenure: run: %w", err)
	}
	defer done()
	standby := standby{base: &c.base, hints: hints}
	for pause := time.Duration(0); ctx.Err() == nil; {
		term := c.standBy(ctx, &standby, pause)
		if standby.over != nil {
			return fmt.Errorf("tenure: run %s: %w", c.lease.cfg.Key, standby.over)
		}
		if pause = 0; term != nil {
			resign, cause := c.hold(ctx, term, hints)
			pause = standby.stayAway(term, cause, resign)
		}
	}
	return nil
}

// standBy competes, or rests while this replica stands down. It returns a term, or nil once ctx is
// done or when the replica has begun or ceased to stand down.
func (c *Coordinator) standBy(ctx context.Context, s *standby, pause time.Duration) (term *Term) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	c.mu.Lock()
	down, out := c.down, c.out
	c.turn = func() { cancel(ErrResigned) }
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		c.turn = nil
		c.mu.Unlock()
		if term == nil {
			s.leave(ctx)
		}
	}()
	switch {
	case out:
		if s.rest(ctx, 0) { // until no release is left to be retried
			c.rest()
			for s.rest(ctx, untilAsked) { // an offer to this replica is left to the others
			}
		}
		return nil
	case !down:
		return s.run(ctx, pause)
	}
	if s.rest(ctx, untilAsked) { // the lease was offered to this replica
		c.mu.Lock()
		defer c.mu.Unlock()
		if ctx.Err() == nil { // it was not told to stand down again
			c.down = false
			c.changed()
		}
	}
	return nil
}

// Hold is [Coordinator.Run] for a term that the caller has acquired or resumed with the
// coordinator's lease. It renews the term and runs the job until the term is over or ctx is
// done. Then it tells the job to return, waits until it has, and releases the lease. It returns
// nil if ctx was done, and otherwise why the term was over. It does not compete for another term.
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
	ctx, hints, done, err := c.begin(ctx, nil)
	if err != nil {
		return fmt.Errorf("tenure: hold: %w", err)
	}
	defer done()
	if _, cause := c.hold(ctx, term, hints); !errors.Is(cause, ErrShutdown) {
		return fmt.Errorf("tenure: hold %s: %w", c.lease.cfg.Key, cause)
	}
	return nil
}

// begin prepares to hold the lease, until done is called. It first waits for the mark of a Drain, unless that is nil. The
// context that it returns also ends when the logger or the trace panics; done then panics too.
func (c *Coordinator) begin(ctx context.Context, marked *Drain) (_ context.Context, hints Subscription, done func(), err error) {
	if !c.running.CompareAndSwap(false, true) {
		return nil, nil, nil, fmt.Errorf("%w: the coordinator is running", ErrInvalid)
	}
	leaveStore, err := c.join(ctx)
	if err != nil {
		c.running.Store(false)
		return nil, nil, nil, err
	}
	if c.turns == nil {
		hints = Watch(c.lease.store, c.lease.cfg.Key)
	} else {
		hints = c.turns.watch(c.lease.cfg.Key)
	}
	marked.AwaitMark(ctx) // before it follows: Start need not wait for a replica that has nothing yet
	leave := c.cfg.Drain.Follow(c.drain)
	ctx, cancel := context.WithCancel(ctx)
	ignorePanics := c.monitor.reports.PassOn(func(p *report.Panic) {
		c.panicked.CompareAndSwap(nil, p)
		cancel()
	})
	return ctx, hints, func() {
		leave()
		hints.Stop()
		leaveStore()
		c.health.Wait()
		c.monitor.reports.Flush()
		ignorePanics()
		cancel()
		panicked := c.panicked.Swap(nil)
		c.rest()
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

// IsHolder reports whether this replica holds the lease and its job has not been told to
// return. It does no I/O. When the trust in the term ends, it turns false by itself, whatever
// else hangs.
func (c *Coordinator) IsHolder() bool {
	term := c.working.Load()
	return term != nil && term.Valid()
}

// hold runs the job for one term. When the job has returned and the lease is released, it returns
// the cause, and the resignation if there was one.
func (c *Coordinator) hold(ctx context.Context, term *Term, hints Subscription) (resign *resignation, cause error) {
	keeper, job := newKeeper(&c.base, term, hints), newJob(ctx, term, &c.base)
	c.enterTerm(keeper)
	keeper.start()
	cause = ErrJobEnded // if anything below panics, the term still ends in order
	defer func() { resign = c.endTerm(term, keeper, job, cause) }()
	if err := c.startJob(term, keeper, job); err != nil {
		return nil, err
	}
	cause = c.untilOver(ctx, term, keeper, job)
	return nil, cause
}

// endTerm tells the job to return, waits until it has, and releases the lease. It returns the
// resignation that ended the term, if there was one.
func (c *Coordinator) endTerm(term *Term, keeper *keeper, job *runningJob, cause error) *resignation {
	keeper.stopping.Store(true)
	c.working.Store(nil)
	job.cancel(cause) // before anything is recorded or logged
	c.monitor.termEnding(term, cause)
	c.awaitJob(term, keeper, job)
	c.monitor.jobReturned(term, cause)
	keeper.stop()
	resign := c.leaveTerm(c.release(term, cause, keeper.hints.Live()))
	if job.panicked != nil {
		panic(job.panicked)
	}
	return resign
}

func (c *Coordinator) enterTerm(keeper *keeper) {
	c.mu.Lock()
	c.keeper = keeper
	if c.down || c.out { // since the term was acquired
		c.endByResigning()
	}
	c.mu.Unlock()
	c.monitor.termBegan(keeper.term)
}

// leaveTerm is called when nothing remains to be done for the term: the lease is released,
// or err says why it is not. It returns the resignation that ended the term, if there was one.
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

// startJob starts the job, or what must succeed before it, or returns why the term is already over.
func (c *Coordinator) startJob(term *Term, keeper *keeper, job *runningJob) error {
	c.mu.Lock() // so that no job begins after a resignation
	defer c.mu.Unlock()
	if _, err := c.untilCheck(term, keeper); err != nil {
		return err
	}
	if keeper.over.Err() != nil {
		return context.Cause(keeper.over)
	}
	if term.unconfirmed() != nil {
		job.start(confirmName, keeper.confirm)
		return nil
	}
	c.working.Store(term)
	c.monitor.jobBegins(term)
	job.alone = c.cfg.Watch == nil || c.cfg.Reconcile == nil
	job.start("watch", c.cfg.Watch)
	job.start("reconcile", c.cfg.Reconcile)
	return nil
}

// untilOver returns why the term is over.
func (c *Coordinator) untilOver(ctx context.Context, term *Term, keeper *keeper, job *runningJob) error {
	check := time.NewTimer(0) // waits for no I/O: it fires even while a renewal hangs
	defer check.Stop()
	for {
		next, err := c.untilCheck(term, keeper)
		if err != nil {
			return err
		}
		check.Reset(next)
		select {
		case <-ctx.Done():
			return ErrShutdown
		case <-keeper.over.Done():
			return context.Cause(keeper.over)
		case r := <-job.results:
			job.finished(r)
			if !r.isConfirmation() {
				r.note(&c.monitor)
				return r.cause
			}
			if err := c.startJob(term, keeper, job); err != nil {
				return err
			}
		case <-check.C:
		}
	}
}

// untilCheck returns how long untilOver may sleep before it checks again, or why the term is
// over.
func (c *Coordinator) untilCheck(term *Term, keeper *keeper) (time.Duration, error) {
	if err := term.over(); err != nil {
		return 0, err
	}
	if term.local() {
		return time.Hour, nil
	}
	untilDeadline := keeper.untilDeadline()
	if untilDeadline <= 0 {
		return 0, keeper.overdueCause()
	}
	return min(untilDeadline, pace.UntilTick(c.longestSleep)), nil
}

// awaitJob waits until the job has returned. If that takes longer than the trust allows, it
// reports the job as stuck and lets the lease expire. Another replica may then take the lease,
// but this one does not compete before its job has returned.
func (c *Coordinator) awaitJob(term *Term, keeper *keeper, job *runningJob) {
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

// Resign ends the current term, if there is one, and returns when the job has returned and
// the lease is released. The replica then stays away long enough for another one to win.
// An error means that the lease could not be released, or that ctx was done first; the
// resignation stands all the same.
//
// A job that resigns must pass its own context; otherwise it would wait for itself to return.
func (c *Coordinator) Resign(ctx context.Context) error {
	c.mu.Lock()
	resign := c.endByResigning()
	c.mu.Unlock()
	return c.awaitResignation(ctx, resign)
}

// endByResigning returns the resignation from the current term; nil if there is no term. The caller
// holds mu.
func (c *Coordinator) endByResigning() *resignation {
	if c.keeper != nil && c.resign == nil {
		c.resign = &resignation{done: make(chan struct{})}
		c.keeper.end(ErrResigned)
	}
	return c.resign
}

func (c *Coordinator) awaitResignation(ctx context.Context, resign *resignation) error {
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

// Do waits until this replica holds the lease, calls fn once with the context of its term,
// and releases the lease. It returns fn's error; if the lease was lost before fn returned,
// that error is also [ErrLost] or [ErrDeadline]. If ctx is done before fn is called, Do
// returns its cause; if ctx is done later, the context of fn is done too, and the lease is
// kept until fn has returned. If fn panics, Do panics as Run does; if it calls
// [runtime.Goexit], Do returns an error. Do never calls fn twice: the caller decides what to do
// after a loss.
//
// Use it for a single piece of work, such as a migration. A job that continues for as long as
// the program runs needs a [Coordinator].
func Do(ctx context.Context, lease *Lease, fn func(context.Context) error) error {
	if fn == nil {
		return fmt.Errorf("tenure: do: %w: fn is nil", ErrInvalid)
	}
	competing, stop := context.WithCancel(ctx)
	defer stop()
	called, result := false, error(nil)
	coordinator, err := NewCoordinator(lease, CoordinatorConfig{Reconcile: func(ctx context.Context) error {
		called, result = true, fmt.Errorf("tenure: do: %w", report.ErrGoexit)
		defer stop() // also if fn does not return
		result = fn(ctx)
		if cause := context.Cause(ctx); isLoss(cause) {
			result = errors.Join(fmt.Errorf("tenure: do: %w", cause), result)
		}
		stop()
		<-ctx.Done() // so that the term ends by a shutdown, and not because the job ended
		return nil
	}})
	if err != nil {
		return err
	}
	if err := coordinator.Run(competing); err != nil {
		return err
	}
	if !called {
		return fmt.Errorf("tenure: do: %w", context.Cause(ctx))
	}
	return result
}
