//go:build unix

package etcdtenure_test

import (
	"context"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/stores/etcdtenure"
	"github.com/tenurelib/tenure/storetest"
)

func TestAReleaseWakesTheStandby(t *testing.T) {
	url := start(t).client
	var jobs testkit.Jobs
	const ttl = 40 * time.Second
	a := testkit.StartReplica(t, &jobs, open(t, url), "a", ttl)
	testkit.Await(t, "a holds", a.IsHolder)
	b := testkit.StartReplica(t, &jobs, open(t, url), "b", ttl)
	testkit.Await(t, "b knows a", func() bool { return b.Status().Holder == "a" })
	time.Sleep(200 * time.Millisecond) // what b may still be doing is over
	released := time.Now()
	a.Stop()
	testkit.Await(t, "b holds", b.IsHolder)
	require.Less(t, time.Since(released), ttl/2)
	require.EqualValues(t, 1, jobs.Most.Load())
}

func TestReplicasSurviveARestartOfTheServer(t *testing.T) {
	for name, test := range map[string]struct {
		signal os.Signal
		rounds int
	}{"killed": {syscall.SIGKILL, 3}, "stopped": {syscall.SIGTERM, 1}} { // to stop takes etcd some seconds
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startDurable(t)
			var jobs testkit.Jobs
			const ttl = 3 * time.Second
			a, b := testkit.StartReplica(t, &jobs, open(t, s.client), "a", ttl), testkit.StartReplica(t, &jobs, open(t, s.client), "b", ttl)
			testkit.RunRestarts(t, &jobs, a, b, test.rounds, func() {
				require.NoError(t, s.Signal(test.signal))
				_ = s.Wait() // its exit status does not matter
				s.begin(t)
			})
		})
	}
}

// A server that is paused for longer than the TTL then executes what it was sent before. By then no
// process may rely on the term.
func TestAServerThatPausesEndsTheTrustInTheTerm(t *testing.T) {
	t.Parallel()
	s := start(t)
	var jobs testkit.Jobs
	const ttl = time.Second
	a, b := testkit.StartReplica(t, &jobs, open(t, s.client), "a", ttl), testkit.StartReplica(t, &jobs, open(t, s.client), "b", ttl)
	testkit.Await(t, "one holds", func() bool { return testkit.Holder(a, b) != nil })
	for range 2 {
		first := testkit.Holder(a, b).Status().Token
		s.pause(t)
		testkit.Await(t, "nobody holds", func() bool { return testkit.Holder(a, b) == nil && jobs.Running.Load() == 0 })
		time.Sleep(ttl / 2)
		s.resume(t)
		testkit.Await(t, "one holds", func() bool { return testkit.Holder(a, b) != nil })
		require.GreaterOrEqual(t, testkit.Holder(a, b).Status().Token, first)
	}
	require.EqualValues(t, 1, jobs.Most.Load())
}

// awaitChange waits until a watch delivers that version as the newest.
func awaitChange(t *testing.T, watch tenure.ChangeSubscription, version int64) {
	t.Helper()
	testkit.Await(t, "the change has arrived", func() bool { change, ok := watch.Last(); return ok && change.Object.Version == version })
}

func awaitHint(t *testing.T, watch tenure.Subscription, what string) {
	t.Helper()
	select {
	case <-watch.C():
	case <-time.After(30 * time.Second):
		t.Fatal("no hint that ", what)
	}
}

// broken returns a watch that has just broken because the server no longer answers, and the watched
// object.
func broken(t *testing.T, s *server, end func()) (tenure.ChangeSubscription, tenure.Object) {
	t.Helper()
	key := tenure.Key{Type: "widget", ID: "a"}
	store := open(t, s.client)
	watch := store.Watch(key).(tenure.ChangeSubscription)
	t.Cleanup(watch.Stop)
	testkit.Await(t, "the watch is live", watch.Live)
	change, _ := watch.Last()
	require.True(t, change.Deleted)
	obj, err := store.PutIf(t.Context(), tenure.Object{Key: key}, tenure.IfAbsent())
	require.NoError(t, err)
	awaitChange(t, watch, obj.Version)
	for len(watch.C()) > 0 {
		<-watch.C()
	}
	end()
	awaitHint(t, watch, "the watch broke")
	require.False(t, watch.Live())
	return watch, obj
}

