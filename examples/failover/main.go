// Command failover shows a lease changing hands: three replicas in one process,
// on one SQLite database in memory, with work that must never overlap. The
// first holder is stopped, the second vanishes without a word. It prints a
// timeline, ends by itself, and exits with 0 only if the work never overlapped
// and was always taken up again.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure"
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
	work.say("         %s is stopped: its lease is released as soon as its work has ended", first)
	replicas[first].stop()

	second, err := work.next(ctx)
	if err != nil {
		return err
	}
	time.Sleep(time.Second)
	work.say("         %s vanishes without a word: its lease must expire, %v after its last renewal", second, ttl)
	replicas[second].store.cut.Store(true)

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

// replica is one of the three. In a real program each is a process.
type replica struct {
	store *cuttable
	stop  func() // and wait until its work has ended
}

func start(name string, store *tenure.SQLiteStore, work *work) (*replica, error) {
	cuttable := &cuttable{SQLiteStore: store}
	lease, err := tenure.NewLease(cuttable, tenure.LeaseConfig{
		Holder: name,
		TTL:    ttl,
		Logger: slog.New(slog.NewTextHandler(io.Discard, nil)), // the timeline tells it
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
	return &replica{store: cuttable, stop: func() { cancel(); <-done }}, nil
}

// work is what must be done by one replica at a time.
type work struct {
	began    time.Time
	turns    chan string // who begins
	running  atomic.Int32
	overlaps atomic.Int32
	mu       sync.Mutex // keeps lines whole
}

func (w *work) do(ctx context.Context, name string) error {
	if w.running.Add(1) > 1 {
		w.overlaps.Add(1)
	}
	w.say("%-8s begins to work (fencing token %d)", name, tenure.TermFromContext(ctx).Token())
	w.turns <- name
	<-ctx.Done()
	w.say("%-8s ends: %v", name, context.Cause(ctx))
	w.running.Add(-1)
	return nil
}

// next returns who takes up the work next.
func (w *work) next(ctx context.Context) (string, error) {
	select {
	case name := <-w.turns:
		return name, nil
	case <-ctx.Done():
		return "", errors.New("nobody took up the work")
	}
}

func (w *work) say(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	fmt.Printf("%7.3fs  %s\n", time.Since(w.began).Seconds(), fmt.Sprintf(format, args...))
}

// cuttable is a store that one replica can be cut off from: its calls hang, as
// those of a process that lost its network do. It embeds the store itself, and not the
// interface tenure.Store, which would hide that it wakes standbys.
type cuttable struct {
	*tenure.SQLiteStore
	cut atomic.Bool
}

func (c *cuttable) Get(ctx context.Context, key tenure.Key) (tenure.Object, error) {
	if err := c.hang(ctx); err != nil {
		return tenure.Object{}, err
	}
	return c.SQLiteStore.Get(ctx, key)
}

func (c *cuttable) PutIf(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
	if err := c.hang(ctx); err != nil {
		return tenure.Object{}, err
	}
	return c.SQLiteStore.PutIf(ctx, obj, cond)
}

func (c *cuttable) DeleteIf(ctx context.Context, key tenure.Key, version int64) error {
	if err := c.hang(ctx); err != nil {
		return err
	}
	return c.SQLiteStore.DeleteIf(ctx, key, version)
}

func (c *cuttable) DeleteAndWake(ctx context.Context, key tenure.Key, version int64) error {
	if err := c.hang(ctx); err != nil {
		return err
	}
	return c.SQLiteStore.DeleteAndWake(ctx, key, version)
}

func (c *cuttable) hang(ctx context.Context) error {
	if !c.cut.Load() {
		return nil
	}
	<-ctx.Done()
	return ctx.Err()
}
