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
	"strings"
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
Run competes for the lease. When it has it, it starts the program; when it loses it, or
cannot renew it in time, it ends the program, by SIGTERM to its process group and by
SIGKILL before another host may begin. When the program ends by itself, the lease is
released, so that another host can run it, and after a pause this one competes again.

The program finds in its environment TENURE_TOKEN, a number that is greater in each later
term of the lease: what it writes to elsewhere can refuse a lower one. TENURE_TERM and
TENURE_HOLDER name the term and the replica. It must stay in the foreground: what it
leaves behind when it ends is ended too.

SIGTERM, SIGINT and SIGQUIT end the program by the same signal, release the lease, and
end tenure; so does a terminal that is closed. SIGHUP, SIGUSR1, SIGUSR2 and SIGWINCH are
passed to the program.

A service that something else supervises is run by two commands in place of a program:

  tenure run -store STORE -key web -start 'systemctl start web' -stop 'systemctl stop web'

-stop is run once before the first term too, for what may be left of an earlier run, and
is tried again until it succeeds. So only one tenure of a host may run one service.

Commands are lines for /bin/sh. Where the store is down, run tries again.`,
	define: func(flags *flag.FlagSet) action {
		var opts runOptions
		opts.define(flags)
		return func(ctx context.Context, out *output, args []string) error {
			return runProgram(ctx, &opts, out, args)
		}
	},
}

// What -on-loss can be.
const (
	onLossStop = "stop"
	onLossKill = "kill"
)

// defaultType is the type of a key that is given as a name alone, as of the
// library's own default key.
const defaultType = "reconciler_lease"

// longestTTL is far above what is of use, and far below what overflows.
const longestTTL = 10000 * time.Hour

type runOptions struct {
	store        storeFlag
	key          keyFlag
	replica      string
	ttl          time.Duration
	renew        time.Duration
	acquire      time.Duration
	check        string
	checkTimeout time.Duration
	confirm      int
	fence        string
	stopTimeout  time.Duration
	onLoss       string
	once         bool
	start, stop  string
}

func (o *runOptions) define(flags *flag.FlagSet) {
	o.store.define(flags)
	o.key.define(flags)
	flags.StringVar(&o.replica, "replica", tenure.ReplicaID(), "`NAME` of this replica, for people and for tenure handover")
	flags.DurationVar(&o.ttl, "ttl", tenure.DefaultTTL, "`TIME` for which the lease counts as held after its last renewal: how long\nnobody runs the program after a host vanished")
	flags.DurationVar(&o.renew, "renew", 0, "`TIME` from one renewal to the next (default a third of the TTL)")
	flags.DurationVar(&o.acquire, "acquire", 0, "`TIME` from one attempt to acquire to the next, where nothing would tell of a\nrelease; after the program has ended by itself, twice that passes\n(default a sixth of the TTL)")
	flags.StringVar(&o.check, "check", "", "`COMMAND` that tells whether this host is fit, by its exit status: asked with the\nargument standby before it competes, active before each renewal; a holder that\nfails is replaced. The argument is appended to the line: one that wants none ends\nin \"&& :\", as in 'test -e /etc/fit && :'")
	flags.DurationVar(&o.checkTimeout, "check-timeout", 0, "`TIME` within which -check must answer (default a sixth of the TTL, or less where a\nlong -stop-timeout leaves less time between renewals)")
	flags.IntVar(&o.confirm, "confirm", 0, "`NUMBER` of renewals before the program starts, after a host has vanished")
	flags.StringVar(&o.fence, "fence", "", "`COMMAND` that cuts off a host that has vanished, before the program starts here;\n$TENURE_PREDECESSOR names it, with U+FFFD for each NUL, cut to\n4096 bytes and \"…\"; tried again until it succeeds. Not for an earlier run of this\n-replica, so each must have a name of its own")
	flags.DurationVar(&o.stopTimeout, "stop-timeout", 0, "`TIME` from SIGTERM to SIGKILL (default a good quarter of the TTL)")
	flags.StringVar(&o.onLoss, "on-loss", onLossStop, "stop or kill: `HOW` the program ends where the lease was not renewed in time or\n-check failed; kill sends SIGKILL at once")
	flags.BoolVar(&o.once, "once", false, "end when the program has ended by itself, with its exit status")
	flags.StringVar(&o.start, "start", "", "`COMMAND` in place of a program: starts a service and returns")
	flags.StringVar(&o.stop, "stop", "", "`COMMAND` that stops what -start has started, and returns when it is stopped")
}

// validate completes the options, or says what is wrong with them.
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
		return timing{}, usageError("a program, or -start and -stop, not both")
	case service && (o.start == "" || o.stop == ""):
		return timing{}, usageError("-start needs -stop, and -stop needs -start")
	case service && o.once:
		return timing{}, usageError("-once needs a program")
	case service && o.onLoss == onLossKill:
		return timing{}, usageError("-on-loss kill needs a program")
	case !service && len(args) == 0:
		return timing{}, usageError(`no program: "tenure run -h" tells more`)
	case o.onLoss != onLossStop && o.onLoss != onLossKill:
		return timing{}, usageError("-on-loss %q is neither stop nor kill", o.onLoss)
	case o.replica == "":
		return timing{}, usageError("-replica is empty")
	case o.ttl < time.Second:
		return timing{}, usageError("-ttl %v is below 1s", o.ttl)
	case o.ttl > longestTTL:
		return timing{}, usageError("-ttl %v is above %v", o.ttl, longestTTL)
	case o.confirm < 0:
		return timing{}, usageError("-confirm %d is negative", o.confirm)
	case o.fence != "" && !isPostgres(store) && o.replica == tenure.ReplicaID() && os.Getenv("TENURE_REPLICA_ID") == "":
		// Each would take the others for earlier runs of itself, and fence nobody.
		return timing{}, usageError("-fence needs -replica: all replicas on a SQLite file are on this host, whose name is their default")
	case o.check == "" && o.checkTimeout != 0:
		return timing{}, usageError("-check-timeout needs -check")
	}
	for name, d := range map[string]time.Duration{"renew": o.renew, "acquire": o.acquire, "check-timeout": o.checkTimeout, "stop-timeout": o.stopTimeout} {
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
		return t, usageError("-check-timeout %v does not fit: with these times it is below %v", o.checkTimeout, most)
	}
	return t, nil
}

// runner runs the program for each term.
type runner struct {
	opts      *runOptions
	args      []string // of the guard, behind its timing
	timing    timing
	log       *slog.Logger
	shutdown  context.CancelFunc
	signal    atomic.Int32            // which one ended tenure
	current   atomic.Pointer[guarded] // while there is one
	onceEnded *ending                 // of Run's goroutine
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
	r := &runner{opts: opts, timing: timing, log: newLogger(lines), shutdown: cancel}
	r.args = []string{"-on-loss", opts.onLoss}
	if len(args) > 0 {
		r.args = append(append(r.args, "--"), args...)
	} else {
		r.args = append(r.args, "-start", opts.start, "-stop", opts.stop)
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
		err = nil // told to end while it waited
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
	case sig != 0: // it has not run
		return exitStatus(128 + int(sig))
	}
	return nil
}

func (r *runner) compete(ctx context.Context, store tenure.Store) error {
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{
		Key: r.opts.key.key(), Holder: r.opts.replica, TTL: r.opts.ttl, Margin: margin(r.opts.ttl), Logger: r.log,
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
		r.log.Info("stopping what may be left of an earlier run")
		if err := stopService(ctx, r.opts.stop, environ(), r.log); err != nil {
			return err
		}
	}
	r.log.Info("competing", "store", describeStore(must(r.opts.store.name())), "lease", r.opts.key.key(), "replica", r.opts.replica)
	return coordinator.Run(ctx)
}

// job is what is done in one term.
func (r *runner) job(ctx context.Context) error {
	g, err := startGuarded(tenure.TermFromContext(ctx), r.args, r.timing, r.log)
	if err != nil {
		return err
	}
	r.current.Store(g)
	end, err := g.run(ctx, r.howToEnd)
	r.current.Store(nil)
	if err != nil {
		if r.opts.stop != "" { // nobody else does it now, and the lease is held until it is done
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

// howToEnd says how the program is to be ended.
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
	if prev.Holder == r.opts.replica { // a host that was started anew must not cut its own power
		r.log.Info("not fenced: it is an earlier run of this replica", "predecessor", prev.Holder)
		return nil
	}
	env := append(environ(), termEnv(tenure.TermFromContext(ctx))...)
	env = append(env, environVar("TENURE_PREDECESSOR", prev.Holder), environVar("TENURE_PREDECESSOR_TERM", prev.Term))
	r.log.Info("fencing", "predecessor", printable(prev.Holder))
	return runHook(ctx, r.opts.fence, nil, env, os.Stderr)
}

// handleSignals passes signals on, and ends tenure at those that ask for it,
// until it is told to stop.
func (r *runner) handleSignals() (stop func()) {
	signals := make(chan os.Signal, 8)
	for _, sig := range []os.Signal{
		syscall.SIGTERM, syscall.SIGINT, syscall.SIGQUIT,
		syscall.SIGHUP, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGWINCH,
		syscall.SIGPIPE, // a log that nobody reads any more must not end tenure
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
				sig = syscall.SIGTERM // it was closed, and nobody would know that this competes on
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

// hasTerminal reports whether this process is one of a terminal's.
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

// asUsage makes the library's verdict on the options one on the command line.
func asUsage(err error) error {
	if errors.Is(err, tenure.ErrInvalid) {
		return errUsage{err}
	}
	return err
}

// keyFlag is -key.
type keyFlag struct{ flag string }

func (k *keyFlag) define(flags *flag.FlagSet) {
	flags.StringVar(&k.flag, "key", "", "`NAME` of the lease, or TYPE/NAME; without a type it is "+defaultType)
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
