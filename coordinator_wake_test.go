package tenure_test

import (
	"context"
	"errors"
	"maps"
	"strings"
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

	watches atomic.Int32
}

func newHinted(live bool) *hinted {
	h := &hinted{Mem: storetest.NewMem(), hints: make(chan struct{}, 1)}
	h.live.Store(live)
	return h
}

// Watch gives a watch to the second replica that asks; the first is the holder,
// and hears nothing.
func (h *hinted) Watch(tenure.Key) tenure.Subscription {
	if h.watches.Add(1) == 1 {
		return hintedWatch{h, nil}
	}
	return hintedWatch{h, h.hints}
}

type hintedWatch struct {
	*hinted
	c chan struct{}
}

func (h hintedWatch) C() <-chan struct{} { return h.c }
func (h hintedWatch) Live() bool         { return h.live.Load() }
func (h hintedWatch) Stop()              {}

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

func TestHintsInVainCostNoMoreThanPolling(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), newHinted(true)
		a := start(t, l, store, "a", tenure.CoordinatorConfig{})
		synctest.Wait()
		b := start(t, l, store, "b", tenure.CoordinatorConfig{})
		time.Sleep(time.Second)
		var creates, reads atomic.Int32
		b.store.SetHook(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			switch call.Op {
			case "put":
				creates.Add(1)
			case "get":
				reads.Add(1)
			}
			return do(ctx)
		})
		hint := func() {
			select {
			case store.hints <- struct{}{}:
			default:
			}
		}
		hint()
		synctest.Wait()
		if n := creates.Load(); n != 1 {
			t.Errorf("%d tries for one hint", n)
		}
		for range 60_000 {
			hint()
			time.Sleep(time.Millisecond)
		}
		if n := creates.Load(); n < 12 || n > 25 || !a.IsHolder() || b.Status().Terms != 0 {
			t.Errorf("%d tries in a minute of hints; a holds: %v; b: %+v", n, a.IsHolder(), b.Status())
		}
		time.Sleep(time.Minute)
		creates.Store(0)
		reads.Store(0)
		time.Sleep(time.Minute)
		if creates.Load() != 0 || reads.Load() != 2 {
			t.Errorf("in two TTLs without a hint: %d creates, %d reads", creates.Load(), reads.Load())
		}
		a.stop()
		hint()
		synctest.Wait()
		if !b.IsHolder() {
			t.Error("a hint after a quiet time is not heard at once")
		}
	})
}

// It gives the lease up for others, and that must not be a reason to try again at once.
func TestAReplicaThatRefusesATokenIsNotWokenByItself(t *testing.T) {
	url := postgresURL(t)
	store := openPostgres(t, url, tenure.PostgresConfig{})
	migrate(t, store)
	pool := postgresPool(t, url)
	var creates atomic.Int32
	refused := make(chan struct{}, 1)
	faulty := storetest.Faulty(store, func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
		err := do(ctx)
		if call.Op == "put" {
			creates.Add(1)
		}
		if call.Op == "delete" {
			select {
			case refused <- struct{}{}:
			default:
			}
		}
		return err
	})
	lease := newLease(t, faulty, tenure.LeaseConfig{TTL: 6 * time.Second, Logger: quiet})
	term := mustAcquire(t, lease)
	execPostgres(t, pool, `UPDATE objects SET resource_version = resource_version + 3600000000`) // the clock was ahead
	_, err := lease.Read(t.Context())
	wantErr(t, err, nil)
	execPostgres(t, pool, `TRUNCATE objects, objects_tombstones`) // and all is restored
	wantErr(t, lease.Release(t.Context(), term), tenure.ErrLost)
	<-refused

	c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
		Reconcile: func(context.Context) error { t.Error("the job runs"); return nil },
	})
	wantErr(t, err, nil)
	creates.Store(0)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	wantErr(t, c.Run(ctx), nil)
	<-refused
	if n := creates.Load(); n > 3 {
		t.Errorf("%d acquires in 2 s", n)
	}
}

