//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tenurelib/tenure"
)

// sweep compares all records of the store with all instances of the backend, and reconciles
// them. A record that fails does not stop the sweep.
//
// This gateway and others answer requests during a sweep. The sweep therefore lists the
// backend before the store: an instance is created after its record, so the record of each
// listed instance is in the store. Records written since the sweep began are skipped,
// because their instances may be missing from the list. If a request writes a record during
// the sweep, the sweep's own write fails on the version, and the next sweep looks again.
//
// The writes are fenced by the term. If a gateway is paused during a sweep for so long that
// another gateway holds the lease, it cannot finish what it has begun.
func (w *watchers) sweep(ctx context.Context) error {
	term := tenure.TermFromContext(ctx)
	log := w.log.With("token", term.Token())
	fenced, err := w.sandboxes.fenced(term)
	if err != nil {
		return err
	}
	began := time.Now()
	instances, err := w.driver.List(ctx)
	if err != nil {
		return err
	}
	list, err := w.sandboxes.list(ctx)
	if err != nil {
		return err
	}
	listed := time.Since(began)

	byID := make(map[string]Instance, len(instances))
	for _, inst := range instances {
		byID[inst.ID] = inst
	}
	var errs []error
	for _, sb := range list {
		inst := byID[sb.Instance]
		delete(byID, sb.Instance)
		// Both are durations: the clock of this host is not compared with the store's.
		if sb.Age <= listed {
			continue
		}
		change, err := w.reconcile(ctx, fenced, sb, inst)
		switch {
		case errors.Is(err, tenure.ErrLost):
			log.Warn(writeRefused, "sandbox", sb.Name, "error", err)
			return nil
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.Is(err, tenure.ErrConflict), errors.Is(err, tenure.ErrNotFound):
		case err != nil:
			errs = append(errs, fmt.Errorf("sandbox %s: %w", sb.Name, err))
		case change != "":
			log.Info("reconciled", "sandbox", sb.Name, "change", change)
		}
	}
	for _, inst := range byID { // those without a record
		if time.Since(inst.CreatedAt) < w.grace {
			continue
		}
		if err := w.driver.Delete(ctx, inst.ID); err != nil {
			errs = append(errs, err)
			continue
		}
		log.Info("reconciled", "instance", inst.ID, "change", "ended: it has no sandbox")
	}
	log.Debug("swept", "sandboxes", len(list), "instances", len(instances))
	return errors.Join(errs...)
}

// reconcile does what is needed for one sandbox, and returns what it has changed. The
// instance is the zero value if the backend does not know it.
func (w *watchers) reconcile(ctx context.Context, fenced sandboxes, sb Sandbox, inst Instance) (change string, err error) {
	switch {
	case sb.Phase == Deleting:
		return "deleted", fenced.finishDeletion(ctx, w.driver, sb)

	case sb.Phase == Ready && !inst.Alive:
		_, err = fenced.fail(ctx, sb, fmt.Sprintf("process %d is gone", sb.PID))
		return "its process is gone", err

	case sb.Phase == Provisioning && sb.Age >= w.grace:
		// If the gateway that creates it still runs, its own write fails with a conflict.
		_, err = fenced.fail(ctx, sb, "its creation was not finished")
		return "its creation was not finished", err

	case sb.Phase == Error && inst.Alive:
		return "its process is ended", w.driver.Delete(ctx, inst.ID) // the record is kept for the grace period

	case sb.Phase == Error && sb.Age >= w.grace:
		if err = fenced.remove(ctx, sb); err == nil {
			err = w.driver.Delete(ctx, sb.Instance)
		}
		return "removed after the grace period", err

	case sb.Phase == Unknown:
		return "", errors.New(sb.Message)
	}
	return "", nil
}
