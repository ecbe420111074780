package tenure_test

import (
	"context"
	"encoding/json"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/testkit/golden"
	"github.com/tenurelib/tenure/storetest"
)

func TestAStatusTellsAllThatAReplicaKnows(t *testing.T) {
	inBubble(t, func(t *scene) {
		began, labels := time.Now(), map[string]string{"address": "10.0.0.1"}
		a := t.startWith(tenure.LeaseConfig{Holder: "a", Labels: labels}, tenure.CoordinatorConfig{})
		b := t.start("b")
		a.store.SetHook(testkit.Slowly(20 * time.Millisecond))
		time.Sleep(35 * time.Second)

		got := a.Status()
		token := got.Token
		require.NotZero(t, token)
		require.Equal(t, tenure.Status{
			Lease: testkit.LeaseKey, Replica: "a", Role: tenure.RoleHolder, Since: got.Since, Reason: "acquired",
			Holder: "a", Labels: labels, HeldSince: got.HeldSince, RenewedAt: got.RenewedAt, TTL: 30 * time.Second,
			Token: token, TrustLeft: 24 * time.Second, TrustGiven: 29 * time.Second, RenewDeadline: 20 * time.Second, RenewalLatency: 20 * time.Millisecond,
			Terms: 1, Recent: []tenure.PastTerm{}, Runs: []tenure.RunStats{},
		}, got)
		require.True(t, got.Since.Equal(began) && got.HeldSince.Equal(began) && got.RenewedAt.Equal(began.Add(30*time.Second)), "%+v", got)
		got = b.Status()
		require.Equal(t, tenure.Status{
			Lease: testkit.LeaseKey, Replica: "b", Role: tenure.RoleStandby, Since: got.Since, Reason: "held by a",
			Holder: "a", Labels: labels, HeldSince: got.HeldSince, RenewedAt: got.RenewedAt, TTL: 30 * time.Second,
			Recent: []tenure.PastTerm{}, Runs: []tenure.RunStats{},
		}, got)
		require.True(t, got.HeldSince.Equal(began) && !got.RenewedAt.Before(began), "%+v", got)

		a.store.SetHook(testkit.Refuse)
		time.Sleep(time.Minute)
		got = b.Status()
		require.Equal(t, tenure.RoleHolder, got.Role)
		require.Equal(t, "stolen from a", got.Reason)
		require.Equal(t, "b", got.Holder)
		require.Nil(t, got.Labels)
		require.Len(t, got.Recent, 1)
		past := got.Recent[0]
		require.Equal(t, tenure.PastTerm{ID: past.ID, Holder: "a", Began: past.Began, Ended: past.Ended, Reason: "expired"}, past)
		require.True(t, past.Began.Equal(began), "%+v", past)
		got = a.Status()
		require.Equal(t, tenure.RoleStandby, got.Role)
		require.Empty(t, got.Holder)
		require.Equal(t, "connection refused", got.LastError)
		require.Len(t, got.Recent, 1)
		own := got.Recent[0]
		require.Equal(t, tenure.PastTerm{ID: past.ID, Holder: "a", Token: token, Began: own.Began, Ended: own.Ended, Reason: "expired: lease not renewed in time"}, own)
	})
}

func TestAStatusKeepsTheLastTenTerms(t *testing.T) {
	inBubble(t, func(t *scene) {
		a := t.start("a")
		var tokens []int64 // the latest first
		for range 12 {
			time.Sleep(time.Minute)
			tokens = slices.Insert(tokens, 0, a.Status().Token)
			require.NoError(t, a.Resign(t.Context()))
		}
		var got []int64
		for _, past := range a.Status().Recent {
			got = append(got, past.Token)
			require.Equal(t, "a", past.Holder)
			require.Equal(t, "released: lease resigned", past.Reason)
			require.GreaterOrEqual(t, past.Ended.Sub(past.Began), 50*time.Second)
		}
		require.Equal(t, tokens[:10], got)
	})
}

func TestAStandbyRemembersTheTermsOfOthers(t *testing.T) {
	inBubble(t, func(t *scene) {
		testkit.MustAcquire(t, testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "a"}))
		b := t.start("b")
		time.Sleep(20 * time.Second)
		putRecord(t, t.store, robbersRecord)
		time.Sleep(20 * time.Second)
		got := b.Status()
		require.Len(t, got.Recent, 1)
		require.Equal(t, "a", got.Recent[0].Holder)
		require.Equal(t, "followed by robber", got.Recent[0].Reason)
		require.Equal(t, "robber", got.Holder)
		testkit.RemoveRecord(t, t.store)
		time.Sleep(time.Minute)
		got = b.Status()
		require.Len(t, got.Recent, 2)
		require.Equal(t, "robber", got.Recent[0].Holder)
		require.Equal(t, "released", got.Recent[0].Reason)
		require.Equal(t, "acquired", got.Reason)
	})
}

