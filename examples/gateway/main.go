//go:build unix

// Command gateway serves sandboxes over HTTP. A sandbox is a process that runs the command
// in a request. Any number of gateways share a store, and each of them answers requests,
// but only the gateway that holds the lease watches the processes. README.md shows how to
// try it.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure"
)

type config struct {
	listen  string
	store   string
	state   string
	replica string
	ttl     time.Duration
	sweep   time.Duration
	grace   time.Duration
}

func main() {
	var cfg config
	flag.StringVar(&cfg.listen, "listen", "127.0.0.1:8080", "`address` to serve HTTP on")
	flag.StringVar(&cfg.store, "store", "gateway.db", "`path` of a SQLite file, or a postgres:// URL")
	flag.StringVar(&cfg.state, "state", "gateway-state", "`directory` of the processes, which all gateways of a store share")
	flag.StringVar(&cfg.replica, "replica", cmp.Or(os.Getenv("OPENSHELL_REPLICA_ID"), tenure.ReplicaID()), "`name` of this gateway")
	flag.DurationVar(&cfg.ttl, "ttl", 30*time.Second, "how long the lease counts as held after its last renewal")
	flag.DurationVar(&cfg.sweep, "sweep", time.Minute, "time between sweeps")
	flag.DurationVar(&cfg.grace, "grace", 5*time.Minute, "how long to keep a record without a process, or a process without a record")
	verbose := flag.Bool("v", false, "also log renewals, and sweeps that change nothing")
	flag.Parse()
	if flag.NArg() > 0 {
		flag.Usage()
		os.Exit(2)
	}
	log.SetFlags(log.LstdFlags | log.Lmicroseconds)
	if *verbose {
		slog.SetLogLoggerLevel(slog.LevelDebug)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal kills the process
	if err := serve(ctx, cfg); err != nil {
		fmt.Fprintln(os.Stderr, "gateway:", err)
		os.Exit(1)
	}
}

// serve runs a gateway until ctx is done. The processes of the sandboxes keep running.
func serve(ctx context.Context, cfg config) error {
	if cfg.sweep <= 0 || cfg.grace <= 0 {
		return fmt.Errorf("-sweep %v and -grace %v must be positive", cfg.sweep, cfg.grace)
	}
	// Listen first: opening the store may take long, and an address in use is reported at once.
	listener, err := net.Listen("tcp", cfg.listen)
	if err != nil {
		return err
	}
	defer listener.Close()
	driver, err := newProcessDriver(cfg.state)
	if err != nil {
		return err
	}
	store, err := openStore(ctx, cfg.store)
	if err != nil && ctx.Err() != nil {
		return nil // the gateway was told to stop while it waited
	}
	if err != nil {
		return err
	}
	defer store.Close()

	w, err := newWatchers(store, driver, cfg)
	if err != nil {
		return err
	}
	s := &server{sandboxes: sandboxes{store}, driver: driver, coordinator: w.coordinator}
	web := &http.Server{Handler: s.handler(), ReadTimeout: requestTimeout}
	go web.Serve(listener)
	slog.Info("listening", "addr", listener.Addr().String(), "replica", cfg.replica)

	// Run returns when the watchers have stopped and the lease is released. Another gateway
	// then watches the processes while this one answers its last requests.
	err = w.coordinator.Run(ctx)
	draining, cancel := context.WithTimeout(context.Background(), requestTimeout+cleanupTimeout)
	defer cancel()
	return errors.Join(err, web.Shutdown(draining))
}

// openStore opens the store and creates its tables. It waits while Postgres is down.
func openStore(ctx context.Context, url string) (tenure.Database, error) {
	store, err := tenure.Open(ctx, url)
	if err != nil {
		return nil, err
	}
	if err := store.Migrate(ctx); err != nil {
		return nil, errors.Join(err, store.Close())
	}
	return store, nil
}
