//go:build unix

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
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
exits by itself, run releases the lease, so that another host can run the program, and
competes again after a pause.

The program's environment has TENURE_TOKEN, a number that increases with each term of the
lease: other systems that the program writes to can reject a lower token. TENURE_TERM and
TENURE_HOLDER name the term and the replica. The program must stay in the foreground:
processes that it leaves behind when it exits are ended too.

SIGTERM, SIGINT and SIGQUIT are passed to the program to end it; tenure then releases the
lease and exits. It does the same when its terminal is closed. SIGHUP, SIGUSR1, SIGUSR2
and SIGWINCH are passed to the program.

For a service that something else supervises, give two commands instead of a program:

  tenure run -store STORE -key web -start 'systemctl start web' -stop 'systemctl stop web'

-stop is retried until it succeeds. It also runs once before the first term, in case an
earlier run left the service running. So only one tenure on a host may run a given service.
-stop-every and -start-every run the commands again, for services that others start or end.

Before the program starts, these take effect in this order: if another host has vanished,
-confirm, -fence and -peers; and in each term, -unfence.

Commands are passed to /bin/sh. If the store is down, run keeps trying.`,
	define: func(flags *flag.FlagSet) action {
		var opts runOptions
		opts.define(flags)
		return func(ctx context.Context, out *output, args []string) error {
			flags.Visit(func(f *flag.Flag) { opts.ttlGiven = opts.ttlGiven || f.Name == "ttl" })
			return runProgram(ctx, &opts, out, args)
		}
	},
}

// The values of -on-loss.
const (
	onLossStop = "stop"
	onLossKill = "kill"
)

// defaultType is the type of a key given without one. The library's default key has
// the same type.
const defaultType = "reconciler_lease"

// longestTTL is far longer than anyone needs, and far too short to overflow.
const longestTTL = 10000 * time.Hour

type runOptions struct {
	store        storeFlag
	key          keyFlag
	replica      string
	ttl          time.Duration
	ttlGiven     bool
	missed       int
	renew        time.Duration
	acquire      time.Duration
	check        string
	checkTimeout time.Duration
	confirm      int
	fence        string
	peers        string
	unfence      string
	stopTimeout  time.Duration
	onLoss       string
	once         bool
	start, stop  string
	log          logFormat
	startEvery   time.Duration
	stopEvery    time.Duration
}

func (o *runOptions) define(flags *flag.FlagSet) {
	o.store.define(flags)
	o.key.define(flags)
	flags.StringVar(&o.replica, "replica", tenure.ReplicaID(), "`NAME` of this replica, as shown to people and used by tenure handover")
	durationVar(flags, &o.ttl, "ttl", tenure.DefaultTTL, "`TIME` for which the lease counts as held after its last renewal. If a host\nvanishes, nobody runs the program for that long")
	durationVar(flags, &o.renew, "renew", 0, "`TIME` from one renewal to the next (default a third of the TTL)")
	flags.IntVar(&o.missed, "missed", 0, "`NUMBER` of renewals that a holder must miss, 2 or more, before this replica takes over.\nThen no clock decides, only what this replica has itself observed; the TTL is\n-renew times this. Give all replicas the same")
	durationVar(flags, &o.acquire, "acquire", 0, "`TIME` between attempts to acquire the lease while nothing would notify this replica\nof a release; run waits twice that after the program has exited by itself\n(default a sixth of the TTL)")
	flags.StringVar(&o.check, "check", "", "`COMMAND` whose exit status says whether this host is healthy. It runs with the\nargument standby before tenure competes, and active before each renewal; a holder\nwhose check fails is replaced. The argument is appended to the command: end a\ncommand that takes none with \"&& :\", as in 'test -e /etc/fit && :'")
	durationVar(flags, &o.checkTimeout, "check-timeout", 0, "`TIME` within which -check must return (default a sixth of the TTL, or less if a\nlong -stop-timeout leaves less time between renewals)")
	flags.IntVar(&o.confirm, "confirm", 0, "`NUMBER` of renewals that must succeed before the program starts, after a host has\nvanished")
	flags.StringVar(&o.fence, "fence", "", "`COMMAND` that cuts off a host that has vanished, before the program starts here.\n$TENURE_PREDECESSOR names that host: NULs become U+FFFD, and a name over 4096\nbytes is cut and marked with \"…\". The command is retried until it succeeds. It\ndoes not run for an earlier run of this -replica, so each needs a name of its own")
	flags.StringVar(&o.peers, "peers", "", "comma-separated `NAMES` of replicas that -fence cuts off too, after the host that has\nvanished, each in $TENURE_PREDECESSOR. This -replica is left out, so that all hosts can\nhave the same list")
	flags.StringVar(&o.unfence, "unfence", "", "`COMMAND` that undoes what another replica's -fence has done to this host. It runs in each\nterm, last of all before the program starts; if it fails, the lease is given up")
	durationVar(flags, &o.stopTimeout, "stop-timeout", 0, "`TIME` from SIGTERM to SIGKILL (default a little over a quarter of the TTL)")
	flags.StringVar(&o.onLoss, "on-loss", onLossStop, "stop or kill: `HOW` the program is ended if the lease was not renewed in time or\n-check failed; kill sends SIGKILL at once")
	flags.BoolVar(&o.once, "once", false, "exit with the program's exit status when it has exited by itself")
	flags.StringVar(&o.start, "start", "", "`COMMAND` that starts a service and returns, used instead of a program")
	flags.StringVar(&o.stop, "stop", "", "`COMMAND` that stops what -start started, and returns when it has stopped")
	flags.Var(&o.log, "log", "json or text: `FORMAT` of the log (default text)")
	durationVar(flags, &o.startEvery, "start-every", 0, "`TIME` between two runs of -start while this replica holds the lease, in case the service\nhas ended; -start must leave a service alone that runs, and the term ends if it fails\n(default: it is run once in a term)")
	durationVar(flags, &o.stopEvery, "stop-every", 0, "`TIME` between two runs of -stop while another replica holds the lease, in case somebody\nhas started the service here (default: it is not run then)")
}

// validate checks the options, fills in defaults, and returns the timing they result in.
func (o *runOptions) validate(args []string) (timing, error) {
	store, err := o.store.name()
	if err != nil {
		return timing{}, err
	}
	if err := o.key.validate(); err != nil {
		return timing{}, err
	}
	service := o.start != "" || o.stop != ""
	switch {
	case service && len(args) > 0:
		return timing{}, usageError("give either a program, or -start and -stop")
	case service && (o.start == "" || o.stop == ""):
		return timing{}, usageError("-start needs -stop, and -stop needs -start")
	case service && o.once:
		return timing{}, usageError("-once needs a program")
	case service && o.onLoss == onLossKill:
		return timing{}, usageError("-on-loss kill needs a program")
	case !service && (o.startEvery != 0 || o.stopEvery != 0):
		return timing{}, usageError("-start-every and -stop-every need -start and -stop")
	case !service && len(args) == 0:
		return timing{}, usageError(`no program: "tenure run -h" explains the usage`)
	case o.onLoss != onLossStop && o.onLoss != onLossKill:
		return timing{}, usageError("-on-loss %q is neither stop nor kill", o.onLoss)
	case o.replica == "":
		return timing{}, usageError("-replica is empty")
	}
	if err := o.observe(); err != nil {
		return timing{}, err
	}
	switch {
	case o.ttl < time.Second:
		return timing{}, usageError("-ttl %v is below 1s", o.ttl)
	case o.ttl > longestTTL:
		return timing{}, usageError("-ttl %v is above %v", o.ttl, longestTTL)
	case o.confirm < 0:
		return timing{}, usageError("-confirm %d is negative", o.confirm)
	case o.fence != "" && !isPostgres(store) && o.replica == tenure.ReplicaID() && os.Getenv("TENURE_REPLICA_ID") == "":
		// Each would take the others for earlier runs of itself and never fence them.
		return timing{}, usageError("-fence needs -replica: all replicas on a SQLite file are on this host and get its name by default")
	case o.fence == "" && o.peers != "":
		return timing{}, usageError("-peers needs -fence")
	case o.peers != "" && slices.Contains(o.peerNames(), ""):
		return timing{}, usageError("-peers %q has an empty name", o.peers)
	case o.check == "" && o.checkTimeout != 0:
		return timing{}, usageError("-check-timeout needs -check")
	}
	for name, d := range map[string]time.Duration{
		"renew": o.renew, "acquire": o.acquire, "check-timeout": o.checkTimeout, "stop-timeout": o.stopTimeout, "start-every": o.startEvery, "stop-every": o.stopEvery,
	} {
		if d < 0 {
			return timing{}, usageError("-%s %v is negative", name, d)
		}
	}
	if !service {
		if _, err := exec.LookPath(args[0]); err != nil {
			return timing{}, usageError("%v", err)
		}
	}
	if o.renew == 0 {
		o.renew = o.ttl / 3
	}
	t, err := newTiming(o.ttl, o.renew, o.stopTimeout)
	if err != nil {
		return t, err
	}
	t.patient = service
	if most := t.renewDeadline - o.renew; o.checkTimeout >= most {
		return t, usageError("-check-timeout %v does not fit: with these times it must be below %v", o.checkTimeout, most)
	}
	return t, nil
}

// peerNames returns the names of -peers.
func (o *runOptions) peerNames() []string {
	if o.peers == "" {
		return nil
	}
	names := strings.Split(o.peers, ",")
	for i, name := range names {
		names[i] = strings.TrimSpace(name)
	}
	return names
}

// observe checks -missed, and sets the TTL that it results in.
func (o *runOptions) observe() error {
	switch {
	case o.missed == 0:
		return nil
	case o.missed < 0:
		return usageError("-missed %d is negative", o.missed)
	case o.renew <= 0:
		return usageError("-missed needs -renew, the time from one renewal to the next")
	case o.missed == 1:
		return usageError("-missed 1 cannot be safe: another replica would take over when the next renewal is due, before a program whose renewal fails could be ended; -renew %v -missed 2 takes over as soon", o.renew/2)
	case o.renew > longestTTL/time.Duration(o.missed):
		return usageError("-renew %v × -missed %d is above %v", o.renew, o.missed, longestTTL)
	}
	ttl := o.renew * time.Duration(o.missed)
	if o.ttlGiven && o.ttl != ttl {
		return usageError("-ttl %v is not -renew × -missed, %v: leave it out", o.ttl, ttl)
	}
	o.ttl = ttl
	return nil
}

// runner runs the program for each term.
type runner struct {
	opts      *runOptions
	args      []string // the guard's arguments after its timing
	timing    timing
	log       *slog.Logger
	shutdown  context.CancelFunc
	signal    atomic.Int32            // the signal that told tenure to end; 0 if none has
	current   atomic.Pointer[guarded] // nil between terms
	service   chan struct{}           // has one element while a term, or a -stop of a standby, is under way
	onceEnded *ending                 // how the program ended under -once; used only by Run's goroutine
}

func runProgram(ctx context.Context, opts *runOptions, out *output, args []string) error {
	timing, err := opts.validate(args)
	if err != nil {
		return err
	}
	opts.store.hideURL(len(args))
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

func (r *runner) compete(ctx context.Context, store tenure.Store) error {
	expiry := tenure.StoreClock
	if r.opts.missed > 0 {
		expiry = tenure.Observed
	}
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{
		Key: r.opts.key.key(), Holder: r.opts.replica, TTL: r.opts.ttl, Margin: margin(r.opts.ttl), Expiry: expiry, Logger: r.log,
	})
	if err != nil {
		return asUsage(err)
	}
	cfg := tenure.CoordinatorConfig{
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
	r.log.Info("competing", "store", describeStore(must(r.opts.store.name())), "lease", r.opts.key.key(), "replica", r.opts.replica)
	if r.opts.stopEvery > 0 {
		var stopping sync.WaitGroup
		ctx, cancel := context.WithCancel(ctx)
		stopping.Go(func() { r.keepStopped(ctx, coordinator) })
		defer stopping.Wait()
		defer cancel()
	}
	return coordinator.Run(ctx)
}

// keepStopped runs -stop again and again while another replica holds the lease, until ctx
// is done.
func (r *runner) keepStopped(ctx context.Context, coordinator *tenure.Coordinator) {
	ticker := time.NewTicker(r.opts.stopEvery)
	defer ticker.Stop()
	said := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		err := r.stopStandby(ctx, coordinator)
		switch {
		case err == nil:
			said = ""
		case err.Error() != said && ctx.Err() == nil:
			said = err.Error()
			r.log.Error("-stop command failed while another replica holds the lease", "error", err)
		}
	}
}

// stopStandby runs -stop if another replica holds the lease. A term that begins meanwhile
// waits for it, so it must not take longer than a program may take to end.
func (r *runner) stopStandby(ctx context.Context, coordinator *tenure.Coordinator) error {
	select {
	case r.service <- struct{}{}:
		defer func() { <-r.service }()
	default:
		return nil // a term is under way
	}
	if status := coordinator.Status(); status.Role != tenure.RoleStandby || status.Holder == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, r.timing.stop)
	defer cancel()
	return runHook(ctx, r.opts.stop, nil, environ(), nil)
}

// job runs the program for one term.
func (r *runner) job(ctx context.Context) error {
	select {
	case r.service <- struct{}{}:
		defer func() { <-r.service }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if r.opts.unfence != "" {
		r.log.Info("unfencing this replica")
		env := append(environ(), termEnv(tenure.TermFromContext(ctx))...)
		if err := runHook(ctx, r.opts.unfence, nil, env, os.Stderr); err != nil {
			return fmt.Errorf("-unfence: %w", err)
		}
	}
	g, err := startGuarded(tenure.TermFromContext(ctx), r.args, r.timing, r.log)
	if err != nil {
		return err
	}
	r.current.Store(g)
	end, err := g.run(ctx, r.howToEnd)
	r.current.Store(nil)
	if err != nil {
		if r.opts.stop != "" { // the guard can no longer do it, and the lease is held until it is done
			stopService(context.Background(), r.opts.stop, environ(), r.log)
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

// howToEnd returns the order that ends the program, given why its term ends.
func (r *runner) howToEnd(cause error) order {
	switch sig := r.signal.Load(); {
	case errors.Is(cause, tenure.ErrLost): // somebody else may run it already
		return order{Kill: true}
	case r.opts.onLoss == onLossKill && (errors.Is(cause, tenure.ErrDeadline) || errors.Is(cause, tenure.ErrUnhealthy)):
		return order{Kill: true}
	case errors.Is(cause, tenure.ErrShutdown) && sig != 0:
		return order{Stop: syscall.Signal(sig)}
	}
	return order{Stop: syscall.SIGTERM}
}

func (r *runner) check(ctx context.Context, role tenure.Role) error {
	arg := "standby"
	if role == tenure.RoleHolder {
		arg = "active"
	}
	return runHook(ctx, r.opts.check, []string{arg}, environ(), nil)
}

func (r *runner) fence(ctx context.Context, prev tenure.Holding) error {
	env := append(environ(), termEnv(tenure.TermFromContext(ctx))...)
	if prev.Holder == r.opts.replica { // a host that has restarted must not cut its own power
		r.log.Info("not fenced: it is an earlier run of this replica", "predecessor", prev.Holder)
	} else {
		r.log.Info("fencing", "predecessor", printable(prev.Holder))
		vanished := []string{environVar("TENURE_PREDECESSOR", prev.Holder), environVar("TENURE_PREDECESSOR_TERM", prev.Term)}
		if err := runHook(ctx, r.opts.fence, nil, slices.Concat(env, vanished), os.Stderr); err != nil {
			return err
		}
	}
	for _, peer := range r.opts.peerNames() {
		if peer == r.opts.replica || peer == prev.Holder {
			continue
		}
		r.log.Info("fencing", "peer", printable(peer))
		if err := runHook(ctx, r.opts.fence, nil, append(env, environVar("TENURE_PREDECESSOR", peer)), os.Stderr); err != nil {
			return fmt.Errorf("peer %s: %w", printable(peer), err)
		}
	}
	return nil
}

// handleSignals passes signals on to the program, and ends tenure on those that ask for
// it, until stop is called.
func (r *runner) handleSignals() (stop func()) {
	signals := make(chan os.Signal, 8)
	for _, sig := range []os.Signal{
		syscall.SIGTERM, syscall.SIGINT, syscall.SIGQUIT,
		syscall.SIGHUP, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGWINCH,
		syscall.SIGPIPE, // a log that nobody reads anymore must not end tenure
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
				sig = syscall.SIGTERM // the terminal was closed, and nobody would know that this still competes
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

// keyFlag is -key.
type keyFlag struct{ flag string }

func (k *keyFlag) define(flags *flag.FlagSet) {
	flags.StringVar(&k.flag, "key", "", "`NAME` of the lease, or TYPE/NAME; the default type is "+defaultType)
}

func (k *keyFlag) key() tenure.Key {
	if kind, id, ok := strings.Cut(k.flag, "/"); ok {
		return tenure.Key{Type: kind, ID: id}
	}
	return tenure.Key{Type: defaultType, ID: k.flag}
}

func (k *keyFlag) validate() error {
	if k.flag == "" {
		return usageError("no lease: give -key")
	}
	if err := k.key().Validate(); err != nil {
		return usageError("-key: %v", err)
	}
	return nil
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(fmt.Sprintf("bug: %v", err))
	}
	return v
}
