package witness

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
	"github.com/tenurelib/tenure/internal/witnessed"
)

const (
	// atOnce is how many leases are released at the same time. On Postgres they then share transactions.
	atOnce = 64

	// pingInterval is the time between two calls that keep the connection to the store alive.
	pingInterval = 10 * time.Second

	// mostKeys is how many keys are kept at least: of a program that has competed for more, those
	// that it has named last.
	mostKeys = 100_000
)

// again is how long after the first look the witness looks for a lease again: an acquire may have been on its way when
// the process died.
var again = []time.Duration{100 * time.Millisecond, time.Second}

// unused is the key of an object that never exists.
var unused = tenure.Key{Type: "tenure.witness", ID: "unused"}

// witness knows what the processes of one name compete for.
type witness struct {
	cfg  Config
	name string // in records
	keys *keys

	opening sync.Once
	opened  chan tenure.Store
	open    sync.WaitGroup
}

// keys are those that were told.
type keys struct {
	latest, before map[tenure.Key]int // two generations; the numbers grow
	told           int
	wakes          map[tenure.Key]bool
}

func newKeys() *keys {
	return &keys{latest: make(map[tenure.Key]int), wakes: make(map[tenure.Key]bool)}
}

func (k *keys) add(key tenure.Key) {
	if len(k.latest) >= mostKeys {
		k.before, k.latest = k.latest, make(map[tenure.Key]int)
	}
	k.told++
	k.latest[key] = k.told
	delete(k.before, key)
}

// all returns sessions, which stand for many keys and are told once, and then the other keys, each beginning with the
// last that was told: a program may have had more keys than can be looked at in time, most of which it has released.
func (k *keys) all() []tenure.Key {
	type told struct {
		key tenure.Key
		at  int
	}
	var all []told
	for _, generation := range []map[tenure.Key]int{k.latest, k.before} {
		for key, at := range generation {
			if key.Type == objects.SessionType {
				at += k.told
			}
			all = append(all, told{key, at})
		}
	}
	slices.SortFunc(all, func(a, b told) int { return b.at - a.at })
	sorted := make([]tenure.Key, len(all))
	for i := range all {
		sorted[i] = all[i].key
	}
	return sorted
}

// note notes what the program tells. At the first key it opens the store.
func (w *witness) note(ctx context.Context, text []byte) {
	var line witnessed.Line
	if json.Unmarshal(text, &line) != nil {
		return // of a later version
	}
	if line.Wake != nil {
		w.keys.wakes[tenure.Key{Type: line.Wake[0], ID: line.Wake[1]}] = true
	}
	if line.Key != nil {
		w.keys.add(tenure.Key{Type: line.Key[0], ID: line.Key[1]})
		w.opening.Do(func() {
			w.opened = make(chan tenure.Store, 1)
			w.open.Go(func() { w.openStore(ctx) })
		})
	}
}

// openStore opens the store, and keeps the connection alive until ctx is done.
func (w *witness) openStore(ctx context.Context) {
	var store tenure.Store
	for failures := 0; store == nil; failures++ {
		var err error
		store, err = w.cfg.Open(ctx)
		if err == nil && store == nil {
			err = errors.New("Open has returned neither a store nor an error")
		}
		if err != nil {
			store = nil
			w.cfg.Logger.Warn("failed to open the store of the leases; retrying", "error", err)
			if !pace.Sleep(ctx, pace.Retry(time.Second, pingInterval, failures)) {
				return
			}
		}
	}
	if closer, ok := store.(io.Closer); ok {
		defer closer.Close()
	}
	w.opened <- store
	if err := store.DeleteIf(ctx, unused, 1); errors.Is(err, tenure.ErrSetup) {
		w.cfg.Logger.Error("this witness cannot release leases", "error", err)
	}
	for ctx.Err() == nil {
		calling, cancel := context.WithTimeout(ctx, pingInterval)
		_, _ = w.releaseKey(calling, store, unused, 0) // which does all but write
		if pool := w.pool(store); pool != nil {
			_, _ = pool.Exec(calling, `SELECT `+ofProgram, w.tag())
		}
		cancel()
		pace.Sleep(ctx, pingInterval)
	}
}

// outcome is what became of the keys.
type outcome struct {
	released, left, failed tally
	wake                   chan struct{} // receives when sessions were released
}

// tally counts keys, and keeps one error of them.
type tally struct {
	mu  sync.Mutex
	n   int
	err error
}

