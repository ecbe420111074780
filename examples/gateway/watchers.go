//go:build unix

package main

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/tenurelib/tenure"
)

// leaseKey is the key of the gateways' lease.
var leaseKey = tenure.Key{Type: "reconciler_lease", ID: "singleton"}

// watchers does the work that only one gateway at a time may do, while this gateway holds
// the lease: it follows the exits of processes, and sweeps for what it has missed.
type watchers struct {
	sandboxes   sandboxes
	driver      Driver
	grace       time.Duration // how long a record without a process is kept after its last write
	coordinator *tenure.Coordinator
	log         *slog.Logger
}

func newWatchers(store tenure.Store, driver Driver, cfg config) (*watchers, error) {
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: leaseKey, Name: "reconciler-lease", Holder: cfg.replica, TTL: cfg.ttl})
	if err != nil {
		return nil, err
	}
	w := &watchers{sandboxes: sandboxes{store}, driver: driver, grace: cfg.grace, log: slog.Default()}
	w.coordinator, err = tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
		Watch:     w.watch,
		Reconcile: tenure.Every(cfg.sweep, w.sweep),
	})
	return w, err
}

// watch records the exits of processes. An error of the driver ends the term, so that a
// gateway that can reach the backend takes over.
func (w *watchers) watch(ctx context.Context) error {
	term := tenure.TermFromContext(ctx)
	log := w.log.With("token", term.Token())
	fenced, err := w.sandboxes.fenced(term)
	if err != nil {
		return err
	}
	log.Info("watching the processes")
	defer func() { log.Info("stopped watching the processes", "cause", context.Cause(ctx)) }()
	for inst, err := range w.driver.Watch(ctx) {
		if err != nil {
			return err
		}
		// If an exit cannot be recorded now, the sweep finds it.
		err = fenced.exited(ctx, inst)
		switch {
		case errors.Is(err, tenure.ErrLost):
			log.Warn(writeRefused, "sandbox", inst.Sandbox, "error", err)
		case err != nil && ctx.Err() == nil:
			log.Warn("failed to record an exit", "sandbox", inst.Sandbox, "error", err)
		}
	}
	return nil
}

// writeRefused is logged when the fence has rejected a write.
const writeRefused = "write refused: the term is over"
