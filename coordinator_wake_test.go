package tenure_test

import (
	"context"
	"errors"
	"maps"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

// hinted is a store whose hints the test gives.
type hinted struct {
	*storetest.Mem
	live  atomic.Bool
	hints chan struct{}
}

func newHinted(live bool) *hinted {
	h := &hinted{Mem: storetest.NewMem(), hints: make(chan struct{}, 1)}
	h.live.Store(live)
	return h
}

func (h *hinted) Watch(tenure.Key) tenure.Watch { return h }
func (h *hinted) C() <-chan struct{}            { return h.hints }
func (h *hinted) Live() bool                    { return h.live.Load() }
func (h *hinted) Stop()                         {}

func TestInSteadyStateAHolderOnlyRenewsAndAStandbyReadsOncePerTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), storetest.NewMem()
		var mu sync.Mutex
		calls := map[string]int{}
		count := func(who string) storetest.Hook {
			return func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
				mu.Lock()
				calls[who+" "+call.Op]++
				mu.Unlock()
				time.Sleep(300 * time.Microsecond) // as databases do
				return do(ctx)
			}
		}
		a := start(t, l, store, "a", tenure.CoordinatorConfig{})
		time.Sleep(time.Second)
		b := start(t, l, store, "b", tenure.CoordinatorConfig{})
		time.Sleep(time.Minute)
		a.store.SetHook(count("holder"))
		b.store.SetHook(count("standby"))
		time.Sleep(100 * 30 * time.Second)
		mu.Lock()
		defer mu.Unlock()
		if want := map[string]int{"holder put": 300, "standby get": 100}; !maps.Equal(calls, want) {
			t.Errorf("in 100 TTLs: %v, want %v", calls, want)
		}
	})
}

func TestAStandbyThatIsNotWokenTriesWhenTheRecordWouldExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), newHinted(true)
		a := start(t, l, store, "a", tenure.CoordinatorConfig{})
		synctest.Wait()
		b := start(t, l, store, "b", tenure.CoordinatorConfig{})
		time.Sleep(time.Minute + time.Second) // the last renewal was a second ago
		a.stop()
		time.Sleep(29*time.Second + 10*time.Millisecond)
		if !b.IsHolder() {
			t.Errorf("b does not hold a TTL after the last renewal:\n%v", l)
		}
	})
}

func TestAStandbyPollsWhereItCannotCountOnAHint(t *testing.T) {
	gone := func(t *testing.T, store *hinted) { // without a hint
		obj, err := store.Get(t.Context(), leaseKey)
		if err == nil {
			err = store.DeleteIf(t.Context(), leaseKey, obj.Version)
		}
		wantErr(t, err, nil)
	}
	foreign := tenure.Object{Key: leaseKey, Payload: []byte(`{"holder":"another program","acquired_at_ms":1}`)}
	t.Run("the watch is not live", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			l, store := newLedger(t), newHinted(false)
			a := start(t, l, store, "a", tenure.CoordinatorConfig{})
			synctest.Wait()
			b := start(t, l, store, "b", tenure.CoordinatorConfig{})
			time.Sleep(time.Minute)
			a.stop()
			time.Sleep(5 * time.Second)
			if !b.IsHolder() {
				t.Error("b does not hold an AcquireInterval after the release")
			}
		})
	})
	t.Run("the watch is live no longer", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			l, store := newLedger(t), newHinted(true)
			a := start(t, l, store, "a", tenure.CoordinatorConfig{})
			synctest.Wait()
			b := start(t, l, store, "b", tenure.CoordinatorConfig{})
			time.Sleep(time.Minute + time.Second)
			store.live.Store(false)
			store.hints <- struct{}{}
			synctest.Wait()
			a.stop()
			time.Sleep(5 * time.Second)
			if !b.IsHolder() {
				t.Error("b does not hold an AcquireInterval after the release")
			}
		})
	})
	t.Run("another program holds", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			store := newHinted(true)
			_, err := store.PutIf(t.Context(), foreign, tenure.MustCreate())
			wantErr(t, err, nil)
			b := start(t, newLedger(t), store, "b", tenure.CoordinatorConfig{})
			time.Sleep(time.Second)
			gone(t, store)
			time.Sleep(5 * time.Second)
			if !b.IsHolder() {
				t.Error("b does not hold an AcquireInterval after the release")
			}
		})
	})
	t.Run("only what it has watched counts", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			l, store := newLedger(t), newHinted(true)
			a := start(t, l, store, "a", tenure.CoordinatorConfig{})
			synctest.Wait()
			lease := newLease(t, store, tenure.LeaseConfig{Holder: "b", Expiry: tenure.Observed})
			c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
				Reconcile: func(ctx context.Context) error { l.run(ctx, "b"); return nil },
			})
			wantErr(t, err, nil)
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error)
			go func() { done <- c.Run(ctx) }()
			time.Sleep(71 * time.Second) // the last renewal was a second ago
			a.store.SetHook(hang)
			time.Sleep(34 * time.Second)
			if !c.IsHolder() {
				t.Errorf("b does not hold a TTL and an AcquireInterval after the last renewal:\n%v", l)
			}
			cancel()
			wantErr(t, <-done, nil)
		})
	})
}

func TestAHintInVainCostsOneTry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), newHinted(true)
		a := start(t, l, store, "a", tenure.CoordinatorConfig{})
		synctest.Wait()
		b := start(t, l, store, "b", tenure.CoordinatorConfig{})
		time.Sleep(time.Second)
		var tries atomic.Int32
		b.store.SetHook(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			if call.Op == "put" {
				tries.Add(1)
			}
			return do(ctx)
		})
		for range 10 {
			store.hints <- struct{}{}
			time.Sleep(time.Millisecond)
		}
		if n := tries.Load(); n != 10 || !a.IsHolder() || b.Status().Terms != 0 {
			t.Errorf("%d tries for 10 hints; a holds: %v; b: %+v", n, a.IsHolder(), b.Status())
		}
	})
}

func TestAStandbyThatIsWokenAndFailsTriesAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), storetest.NewMem()
		a := start(t, l, store, "a", tenure.CoordinatorConfig{})
		synctest.Wait()
		b := start(t, l, store, "b", tenure.CoordinatorConfig{})
		time.Sleep(time.Minute)
		var failed atomic.Bool
		b.store.SetHook(func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
			if !failed.Swap(true) {
				return errors.New("connection reset")
			}
			return do(ctx)
		})
		a.stop()
		time.Sleep(5 * time.Second)
		if !failed.Load() || !b.IsHolder() {
			t.Errorf("b does not hold an AcquireInterval after its failure:\n%v", l)
		}
	})
}
