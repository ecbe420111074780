package tenure_test

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

func TestAStatusTellsAllThatAReplicaKnows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), storetest.NewMem()
		began := time.Now()
		job := tenure.CoordinatorConfig{Reconcile: returnsAfter(0)}
		a := startWith(t, store, tenure.LeaseConfig{Holder: "a", Labels: map[string]string{"address": "10.0.0.1"}}, job)
		synctest.Wait()
		b := start(t, l, store, "b", tenure.CoordinatorConfig{})
		a.store.SetHook(slowly(20 * time.Millisecond))
		time.Sleep(35 * time.Second)

		got := a.Status()
		if got.Lease != leaseKey || got.Replica != "a" || got.Role != tenure.RoleHolder || got.Reason != "acquired" || !got.Since.Equal(began) {
			t.Errorf("holder's role: %+v", got)
		}
		if got.Holder != "a" || got.Labels["address"] != "10.0.0.1" || !got.HeldSince.Equal(began) || got.Token == 0 {
			t.Errorf("holder's term: %+v", got)
		}
		if renewed := began.Add(30 * time.Second); !got.RenewedAt.Equal(renewed) ||
			got.RenewalLatency != 20*time.Millisecond || got.TrustLeft != 24*time.Second {
			t.Errorf("holder's last renewal: %+v", got)
		}
		if got.Terms != 1 || got.Stuck || got.LastError != "" || len(got.Recent) != 0 {
			t.Errorf("holder's past: %+v", got)
		}

		token := got.Token
		got = b.Status()
		if got.Role != tenure.RoleStandby || got.Reason != "held by a" || got.Holder != "a" || got.Labels["address"] != "10.0.0.1" ||
			!got.HeldSince.Equal(began) || got.RenewedAt.Before(began) || got.Token != 0 || got.TrustLeft != 0 || got.RenewalLatency != 0 {
			t.Errorf("standby: %+v", got)
		}

		a.store.SetHook(refuse)
		time.Sleep(time.Minute)
		got = b.Status()
		if got.Role != tenure.RoleHolder || got.Reason != "stolen from a" || got.Holder != "b" || got.Labels != nil {
			t.Errorf("after b's steal: %+v", got)
		}
		if len(got.Recent) != 1 || got.Recent[0].Holder != "a" || !got.Recent[0].Began.Equal(began) || got.Recent[0].Reason != "expired" {
			t.Errorf("b's recent terms: %+v", got.Recent)
		}
		id := got.Recent[0].ID
		got = a.Status()
		if len(got.Recent) != 1 || got.Recent[0].ID != id || got.Recent[0].Token != token || got.Recent[0].Reason != tenure.ErrDeadline.Error() {
			t.Errorf("a's recent terms: %+v; want that of ID %s, token %d", got.Recent, id, token)
		}
		if got.LastError != "connection refused" || got.Role != tenure.RoleStandby || got.Holder != "" {
			t.Errorf("after a's loss: %+v", got)
		}
	})
}

func TestAStatusKeepsTheLastTenTerms(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := start(t, nil, storetest.NewMem(), "a", tenure.CoordinatorConfig{Reconcile: returnsAfter(0)})
		var tokens []int64 // the latest first
		for range 12 {
			time.Sleep(time.Minute)
			tokens = slices.Insert(tokens, 0, a.Status().Token)
			wantErr(t, a.Resign(t.Context()), nil)
		}
		var got []int64
		for _, past := range a.Status().Recent {
			got = append(got, past.Token)
			if past.Holder != "a" || past.Reason != tenure.ErrResigned.Error() || past.Ended.Sub(past.Began) < 50*time.Second {
				t.Errorf("got %+v", past)
			}
		}
		if !slices.Equal(got, tokens[:10]) {
			t.Errorf("got the terms of tokens %v, want %v", got, tokens[:10])
		}
	})
}

func TestAStandbyRemembersTheTermsOfOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		mustAcquire(t, newLease(t, store, tenure.LeaseConfig{Holder: "a"}))
		b := start(t, nil, store, "b", tenure.CoordinatorConfig{Reconcile: returnsAfter(0)})
		time.Sleep(20 * time.Second)
		obj, err := store.Get(t.Context(), leaseKey)
		wantErr(t, err, nil)
		obj.Payload = []byte(`{"holder":"robber","term":"another","ttl_ms":30000}`)
		put(t, store, obj)
		time.Sleep(20 * time.Second)
		got := b.Status()
		if len(got.Recent) != 1 || got.Recent[0].Holder != "a" || got.Recent[0].Reason != "followed by robber" || got.Holder != "robber" {
			t.Errorf("after the robber's steal: %+v", got)
		}
		wantErr(t, store.DeleteIf(t.Context(), leaseKey, put(t, store, obj).Version), nil)
		time.Sleep(time.Minute)
		got = b.Status()
		if len(got.Recent) != 2 || got.Recent[0].Holder != "robber" || got.Recent[0].Reason != "released" || got.Reason != "acquired" {
			t.Errorf("after the robber's release: %+v", got)
		}
	})
}

