package tenure_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/proof/kit"
	"github.com/tenurelib/tenure/storetest"
)

// The replica was cut off and has recovered; its job returned long ago.
func TestNoReplicaFencesItself(t *testing.T) {
	for name, test := range map[string]struct {
		act  func(t *scene, b *replica)
		want []string
	}{
		"shutdown": {func(_ *scene, b *replica) { b.stop() }, []string{"a works"}},
		"handover": {func(t *scene, b *replica) { require.NoError(t, b.lease.RequestHandover(t.Context(), "a")) }, []string{"a works"}},
		"crash":    {func(_ *scene, b *replica) { b.store.SetHook(kit.Hang) }, []string{"a fences b at ", "a works"}},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *scene) {
				a, b := t.start("a", t.fencing(kit.Succeeds)), t.start("b", t.fencing(kit.UntilDone))
				time.Sleep(time.Minute)
				a.store.SetHook(kit.Hang)
				time.Sleep(40 * time.Second) // b has it, and cannot fence a
				a.store.SetHook(nil)
				time.Sleep(20 * time.Second)
				test.act(t, b)
				time.Sleep(time.Minute)
				require.Equal(t, append([]string{"a works", "b fences a at "}, test.want...), t.said())
			})
		})
	}
}

func TestAReplicaThatWasAloneFencesNobodyAfterAnOutage(t *testing.T) {
	for _, unique := range []bool{false, true} {
		t.Run(fmt.Sprint("AssumeUniqueHolder ", unique), func(t *testing.T) {
			inBubble(t, func(t *scene) {
				a := t.startWith(tenure.LeaseConfig{Holder: "a", AssumeUniqueHolder: unique}, t.fencing(kit.Succeeds))
				time.Sleep(time.Minute)
				a.store.SetHook(kit.Refuse)
				time.Sleep(90 * time.Second)
				a.store.SetHook(nil)
				time.Sleep(time.Minute)
				require.Equal(t, []string{"a works", "a works"}, t.said())
			})
		})
	}
}

func TestOfTwoPredecessorsWithOneNameBothAreFenced(t *testing.T) {
	inBubble(t, func(t *scene) {
		addr := func(a string) map[string]string { return map[string]string{"addr": a} }
		kit.MustAcquire(t, kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "x", Labels: addr("1")}))
		b := t.startWith(tenure.LeaseConfig{Holder: "x", Labels: addr("2")}, t.fencing(kit.UntilDone))
		time.Sleep(45 * time.Second)
		b.store.SetHook(kit.Hang)
		t.start("c", t.fencing(kit.Succeeds))
		time.Sleep(time.Minute)
		require.Equal(t, []string{"x fences x at 1", "c fences x at 1", "c fences x at 2", "c works"}, t.said())
	})
}

// Once b works, its successor has to fence only b, even if b has not renewed since.
func TestAPredecessorThatWasFencedIsNotFencedAgain(t *testing.T) {
	for _, until := range []time.Duration{31 * time.Second, time.Minute} {
		inBubble(t, func(t *scene) {
			kit.MustAcquire(t, kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "a"}))
			b := t.start("b", t.fencing(kit.Succeeds))
			time.Sleep(until)
			require.Equal(t, []string{"b fences a at ", "b works"}, t.said())
			b.store.SetHook(kit.Hang)
			t.start("c", t.fencing(kit.Succeeds))
			time.Sleep(time.Minute)
			require.Equal(t, []string{"c fences b at ", "c works"}, t.said()[2:])
		})
	}
}

func TestFencePredecessorMayChangeTheLabelsThatItIsGiven(t *testing.T) {
	inBubble(t, func(t *scene) {
		kit.MustAcquire(t, kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "a", Labels: map[string]string{"addr": "1"}}))
		cfg := t.fencing(kit.Succeeds)
		cfg.FencePredecessor = func(ctx context.Context, prev tenure.Holding) error {
			for ctx.Err() == nil {
				prev.Labels["addr"] += "!"
				time.Sleep(time.Second)
			}
			return ctx.Err()
		}
		b := t.start("b", cfg)
		time.Sleep(time.Minute)
		b.stop()
		t.start("c", t.fencing(kit.Succeeds))
		time.Sleep(time.Second)
		require.Equal(t, []string{"c fences a at 1", "c works"}, t.said())
	})
}

// It offers the lease to any replica, which is no reason to come back itself.
func TestAReplicaThatResignsBeforeItHasConfirmedStaysAway(t *testing.T) {
	inBubble(t, func(t *scene) {
		_, b := t.takeover(t.fencing(kit.UntilDone))
		require.NoError(t, b.Resign(t.Context()))
		for range 10 {
			time.Sleep(10 * time.Millisecond)
			require.NoError(t, b.store.Wake(t.Context(), kit.LeaseKey))
		}
		require.Equal(t, tenure.RoleStandby, b.Status().Role)
		require.Equal(t, 1, b.Status().Terms)
	})
}

func TestATermMayBeReleasedTwiceAtOnce(t *testing.T) {
	lease := kit.NewLease(t, storetest.NewMem(), tenure.LeaseConfig{})
	term := kit.MustAcquire(t, lease)
	var all sync.WaitGroup
	for range 2 {
		all.Go(func() { lease.Release(t.Context(), term) })
	}
	all.Wait()
}

func TestAHolderThatLosesItsTermToAnOfferKnowsThatNobodyHolds(t *testing.T) {
	inBubble(t, func(t *scene) {
		a := t.start("a")
		time.Sleep(time.Second)
		putRecord(t, t.store, `{"holder":"gone","acquired_at_ms":1,"term":"an offer","ttl_ms":30000,"offered":true}`)
		require.NoError(t, a.store.Wake(t.Context(), kit.LeaseKey))
		time.Sleep(29 * time.Second)
		got := a.Status()
		require.Empty(t, got.Holder)
		require.Len(t, got.Recent, 1)
		require.NotEqual(t, "an offer", got.Recent[0].ID)
	})
}