func (t *tally) add(n int, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.n, t.err = t.n+n, cmp.Or(t.err, err)
}

// release releases all leases of processes that have died. Nothing of them is left. It takes Settle and ReleaseTimeout
// from then on at most, and may send wakes for another second.
func (w *witness) release(ctx context.Context, died time.Time, status int) {
	if w.opened == nil {
		return // it never competed
	}
	deadline := died.Add(w.cfg.Settle + w.cfg.ReleaseTimeout)
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	pace.Sleep(ctx, w.cfg.Settle)
	var store tenure.Store
	select {
	case store = <-w.opened:
	case <-ctx.Done():
		w.cfg.Logger.Error("the store did not answer; the leases of the program have to expire", "status", status)
		return
	}
	drained := false
	for failures := 0; ; failures++ {
		var err error
		if drained, err = w.drain(ctx, store); err == nil {
			break
		}
		if !pace.Sleep(ctx, pace.Retry(20*time.Millisecond, 500*time.Millisecond, failures)) {
			w.cfg.Logger.Error("failed to end the Postgres sessions of the program; its leases have to expire", "status", status, "error", err)
			return
		}
	}
	looks := again
	if status == 0 || drained { // then nothing is on its way
		looks = nil
	}
	result := outcome{wake: make(chan struct{}, 1)}
	var waking, releasing sync.WaitGroup
	waking.Go(func() {
		// A session that was released when the time was up is not to wait for its wake.
		ctx, cancel := context.WithDeadline(context.WithoutCancel(ctx), deadline.Add(time.Second))
		defer cancel()
		for range result.wake {
			var sending sync.WaitGroup
			for key := range w.keys.wakes {
				sending.Go(func() { _ = tenure.Wake(ctx, store, key) })
			}
			sending.Wait()
		}
	})
	turn := make(chan struct{}, atOnce)
	keys := w.keys.all()
	for i, key := range keys {
		turn <- struct{}{}
		if err := ctx.Err(); err != nil {
			result.failed.add(len(keys)-i, err)
			break
		}
		releasing.Go(func() {
			done := w.settle(ctx, store, key, died, &result)
			<-turn
			for look := 0; !done && look < len(looks) && pace.Sleep(ctx, looks[look]-time.Since(died)); look++ {
				turn <- struct{}{}
				if ctx.Err() == nil {
					done = w.settle(ctx, store, key, died, &result)
				}
				<-turn
			}
		})
	}
	releasing.Wait()
	close(result.wake)
	waking.Wait()
	if result.left.n > 0 {
		w.cfg.Logger.Warn("leases are left to expire", "leases", result.left.n, "error", result.left.err)
	}
	if result.failed.n > 0 {
		w.cfg.Logger.Error("failed to release leases; they will expire", "leases", result.failed.n, "error", result.failed.err)
	}
	w.cfg.Logger.Info("program ended", "status", status, "released", result.released.n, "left_to_expire", result.left.n,
		"failed", result.failed.n, "took", time.Since(died).Round(100*time.Microsecond))
}

// settle releases the lease with a key, if it is a dead process's. It reports whether it has decided about one.
func (w *witness) settle(ctx context.Context, store tenure.Store, key tenure.Key, died time.Time, result *outcome) (decided bool) {
	for failures := 0; ; failures++ {
		older := max(0, w.cfg.Young)
		if older > 0 {
			older += time.Since(died)
		}
		released, err := w.releaseKey(ctx, store, key, older)
		// What is gone after an error was perhaps released, and the answer lost.
		if key.Type == objects.SessionType && err == nil && (released || failures > 0) {
			select {
			case result.wake <- struct{}{}:
			default: // those who wait will be woken yet
			}
		}
		switch {
		case released:
			result.released.add(1, nil)
			return true
		case errors.Is(err, tenure.ErrHeld):
			result.left.add(1, err)
			return true
		case err == nil:
			return false
		case !pace.Sleep(ctx, pace.Retry(20*time.Millisecond, 500*time.Millisecond, failures)):
			result.failed.add(1, err)
			return true
		}
	}
}

// releaseKey releases the lease with a key, if it is a dead process's.
func (w *witness) releaseKey(ctx context.Context, store tenure.Store, key tenure.Key, older time.Duration) (bool, error) {
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: key, Holder: "witness", Expiry: tenure.Observed, Logger: w.cfg.Logger})
	if err != nil {
		return false, err
	}
	return lease.ReleaseDead(ctx, w.name, older)
}
