//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/tenurelib/tenure"
)

// tally counts what a sweep has done.
type tally struct {
	failed  int // sandboxes turned to Error
	pruned  int // sandboxes removed after the grace period
	deleted int // sandboxes whose deletion had been started, and is now finished
	orphans int // instances without a sandbox, deleted
}

// sweep compares all records of the store with all instances of the backend, and
// reconciles them. A record that fails does not stop the sweep.
//
// This gateway and others handle requests during a sweep. So the sweep lists the backend
// before the store: an instance is created after its record, so the record of each listed
// instance is in the store. Records written since the sweep began are skipped, because
// their instances may be missing from the list. If somebody writes a record during the
// sweep, the sweep's own write fails on the version, and the next sweep looks again.
//
// Its writes are fenced by its term: if a gateway is paused during a sweep for so long that
// another one holds the lease, it can't finish what it had begun.
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
	var done tally
	var errs []error
	for _, sb := range list {
		inst := byID[sb.Instance]
		delete(byID, sb.Instance)
		// The record's age and the time since the sweep began are both durations, so the
		// clock of this host isn't compared with the store's.
		if sb.Age <= listed {
			continue
		}
		err := w.reconcile(ctx, fenced, sb, inst, &done)
		switch {
		case errors.Is(err, tenure.ErrLost):
			log.Warn(writeRefused, "sandbox", sb.Name, "error", err)
			return nil
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil:
			errs = append(errs, fmt.Errorf("sandbox %s: %w", sb.Name, err))
		}
	}
	for _, inst := range byID {
		if time.Since(inst.CreatedAt) < w.grace {
			continue
		}
		if err := w.driver.Delete(ctx, inst.ID); ctx.Err() != nil {
			return context.Cause(ctx)
		} else if err != nil {
			errs = append(errs, err)
			continue
		}
		done.orphans++
	}

	w.sweeps.Add(1)
	level := slog.LevelInfo
	if done == (tally{}) {
		level = slog.LevelDebug
	}
	log.Log(ctx, level, "sweep", "sandboxes", len(list), "instances", len(instances),
		"failed", done.failed, "pruned", done.pruned, "deleted", done.deleted, "orphans", done.orphans)
	return errors.Join(errs...)
}

// reconcile does what is needed for one sandbox. Its instance is the zero value if the
// backend doesn't know it.
func (w *watchers) reconcile(ctx context.Context, fenced sandboxes, sb Sandbox, inst Instance, done *tally) error {
	count, err := &done.failed, error(nil)
	switch {
	case sb.Phase == Deleting:
		count, err = &done.deleted, fenced.finish(ctx, w.driver, sb)

	case sb.Phase == Ready && !inst.Alive:
		_, err = fenced.fail(ctx, sb, fmt.Sprintf("process %d is gone", sb.PID))

	case sb.Phase == Provisioning && sb.Age >= w.grace:
		// If the gateway that is creating it still runs, its own write fails with a conflict.
		_, err = fenced.fail(ctx, sb, "its creation was not finished")

	case sb.Phase == Error && inst.Alive:
		return w.driver.Delete(ctx, inst.ID) // its record is pruned after the grace period, like any other

	case sb.Phase == Error && sb.Age >= w.grace:
		count = &done.pruned
		if err = fenced.delete(ctx, sb); err == nil {
			err = w.driver.Delete(ctx, sb.Instance)
		}

	case sb.Phase == Unknown:
		return errors.New(sb.Message)

	default:
		return nil
	}
	if errors.Is(err, tenure.ErrConflict) || errors.Is(err, tenure.ErrNotFound) {
		return nil
	}
	if err == nil {
		*count++
	}
	return err
}
