package tenure

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

// The causes for which a job's context ends, besides [ErrLost] and
// [ErrDeadline]. A job finds them by [context.Cause].
var (
	// ErrResigned says that the term was given up by [Coordinator.Resign].
	ErrResigned = errors.New("lease resigned")

	// ErrShutdown says that the context of [Coordinator.Run] is done.
	ErrShutdown = errors.New("coordinator shuts down")

	// ErrJobEnded says that one of the job's funcs returned or panicked while
	// the term lasted.
	ErrJobEnded = errors.New("job ended")
)

// CoordinatorConfig configures a [Coordinator]. Watch or Reconcile is required;
// the zero value of all else serves.
type CoordinatorConfig struct {
	// Watch and Reconcile are the job. Both run, each in its own goroutine,
	// from the begin of a term until their context ends; either may be nil.
	// [context.Cause] tells why it ended, [TermFromContext] for which term they
	// run. If one returns or panics before, the term is over: the other's
	// context ends, the lease is released, and after a pause this replica
	// competes again.
	Watch     func(ctx context.Context) error
	Reconcile func(ctx context.Context) error

	// RenewInterval is the time from one renewal to the next. Default TTL/3.
	RenewInterval time.Duration

	// AcquireInterval is the longest time from one attempt of a standby to the
	// next where it cannot expect to be woken by a release: on a store that is no
	// [Watcher], while its watch is not live, or after an error; after an
	// [ErrSetup] it is longer. A replica whose term has ended stays away for as
	// long, and for twice as long if it resigned or its job ended. Default TTL/6.
	AcquireInterval time.Duration

	// RenewDeadline is how long the job may go on without a renewal. What is
	// left of TTL − Margin behind it is the time the job has to return. Default
	// 2/3 of the TTL.
	RenewDeadline time.Duration

	// Check, where set, tells whether this replica is fit, by nil. It is asked
	// before this replica competes, with the role [Standby], and before each
	// renewal, with [Holder], or [Confirming] before the job has begun. A standby
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
	// nobody held it.
	Confirmations int

	// FencePredecessor, where set, is called after a takeover and its
	// confirmations, before the job begins: to cut off the power, the disk or the
	// address of a holder that vanished. It is called again until it returns nil,
	// or the term is over. It must return when its context ends, as a job must.
	FencePredecessor func(ctx context.Context, prev Holding) error

	// Logger gets one line per acquire, loss and release, and what goes wrong.
	// Default slog.Default().
	Logger *slog.Logger

	// Trace, where set, is told what happens.
	Trace *Trace
}

// Trace is a set of funcs that a [Coordinator] calls as things happen. Any may
// be nil. They are called from the coordinator's own goroutine, must return
// quickly, and must not panic.
type Trace struct {
	// JobStuck is called when the job has not returned although its context
	// ended so long ago. The lease is no longer renewed, and will expire.
	JobStuck func(term *Term, since time.Duration)
}