func TestARecordDeletedWithoutAHintIsMissedWithinTheStandbysOwnTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newHinted(true)
		mustAcquire(t, newLease(t, store, tenure.LeaseConfig{Holder: "dead", TTL: time.Hour}))
		b := start(t, newLedger(t), store, "b", tenure.CoordinatorConfig{})
		time.Sleep(time.Minute)
		obj, err := store.Get(t.Context(), leaseKey)
		wantErr(t, err, nil)
		wantErr(t, store.DeleteIf(t.Context(), leaseKey, obj.Version), nil)
		time.Sleep(30 * time.Second)
		if !b.IsHolder() {
			t.Error("b does not hold a TTL after the record was deleted")
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

// race is some replicas that stand by for one lease, and what they call.
type race struct {
	*testing.T
	away   time.Duration // of the store, there and back
	store  *storetest.Mem
	ledger *ledger

	mu    sync.Mutex
	calls map[string]int
}

func newRace(t *testing.T, away time.Duration) *race {
	return &race{T: t, away: away, store: storetest.NewMem(), ledger: newLedger(t), calls: map[string]int{}}
}

func (r *race) standBy(name string) *replica {
	replica := start(r.T, r.ledger, r.store, name, tenure.CoordinatorConfig{})
	replica.store.SetHook(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
		r.mu.Lock()
		r.calls[name+" "+call.Op]++
		r.mu.Unlock()
		time.Sleep(r.away / 2)
		defer time.Sleep(r.away / 2)
		return do(ctx)
	})
	time.Sleep(time.Second)
	return replica
}

// release stops the holder, and returns what others call in the second after that.
func (r *race) release(holder *replica) map[string]int {
	r.mu.Lock()
	clear(r.calls)
	r.mu.Unlock()
	holder.stop()
	time.Sleep(time.Second)
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.calls, func(call string, _ int) bool { return strings.HasSuffix(call, " delete") })
	return maps.Clone(r.calls)
}

// beaten lets two replicas race, and returns the one that has won and the other.
func (r *race) beaten() (won, lost *replica, loser string) {
	a := r.standBy("a")
	b, c := r.standBy("b"), r.standBy("c")
	r.release(a)
	if b.IsHolder() {
		return b, c, "c"
	}
	return c, b, "b"
}

func (r *race) wantCalls(what string, holds *replica, got, want map[string]int) {
	r.Helper()
	if !holds.IsHolder() || !maps.Equal(got, want) {
		r.Errorf("%s: holds: %v; calls are %v, want %v", what, holds.IsHolder(), got, want)
	}
}

// Else each of many standbys writes in vain at every release, while the one that
// wins waits for the same server.
func TestWhoWasBeatenYieldsUntilItHasWon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRace(t, 300*time.Microsecond)
		won, lost, loser := r.beaten()
		d := r.standBy("d")
		r.wantCalls("d, which was never beaten", d, r.release(won), map[string]int{"d put": 1, loser + " get": 1})
		r.wantCalls(loser+", the only one", lost, r.release(d), map[string]int{loser + " get": 1, loser + " put": 1})
		e := r.standBy("e")
		wantErr(t, lost.Resign(t.Context()), nil)
		time.Sleep(time.Minute)
		r.wantCalls(loser+", which has won since", lost, r.release(e), map[string]int{loser + " put": 1})
	})
}

func TestWhoIsFarAwayDoesNotYield(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRace(t, 20*time.Millisecond)
		won, lost, loser := r.beaten()
		r.wantCalls(loser, lost, r.release(won), map[string]int{loser + " put": 1})
	})
}

// They would, if who held last went first each time.
func TestTwoReplicasWhoseJobsFailDoNotKeepTheLeaseFromAThird(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRace(t, 300*time.Microsecond)
		fails := tenure.CoordinatorConfig{Logger: quiet, Reconcile: func(ctx context.Context) error {
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(20 * time.Second):
				return errors.New("no disk")
			}
		}}
		start(t, r.ledger, r.store, "a", fails)
		time.Sleep(time.Second)
		start(t, r.ledger, r.store, "b", fails)
		c := r.standBy("c")
		for range 100 {
			if c.IsHolder() {
				return
			}
			time.Sleep(20 * time.Second)
		}
		t.Error("c does not hold after a hundred terms of others")
	})
}
