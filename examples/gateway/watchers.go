//go:build unix

package main

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure"
)

// writeRefused is logged when the fence has rejected a write.
const writeRefused = "write refused: the term is over"

// watchers does the work that only one gateway at a time may do, while this one holds the
// lease: it follows the driver's events, and sweeps for what they have missed.
type watchers struct {
	sandboxes sandboxes
	driver    Driver
	grace     time.Duration
	log       *slog.Logger

	lease       *tenure.Lease
	coordinator *tenure.Coordinator
	sweeps      atomic.Int64  // done by this replica
	stopped     chan struct{} // closed when the coordinator has returned
	err         error         // the coordinator's; set before stopped is closed
}

type watchersConfig struct {
	replica string
	ttl     time.Duration                               // the lease's
	sweep   time.Duration                               // between the end of a sweep and the next sweep
	grace   time.Duration                               // how long a record without a process is kept after its last write
	check   func(context.Context, tenure.Role) error    // may be nil
	confirm int                                         // the number of renewals that confirm a takeover
	fence   func(context.Context, tenure.Holding) error // may be nil
	log     *slog.Logger
}

// spawnWatchers starts the watchers, which run until ctx is done. When stopped is closed,
// they have released the lease. Its errors match [tenure.ErrInvalid], and say what is wrong
// with the config.
func spawnWatchers(ctx context.Context, store tenure.Store, driver Driver, cfg watchersConfig) (*watchers, error) {
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Holder: cfg.replica, TTL: cfg.ttl, Logger: cfg.log})
	if err != nil {
		return nil, err
	}
	w := &watchers{
		sandboxes: sandboxes{store},
		driver:    driver,
		grace:     cfg.grace,
		log:       cfg.log,
		lease:     lease,
		stopped:   make(chan struct{}),
	}
	w.coordinator, err = tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
		Watch:            w.watch,
		Reconcile:        tenure.Every(cfg.sweep, w.sweep),
		Check:            cfg.check,
		Confirmations:    cfg.confirm,
		FencePredecessor: cfg.fence,
		Logger:           cfg.log,
	})
	if err != nil {
		return nil, err
	}
	go func() {
		defer close(w.stopped)
		w.err = w.coordinator.Run(ctx)
	}()
	return w, nil
}

// watch sets a sandbox to Error when its process has exited. An error of the driver ends
// the term, so that a gateway that can reach the backend takes over.
func (w *watchers) watch(ctx context.Context) error {
	term := tenure.TermFromContext(ctx)
	log := w.log.With("token", term.Token())
	fenced, err := w.sandboxes.fenced(term)
	if err != nil {
		return err
	}
	log.Info("job started")
	defer func() { log.Info("job stopped", "cause", context.Cause(ctx)) }()
	for event, err := range w.driver.Watch(ctx) {
		if err != nil {
			return err
		}
		log.Debug("event", "kind", event.Kind, "sandbox", event.Instance.Name, "instance", event.Instance.ID)
		if event.Kind != Exited {
			continue
		}
		// Events are hints: the sweep sees to those that can't be recorded now.
		err = fenced.exited(ctx, event.Instance)
		switch {
		case errors.Is(err, tenure.ErrLost):
			log.Warn(writeRefused, "sandbox", event.Instance.Name, "error", err)
		case err != nil && ctx.Err() == nil:
			log.Warn("exit not recorded", "sandbox", event.Instance.Name, "error", err)
		}
	}
	return nil
}
