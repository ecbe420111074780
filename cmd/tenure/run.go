//go:build unix

package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
	"github.com/tenurelib/tenure/internal/pgconns"
)

func runCommand(out *output) *cobra.Command {
	o := &runOptions{}
	var timing timing
	c := &cobra.Command{
		Use:   "run --store STORE --key NAME [flags] -- program [argument...]",
		Short: "start a program while this host holds a lease",
		Long: `Run competes for the lease, and starts the program when it has acquired it. When it loses
the lease, or cannot renew it in time, it ends the program: it sends SIGTERM to the
program's process group, and SIGKILL before another host may start it. When the program
exits on its own, run releases the lease, so that another host can run the program, and
competes again after a pause.

The program's environment has TENURE_TOKEN, a number that increases with each term of the
lease: other systems that the program writes to can reject a lower token. TENURE_TERM and
TENURE_HOLDER name the term and the replica. The program must stay in the foreground:
processes that it leaves behind when it exits are ended too.

SIGTERM, SIGINT and SIGQUIT are passed to the program to end it, and then tenure releases
the lease and exits. It does the same when its terminal is closed. SIGHUP, SIGUSR1, SIGUSR2
and SIGWINCH are only passed to the program.

For a service that something else supervises, give two commands instead of a program:

    tenure run --store STORE --key web --start 'systemctl start web' --stop 'systemctl stop web'

--stop is retried until it succeeds. It also runs once before the first term, in case an
earlier run left the service running. Run only one tenure per host for a given service.
--stop-every and --start-every run the commands again, in case something else starts or ends
the service.

Before the program starts, these take effect in this order: --confirm, if another host has
vanished; --unfence; --fence for the host that has vanished; and --fence for each of the --peers.
--unfence-every and --fence-every run the commands again while the program runs.

Commands are passed to /bin/sh. If the store is down, run keeps trying.`,
		Args: cobra.ArbitraryArgs,
		PreRunE: func(c *cobra.Command, args []string) (err error) {
			timing, err = o.validate(c.Flags(), args)
			return err
		},
		RunE: func(c *cobra.Command, args []string) error { return runProgram(c.Context(), o, timing, out, args) },
	}
	o.runFlags(c)
	return c
}