func TestAStatusIsWrittenAsJSONAndReadBack(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	status := tenure.Status{
		Lease: testkit.LeaseKey, Replica: "a", Role: tenure.RoleStopping, Since: at, Reason: "lease resigned",
		Holder: "a", Stale: true, Labels: map[string]string{"address": "10.0.0.1"}, HeldSince: at, RenewedAt: at, TTL: 30 * time.Second,
		Token: 7, TrustLeft: 1500 * time.Millisecond, TrustGiven: 29 * time.Second, RenewDeadline: 20 * time.Second, RenewalLatency: 2 * time.Millisecond, Terms: 3, Stuck: true, LastError: "refused",
		Recent: []tenure.PastTerm{{ID: "t", Holder: "b", Token: 6, Began: at, Ended: at, Reason: "released"}},
		Runs:   []tenure.RunStats{{Name: "watch", Running: 1, Started: 3, Succeeded: 1, Failed: 2, RunningSince: at, Overdue: true, LastStart: at, LastSuccess: at, LastFailure: at, LastError: "no"}},
	}
	got, err := json.Marshal(status)
	require.NoError(t, err)
	golden.Compare(t, "status", golden.JSON(t, status,
		tenure.Status{Lease: testkit.LeaseKey, Replica: "b", Role: tenure.RoleStandby, Since: at, Recent: []tenure.PastTerm{}, Runs: []tenure.RunStats{}}))
	var read tenure.Status
	require.NoError(t, json.Unmarshal(got, &read))
	require.Equal(t, status, read)

	odd := tenure.Status{Lease: tenure.Key{Type: "a/b%2F", ID: "c/d"}}
	got, err = json.Marshal(odd)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(got, &read))
	require.Equal(t, odd.Lease, read.Lease)
	require.ErrorIs(t, json.Unmarshal([]byte(`{"lease":"singleton"}`), &read), tenure.ErrInvalid)
}

func TestAStandbyKnowsWhenItsKnowledgeIsStale(t *testing.T) {
	inBubbles(t, func(t *scene) {
		a, b := t.start("a"), t.start("b")
		for range 6000 { // ten minutes: it looks in time
			require.False(t, b.Status().Stale)
			time.Sleep(100 * time.Millisecond)
		}
		time.Sleep(5*time.Second + time.Millisecond)
		renewed := a.Status().RenewedAt
		b.store.SetHook(testkit.Hang)
		events, ok := t.store.(*storetest.Mem)
		if ok = ok && events.Events; ok {
			events.SetLive(false)
		}
		seen := b.Status().RenewedAt // as it last read it
		require.False(t, seen.After(renewed.Add(time.Millisecond)))
		time.Sleep(time.Until(seen.Add(30 * time.Second)))
		got := b.Status()
		require.False(t, got.Stale, "%v %v %+v", seen, renewed, got)
		time.Sleep(time.Second + time.Millisecond)
		got = b.Status()
		require.True(t, got.Stale)
		require.Equal(t, "a", got.Holder)
		require.Equal(t, 30*time.Second, got.TTL)
		require.True(t, got.RenewedAt.Equal(seen))
		require.False(t, a.Status().Stale)

		b.store.SetHook(nil)
		if ok {
			events.SetLive(true)
		}
		time.Sleep(time.Minute)
		require.False(t, b.Status().Stale)
	})
}

// ExpiryObserved does not trust the clock by which a record's age is measured, so the age says
// nothing.
func TestARecordWhoseAgeDoesNotCountIsStaleATTLAfterItWasRead(t *testing.T) {
	inBubble(t, func(t *scene) {
		t.start("a")
		b := t.startWith(tenure.LeaseConfig{Holder: "b", Expiry: tenure.ExpiryObserved}, tenure.CoordinatorConfig{})
		time.Sleep(9 * time.Second) // b reads every 5 s
		b.store.SetHook(testkit.Hang)
		time.Sleep(24 * time.Second) // the record as b knows it was written 33 s ago, and read at most 29 s ago
		require.False(t, b.Status().Stale)
		time.Sleep(8 * time.Second)
		require.True(t, b.Status().Stale)
	})
}

