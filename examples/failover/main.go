// Command failover shows a lease changing hands. Three replicas in one process share an
// in-memory SQLite database, and their work must never overlap. The first holder is
// stopped, the second is cut off from the store. The command prints a timeline, and exits
// with 0 only if the work never overlapped and was always resumed.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

const (
	ttl     = 3 * time.Second
	timeout = 14 * time.Second
)

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "failover:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	store, err := tenure.OpenSQLite(ctx, ":memory:", tenure.SQLiteConfig{Shared: true})
	if err != nil {
		return err
	}
	defer store.Close()
	if err := store.Migrate(ctx); err != nil {
		return err
	}

	work := &work{began: time.Now(), turns: make(chan string, 100)}
	replicas := map[string]*replica{}
	for _, name := range []string{"alpha", "beta", "gamma"} {
		r, err := start(name, store, work)
		if err != nil {
			return err
		}
		replicas[name] = r
		defer r.stop()
	}

	first, err := work.next(ctx)
	if err != nil {
		return err
	}
	time.Sleep(time.Second)
	work.say("         %s is stopped: it releases the lease as soon as its work has ended", first)
	replicas[first].stop()

	second, err := work.next(ctx)
	if err != nil {
		return err
	}
	time.Sleep(time.Second)
	work.say("         %s loses its connection to the store: the lease expires %v after its last renewal", second, ttl)
	replicas[second].store.SetHook(hang)

	third, err := work.next(ctx)
	if err != nil {
		return err
	}
	time.Sleep(time.Second)
	replicas[third].stop()
	if n := work.overlaps.Load(); n > 0 {
		return fmt.Errorf("the work overlapped %d times", n)
	}
	work.say("         done: three terms, no overlap")
	return nil
}

// hang keeps each call to a store waiting, as it would if the network were down.
func hang(ctx context.Context, _ storetest.Call, _ func(context.Context) error) error {
	<-ctx.Done()
	return ctx.Err()
}

// replica is one of the three. In a real program each would be a process.
type replica struct {
	store *storetest.FaultyStore // the way from this replica to the store
	stop  func()                 // also waits until its work has ended
}

func start(name string, store tenure.Store, work *work) (*replica, error) {
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
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		coordinator.Run(ctx)
	}()
	return &replica{store: faulty, stop: func() { cancel(); <-done }}, nil
}

// work is what only one replica at a time may do.
type work struct {
	began    time.Time
	turns    chan string // the name of each replica that starts to work
	running  atomic.Int32
	overlaps atomic.Int32
	mu       sync.Mutex // keeps lines from being interleaved
}

func (w *work) do(ctx context.Context, name string) error {
	if w.running.Add(1) > 1 {
		w.overlaps.Add(1)
	}
	w.say("%-8s starts to work (fencing token %d)", name, tenure.TermFromContext(ctx).Token())
	w.turns <- name
	<-ctx.Done()
	w.say("%-8s ends: %v", name, context.Cause(ctx))
	w.running.Add(-1)
	return nil
}

// next waits for the next replica that starts to work, and returns its name.
func (w *work) next(ctx context.Context) (string, error) {
	select {
	case name := <-w.turns:
		return name, nil
	case <-ctx.Done():
		return "", errors.New("no replica resumed the work")
	}
}

func (w *work) say(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	fmt.Printf("%7.3fs  %s\n", time.Since(w.began).Seconds(), fmt.Sprintf(format, args...))
}
