package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/tenurelib/tenure"
)

// leaseKey is the key of the gateways' lease.
var leaseKey = tenure.Key{Type: "reconciler_lease", ID: "singleton"}

// reconciler does the work that only one gateway at a time may do, while this gateway holds
// the lease: it watches the backend, and sweeps for what it has missed.
type reconciler struct {
	sandboxes   sandboxes
	driver      Driver
	grace       time.Duration
	coordinator *tenure.Coordinator

	// mu keeps the watch from changing a sandbox in the middle of a sweep. The lease excludes
	// other gateways, not the other goroutine of the same job.
	mu sync.Mutex
}

func newReconciler(store tenure.Store, driver Driver, cfg config) (*reconciler, error) {
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: leaseKey, Name: "reconciler-lease", Holder: cfg.replica, TTL: cfg.ttl})
	if err != nil {
		return nil, err
	}
	r := &reconciler{sandboxes: sandboxes{store}, driver: driver, grace: cfg.grace}
	r.coordinator, err = tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
		Watch:     r.watch,
		Reconcile: tenure.Every(cfg.sweep, r.sweep),
	})
	return r, err
}

// watch follows the backend. An error of the driver ends the term, so that a gateway that can
// reach the backend takes over.
func (r *reconciler) watch(ctx context.Context) error {
	fenced, err := r.sandboxes.fenced(ctx)
	if err != nil {
		return err
	}
	for instance, err := range r.driver.Watch(ctx) {
		if err != nil {
			return err
		}
		err := r.gone(ctx, fenced, instance)
		if err != nil && !errors.Is(err, tenure.ErrNotFound) { // the next sweep finds it
			slog.Warn("failed to record that an instance is gone", "instance", instance, "error", err)
		}
	}
	return nil
}

// gone looks at the sandbox of an instance that is gone.
func (r *reconciler) gone(ctx context.Context, fenced sandboxes, instance string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	sb, err := fenced.get(ctx, sandboxOf(instance))
	if err != nil || sb.Instance != instance { // it has been deleted and created again
		return err
	}
	return r.reconcile(ctx, fenced, sb, false)
}

// sweep compares all records of the store with all instances of the backend, and reconciles
// them. A record that fails does not stop the sweep. If a request writes a record during the
// sweep, the sweep's own write fails on the version.
//
// The writes are fenced by the term. If a gateway is paused during a sweep for so long that
// another gateway holds the lease, it cannot finish what it has begun.
func (r *reconciler) sweep(ctx context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	fenced, err := r.sandboxes.fenced(ctx)
	if err != nil {
		return err
	}
	// An instance is created after its record. The backend is listed first, so that an instance
	// has no sandbox if its record is not in the store.
	instances, err := r.driver.List(ctx)
	if err != nil {
		return err
	}
	list, err := r.sandboxes.list(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for _, sb := range list {
		_, exists := instances[sb.Instance]
		delete(instances, sb.Instance)
		switch err := r.reconcile(ctx, fenced, sb, exists); {
		case errors.Is(err, tenure.ErrConflict), errors.Is(err, tenure.ErrNotFound): // a request was faster
		case err != nil:
			errs = append(errs, fmt.Errorf("sandbox %s: %w", sb.Name, err))
		}
	}
	for orphan, created := range instances {
		if time.Since(created) >= r.grace {
			errs = append(errs, r.driver.Delete(ctx, orphan))
		}
	}
	return errors.Join(errs...)
}

// reconcile does what is needed for one sandbox.
func (r *reconciler) reconcile(ctx context.Context, fenced sandboxes, sb Sandbox, exists bool) error {
	old := sb.age >= r.grace // since the last write, by the store's clock
	if !exists {
		// The instance may have been created since the backend was listed, so look a second time. If it
		// is created after that, the gateway that does so finds the record changed, and removes it again.
		var err error
		if exists, err = r.driver.Has(ctx, sb.Instance); err != nil {
			return err
		}
	}
	switch {
	case sb.Phase == Ready && !exists:
		_, err := fenced.set(ctx, sb, Error)
		return err
	case sb.Phase == Provisioning && exists && old: // the gateway that created it has died
		_, err := fenced.set(ctx, sb, Ready)
		return err
	case !exists && old:
		return fenced.remove(ctx, sb)
	}
	return nil
}