func TestEachReplicaTellsTheSameOfHowATermEnded(t *testing.T) {
	for name, test := range map[string]struct {
		end         func(t *scene, a *replica)
		own, others string
	}{
		"released": {func(_ *scene, a *replica) { a.stop() }, "released: replica is shutting down", "released"},
		"handed over": {func(t *scene, a *replica) { require.NoError(t, a.lease.RequestHandover(t.Context(), "c")) },
			"offered to c: lease resigned: on request, in favour of c", "offered to c"},
		"robbed": {func(t *scene, _ *replica) { putRecord(t, t.store, robbersRecord) },
			"followed by robber: lease lost: reconciler_lease/singleton is held by robber", "followed by robber"},
		"not released": {func(_ *scene, a *replica) { a.store.SetHook(testkit.Refuse); a.stop() },
			"expired: replica is shutting down", "expired"},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *scene) {
				a, b := t.start("a"), t.start("b")
				test.end(t, a)
				time.Sleep(40 * time.Second)
				first := func(r *replica) tenure.PastTerm { past := r.Status().Recent; return past[len(past)-1] }
				require.Equal(t, test.own, first(a).Reason)
				require.Equal(t, test.others, first(b).Reason)
				require.Equal(t, first(a).ID, first(b).ID)
			})
		})
	}
}

func TestAStandbyAndAReplicaWithoutItsDatabaseAreHealthy(t *testing.T) {
	inBubble(t, func(t *scene) {
		a, b := t.start("a"), t.start("b")
		a.store.SetHook(testkit.Hang)
		for range 600 {
			time.Sleep(100 * time.Millisecond)
			require.NoError(t, a.Healthy(0))
			require.NoError(t, b.Healthy(0))
		}
		t.wantHolder(b)
	})
}

func TestAReplicaWhoseJobIsStuckIsUnhealthyUntilItReturns(t *testing.T) {
	inBubble(t, func(t *scene) {
		a := t.start("a", tenure.CoordinatorConfig{Reconcile: returnsAfter(time.Minute)})
		go a.Resign(t.Context())
		time.Sleep(8 * time.Second)
		require.NoError(t, a.Healthy(time.Hour))
		time.Sleep(2 * time.Second)
		require.ErrorContains(t, a.Healthy(time.Hour), "still runs")
		time.Sleep(time.Minute)
		require.NoError(t, a.Healthy(0))
	})
}

func TestAHolderWhoseTrustEndedUnnoticedIsUnhealthyAfterTheTolerance(t *testing.T) {
	inBubble(t, func(t *scene) {
		release := make(chan struct{})
		a := t.start("a", tenure.CoordinatorConfig{})
		a.store.SetHook(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			<-release // deaf to the end of its context
			return testkit.Refuse(ctx, call, do)
		})
		time.Sleep(29*time.Second + 5*time.Second) // TTL − Margin, and the tolerance
		require.NoError(t, a.Healthy(5*time.Second))
		time.Sleep(time.Millisecond)
		require.ErrorContains(t, a.Healthy(5*time.Second), "ended 5.001s ago")
		a.store.SetHook(nil)
		close(release)
		time.Sleep(time.Minute)
		require.NoError(t, a.Healthy(0))
	})
}

func TestChangesBeginWithTheStatusAsItIs(t *testing.T) {
	c, err := tenure.NewCoordinator(testkit.NewLease(t, storetest.NewMem(), tenure.LeaseConfig{Holder: "a"}), tenure.CoordinatorConfig{})
	require.NoError(t, err)
	for status := range c.Changes(t.Context()) {
		require.Equal(t, "a", status.Replica)
		require.Equal(t, tenure.RoleStandby, status.Role)
		return
	}
	t.Error("there is no first status")
}

func TestAReaderOfChangesSeesEachChangeAndNoRenewal(t *testing.T) {
	inBubble(t, func(t *scene) {
		a := t.start("a", tenure.CoordinatorConfig{Reconcile: returnsAfter(time.Second)})
		ctx, cancel := context.WithCancel(t.Context())
		var seen []string
		var reader sync.WaitGroup
		reader.Go(func() {
			for s := range a.Changes(ctx) {
				seen = append(seen, string(s.Role)+" "+s.Holder+" "+s.LastError)
			}
		})
		time.Sleep(55 * time.Second)
		a.store.SetHook(testkit.Refuse)
		time.Sleep(11 * time.Second)
		a.store.SetHook(nil)
		time.Sleep(10 * time.Second)
		require.NoError(t, a.Resign(t.Context()))
		synctest.Wait()
		cancel()
		reader.Wait()
		require.Equal(t, []string{"holder a ", "holder a connection refused", "holder a ", "stopping a ", "standby  "}, seen)
	})
}

func TestASlowReaderOfChangesGetsTheLatestAndDelaysNobody(t *testing.T) {
	inBubble(t, func(t *scene) {
		a := t.start("a")
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Minute)
		defer cancel()
		var terms []int
		var reader sync.WaitGroup
		reader.Go(func() {
			for s := range a.Changes(ctx) {
				terms = append(terms, s.Terms)
				time.Sleep(10 * time.Minute)
			}
		})
		for range 5 {
			time.Sleep(time.Minute)
			require.NoError(t, a.Resign(t.Context()))
		}
		reader.Wait()
		require.Equal(t, []int{1, 6}, terms)
		t.wantHolder(a)
	})
}
