// Command gateway serves sandboxes over HTTP. Any number of gateways share a store and a
// backend, and each of them answers requests, but only the gateway that holds the lease
// reconciles the two. README.md shows how to try it.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
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
	listen, store, state, replica string
	ttl, sweep, grace             time.Duration
}

func main() {
	var cfg config
	flag.StringVar(&cfg.listen, "listen", "127.0.0.1:8080", "`address` to serve HTTP on")
	flag.StringVar(&cfg.store, "store", "gateway.db", "`path` of a SQLite file that only this gateway uses, PATH?shared=true, or a postgres:// URL")
	flag.StringVar(&cfg.state, "state", "gateway-state", "`directory` of the backend, which all gateways of a store share")
	flag.StringVar(&cfg.replica, "replica", cmp.Or(os.Getenv("OPENSHELL_REPLICA_ID"), tenure.ReplicaID()), "`name` of this gateway")
	flag.DurationVar(&cfg.ttl, "ttl", 30*time.Second, "how long the lease counts as held after its last renewal")
	flag.DurationVar(&cfg.sweep, "sweep", time.Minute, "time between sweeps")
	flag.DurationVar(&cfg.grace, "grace", 5*time.Minute, "how long to keep a record without an instance, or an instance without a record")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal kills the gateway
	if err := serve(ctx, cfg); err != nil {
		log.Fatal(err)
	}
}

// serve runs a gateway until ctx is done. The sandboxes stay.
func serve(ctx context.Context, cfg config) error {
	store, err := tenure.Open(ctx, cfg.store)
	if err != nil {
		return err
	}
	defer store.Close()
	if err := store.Migrate(ctx); err != nil {
		return err
	}
	if err := os.MkdirAll(cfg.state, 0o700); err != nil {
		return err
	}
	dir, err := os.OpenRoot(cfg.state)
	if err != nil {
		return err
	}
	driver := dirDriver{dir}
	r, err := newReconciler(store, driver, cfg)
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", cfg.listen)
	if err != nil {
		return err
	}
	s := &server{sandboxes: sandboxes{store}, driver: driver, coordinator: r.coordinator}
	web := &http.Server{Handler: s.handler()}
	go web.Serve(listener)
	slog.Info("listening", "addr", listener.Addr().String(), "replica", cfg.replica)

	// Run returns when the reconciler has stopped and the lease is released. Another gateway
	// then reconciles while this one answers its last requests.
	err = r.coordinator.Run(ctx)
	draining, cancel := context.WithTimeout(context.Background(), requestTimeout)
	defer cancel()
	return errors.Join(err, web.Shutdown(draining))
}