func (cfg CoordinatorConfig) withDefaults(lease LeaseConfig) (CoordinatorConfig, error) {
	if cfg.RenewInterval == 0 {
		cfg.RenewInterval = lease.TTL / 3
	}
	if cfg.AcquireInterval == 0 {
		cfg.AcquireInterval = lease.TTL / 6
	}
	if cfg.RenewDeadline == 0 {
		cfg.RenewDeadline = lease.TTL * 2 / 3
	}
	if cfg.Logger == nil {
		cfg.Logger = lease.Logger
	}
	if cfg.Trace == nil {
		cfg.Trace = &Trace{}
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
	if cfg.Watch == nil && cfg.Reconcile == nil {
		refuse("Watch and Reconcile are both nil, and one must be the job")
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
	lease   *Lease
	cfg     CoordinatorConfig
	log     *slog.Logger
	single  bool
	running atomic.Bool

	checks   checks   // of whichever goroutine checks: never two at once
	cooldown cooldown // of Run's goroutine

	term atomic.Pointer[Term] // while its job runs and has not been told to stop

	mu     sync.Mutex // guards the fields below
	status Status
	held   *Term        // until it was given back; nil for a standby
	resign *resignation // of that term
	token  int64        // of the last term
}

// resignation is how Resign reaches the goroutine that owns the term.
type resignation struct {
	once  sync.Once
	away  time.Duration // how long to stay away at least; set before asked is closed
	asked chan struct{} // closed by the first to ask
	over  chan struct{} // closed when the lease has been given back
	err   error         // set before over is closed
}

// wanted reports whether somebody has asked.
func (r *resignation) wanted() bool {
	select {
	case <-r.asked:
		return true
	default:
		return false
	}
}

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
		lease:  lease,
		cfg:    cfg,
		log:    cfg.Logger.With("lease", lease.cfg.Key.String(), "replica", lease.cfg.Holder),
		single: lease.store.SingleReplica(),
		status: Status{Replica: lease.cfg.Holder, Since: time.Now()},
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
	for pause := time.Duration(0); ; {
		term := c.standby(ctx, pause)
		if term == nil {
			return nil
		}
		pause = c.hold(ctx, term)
	}
}

// IsHolder reports whether this replica holds the lease and its job has not been
// told to stop. It does no I/O. It turns false by itself when the term's trust
// ends, whatever else is stuck.
func (c *Coordinator) IsHolder() bool {
	term := c.term.Load()
	return term != nil && term.Valid()
}

// Resign ends the current term, if there is one, and returns when the job has
// returned and the lease has been given back; the replica then stays away for
// long enough that another can win. An error says that the lease could not be
// released, or that ctx was done before; the resignation stands all the same.
//
// A job that resigns must not wait for itself to return: it passes its own
// context.
func (c *Coordinator) Resign(ctx context.Context) error { return c.ResignFor(ctx, 0) }

// ResignFor is [Coordinator.Resign] with a time for which this replica stays away
// at least, counted from when the lease was given back. Where several resign from
// one term, the first one's time counts.
func (c *Coordinator) ResignFor(ctx context.Context, away time.Duration) error {
	if away < 0 {
		return fmt.Errorf("tenure: resign %s: %w: away %v is negative", c.lease.cfg.Key, ErrInvalid, away)
	}
	c.mu.Lock()
	resign := c.resign
	c.mu.Unlock()
	if resign == nil {
		return nil
	}
	resign.once.Do(func() {
		resign.away = away
		close(resign.asked)
	})
	select {
	case <-resign.over:
		return resign.err
	case <-ctx.Done():
		return fmt.Errorf("tenure: resign %s: %w", c.lease.cfg.Key, ctx.Err())
	}
}

// standby competes for the lease, at first after a pause. It returns nil once
// ctx is done.
func (c *Coordinator) standby(ctx context.Context, pause time.Duration) *Term {
	if !sleep(ctx, pause) {
		return nil
	}
	var hints Watch = noWatch{}
	if !c.single {
		hints = watch(c.lease.store, c.lease.cfg.Key)
	}
	defer hints.Stop()
	var vain vainHints
	for woken := false; ; {
		var term *Term
		err := c.check(ctx, Standby)
		if err == nil {
			term, err = c.acquire(ctx, woken)
		}
		if err == nil && ctx.Err() != nil {
			c.giveBack(term, ErrShutdown)
			return nil
		}
		if err == nil {
			return term
		}
		if ctx.Err() != nil {
			return nil
		}
		pause, deaf := c.notAcquired(err, hints.Live()), vain.after(woken, c.cfg.AcquireInterval)
		if !errors.Is(err, ErrHeld) {
			deaf = pause // whoever cannot acquire now need not hear when to
		}
		if !sleep(ctx, min(deaf, pause)) {
			return nil
		}
		if woken = false; deaf >= pause {
			continue
		}
		timer := time.NewTimer(pause - deaf)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-timer.C:
		case <-hints.C():
			timer.Stop()
			woken = true
		}
	}
}

func (c *Coordinator) acquire(ctx context.Context, woken bool) (*Term, error) {
	if c.single {
		return newLocalTerm(c.lease.cfg.Key, c.lease.cfg.Holder, c.lastToken()), nil
	}
	// Not ended by a shutdown: an acquire that is cut off halfway may leave a
	// record of a term that nobody holds, and all would have to wait for its TTL.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.callTimeout())
	defer cancel()
	if woken {
		return c.lease.acquireOrSteal(ctx, true)
	}
	return c.lease.AcquireOrSteal(ctx)
}