func TestAStatusIsWrittenAsJSONAndReadBack(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	status := tenure.Status{
		Lease: leaseKey, Replica: "a", Role: tenure.RoleStopping, Since: at, Reason: "lease resigned",
		Holder: "a", Labels: map[string]string{"address": "10.0.0.1"}, HeldSince: at, RenewedAt: at,
		Token: 7, TrustLeft: 1500 * time.Millisecond, TrustGiven: 29 * time.Second, RenewDeadline: 20 * time.Second, RenewalLatency: 2 * time.Millisecond, Terms: 3, Stuck: true, LastError: "refused",
		Recent: []tenure.PastTerm{{ID: "t", Holder: "b", Token: 6, Began: at, Ended: at, Reason: "released"}},
	}
	got, err := json.Marshal(status)
	wantErr(t, err, nil)
	const want = `{"lease":"reconciler_lease/singleton","replica":"a","role":"stopping","since":"2026-01-02T03:04:05Z","reason":"lease resigned",` +
		`"holder":"a","labels":{"address":"10.0.0.1"},"held_since":"2026-01-02T03:04:05Z","renewed_at":"2026-01-02T03:04:05Z",` +
		`"token":7,"terms":3,"stuck":true,"last_error":"refused",` +
		`"recent":[{"id":"t","holder":"b","token":6,"began":"2026-01-02T03:04:05Z","ended":"2026-01-02T03:04:05Z","reason":"released"}],` +
		`"trust_left_seconds":1.5,"trust_given_seconds":29,"renew_deadline_seconds":20,"renewal_latency_seconds":0.002}`
	require.Equal(t, want, string(got))
	var read tenure.Status
	require.NoError(t, json.Unmarshal(got, &read))
	require.Equal(t, status, read)

	odd := tenure.Status{Lease: tenure.Key{Type: "a/b%2F", ID: "c/d"}}
	got, err = json.Marshal(odd)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(got, &read))
	require.Equal(t, odd.Lease, read.Lease)
	require.ErrorIs(t, json.Unmarshal([]byte(`{"role":"king"}`), &read), tenure.ErrInvalid)
	require.ErrorIs(t, json.Unmarshal([]byte(`{"lease":"singleton"}`), &read), tenure.ErrInvalid)
}

func TestAStandbyAndADatabaseThatIsDownAreHealthy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		a := start(t, newLedger(t), store, "a", tenure.CoordinatorConfig{})
		synctest.Wait()
		b := start(t, newLedger(t), store, "b", tenure.CoordinatorConfig{})
		a.store.SetHook(hang)
		for range 600 {
			time.Sleep(100 * time.Millisecond)
			for _, r := range []*replica{a, b} {
				if err := r.Healthy(0); err != nil {
					t.Fatalf("%s: %v; %+v", r.Status().Replica, err, r.Status())
				}
			}
		}
		if !b.IsHolder() {
			t.Error("b has not taken over: the test has shown nothing")
		}
	})
}

func TestAReplicaWhoseJobIsStuckIsUnhealthyUntilItReturns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := start(t, nil, storetest.NewMem(), "a", tenure.CoordinatorConfig{Reconcile: returnsAfter(time.Minute)})
		synctest.Wait()
		go a.Resign(t.Context())
		time.Sleep(8 * time.Second)
		wantErr(t, a.Healthy(time.Hour), nil)
		time.Sleep(2 * time.Second)
		if err := a.Healthy(time.Hour); err == nil || !strings.Contains(err.Error(), "still runs") {
			t.Errorf("got %v, want that the job still runs", err)
		}
		time.Sleep(time.Minute)
		wantErr(t, a.Healthy(0), nil)
	})
}

func TestAHolderWhoseTrustEndedUnnoticedIsUnhealthyAfterTheTolerance(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		a := start(t, nil, storetest.NewMem(), "a", tenure.CoordinatorConfig{
			Reconcile: returnsAfter(0),
			Trace:     &tenure.Trace{Lost: func(*tenure.Term, error) { <-release }}, // stops the coordinator in its tracks
		})
		synctest.Wait()
		a.store.SetHook(refuse)
		time.Sleep(29*time.Second + 5*time.Second) // TTL − Margin, and the tolerance
		wantErr(t, a.Healthy(5*time.Second), nil)
		time.Sleep(time.Millisecond)
		if err := a.Healthy(5 * time.Second); err == nil || !strings.Contains(err.Error(), "ended 5.001s ago") {
			t.Errorf("got %v, want that the trust ended 5.001s ago", err)
		}
		a.store.SetHook(nil)
		close(release)
		time.Sleep(time.Minute)
		wantErr(t, a.Healthy(0), nil)
	})
}