// runFlags defines the flags of run.
func (o *runOptions) runFlags(c *cobra.Command) {
	o.storeFlags(c)
	o.keyFlag(c)
	flags := c.Flags()
	flags.BoolVar(&o.store.lossless, "lossless", false, "a failover of this Postgres never loses an acknowledged write, so a free lease is taken at once after one; give it on all replicas or on none")
	flags.StringVar(&o.replica, "replica", "", "`NAME` of this replica, as shown to people and used by tenure handover (default $TENURE_REPLICA_ID, or the host's name)")
	flags.BoolVar(&o.unique, "unique-replica", false, "if tenure was killed and is started again, continue as soon as the program of the earlier run has ended; a second run of a replica on the same host waits for the first. Give each host its own --replica")
	flags.DurationVar(&o.ttl, "ttl", tenure.DefaultTTL, "`TIME` for which the lease counts as held after its last renewal. If a host vanishes, the program runs nowhere for that long")
	flags.DurationVar(&o.renew, "renew", 0, "`TIME` from one renewal to the next (default a third of the TTL)")
	flags.IntVar(&o.missed, "missed", 0, "`NUMBER` of renewals that a holder must miss, 2 or more, before this replica takes over. Then no clock decides, only what this replica has observed itself; the TTL is --renew times NUMBER. Give all replicas the same NUMBER")
	flags.DurationVar(&o.acquire, "acquire", 0, "`TIME` between attempts to acquire the lease while nothing would notify this replica of a release; run waits twice as long after the program has exited on its own (default a sixth of the TTL)")
	flags.StringVar(&o.check, "check", "", "`COMMAND` whose exit status says whether this host is healthy. It runs with the argument active before each renewal, and as often with the argument standby on a host that stands by; a holder whose check fails is replaced. The argument is appended to the command: end a command that takes none with \"&& :\", as in 'test -e /etc/fit && :'")
	flags.DurationVar(&o.checkTimeout, "check-timeout", 0, "`TIME` within which --check must return (default a sixth of the TTL, or less if a long --stop-timeout leaves less time between renewals). It may be up to five sixths of the TTL less --stop-timeout, which counts as at least a tenth of the TTL. A --check that uses more than half of it is reported. A --check that may last longer than the default begins before a renewal is due; if it may last longer than half of the TTL, the default --stop-timeout is shorter")
	flags.IntVar(&o.confirm, "confirm", 0, "`NUMBER` of renewals that must succeed before the program starts, after a host has vanished")
	flags.StringVar(&o.fence, "fence", "", "`COMMAND` that cuts off a host that has vanished, before the program starts here. $TENURE_PREDECESSOR names that host: NULs become U+FFFD, and a name over 4096 bytes is cut and marked with \"…\". The command is retried until it succeeds. It does not run for an earlier run of this --replica, so each replica needs its own name")
	flags.StringVar(&o.peers, "peers", "", "comma-separated `NAMES` of all replicas. Before the program starts, in each term, --fence runs for each of them but this one, with the name in $TENURE_PREDECESSOR. If that fails for a TTL, the lease is given up. Standbys are cut off too: give an --unfence that brings this host back")
	flags.DurationVar(&o.fenceEvery, "fence-every", 0, "`TIME` between two runs of --fence for each of the --peers while this replica runs the program; a failure is only logged (default: only before the program starts)")
	flags.StringVar(&o.unfence, "unfence", "", "`COMMAND` that undoes what another replica's --fence has done to this host. It runs in each term before anything is fenced and the program starts; if it fails, the lease is given up")
	flags.DurationVar(&o.unfenceEvery, "unfence-every", 0, "`TIME` between two runs of --unfence while this replica runs the program; if one fails, the term ends (default: once per term)")
	flags.DurationVar(&o.stopTimeout, "stop-timeout", 0, "`TIME` from SIGTERM to SIGKILL (default a little over a quarter of the TTL, and less with a long --check-timeout)")
	flags.StringVar(&o.onLoss, "on-loss", onLossStop, "stop or kill: `HOW` the program is ended if the lease was not renewed in time or --check failed; kill sends SIGKILL at once. With --start, SIGKILL goes to all that --start has left running below tenure, and then --stop is run with TENURE_STOP=kill")
	flags.BoolVar(&o.once, "once", false, "when the program exits on its own, exit with its exit status")
	flags.DurationVar(&o.every, "every", 0, "with --once: `TIME` between two runs, as of a cron line that several hosts have. The program does not run if a run that began less than half of TIME before this command has succeeded, and the exit status is 0")
	flags.StringVar(&o.start, "start", "", "`COMMAND` that starts a service and returns, used instead of a program")
	flags.StringVar(&o.stop, "stop", "", "`COMMAND` that stops what --start started, and returns when it has stopped")
	flags.DurationVar(&o.startEvery, "start-every", 0, "`TIME` between two runs of --start while this replica holds the lease, in case the service has ended; --start must leave a running service alone, and the term ends if --start fails (default: once per term)")
	flags.DurationVar(&o.stopEvery, "stop-every", 0, "`TIME` between two runs of --stop while another replica holds the lease, in case the service was started here (default: never)")
	flags.StringVar(&o.log, "log", "text", "json or text: `FORMAT` of the log")
	c.MarkFlagsMutuallyExclusive("start", "once")
}

// runner runs the program for each term.
type runner struct {
	opts        *runOptions
	args        []string // the guard's arguments after its timing
	timing      timing
	log         *slog.Logger
	shutdown    context.CancelCauseFunc            // with nil if tenure was told to end
	signal      atomic.Int32                       // the signal that told tenure to end; 0 if none has
	current     atomic.Pointer[guarded]            // nil between terms
	name        *os.File                           // of this replica, which the guards hold too; nil unless it is unique
	coordinator *tenure.Coordinator                // set by compete before it runs
	service     chan struct{}                      // has one element while a term, or a --stop of a standby, is under way
	unfenced    string                             // the ID of the last term in which --unfence has succeeded; used by fence and then by the job
	fencedIn    string                             // the ID of the last term in which --fence has succeeded for a host; used by fence and then by the job
	fenced      []string                           // the hosts for which it has
	fencing     atomic.Bool                        // whether the --peers are being fenced, before the program starts
	checking    sync.Mutex                         // held while --check runs
	giveWay     atomic.Pointer[context.CancelFunc] // of a run of --check by checkStandby
	slowCheck   atomic.Pointer[time.Time]          // when a --check that was reported as slow began
	onceEnded   *ending                            // how the program ended under --once; used only by Run's goroutine
	began       time.Time                          // when the command began, for --every
	table       uint32                             // see tableID; used by the coordinator's Trace once it runs
}