func TestAWatchThatBreaksIsNotLiveAndTellsThePresentStateWhenItIsAgain(t *testing.T) {
	for what, fault := range map[string]struct{ end, again func(*server, *testing.T) }{
		"killed": {func(s *server, _ *testing.T) { s.kill() }, func(s *server, t *testing.T) { s.begin(t) }},
		"paused": {func(s *server, t *testing.T) { s.pause(t) }, func(s *server, t *testing.T) { s.resume(t) }},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s := startDurable(t)
			watch, obj := broken(t, s, func() { fault.end(s, t) })
			fault.again(s, t)
			other := open(t, s.client)
			obj, err := other.PutIf(t.Context(), tenure.Object{Key: obj.Key}, tenure.IfVersion(obj.Version))
			require.NoError(t, err)
			awaitChange(t, watch, obj.Version)
		})
	}
}

// quietly tests that a condition holds for a while. It repeats the test, because on a busy machine
// the condition does not always hold.
func quietly(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for range 5 {
		if ok() {
			return
		}
	}
	t.Fatal("not once in 5 times: ", what)
}

// staysLive tests that an idle watch does not break.
func staysLive(t *testing.T, watch tenure.Subscription) {
	t.Helper()
	quietly(t, "the watch stays live", func() bool {
		testkit.Await(t, "the watch is live", watch.Live)
		for len(watch.C()) > 0 {
			<-watch.C()
		}
		time.Sleep(4 * time.Second)
		return watch.Live() && len(watch.C()) == 0
	})
}

func TestAWatchInAClusterAtRestStaysLive(t *testing.T) {
	t.Parallel()
	url := start(t).client
	store := open(t, url)
	watch := store.Watch(tenure.Key{Type: "widget", ID: "a"})
	testkit.Await(t, "the watch is live", watch.Live)
	another := store.Watch(tenure.Key{Type: "widget", ID: "b"})
	testkit.Await(t, "the watch is live", another.Live)
	staysLive(t, watch)
	staysLive(t, another)
}

// While the watch was broken, the revisions after the one that it has seen were compacted, so that
// it cannot continue from there.
func TestAWatchSurvivesACompaction(t *testing.T) {
	t.Parallel()
	s := startDurable(t)
	link := newProxy(t, s.client)
	client := connect(t, s.client)
	watched := open(t, link.url)
	key := tenure.Key{Type: "widget", ID: "a"}
	watch := watched.Watch(key).(tenure.ChangeSubscription)
	defer watch.Stop()
	testkit.Await(t, "the watch is live", watch.Live)
	other := open(t, s.client)
	write := func() (obj tenure.Object) {
		t.Helper()
		for range 5 {
			var err error
			obj, err = other.PutIf(t.Context(), tenure.Object{Key: key}, tenure.Unconditional())
			require.NoError(t, err)
		}
		is, err := client.Get(t.Context(), "x")
		require.NoError(t, err)
		_, err = client.Compact(t.Context(), is.Header.Revision)
		require.NoError(t, err)
		return obj
	}
	awaitChange(t, watch, write().Version) // a watch that is not behind does not notice
	link.cut()
	obj := write()
	link.restore()
	awaitChange(t, watch, obj.Version)
	require.NoError(t, other.DeleteIf(t.Context(), key, tenure.IfVersion(obj.Version)))
	testkit.Await(t, "the deletion has arrived", func() bool { change, ok := watch.Last(); return ok && change.Deleted })
}

