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

// writeRefused is logged where the fence has kept a write from landing.
const writeRefused = "write refused: the term is over"

// watchers does what one gateway at a time must do, while this one holds the
// lease: it follows the driver's events, and sweeps the store against the
// backend for what they have missed.
type watchers struct {
	sandboxes sandboxes
	driver    Driver
	grace     time.Duration
	log       *slog.Logger

	lease       *tenure.Lease
	coordinator *tenure.Coordinator
	sweeps      atomic.Int64  // done by this replica
	stopped     chan struct{} // closed when the coordinator has returned
	err         error         // of the coordinator; set before stopped is closed
}

type watchersConfig struct {
	replica string
	ttl     time.Duration                               // of the lease
	sweep   time.Duration                               // from the end of a sweep to the next
	grace   time.Duration                               // how long after its last write a record without a process is kept
	check   func(context.Context, tenure.Role) error    // may be nil, as in the coordinator's config
	confirm int                                         // how many renewals confirm a takeover
	fence   func(context.Context, tenure.Holding) error // may be nil
	log     *slog.Logger
}

// spawnWatchers starts the watchers, until ctx ends; they have released the lease
// when stopped is closed. An error is [tenure.ErrInvalid], and says what is wrong
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

// watch turns a sandbox to Error when its process has exited. An error of the
// driver ends the term, so that a gateway which can see the backend takes over.
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
		// Events are hints: one that can't be recorded now is left to the sweep.
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