func TestChangesBeginWithTheStatusAsItIs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, err := tenure.NewCoordinator(newLease(t, storetest.NewMem(), tenure.LeaseConfig{Holder: "a"}),
			tenure.CoordinatorConfig{Reconcile: returnsAfter(0)})
		wantErr(t, err, nil)
		var first []tenure.Status
		for status := range c.Changes(t.Context()) {
			first = append(first, status)
			break
		}
		if len(first) != 1 || first[0].Replica != "a" || first[0].Role != tenure.RoleStandby {
			t.Errorf("got %+v", first)
		}
	})
}

func TestEachChangeReachesAReaderOfChangesAndRenewalsDoNot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		a := start(t, nil, store, "a", tenure.CoordinatorConfig{Reconcile: returnsAfter(time.Second)})
		synctest.Wait()
		ctx, cancel := context.WithCancel(t.Context())
		var mu sync.Mutex
		var seen []string
		var readers sync.WaitGroup
		readers.Go(func() {
			for s := range a.Changes(ctx) {
				mu.Lock()
				seen = append(seen, s.Role.String()+" "+s.Holder+" "+s.LastError)
				mu.Unlock()
			}
		})
		time.Sleep(55 * time.Second)
		a.store.SetHook(refuse)
		time.Sleep(11 * time.Second)
		a.store.SetHook(nil)
		time.Sleep(10 * time.Second)
		wantErr(t, a.Resign(t.Context()), nil)
		synctest.Wait()
		cancel()
		readers.Wait()
		want := []string{"holder a ", "holder a connection refused", "holder a ", "stopping a ", "standby  "}
		if !slices.Equal(seen, want) {
			t.Errorf("got %q, want %q", seen, want)
		}
	})
}

func TestASlowReaderOfChangesGetsTheLatestAndKeepsNobodyWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		a := start(t, nil, store, "a", tenure.CoordinatorConfig{Reconcile: returnsAfter(0)})
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Minute)
		defer cancel()
		var terms []int
		var readers sync.WaitGroup
		readers.Go(func() {
			for s := range a.Changes(ctx) {
				terms = append(terms, s.Terms)
				time.Sleep(10 * time.Minute)
			}
		})
		for range 5 {
			time.Sleep(time.Minute)
			wantErr(t, a.Resign(t.Context()), nil)
		}
		readers.Wait()
		if !slices.Equal(terms, []int{1, 6}) || !a.IsHolder() {
			t.Errorf("a reader saw after how many terms: %v; want 1, then 6", terms)
		}
	})
}

// Otherwise it would tell for hours of one who is long gone.
func TestAReplicaThatDoesNotCompeteSeesWhoHolds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), storetest.NewMem()
		a := start(t, l, store, "a", tenure.CoordinatorConfig{})
		synctest.Wait()
		var fit fitness
		fit.standby.Store(true)
		var log bytes.Buffer
		unfit := start(t, l, store, "unfit", tenure.CoordinatorConfig{Check: fit.check, Logger: slog.New(slog.NewTextHandler(&log, nil))})
		time.Sleep(45 * time.Second) // a TTL, and what is between two checks, and a bit
		if got := unfit.Status(); got.Holder != "a" || !strings.Contains(got.LastError, errUnfit.Error()) {
			t.Errorf("who is not fit tells of %+v", got)
		}
		b := start(t, l, store, "b", tenure.CoordinatorConfig{})
		time.Sleep(time.Second)
		wantErr(t, a.ResignFor(t.Context(), time.Hour), nil)
		time.Sleep(45 * time.Second)
		if !b.IsHolder() {
			t.Fatalf("b does not hold:\n%v", l)
		}
		for _, r := range []*replica{a, unfit} {
			if got := r.Status(); got.Holder != "b" || got.RenewedAt.IsZero() {
				t.Errorf("%s tells of %+v", got.Replica, got)
			}
		}
		b.stop()
		time.Sleep(45 * time.Second)
		for _, r := range []*replica{a, unfit} {
			if got := r.Status(); got.Holder != "" {
				t.Errorf("where nobody holds %s tells of %+v", got.Replica, got)
			}
		}
		unfit.stop()
		if got := strings.Count(log.String(), "replica is unhealthy and does not compete"); got != 1 {
			t.Errorf("%d lines say that it is not fit:\n%s", got, &log)
		}
	})
}
