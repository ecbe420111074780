package witness

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
	"github.com/tenurelib/tenure/internal/report"
	"github.com/tenurelib/tenure/internal/witnessed"
)

const (
	// atOnce is how many leases are released at the same time. On Postgres they then share transactions.
	atOnce = 64

	// pingInterval is the time between two calls that keep the connection to the store alive.
	pingInterval = 10 * time.Second

	// The pause before the witness looks again for a lease that it could not release doubles from the first to the last.
	firstPause = 20 * time.Millisecond
	lastPause  = 500 * time.Millisecond

	// longestCall is how long a coordinator waits for an answer. An acquire that the program sent earlier than that before
	// its death was given up.
	longestCall = 10 * time.Second

	// longestFlight is how long after the death the witness looks for a lease whose acquire was under way then.
	longestFlight = 2 * time.Second
)

// unused is the key of an object that never exists.
var unused = tenure.Key{Type: "tenure.witness", ID: "unused"}

// errUnderWay means that there is nothing to release, but that an acquire of the program may still be completed.
var errUnderWay = errors.New("an acquire is under way")

// witness is the witness of one program.
type witness struct {
	cfg  Config
	name string // in records
	keys *keys

	opening sync.Once
	opened  chan tenure.Store
	open    sync.WaitGroup
}

// overtaker is a store whose server can complete an acquire long after the process that has sent it is dead. Overtake
// makes the server refuse such an acquire, or returns [tenure.ErrExists] if there is a record.
type overtaker interface {
	Overtake(ctx context.Context, key tenure.Key) error
}