func runProgram(ctx context.Context, opts *runOptions, timing timing, out *output, args []string) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	lines := newLateWriter(out.stderr)
	defer lines.close()
	r := &runner{opts: opts, timing: timing, log: newLogger(lines, opts.log), shutdown: cancel, service: make(chan struct{}, 1), began: time.Now()}
	r.args = []string{"--on-loss", opts.onLoss, "--log", opts.log}
	if len(args) > 0 {
		r.args = append(append(r.args, "--"), args...)
	} else {
		r.args = append(r.args, "--start", opts.start, "--stop", opts.stop, "--start-every", opts.startEvery.String())
	}
	defer r.handleSignals()()

	store, err := opts.store.open(ctx, r.log)
	if err == nil {
		defer store.Close()
		err = r.setUp(ctx, store)
	}
	if err != nil && !errors.As(err, new(errUsage)) {
		pace.Sleep(ctx, startPause)
	}
	if err == nil && opts.unique {
		err = r.awaitEarlierRun(ctx, store)
		defer r.name.Close()
	}
	if err == nil {
		err = r.compete(ctx, store)
	}
	if ctx.Err() != nil && errors.Is(err, context.Cause(ctx)) {
		err = nil // it was told to end while it waited
	}
	if cause := context.Cause(ctx); err == nil && cause != context.Canceled {
		err = cause
	}
	return errors.Join(err, r.status())
}

// status is the exit status under --once.
func (r *runner) status() error {
	switch sig := r.signal.Load(); {
	case !r.opts.once:
		return nil
	case r.onceEnded != nil && r.onceEnded.Status == 0:
		return nil
	case r.onceEnded != nil:
		return exitStatus(r.onceEnded.Status)
	case sig != 0: // the program never ran
		return exitStatus(128 + int(sig))
	}
	return nil
}

