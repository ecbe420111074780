package tenure_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

// It was cut off and is well again: its job has returned long ago.
func TestNoReplicaFencesItself(t *testing.T) {
	for name, scene := range map[string]struct {
		act  func(t *testing.T, b *replica)
		want []string
	}{
		"shutdown": {func(_ *testing.T, b *replica) { b.stop() }, nil},
		"handover": {func(t *testing.T, b *replica) { wantErr(t, b.lease.RequestHandover(t.Context(), "a"), nil) }, nil},
		"crash":    {func(_ *testing.T, b *replica) { b.store.SetHook(hang) }, []string{"a fences b at "}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store, s := storetest.NewMem(), &script{}
				a := startWith(t, store, tenure.LeaseConfig{Holder: "a"}, fencing(s, succeeds))
				synctest.Wait()
				b := startWith(t, store, tenure.LeaseConfig{Holder: "b"}, fencing(s, untilDone))
				time.Sleep(time.Minute)
				a.store.SetHook(hang)
				time.Sleep(40 * time.Second) // b has it, and cannot fence a
				a.store.SetHook(nil)
				time.Sleep(20 * time.Second)
				scene.act(t, b)
				time.Sleep(time.Minute)
				s.want(t, append(append([]string{"a works", "b fences a at "}, scene.want...), "a works")...)
			})
		})
	}
}

func TestAReplicaThatWasAloneFencesNobodyAfterAnOutage(t *testing.T) {
	for _, reclaim := range []bool{false, true} {
		t.Run(fmt.Sprint("reclaim ", reclaim), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store, s := storetest.NewMem(), &script{}
				a := startWith(t, store, tenure.LeaseConfig{Holder: "a", AssumeUniqueHolder: reclaim}, fencing(s, succeeds))
				time.Sleep(time.Minute)
				a.store.SetHook(refuse)
				time.Sleep(90 * time.Second)
				a.store.SetHook(nil)
				time.Sleep(time.Minute)
				s.want(t, "a works", "a works")
			})
		})
	}
}

func TestOfTwoPredecessorsWithOneNameBothAreFenced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, s := storetest.NewMem(), &script{}
		addr := func(a string) map[string]string { return map[string]string{"addr": a} }
		mustAcquire(t, newLease(t, store, tenure.LeaseConfig{Holder: "x", Labels: addr("1")}))
		b := startWith(t, store, tenure.LeaseConfig{Holder: "x", Labels: addr("2")}, fencing(s, untilDone))
		time.Sleep(45 * time.Second)
		b.store.SetHook(hang)
		startWith(t, store, tenure.LeaseConfig{Holder: "c"}, fencing(s, succeeds))
		time.Sleep(time.Minute)
		s.want(t, "x fences x at 1", "c fences x at 1", "c fences x at 2", "c works")
	})
}

func TestAReplicaThatCrashesAtWorkLeavesItsPredecessorInPeace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, s := storetest.NewMem(), &script{}
		mustAcquire(t, newLease(t, store, tenure.LeaseConfig{Holder: "a"}))
		b := startWith(t, store, tenure.LeaseConfig{Holder: "b"}, fencing(s, succeeds))
		time.Sleep(31 * time.Second) // b works, and its next renewal comes in 9 s
		s.want(t, "b fences a at ", "b works")
		b.store.SetHook(hang)
		startWith(t, store, tenure.LeaseConfig{Holder: "c"}, fencing(s, succeeds))
		time.Sleep(time.Minute)
		s.want(t, "b fences a at ", "b works", "c fences b at ", "c works")
	})
}

func TestWhatAPredecessorsFenceDoesToItsLabelsStaysThere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, s := storetest.NewMem(), &script{}
		mustAcquire(t, newLease(t, store, tenure.LeaseConfig{Holder: "a", Labels: map[string]string{"addr": "1"}}))
		cfg := fencing(s, succeeds)
		cfg.FencePredecessor = func(ctx context.Context, prev tenure.Holding) error {
			for ctx.Err() == nil {
				prev.Labels["addr"] += "!"
				time.Sleep(time.Second)
			}
			return ctx.Err()
		}
		b := startWith(t, store, tenure.LeaseConfig{Holder: "b"}, cfg)
		time.Sleep(time.Minute)
		b.stop()
		startWith(t, store, tenure.LeaseConfig{Holder: "c"}, fencing(s, succeeds))
		time.Sleep(time.Second)
		s.want(t, "c fences a at 1", "c works")
	})
}

// That it leaves the lease to anybody is no reason to come back itself.
func TestAReplicaThatHasNotConfirmedStaysAwayForAsLongAsItSaid(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, b := takeover(t, newLedger(t), tenure.CoordinatorConfig{FencePredecessor: func(ctx context.Context, _ tenure.Holding) error { return untilDone(ctx) }})
		wantErr(t, b.ResignFor(t.Context(), time.Hour), nil)
		for range 10 {
			time.Sleep(10 * time.Millisecond)
			wantErr(t, b.store.Wake(t.Context(), leaseKey), nil)
		}
		if got := b.Status(); got.Role != tenure.RoleStandby || got.Terms != 1 {
			t.Errorf("right after it resigned for an hour: %+v", got)
		}
	})
}

func TestATermMayBeReleasedTwiceAtOnce(t *testing.T) {
	lease := newLease(t, storetest.NewMem(), tenure.LeaseConfig{})
	term := mustAcquire(t, lease)
	var all sync.WaitGroup
	for range 2 {
		all.Go(func() { lease.Release(t.Context(), term) })
	}
	all.Wait()
}

func TestWhoLosesToAnOfferKnowsThatNobodyHolds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		a := start(t, newLedger(t), store, "a", tenure.CoordinatorConfig{})
		time.Sleep(time.Second)
		obj, err := store.Get(t.Context(), leaseKey)
		wantErr(t, err, nil)
		obj.Payload = []byte(`{"holder":"gone","acquired_at_ms":1,"term":"an offer","ttl_ms":30000,"offered":true}`)
		put(t, store, obj)
		wantErr(t, store.Wake(t.Context(), leaseKey), nil)
		time.Sleep(29 * time.Second)
		got := a.Status()
		if got.Holder != "" || len(got.Recent) != 1 || got.Recent[0].ID == "an offer" {
			t.Errorf("status: %+v", got)
		}
	})
}
