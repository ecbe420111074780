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

	"github.com/tenurelib/tenure"
)

var runCommand = command{
	name:     "run",
	synopsis: "-store STORE -key NAME [flags] -- program [argument...]",
	summary:  "start a program while this host holds a lease",
	about: `
Run competes for the lease, and starts the program when it has acquired it. When it loses
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

  tenure run -store STORE -key web -start 'systemctl start web' -stop 'systemctl stop web'

-stop is retried until it succeeds. It also runs once before the first term, in case an
earlier run left the service running. Run only one tenure per host for a given service.
-stop-every and -start-every run the commands again, in case something else starts or ends
the service.

Before the program starts, these take effect in this order: -confirm, if another host has
vanished; -unfence, in each term; and then -fence and -peers, if another host has vanished.
-unfence-every and -fence-every run the commands again while the program runs.

Commands are passed to /bin/sh. If the store is down, run keeps trying.`,
	flags: storeFlags + "lossless key replica unique-replica ttl renew missed acquire check check-timeout confirm " +
		"fence peers fence-every unfence unfence-every stop-timeout on-loss once start stop start-every stop-every log",
	takes: true,
	act:   runProgram,
}

// runner runs the program for each term.
type runner struct {
	opts        *options
	args        []string // the guard's arguments after its timing
	timing      timing
	log         *slog.Logger
	shutdown    context.CancelFunc
	signal      atomic.Int32            // the signal that told tenure to end; 0 if none has
	current     atomic.Pointer[guarded] // nil between terms
	name        *os.File                // of this replica, which the guards hold too; nil unless it is unique
	coordinator *tenure.Coordinator     // set by compete before it runs
	service     chan struct{}           // has one element while a term, or a -stop of a standby, is under way
	unfenced    string                  // the ID of the last term in which -unfence has succeeded; used by fence and then by the job
	peersFenced string                  // the ID of the last term in which all -peers were fenced; used only by fence, which has one call at a time
	onceEnded   *ending                 // how the program ended under -once; used only by Run's goroutine
}

func runProgram(ctx context.Context, opts *options, out *output, args []string) error {
	timing, err := opts.validate(args)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	lines := newLateWriter(out.stderr)
	defer lines.close()
	r := &runner{opts: opts, timing: timing, log: newLogger(lines, opts.log), shutdown: cancel, service: make(chan struct{}, 1)}
	r.args = []string{"-on-loss", opts.onLoss}
	if opts.log != "" {
		r.args = append(r.args, "-log", opts.log.String())
	}
	if len(args) > 0 {
		r.args = append(append(r.args, "--"), args...)
	} else {
		r.args = append(r.args, "-start", opts.start, "-stop", opts.stop, "-start-every", opts.startEvery.String())
	}
	defer r.handleSignals()()

	store, err := opts.store.open(ctx, r.log)
	if err == nil {
		defer store.Close()
		err = store.Migrate(ctx)
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
	return errors.Join(err, r.status())
}

// status is the exit status under -once.
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
	expiry := tenure.StoreClock
	if r.opts.missed > 0 {
		expiry = tenure.Observed
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
		Reconcile:       r.job,
		RenewInterval:   r.opts.renew,
		AcquireInterval: r.opts.acquire,
		RenewDeadline:   r.timing.renewDeadline,
		Confirmations:   r.opts.confirm,
		CheckTimeout:    r.opts.checkTimeout,
		Logger:          r.log,
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
			r.repeat(following, r.opts.stopEvery, "-stop command failed while another replica holds the lease", func() error { return r.stopStandby(following) })
		})
	}
	return coordinator.Run(ctx)
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
		r.shutdown()
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
			r.shutdown()
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