// awaitEarlierRun returns when no earlier run of this replica, and none of its guards, is left on
// this host, so that nothing of its program is. It keeps later runs waiting for this one.
func (r *runner) awaitEarlierRun(ctx context.Context, store database) error {
	place := r.opts.store.describe(store)
	if _, isFile := store.(*tenure.SQLiteStore); isFile {
		var err error
		if place, err = filepath.Abs(place); err != nil {
			return err
		}
	}
	id := sha256.Sum256(fmt.Appendf(nil, "%q", []string{place, r.opts.store.schema, r.opts.store.table, r.opts.key().String(), r.opts.replica}))
	for waits := false; ; waits = true {
		name, err := holdName(fmt.Sprintf("tenure-%x", id[:16]))
		if err == nil {
			r.name = name
			return nil
		}
		if !errors.Is(err, syscall.EADDRINUSE) {
			return err
		}
		if !waits {
			r.log.Warn("another run of this replica is on this host; waiting until it and its program have ended", "replica", r.opts.replica)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (r *runner) compete(ctx context.Context, store database) error {
	expiry := tenure.ExpiryStoreClock
	if r.opts.missed > 0 {
		expiry = tenure.ExpiryObserved
	}
	labels := map[string]string(nil)
	if r.opts.unique {
		where, err := nameScope()
		if err != nil {
			return err
		}
		labels = map[string]string{tenure.UniqueWithin: where + " " + r.name.Name()} // so that nothing outlives what was waited for
	}
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{
		Key: r.opts.key(), Holder: r.opts.replica, TTL: r.opts.ttl, Margin: margin(r.opts.ttl), Expiry: expiry, Logger: r.log,
		AssumeUniqueHolder: r.opts.unique, Labels: labels,
	})
	if err != nil {
		return asUsage(err)
	}
	drain, err := tenure.NewDrain(store, r.opts.replica, r.log)
	if err != nil {
		return asUsage(err)
	}
	cfg := tenure.CoordinatorConfig{
		Drain:           drain,
		Reconcile:       func(ctx context.Context) error { return r.oncePer(ctx, store, r.job) },
		RenewInterval:   r.opts.renew,
		AcquireInterval: r.opts.acquire,
		RenewDeadline:   r.timing.renewDeadline,
		Confirmations:   r.opts.confirm,
		CheckTimeout:    r.opts.checkTimeout,
		Logger:          r.log,
		Trace:           &tenure.Trace{Attempt: r.setUpAgain(ctx, store)},
	}
	if r.opts.check != "" {
		cfg.Check = r.check
	}
	if r.opts.fence != "" {
		cfg.FencePredecessor = r.fence
	}
	coordinator, err := tenure.NewCoordinator(lease, cfg)
	if err != nil {
		return asUsage(err)
	}
	if r.opts.stop != "" {
		r.log.Info("stopping the service in case an earlier run left it running")
		if err := stopService(ctx, r.opts.stop, environ(), r.log); err != nil {
			return err
		}
	}
	r.coordinator = coordinator
	r.log.Info("competing", "store", r.opts.store.describe(store), "lease", r.opts.key(), "replica", r.opts.replica)
	var beside sync.WaitGroup
	defer beside.Wait()
	following, cancel := context.WithCancel(ctx)
	defer cancel()
	beside.Go(func() { _ = drain.Run(following) })
	if r.opts.stopEvery > 0 {
		beside.Go(func() {
			r.repeat(following, r.opts.stopEvery, "--stop command failed while another replica holds the lease", func() error { return r.stopStandby(following) })
		})
	}
	if r.opts.check != "" {
		beside.Go(func() {
			r.repeat(following, r.opts.renew, "this host could not take over: --check fails", func() error { return r.checkStandby(following) })
		})
	}
	return coordinator.Run(ctx)
}

const (
	// startPause keeps a supervisor that restarts run at once from doing so in a tight loop while the store refuses it.
	startPause = time.Second

	// refusedFor is how long a store may refuse to work before run ends, in addition to the TTL.
	refusedFor = time.Minute
)

// setUp creates what is missing in the store. It does not replace a table that was only renamed, or that this role can't see
// any more: two tables would have two holders.
func (r *runner) setUp(ctx context.Context, store database) error {
	hidden, err := r.opts.store.isHidden(ctx, store, r.table)
	if err == nil && hidden {
		err = errors.New("the table is still in the database, but it was renamed, or the role or its search_path no longer finds it: undo that")
	}
	if err == nil {
		err = store.Migrate(ctx)
	}
	if err == nil {
		r.table, err = r.opts.store.tableID(ctx, store)
	}
	return err
}

// setUpAgain returns what to do after each attempt to acquire the lease. If the store has been without its table or stream for
// as long as any holder of the lease can trust its term, it is set up again. If it refuses to work for longer, run ends: its
// supervisor starts it with the credentials of that time.
func (r *runner) setUpAgain(ctx context.Context, store database) func(time.Duration, error) {
	var refused time.Time // since when each attempt was
	ttl := r.opts.ttl
	return func(_ time.Duration, err error) {
		if held := (*tenure.HeldError)(nil); errors.As(err, &held) {
			ttl = max(ttl, held.Holding.TTL)
		}
		if !errors.Is(err, tenure.ErrSetup) && !pgconns.IsRejected(err) {
			refused = time.Time{}
			return
		}
		if refused.IsZero() {
			refused = time.Now()
		}
		if errors.As(err, new(*objects.NoTable)) && time.Since(refused) >= ttl {
			limited, cancel := context.WithTimeout(ctx, storeTimeout)
			defer cancel()
			if err = r.setUp(limited, store); err == nil {
				r.log.Warn("the store had lost what run had set up; set it up again", "store", r.opts.store.describe(store))
				refused = time.Time{}
				return
			}
		}
		if time.Since(refused) >= ttl+refusedFor {
			r.shutdown(err)
		}
	}
}

// job runs the program for one term.
func (r *runner) job(ctx context.Context) error {
	select {
	case r.service <- struct{}{}:
		defer func() { <-r.service }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if err := r.unfence(ctx); err != nil {
		return err
	}
	if err := r.fencePeers(ctx); err != nil {
		return err
	}
	g, err := startGuarded(tenure.TermFromContext(ctx), r.args, r.timing, r.name, r.log)
	if err != nil {
		return err
	}
	r.current.Store(g)
	running, cancel := context.WithCancelCause(ctx)
	wait := r.assert(running, cancel)
	end, err := g.run(running, r.howToEnd)
	r.current.Store(nil)
	cancel(nil)
	wait()
	if err != nil {
		if r.opts.stop != "" {
			r.stopUnguarded(ctx)
		}
		return err
	}
	r.log.Info("program ended", "how", end.Text, "told", end.Told)
	if r.opts.once && (!end.Told || r.signal.Load() != 0) {
		r.onceEnded = &end
		r.shutdown(nil)
	}
	return errors.New(end.Text)
}

// stopUnguarded stops the service of a term whose guard is gone, as the guard would. The lease is held
// until it returns.
func (r *runner) stopUnguarded(ctx context.Context) {
	stopping, kill := context.WithCancel(context.Background())
	defer kill()
	if r.opts.killsService() {
		term := tenure.TermFromContext(ctx)
		look := func() error {
			if r.howToEnd(context.Cause(ctx)).Kill || r.timing.left(term.Remaining()).Hard <= 0 {
				kill()
			}
			return nil
		}
		look()
		go r.repeat(stopping, r.timing.ask, "", look)
	}
	if stopService(stopping, r.opts.stop, environ(), r.log) != nil {
		stopService(context.Background(), r.opts.stop, append(environ(), "TENURE_STOP=kill"), r.log)
	}
}

// howToEnd returns the order that ends the program, given why its term ends.
func (r *runner) howToEnd(cause error) order {
	switch sig := r.signal.Load(); {
	case errors.Is(cause, tenure.ErrLost): // another host may run it already
		return order{Kill: true}
	case r.opts.onLoss == onLossKill && (errors.Is(cause, tenure.ErrDeadline) || errors.Is(cause, tenure.ErrUnhealthy)):
		return order{Kill: true}
	case errors.Is(cause, tenure.ErrShutdown) && sig != 0:
		return order{Stop: syscall.Signal(sig)}
	}
	return order{Stop: syscall.SIGTERM}
}

// handleSignals passes signals on to the program, and ends tenure on those that ask for
// it, until stop is called.
func (r *runner) handleSignals() (stop func()) {
	signals := make(chan os.Signal, 8)
	for _, sig := range []os.Signal{
		syscall.SIGTERM, syscall.SIGINT, syscall.SIGQUIT,
		syscall.SIGHUP, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGWINCH,
		syscall.SIGPIPE, // a closed log must not end tenure
	} {
		if !signal.Ignored(sig) {
			signal.Notify(signals, sig)
		}
	}
	terminal := hasTerminal()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for sig := range signals {
			if sig == syscall.SIGHUP && terminal && !hasTerminal() {
				sig = syscall.SIGTERM // the terminal was closed, and its user would not know that this replica still competes
			}
			r.handle(sig.(syscall.Signal))
		}
	}()
	return func() {
		signal.Stop(signals)
		close(signals)
		<-done
	}
}

// hasTerminal reports whether this process has a controlling terminal.
func hasTerminal() bool {
	tty, err := os.Open("/dev/tty")
	if err != nil {
		return false
	}
	tty.Close()
	return true
}

func (r *runner) handle(sig syscall.Signal) {
	switch sig {
	case syscall.SIGPIPE:
		return
	case syscall.SIGTERM, syscall.SIGINT, syscall.SIGQUIT:
		if r.signal.CompareAndSwap(0, int32(sig)) {
			r.log.Info("told to end", "signal", sig.String())
			r.shutdown(nil)
			return
		}
	}
	if g := r.current.Load(); g != nil {
		g.send(order{Signal: sig})
	}
}

// asUsage turns the library's error about an invalid option into a usage error.
func asUsage(err error) error {
	if errors.Is(err, tenure.ErrInvalid) {
		return errUsage{err}
	}
	return err
}