func TestAStandbyNeitherPollsNorReadsWhileTheHolderRenews(t *testing.T) {
	t.Parallel()
	url := start(t).client
	var jobs testkit.Jobs
	var writes, calls atomic.Int32
	ctx, cancel := context.WithCancel(t.Context())
	var done sync.WaitGroup
	defer done.Wait()
	defer cancel()
	begin := func(name string, count *atomic.Int32) *tenure.Coordinator {
		counted := storetest.Faulty(open(t, url), func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
			count.Add(1)
			return do(ctx)
		})
		c, err := tenure.NewCoordinator(testkit.NewLease(t, counted, tenure.LeaseConfig{Holder: name, TTL: 12 * time.Second}),
			tenure.CoordinatorConfig{Reconcile: jobs.Run, RenewInterval: 200 * time.Millisecond, Logger: testkit.Quiet})
		require.NoError(t, err)
		done.Go(func() { _ = c.Run(ctx) })
		return c
	}
	a := begin("a", &writes)
	testkit.Await(t, "a holds", a.IsHolder)
	b := begin("b", &calls)
	testkit.Await(t, "b knows a", func() bool { return b.Status().Holder == "a" })
	quietly(t, "the standby reads nothing while the holder writes", func() bool {
		before, written := calls.Load(), writes.Load()
		time.Sleep(5 * time.Second) // more than two AcquireIntervals
		return calls.Load() == before && writes.Load() > written+5
	})
}

func TestWatchesLeaveNothingBehind(t *testing.T) {
	t.Parallel()
	s := start(t)
	store := open(t, s.client)
	var watches []tenure.Subscription
	for i := range 20 {
		watches = append(watches, store.Watch(tenure.Key{Type: "widget", ID: fmt.Sprint(i)}))
	}
	for _, watch := range watches {
		testkit.Await(t, "the watch is live", watch.Live)
	}
	require.Equal(t, 20, s.metric(t, "etcd_debugging_mvcc_watcher_total"))
	require.Equal(t, 1, s.metric(t, "etcd_debugging_mvcc_watch_stream_total"))
	for _, watch := range watches {
		watch.Stop()
	}
	testkit.Await(t, "the server watches nothing", func() bool {
		return s.metric(t, "etcd_debugging_mvcc_watcher_total") == 0 && s.metric(t, "etcd_debugging_mvcc_watch_stream_total") == 0
	})
}

func TestTokensGoOnAboveThoseOfAPrefixThatWasRemoved(t *testing.T) {
	t.Parallel()
	url := start(t).client
	client, store := connect(t, url), open(t, url)
	a, b := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "a"}), testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "b"})
	before, err := a.TryAcquire(t.Context())
	require.NoError(t, err)
	other := open(t, url) // knows the old versions
	_, err = other.Get(t.Context(), before.Key())
	require.NoError(t, err)
	_, err = client.Delete(t.Context(), "tenure/", clientv3.WithPrefix())
	require.NoError(t, err)
	require.ErrorIs(t, a.Renew(t.Context(), before), tenure.ErrSetup)
	require.NoError(t, store.Migrate(t.Context()))
	require.ErrorIs(t, a.Renew(t.Context(), before), tenure.ErrLost)
	after, err := b.TryAcquire(t.Context())
	require.NoError(t, err)
	require.Greater(t, after.Token(), before.Token())
	require.NoError(t, b.Release(t.Context(), after))
	last, err := testkit.NewLease(t, other, tenure.LeaseConfig{}).TryAcquire(t.Context())
	require.NoError(t, err)
	require.Greater(t, last.Token(), after.Token())
}

func TestTokensGoOnAboveThoseOfAClusterThatWasRemoved(t *testing.T) {
	t.Parallel()
	s := startDurable(t)
	acquire := func(store *etcdtenure.Store) *tenure.Term {
		term, err := testkit.NewLease(t, store, tenure.LeaseConfig{}).AcquireOrSteal(t.Context())
		require.NoError(t, err)
		return term
	}
	store := open(t, s.client)
	before := acquire(store)
	s.kill()
	require.NoError(t, os.RemoveAll(s.Data))
	s.begin(t)
	s.awaitHealth(t)
	_, err := store.Get(t.Context(), before.Key())
	require.Error(t, err)
	require.Greater(t, acquire(open(t, s.client)).Token(), before.Token())
}

