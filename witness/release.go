package witness

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"sync"
	"sync/atomic"
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
	latest, before map[tenure.Key]bool // two generations
	wakes          map[tenure.Key]bool
}

func newKeys() *keys {
	return &keys{latest: make(map[tenure.Key]bool), wakes: make(map[tenure.Key]bool)}
}

func (k *keys) add(key tenure.Key) {
	if len(k.latest) >= mostKeys {
		k.before, k.latest = k.latest, make(map[tenure.Key]bool)
	}
	k.latest[key] = true
	delete(k.before, key)
}

func (k *keys) all() (all []tenure.Key) {
	for _, generation := range []map[tenure.Key]bool{k.latest, k.before} {
		for key := range generation {
			all = append(all, key)
		}
	}
	return all
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
		if store, err = w.cfg.Open(ctx); err != nil {
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

// outcome counts what became of the keys.
type outcome struct{ released, sessions, left, failed atomic.Int32 }

// release releases all leases of processes that have died. Nothing of them is left.
func (w *witness) release(ctx context.Context, died time.Time, status int) {
	if w.opened == nil {
		return // it never competed
	}
	var store tenure.Store
	select {
	case store = <-w.opened:
	case <-ctx.Done():
		w.cfg.Logger.Error("the store did not answer; the leases of the program have to expire", "status", status)
		return
	}
	pace.Sleep(ctx, w.cfg.Settle)
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
	var result outcome
	var releasing sync.WaitGroup
	turn := make(chan struct{}, atOnce)
	for _, key := range w.keys.all() {
		releasing.Go(func() {
			for look := -1; look < len(looks); look++ {
				if look >= 0 && !pace.Sleep(ctx, looks[look]-time.Since(died)) {
					return
				}
				turn <- struct{}{}
				done := w.settle(ctx, store, key, died, &result)
				<-turn
				if done {
					return
				}
			}
		})
	}
	releasing.Wait()
	if result.sessions.Load() > 0 {
		for key := range w.keys.wakes {
			releasing.Go(func() { _ = tenure.Wake(ctx, store, key) })
		}
		releasing.Wait()
	}
	w.cfg.Logger.Info("program ended", "status", status, "released", result.released.Load(), "left_to_expire", result.left.Load(),
		"failed", result.failed.Load(), "took", time.Since(died).Round(100*time.Microsecond))
}

// settle releases the lease with a key, if it is a dead process's. It reports whether it has decided about one.
func (w *witness) settle(ctx context.Context, store tenure.Store, key tenure.Key, died time.Time, result *outcome) (decided bool) {
	for failures := 0; ; failures++ {
		older := max(0, w.cfg.Young)
		if older > 0 {
			older += time.Since(died)
		}
		released, err := w.releaseKey(ctx, store, key, older)
		switch {
		case released:
			result.released.Add(1)
			if key.Type == objects.SessionType {
				result.sessions.Add(1)
			}
			return true
		case errors.Is(err, tenure.ErrHeld):
			result.left.Add(1)
			w.cfg.Logger.Warn("lease is left to expire", "lease", key, "error", err)
			return true
		case err == nil:
			return false
		case !pace.Sleep(ctx, pace.Retry(20*time.Millisecond, 500*time.Millisecond, failures)):
			result.failed.Add(1)
			w.cfg.Logger.Error("failed to release lease; it will expire", "lease", key, "error", err)
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