// notAcquired returns how long to wait after a failed attempt, unless woken.
func (c *Coordinator) notAcquired(err error, wakes bool) time.Duration {
	pause := jitter(c.cfg.AcquireInterval)
	var held *HeldError
	if errors.As(err, &held) {
		c.log.Debug("lease is held", "holder", held.Holding.Holder)
		c.note(held.Holding.Holder, nil)
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

// hold runs the job for one term. It returns, with the pause before this replica
// competes again, after the job has returned and the lease was given back.
func (c *Coordinator) hold(ctx context.Context, term *Term) (pause time.Duration) {
	resign := c.enterTerm(term)
	keeper := c.startKeeper(term)
	job := newJob(ctx, jobScope{term, c.log})
	if c.mustConfirm(term) {
		job.start(confirmName, func(ctx context.Context) error { return c.confirm(ctx, term, keeper) })
	} else {
		c.startJob(term, job)
	}

	cause := c.untilOver(ctx, term, keeper, job, resign)
	keeper.winding.Store(true)
	c.stopping(term, cause)
	job.cancel(cause)
	c.awaitJob(term, keeper, job)
	keeper.stop()
	resign.err = c.giveBack(term, cause)

	c.leaveTerm()
	close(resign.over)
	if job.panicked != nil {
		panic(job.panicked)
	}
	return c.stayAway(term, cause, resign)
}

func (c *Coordinator) startJob(term *Term, job *job) {
	c.becomeHolder(term)
	job.start("watch", c.cfg.Watch)
	job.start("reconcile", c.cfg.Reconcile)
}

// stayAway returns how long this replica does not compete after a term.
func (c *Coordinator) stayAway(term *Term, cause error, resign *resignation) time.Duration {
	every, least := c.cfg.AcquireInterval, time.Duration(0)
	if resign.wanted() {
		least = max(2*jitter(every), resign.away)
	}
	switch {
	case errors.Is(cause, ErrUnhealthy):
		return max(least, jitter(c.cooldown.after(time.Since(term.AcquiredAt()), 2*every, longestCooldown*c.lease.cfg.TTL)))
	case errors.Is(cause, ErrJobEnded):
		return max(least, 2*jitter(every)) // every standby tries before
	default:
		return max(least, jitter(every))
	}
}

// untilOver returns why the term is over.
func (c *Coordinator) untilOver(ctx context.Context, term *Term, keeper *keeper, job *job, resign *resignation) error {
	// This timer stands behind no I/O: it fires while a renewal hangs.
	deadline := time.NewTimer(c.untilDeadline(term))
	defer deadline.Stop()
	for {
		select {
		case <-ctx.Done():
			return ErrShutdown
		case <-resign.asked:
			return ErrResigned
		case err := <-keeper.lost:
			return err
		case r := <-job.results:
			job.took(r)
			if !r.confirmed() {
				return r.cause()
			}
			c.startJob(term, job)
		case <-deadline.C:
			if err := term.over(); err != nil {
				return err
			}
			left := c.untilDeadline(term)
			if left <= 0 {
				return keeper.late()
			}
			deadline.Reset(left)
		}
	}
}

// untilDeadline returns how long untilOver may sleep before it looks again; 0 or
// less: the term was not renewed in time.
func (c *Coordinator) untilDeadline(term *Term) time.Duration {
	if term.local() {
		return time.Hour
	}
	// A timer stands still while the machine is suspended, so it sleeps in short
	// stretches, each of which ends with a look at the wall clock.
	return min(time.Until(term.lastAttempt().Add(c.cfg.RenewDeadline)), max(c.lease.cfg.Margin, time.Second))
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
			keeper.cancel()
			c.setStuck(true)
			c.log.Error("job does not return although its context has ended; its lease is renewed no longer",
				"token", term.Token(), "waited", time.Since(told))
			if c.cfg.Trace.JobStuck != nil {
				c.cfg.Trace.JobStuck(term, time.Since(told))
			}
		}
	}
	c.setStuck(false)
	c.log.Debug("job returned", "token", term.Token(), "took", time.Since(told))
}

// giveBack releases the lease, unless it is another's already.
func (c *Coordinator) giveBack(term *Term, cause error) error {
	if errors.Is(cause, ErrLost) && !errors.Is(cause, ErrJobEnded) { // a job's word is not enough
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), c.callTimeout())
	defer cancel()
	for {
		err := c.lease.Release(ctx, term)
		switch {
		case err == nil:
			c.note("", nil)
			c.log.Info("lease released", "holder", term.Holder(), "token", term.Token(), "cause", cause)
			return nil
		case errors.Is(err, ErrLost):
			c.log.Info("lease lost before it was released", "holder", term.Holder(), "token", term.Token(), "error", err)
			return nil
		case !sleep(ctx, jitter(c.callTimeout()/10)):
			c.report("lease cannot be released; it will expire", err)
			return err
		}
	}
}

// callTimeout bounds one call to the store, so that between the time for a
// renewal and the renew deadline two can hang, one after the other.
func (c *Coordinator) callTimeout() time.Duration {
	return (c.cfg.RenewDeadline - c.cfg.RenewInterval) / 2
}