// After a restore that no process has noticed yet, the next term may have the same revision as a
// term that the snapshot lacks.
func TestAFenceTellsTermsOfTheSameRevisionApart(t *testing.T) {
	t.Parallel()
	s := startDurable(t)
	store := open(t, s.client)
	snapshot := s.snapshot(t)
	before, err := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "a"}).TryAcquire(t.Context())
	require.NoError(t, err)
	s.restore(t, snapshot, "etcd-cluster")

	another := open(t, s.client)
	next, err := testkit.NewLease(t, another, tenure.LeaseConfig{Holder: "b"}).TryAcquire(t.Context())
	require.NoError(t, err)
	require.Equal(t, before.Token(), next.Token())
	conditions, err := another.FenceConditions(t.Context(), next)
	require.NoError(t, err)
	resp, err := connect(t, s.client).Txn(t.Context()).If(conditions...).Commit()
	require.NoError(t, err)
	require.True(t, resp.Succeeded)
	fence, err := store.Fence(before)
	require.NoError(t, err)
	late := tenure.Key{Type: "widget", ID: "late"}
	_, err = fence.PutIf(t.Context(), tenure.Object{Key: late}, tenure.IfAbsent())
	require.Error(t, err)
	_, err = another.Get(t.Context(), late)
	require.ErrorIs(t, err, tenure.ErrNotFound)
}

// etcd does not know what was written after the snapshot. A process that has seen it, or sees
// another cluster, begins another epoch.
func TestTokensGoOnAboveThoseOfAClusterThatWasRestored(t *testing.T) {
	for what, test := range map[string]struct {
		token   string // of the restored cluster
		witness bool   // a process keeps running
	}{
		"under another name":      {token: "another"},
		"seen by another process": {token: "etcd-cluster", witness: true}, // the default, so that the cluster has the same ID
		"both":                    {token: "another", witness: true},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s := startDurable(t)
			ctx := t.Context()
			store := open(t, s.client)
			lease := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "a"})
			widget := tenure.Key{Type: "widget", ID: "a"}
			old, err := store.PutIf(ctx, tenure.Object{Key: widget, Payload: []byte("old")}, tenure.IfAbsent())
			require.NoError(t, err)
			snapshot := s.snapshot(t)

			var term *tenure.Term
			for range 3 { // terms that the snapshot lacks
				term, err = lease.TryAcquire(ctx)
				require.NoError(t, err)
				fence, err := store.Fence(term)
				require.NoError(t, err)
				_, err = fence.PutIf(ctx, tenure.Object{Key: widget, Payload: []byte("lost")}, tenure.Unconditional())
				require.NoError(t, err)
				require.NoError(t, lease.Release(ctx, term))
			}
			term, err = lease.TryAcquire(ctx)
			require.NoError(t, err)
			fence, err := store.Fence(term)
			require.NoError(t, err)
			watch := store.Watch(widget).(tenure.ChangeSubscription)
			defer watch.Stop()
			testkit.Await(t, "the watch is live", watch.Live)
			s.restore(t, snapshot, test.token)

			if test.witness {
				testkit.Await(t, "the watch has noticed, by itself", func() bool {
					change, ok := watch.Last()
					return ok && change.Object.Version > term.Token()
				})
				_, err = fence.PutIf(ctx, tenure.Object{Key: widget, Payload: []byte("stale")}, tenure.Unconditional())
				require.ErrorIs(t, err, tenure.ErrLost)
				require.ErrorIs(t, lease.Renew(ctx, term), tenure.ErrLost)
			}
			another := open(t, s.client)
			is, err := another.Get(ctx, widget)
			require.NoError(t, err)
			require.Equal(t, "old", string(is.Payload), "what the snapshot has")
			_, err = another.PutIf(ctx, is, tenure.IfVersion(old.Version))
			require.ErrorIs(t, err, tenure.ErrConflict)
			next, err := testkit.NewLease(t, another, tenure.LeaseConfig{Holder: "b"}).AcquireOrSteal(ctx)
			require.NoError(t, err)
			require.Greater(t, next.Token(), term.Token())
			testkit.Await(t, "the watch tells the present state", func() bool {
				change, ok := watch.Last()
				return ok && change.Object.Version == is.Version
			})
		})
	}
}

func TestTheJobOfAHolderThatIsCutOffHasEndedBeforeTheNextOneBegins(t *testing.T) {
	url := start(t).client
	testkit.RunCutOff(t, open(t, url), open(t, url), 4*time.Second)
}

func TestOfAThousandForcedRacesNoStaleWriteIsAccepted(t *testing.T) {
	url := start(t).client
	testkit.RunForcedRaces(t, 4, 250, func(int) *etcdtenure.Store { return open(t, url) })
}