// note notes a line of the program. At the first key it opens the store.
func (w *witness) note(ctx context.Context, text []byte) {
	var line witnessed.Line
	if json.Unmarshal(text, &line) != nil {
		return // of a later version
	}
	key := func(of [2]string) tenure.Key { return tenure.Key{Type: of[0], ID: of[1]} }
	switch none := [2]string{}; {
	case line.Wake != none:
		w.keys.wakes[key(line.Wake)] = true
	case line.Answered != none:
		w.keys.answered(key(line.Answered))
	case line.Key != none:
		w.keys.acquires(key(line.Key), line.Answers)
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
	if err := store.DeleteIf(ctx, unused, tenure.IfVersion(1)); errors.Is(err, tenure.ErrSetup) {
		w.cfg.Logger.Error("this witness cannot release leases", "error", err)
	}
	for ctx.Err() == nil {
		calling, cancel := context.WithTimeout(ctx, pingInterval)
		if lease, err := w.lease(store, unused); err == nil {
			_, _ = lease.ReleaseDead(calling, w.name, 0) // which does all but write
		}
		if pool := w.pool(store); pool != nil {
			_, _ = pool.Exec(calling, `SELECT `+ofProgram, w.tag())
		}
		cancel()
		pace.Sleep(ctx, pingInterval)
	}
}

// release releases the leases of the program when nothing of it is left. It takes Settle and ReleaseTimeout at most, and
// may wake waiting sessions for another second, and wait a second for a log that blocks.
func (w *witness) release(ctx context.Context, died time.Time, status int) {
	defer report.Flush(w.cfg.Logger)
	if w.opened == nil {
		return // the program has never competed
	}
	ctx, cancel := context.WithDeadline(ctx, died.Add(w.cfg.Settle+w.cfg.ReleaseTimeout))
	defer cancel()
	pace.Sleep(ctx, w.cfg.Settle)
	store, drained, err := w.prepare(ctx)
	if err != nil {
		w.cfg.Logger.Error("failed to release leases; they will expire", "status", status, "error", err)
		return
	}
	var released, left, failed tally
	keys, pause := w.keys.all(), pace.Doubling{}
	for {
		errs := w.look(ctx, store, keys, died)
		failed = tally{}
		var again []*naming
		for i, err := range errs {
			switch {
			case err == nil:
				released.add(nil)
			case errors.Is(err, tenure.ErrHeld):
				left.add(err)
			case errors.Is(err, errUnderWay) && !drained && time.Since(died) < longestFlight:
				again = append(again, keys[i])
			case !errors.Is(err, errUnderWay) && !errors.Is(err, tenure.ErrNotFound):
				failed.add(err)
				again = append(again, keys[i])
			}
		}
		if keys = again; len(keys) == 0 || !pace.Sleep(ctx, pause.Next(0, firstPause, lastPause)) {
			break
		}
	}
	if left.n > 0 {
		w.cfg.Logger.Warn("leases are left to expire", "leases", left.n, "error", left.err)
	}
	if failed.n > 0 {
		w.cfg.Logger.Error("failed to release leases; they will expire", "leases", failed.n, "error", failed.err)
	}
	w.cfg.Logger.Info("program ended", "status", status, "released", released.n, "left_to_expire", left.n,
		"failed", failed.n, "took", time.Since(died).Round(100*time.Microsecond))
}

// tally counts leases, and keeps the first error.
type tally struct {
	n   int
	err error
}

func (t *tally) add(err error) { t.n, t.err = t.n+1, cmp.Or(t.err, err) }

// prepare waits until the store is open, and ends the program's sessions in it. Drained means that it had some: then no
// acquire is under way.
func (w *witness) prepare(ctx context.Context) (store tenure.Store, drained bool, err error) {
	select {
	case store = <-w.opened:
	case <-ctx.Done():
		return nil, false, errors.New("the store could not be opened in time")
	}
	for failures := 0; ; failures++ {
		found, err := w.drain(ctx, store)
		drained = drained || found
		if err == nil || !pace.Sleep(ctx, pace.Retry(firstPause, lastPause, failures)) {
			return store, drained, err
		}
	}
}

// look releases the leases with these keys, if the program holds them, and wakes those who wait for a session's keys. For
// each key it returns the error of releaseKey.
func (w *witness) look(ctx context.Context, store tenure.Store, keys []*naming, died time.Time) []error {
	errs := make([]error, len(keys))
	slots := make(chan struct{}, atOnce)
	var looking sync.WaitGroup
	for i, n := range keys {
		slots <- struct{}{}
		if errs[i] = ctx.Err(); errs[i] != nil {
			<-slots
			continue
		}
		looking.Go(func() {
			defer func() { <-slots }()
			errs[i] = w.releaseKey(ctx, store, n, died)
			// Also a session that is gone was perhaps released, by a delete whose answer was lost.
			if err := errs[i]; n.key.Type == objects.SessionType && (err == nil || errors.Is(err, tenure.ErrNotFound)) {
				w.wake(ctx, store)
			}
		})
	}
	looking.Wait()
	return errs
}

// releaseKey releases the lease with a key, if the program holds it. [tenure.ErrHeld] means that the lease is left to
// expire, and [tenure.ErrNotFound] that the program does not hold it, and will not.
func (w *witness) releaseKey(ctx context.Context, store tenure.Store, n *naming, died time.Time) error {
	lease, err := w.lease(store, n.key)
	if err != nil {
		return err
	}
	underWay := died.Sub(n.unanswered) < longestCall
	older := time.Duration(0)
	if w.cfg.Young > 0 && !underWay { // an acquire that was not answered has begun no job that could have crashed the program
		older = w.cfg.Young + time.Since(died)
	}
	released, err := lease.ReleaseDead(ctx, w.name, older)
	switch {
	case released || err != nil:
		return err
	case !underWay:
		return tenure.ErrNotFound
	}
	if overtaker, ok := store.(overtaker); ok {
		switch err := overtaker.Overtake(ctx, n.key); {
		case err == nil:
			return tenure.ErrNotFound
		case !errors.Is(err, tenure.ErrExists):
			return err
		}
	}
	return errUnderWay
}

func (w *witness) lease(store tenure.Store, key tenure.Key) (*tenure.Lease, error) {
	return tenure.NewLease(store, tenure.LeaseConfig{Key: key, Holder: "witness", Expiry: tenure.ExpiryObserved, Logger: w.cfg.Logger})
}

// wake wakes those who wait for keys of a session, even if the time for releases is up.
func (w *witness) wake(ctx context.Context, store tenure.Store) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	var sending sync.WaitGroup
	for key := range w.keys.wakes {
		sending.Go(func() { _ = tenure.Wake(ctx, store, key) })
	}
	sending.Wait()
}
