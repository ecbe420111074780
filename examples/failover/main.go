// Command failover shows a lease changing hands. Three replicas in one process share an
// in-memory SQLite database, and their work must never overlap. The first holder is stopped,
// the second is cut off from the store. The command prints a timeline, and exits with 0 only if
// the work never overlapped and was always resumed.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"
	"time"

	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

const (
	ttl     = 3 * time.Second
	pause   = 1500 * time.Millisecond // halfway between two renewals
	timeout = 14 * time.Second
)

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	if err := run(ctx, newTimeline(os.Stdout)); err != nil {
		fmt.Fprintln(os.Stderr, "failover:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, timeline *timeline) error {
	store, err := tenure.OpenSQLite(ctx, ":memory:", tenure.SQLiteConfig{Shared: true})
	if err != nil {
		return err
	}
	defer store.Close()
	if err := store.Migrate(ctx); err != nil {
		return err
	}
	work := &work{timeline: timeline, turns: make(chan struct{}, 3)}

	alpha, err := start("alpha", store, work, "")
	if err != nil {
		return err
	}
	defer alpha.stop()
	if err := work.next(ctx); err != nil {
		return err
	}

	beta, err := start("beta", store, work, "stands by")
	if err != nil {
		return err
	}
	defer beta.stop()
	time.Sleep(pause)
	timeline.add(moment{}, "         alpha is stopped: it releases the lease as soon as its work has ended")
	alpha.stop()
	if err := work.next(ctx); err != nil {
		return err
	}

	gamma, err := start("gamma", store, work, "stands by until the lease expires")
	if err != nil {
		return err
	}
	defer gamma.stop()
	time.Sleep(pause)
	timeline.add(moment{replica: "beta", does: isCutOff}, "         beta loses its connection to the store: the lease expires %v after its last renewal", ttl)
	beta.store.SetHook(hang)
	if err := work.next(ctx); err != nil {
		return err
	}

	time.Sleep(pause)
	if n := work.overlaps.Load(); n > 0 {
		return fmt.Errorf("the work overlapped %d times", n)
	}
	timeline.add(moment{}, "         three terms, no overlap; gamma is stopped")
	return nil
}

// hang keeps each call to a store waiting, as if the network were down.
func hang(ctx context.Context, _ storetest.Call, _ func(context.Context) error) error {
	<-ctx.Done()
	return ctx.Err()
}

// replica is one of the three. In a real program each would be a process.
type replica struct {
	store *storetest.FaultyStore // the way from this replica to the store
	stop  func()                 // also waits until its work has ended
}

// start starts a replica. The note says what it does at first in the picture.
func start(name string, store tenure.Store, work *work, note string) (*replica, error) {
	faulty := storetest.Faulty(store, nil) // nothing fails yet
	lease, err := tenure.NewLease(faulty, tenure.LeaseConfig{
		Key:    tenure.Key{Type: "lease", ID: "sweeper"},
		Holder: name,
		TTL:    ttl,
		Logger: slog.New(slog.DiscardHandler), // the timeline shows what happens
	})
	if err != nil {
		return nil, err
	}
	coordinator, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
		Reconcile: func(ctx context.Context) error { return work.do(ctx, name) },
	})
	if err != nil {
		return nil, err
	}
	work.timeline.add(moment{replica: name, does: standsBy, note: note}, "")
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		coordinator.Run(ctx)
	}()
	return &replica{store: faulty, stop: func() { cancel(); <-done }}, nil
}

// work is the work that only one replica at a time may do.
type work struct {
	timeline *timeline
	turns    chan struct{} // gets a value when a replica starts to work
	running  atomic.Int32
	overlaps atomic.Int32
}

func (w *work) do(ctx context.Context, name string) error {
	if w.running.Add(1) > 1 {
		w.overlaps.Add(1)
	}
	w.timeline.add(moment{replica: name, does: works}, "%-8s starts to work (fencing token %d)", name, tenure.TermFromContext(ctx).Token())
	w.turns <- struct{}{}
	<-ctx.Done()
	note := "stopped: releases the lease"
	if errors.Is(context.Cause(ctx), tenure.ErrDeadline) {
		note = "told to return"
	}
	w.timeline.add(moment{replica: name, does: ends, note: note}, "%-8s ends: %v", name, context.Cause(ctx))
	w.running.Add(-1)
	return nil
}

// next waits until another replica starts to work.
func (w *work) next(ctx context.Context) error {
	select {
	case <-w.turns:
		return nil
	case <-ctx.Done():
		return errors.New("no replica resumed the work")
	}
}
