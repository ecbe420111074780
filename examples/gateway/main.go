//go:build unix

// Gateway serves sandboxes over HTTP. Each sandbox is a process, which runs the command in
// a request. Any number of gateways may serve one store. Watching the processes must be
// done only once, so the gateway that holds the lease does it. README.md says how to try
// it.
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
	flags.StringVar(&opts.state, "state", "gateway-state", "`directory` of the processes, shared by all gateways of a store")
	flags.DurationVar(&opts.ttl, "ttl", 30*time.Second, "how long after its last renewal the lease counts as held")
	flags.DurationVar(&opts.sweep, "sweep", time.Minute, "time between sweeps of the store")
	flags.DurationVar(&opts.grace, "grace", 5*time.Minute, "how long to keep a record without a process, or a process without a record")
	flags.StringVar(&opts.replica, "replica", tenure.ReplicaID(), "`name` of this gateway among the replicas")
	flags.StringVar((*string)(&opts.check), "check", "", "shell `command` that exits with 0 if this gateway is fit for its $ROLE")
	flags.IntVar(&opts.confirm, "confirm", 0, "after a takeover: the `number` of renewals before the job starts")
	flags.StringVar((*string)(&opts.fence), "fence", "", "after a takeover: shell `command` that cuts off $PREDECESSOR before the job starts")
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
	context.AfterFunc(ctx, stop) // so that a second signal kills the process
	os.Exit(run(ctx, os.Args[1:], os.Stderr))
}

// run runs the program until ctx is done or an error stops it, and returns its exit code.
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
		if !errors.Is(err, tenure.ErrInvalid) { // ErrInvalid means that the library found an invalid option
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

// serve runs a gateway until ctx is done. The sandboxes' processes keep running.
func serve(ctx context.Context, opts options, log *slog.Logger) (err error) {
	// Listen before opening the store, which may have to wait, so that an address in use is
	// reported at once.
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
		return nil // it was told to end while it waited
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
	// Release the lease first, so that another gateway watches the processes while this one
	// answers its last requests.
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
