//go:build unix

// Gateway serves sandboxes over HTTP: each is a process that it starts from the
// command in the request. Any number of gateways may serve one store; the work
// that must be done once, the watching of the processes, is done by the one
// that holds the lease. README.md tells how to try it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/tenurelib/tenure"
)

// drainTimeout bounds how long a shutdown waits for requests.
const drainTimeout = requestTimeout + cleanupTimeout

type options struct {
	listen  string
	store   string
	shared  bool
	state   string
	ttl     time.Duration
	sweep   time.Duration
	grace   time.Duration
	replica string
	check   command
	confirm int
	fence   command
	verbose bool
}

func parseOptions(args []string, usage io.Writer) (options, error) {
	var opts options
	flags := flag.NewFlagSet("gateway", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.StringVar(&opts.listen, "listen", "127.0.0.1:8080", "`address` to serve HTTP on")
	flags.StringVar(&opts.store, "store", "gateway.db", "SQLite `path`, or postgres://…")
	flags.BoolVar(&opts.shared, "shared", false, "several gateways use the SQLite file")
	flags.StringVar(&opts.state, "state", "gateway-state", "`directory` of the processes; one for all gateways of a store")
	flags.DurationVar(&opts.ttl, "ttl", 30*time.Second, "how long after its last renewal the lease counts as held")
	flags.DurationVar(&opts.sweep, "sweep", time.Minute, "time from one sweep of the store to the next")
	flags.DurationVar(&opts.grace, "grace", 5*time.Minute, "how long what has no process, or no record, is kept")
	flags.StringVar(&opts.replica, "replica", tenure.ReplicaID(), "`name` of this gateway among the replicas")
	flags.StringVar((*string)(&opts.check), "check", "", "shell `command` that tells by exit code 0 that this gateway is fit for its $ROLE")
	flags.IntVar(&opts.confirm, "confirm", 0, "after a takeover: the `number` of renewals before the job begins")
	flags.StringVar((*string)(&opts.fence), "fence", "", "after a takeover: shell `command` that cuts off $PREDECESSOR before the job begins")
	flags.BoolVar(&opts.verbose, "v", false, "log renewals, events and sweeps that changed nothing")
	err := flags.Parse(args)
	if errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(usage, "Usage: gateway [flags]")
		flags.SetOutput(usage)
		flags.PrintDefaults()
	}
	if err != nil {
		return opts, err
	}

	var errs []error
	refuse := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if flags.NArg() > 0 {
		refuse("unexpected argument %q", flags.Arg(0))
	}
	for _, d := range []struct {
		name  string
		value time.Duration
	}{{"ttl", opts.ttl}, {"sweep", opts.sweep}, {"grace", opts.grace}} {
		if d.value <= 0 {
			refuse("-%s %v is not positive", d.name, d.value)
		}
	}
	if opts.confirm < 0 {
		refuse("-confirm %d is negative", opts.confirm)
	}
	for _, s := range []struct{ name, value string }{
		{"listen", opts.listen}, {"store", opts.store}, {"state", opts.state}, {"replica", opts.replica},
	} {
		if s.value == "" {
			refuse("-%s is empty", s.name)
		}
	}
	if _, _, err := net.SplitHostPort(opts.listen); opts.listen != "" && err != nil {
		refuse("-listen %q is not host:port", opts.listen)
	}
	if strings.Contains(opts.store, "://") && !isPostgres(opts.store) {
		refuse("-store is neither a SQLite path nor a postgres:// URL")
	}
	if opts.shared && isPostgres(opts.store) {
		refuse("-shared is for SQLite; Postgres is always shared")
	}
	return opts, errors.Join(errs...)
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // from here a second signal kills
	os.Exit(run(ctx, os.Args[1:], os.Stderr))
}

// run is the program: it returns its exit code when ctx has ended, or when it
// cannot go on.
func run(ctx context.Context, args []string, stderr io.Writer) int {
	opts, err := parseOptions(args, stderr)
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	code := 2
	if err == nil {
		err = serve(ctx, opts, newLogger(stderr, opts.verbose))
		if err == nil {
			return 0
		}
		if !errors.Is(err, tenure.ErrInvalid) { // else the library has found it
			code = 1
		}
	}
	fmt.Fprintln(stderr, "gateway:", strings.ReplaceAll(err.Error(), "\n", "; "))
	return code
}

func newLogger(w io.Writer, verbose bool) *slog.Logger {
	level := slog.LevelInfo
	if verbose {
		level = slog.LevelDebug
	}
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: level}))
}

// serve runs a gateway until ctx ends. The sandboxes' processes go on.
func serve(ctx context.Context, opts options, log *slog.Logger) (err error) {
	// The address before the store, which may have to be waited for: that the
	// address is in use is known at once.
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", opts.listen)
	if err != nil {
		return err
	}
	defer listener.Close()
	driver, err := newProcessDriver(opts.state)
	if err != nil {
		return err
	}
	defer driver.Close()
	log.Info("opening store", "store", redact(opts.store))
	store, err := openStore(ctx, opts.store, opts.shared, log)
	if ctx.Err() != nil && err != nil {
		return nil // told to end while it waited
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()

	watching, stopWatchers := context.WithCancel(ctx)
	defer stopWatchers()
	watchers, err := spawnWatchers(watching, store, driver, watchersConfig{
		replica: opts.replica,
		ttl:     opts.ttl,
		sweep:   opts.sweep,
		grace:   opts.grace,
		check:   opts.check.check(),
		confirm: opts.confirm,
		fence:   opts.fence.fence(opts.replica, log),
		log:     log,
	})
	if err != nil {
		return err
	}
	s := &server{sandboxes: sandboxes{store}, driver: driver, watchers: watchers, log: log}
	httpServer := newHTTPServer(s.handler(), log)
	served := make(chan error, 1)
	go func() { served <- httpServer.Serve(listener) }()
	log.Info("listening", "addr", listener.Addr().String(), "replica", opts.replica)

	select {
	case <-ctx.Done():
		log.Info("shutting down")
	case err = <-served:
	case <-watchers.stopped:
	}
	// The lease first, so that another gateway goes on with the watching while
	// this one answers the last requests.
	stopWatchers()
	<-watchers.stopped
	draining, cancel := context.WithTimeout(context.Background(), drainTimeout)
	defer cancel()
	if shutdownErr := httpServer.Shutdown(draining); shutdownErr != nil {
		log.Warn("requests cut off", "error", shutdownErr)
		httpServer.Close()
	}
	return errors.Join(err, watchers.err)
}
