//go:build unix

package etcdtenure_test

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/etcdtenure"
	"github.com/tenurelib/tenure/storetest"
)

// replica is a coordinator that runs until the test ends.
type replica struct {
	*tenure.Coordinator
	jobs  *ledger
	store *etcdtenure.Store
	lease *tenure.Lease
	stop  func()
}

// ledger has the jobs that run, which must never be two.
type ledger struct {
	running atomic.Int32
	most    atomic.Int32
	term    atomic.Pointer[tenure.Term] // of the last one
}

func (l *ledger) job(ctx context.Context) error {
	n := l.running.Add(1)
	l.term.Store(tenure.TermFromContext(ctx))
	l.most.Store(max(l.most.Load(), n))
	<-ctx.Done()
	l.running.Add(-1)
	return nil
}

func run(t testing.TB, jobs *ledger, store *etcdtenure.Store, name string, ttl time.Duration) *replica {
	t.Helper()
	lease := newLease(t, store, tenure.LeaseConfig{Holder: name, TTL: ttl})
	c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Reconcile: jobs.job, Logger: quiet})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() { _ = c.Run(ctx) })
	r := &replica{c, jobs, store, lease, func() { cancel(); done.Wait() }}
	t.Cleanup(r.stop)
	return r
}

// fence returns the store with its writes fenced by the term of the job that runs.
func (r *replica) fence(t testing.TB) tenure.Store {
	t.Helper()
	fenced, err := r.store.Fence(r.jobs.term.Load())
	require.NoError(t, err)
	return fenced
}

func holder(replicas ...*replica) *replica {
	for _, r := range replicas {
		if r.IsHolder() {
			return r
		}
	}
	return nil
}

func TestAReleaseWakesTheStandby(t *testing.T) {
	url := start(t).client
	var jobs ledger
	const ttl = 40 * time.Second
	a := run(t, &jobs, open(t, url), "a", ttl)
	await(t, "a holds", a.IsHolder)
	b := run(t, &jobs, open(t, url), "b", ttl)
	await(t, "b knows a", func() bool { return b.Status().Holder == "a" })
	time.Sleep(200 * time.Millisecond) // what b may still be doing is over
	released := time.Now()
	a.stop()
	await(t, "b holds", b.IsHolder)
	require.Less(t, time.Since(released), ttl/2)
	require.EqualValues(t, 1, jobs.most.Load())
}

func TestReplicasSurviveARestartOfTheServer(t *testing.T) {
	for name, test := range map[string]struct {
		end    func(*server)
		rounds int
	}{"killed": {(*server).kill, 3}, "stopped": {(*server).stop, 1}} { // to stop takes etcd some seconds
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startDurable(t)
			var jobs ledger
			const ttl = 3 * time.Second
			a, b := run(t, &jobs, open(t, s.client), "a", ttl), run(t, &jobs, open(t, s.client), "b", ttl)
			await(t, "one holds", func() bool { return holder(a, b) != nil })
			first := holder(a, b).Status().Token
			for range test.rounds {
				obj, err := a.store.Get(t.Context(), a.lease.Key())
				require.NoError(t, err)
				test.end(s)
				s.begin(t)
				var is tenure.Object
				await(t, "the server answers", func() bool {
					ctx, cancel := context.WithTimeout(t.Context(), time.Second)
					defer cancel()
					is, err = a.store.Get(ctx, a.lease.Key())
					return err == nil
				})
				require.GreaterOrEqual(t, is.Version, obj.Version, "what was acknowledged")
				await(t, "one holds", func() bool { return holder(a, b) != nil })
				require.GreaterOrEqual(t, holder(a, b).Status().Token, first)
			}
			before := holder(a, b)
			before.stop()
			await(t, "the other holds", func() bool { return holder(a, b) != nil })
			require.NotSame(t, before, holder(a, b))
			require.Greater(t, holder(a, b).Status().Token, first)
			require.EqualValues(t, 1, jobs.most.Load())
		})
	}
}

// A server that is stopped for longer than the TTL executes what it was sent before. By then
// nobody may rely on the term.
func TestAServerThatPausesEndsTheTrustInTheTerm(t *testing.T) {
	t.Parallel()
	s := start(t)
	var jobs ledger
	const ttl = time.Second
	a, b := run(t, &jobs, open(t, s.client), "a", ttl), run(t, &jobs, open(t, s.client), "b", ttl)
	await(t, "one holds", func() bool { return holder(a, b) != nil })
	for range 2 {
		first := holder(a, b).Status().Token
		s.pause(t)
		await(t, "nobody holds", func() bool { return holder(a, b) == nil && jobs.running.Load() == 0 })
		time.Sleep(ttl / 2)
		s.resume(t)
		await(t, "one holds", func() bool { return holder(a, b) != nil })
		require.GreaterOrEqual(t, holder(a, b).Status().Token, first)
	}
	require.EqualValues(t, 1, jobs.most.Load())
}

// awaitChange waits until a watch tells of that version, as the newest.
func awaitChange(t *testing.T, watch tenure.ChangeSubscription, version int64) {
	t.Helper()
	await(t, "the change has arrived", func() bool { change, ok := watch.Last(); return ok && change.Object.Version == version })
}

func awaitHint(t *testing.T, watch tenure.Subscription, what string) {
	t.Helper()
	select {
	case <-watch.C():
	case <-time.After(30 * time.Second):
		t.Fatal("nothing says that ", what)
	}
}

// broken returns a watch that has just broken, because the server does not answer any more,
// and the object that it watches.
func broken(t *testing.T, s *server, end func()) (tenure.ChangeSubscription, tenure.Object) {
	t.Helper()
	key := tenure.Key{Type: "widget", ID: "a"}
	store := open(t, s.client)
	watch := store.Watch(key).(tenure.ChangeSubscription)
	t.Cleanup(watch.Stop)
	await(t, "the watch is live", watch.Live)
	change, _ := watch.Last()
	require.True(t, change.Deleted)
	obj, err := store.PutIf(t.Context(), tenure.Object{Key: key}, tenure.MustCreate())
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
			obj, err := other.PutIf(t.Context(), tenure.Object{Key: obj.Key}, tenure.MatchVersion(obj.Version))
			require.NoError(t, err)
			awaitChange(t, watch, obj.Version)
		})
	}
}

// quietly tests that something is so for a while. On a busy machine it is not always.
func quietly(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for range 5 {
		if ok() {
			return
		}
	}
	t.Fatal("not once in 5 times: ", what)
}

// staysLive tests that a watch at which nothing happens does not break.
func staysLive(t *testing.T, watch tenure.Subscription) {
	t.Helper()
	quietly(t, "the watch stays live", func() bool {
		await(t, "the watch is live", watch.Live)
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
	await(t, "the watch is live", watch.Live)
	another := store.Watch(tenure.Key{Type: "widget", ID: "b"})
	await(t, "the watch is live", another.Live)
	staysLive(t, watch)
	staysLive(t, another)
}

// While the watch was broken the revisions after the one that it has seen were compacted, so
// that it cannot go on from there.
func TestAWatchSurvivesACompaction(t *testing.T) {
	t.Parallel()
	s := startDurable(t)
	link := newProxy(t, s.client)
	client := connect(t, s.client)
	watched := open(t, link.url)
	key := tenure.Key{Type: "widget", ID: "a"}
	watch := watched.Watch(key).(tenure.ChangeSubscription)
	defer watch.Stop()
	await(t, "the watch is live", watch.Live)
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
	require.NoError(t, other.DeleteIf(t.Context(), key, obj.Version))
	await(t, "the deletion has arrived", func() bool { change, ok := watch.Last(); return ok && change.Deleted })
}

func TestAStandbyNeitherPollsNorReadsWhileTheHolderRenews(t *testing.T) {
	t.Parallel()
	url := start(t).client
	var jobs ledger
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
		c, err := tenure.NewCoordinator(newLease(t, counted, tenure.LeaseConfig{Holder: name, TTL: 12 * time.Second}),
			tenure.CoordinatorConfig{Reconcile: jobs.job, RenewInterval: 200 * time.Millisecond, Logger: quiet})
		require.NoError(t, err)
		done.Go(func() { _ = c.Run(ctx) })
		return c
	}
	a := begin("a", &writes)
	await(t, "a holds", a.IsHolder)
	b := begin("b", &calls)
	await(t, "b knows a", func() bool { return b.Status().Holder == "a" })
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
		await(t, "the watch is live", watch.Live)
	}
	require.Equal(t, 20, s.metric(t, "etcd_debugging_mvcc_watcher_total"))
	require.Equal(t, 1, s.metric(t, "etcd_debugging_mvcc_watch_stream_total"))
	for _, watch := range watches {
		watch.Stop()
	}
	await(t, "the server watches nothing", func() bool {
		return s.metric(t, "etcd_debugging_mvcc_watcher_total") == 0 && s.metric(t, "etcd_debugging_mvcc_watch_stream_total") == 0
	})
}

func TestTokensGoOnAboveThoseOfAPrefixThatWasRemoved(t *testing.T) {
	t.Parallel()
	url := start(t).client
	client, store := connect(t, url), open(t, url)
	a, b := newLease(t, store, tenure.LeaseConfig{Holder: "a"}), newLease(t, store, tenure.LeaseConfig{Holder: "b"})
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
	last, err := newLease(t, other, tenure.LeaseConfig{}).TryAcquire(t.Context())
	require.NoError(t, err)
	require.Greater(t, last.Token(), after.Token())
}

func TestTokensGoOnAboveThoseOfAClusterThatWasRemoved(t *testing.T) {
	t.Parallel()
	s := startDurable(t)
	acquire := func(store *etcdtenure.Store) *tenure.Term {
		term, err := newLease(t, store, tenure.LeaseConfig{}).AcquireOrSteal(t.Context())
		require.NoError(t, err)
		return term
	}
	store := open(t, s.client)
	before := acquire(store)
	s.kill()
	require.NoError(t, os.RemoveAll(s.dir))
	s.begin(t)
	s.awaitHealth(t)
	_, err := store.Get(t.Context(), before.Key())
	require.Error(t, err)
	require.Greater(t, acquire(open(t, s.client)).Token(), before.Token())
}

// After a restore that nobody has noticed yet, the next term may have the revision of one that
// the snapshot does not have.
func TestAFenceTellsTermsOfTheSameRevisionApart(t *testing.T) {
	t.Parallel()
	s := startDurable(t)
	store := open(t, s.client)
	snapshot := s.snapshot(t)
	before, err := newLease(t, store, tenure.LeaseConfig{Holder: "a"}).TryAcquire(t.Context())
	require.NoError(t, err)
	s.restore(t, snapshot, "etcd-cluster")

	another := open(t, s.client)
	next, err := newLease(t, another, tenure.LeaseConfig{Holder: "b"}).TryAcquire(t.Context())
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
	_, err = fence.PutIf(t.Context(), tenure.Object{Key: late}, tenure.MustCreate())
	require.Error(t, err)
	_, err = another.Get(t.Context(), late)
	require.ErrorIs(t, err, tenure.ErrNotFound)
}

// Etcd cannot tell what was written after the snapshot. Who has seen it, or sees another
// cluster, begins another epoch.
func TestTokensGoOnAboveThoseOfAClusterThatWasRestored(t *testing.T) {
	for what, test := range map[string]struct {
		token   string // of the restored cluster
		witness bool   // a process goes on
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
			lease := newLease(t, store, tenure.LeaseConfig{Holder: "a"})
			widget := tenure.Key{Type: "widget", ID: "a"}
			old, err := store.PutIf(ctx, tenure.Object{Key: widget, Payload: []byte("old")}, tenure.MustCreate())
			require.NoError(t, err)
			snapshot := s.snapshot(t)

			var term *tenure.Term
			for range 3 { // which the snapshot does not have
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
			await(t, "the watch is live", watch.Live)
			s.restore(t, snapshot, test.token)

			if test.witness {
				await(t, "the watch has noticed, by itself", func() bool {
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
			_, err = another.PutIf(ctx, is, tenure.MatchVersion(old.Version))
			require.ErrorIs(t, err, tenure.ErrConflict)
			next, err := newLease(t, another, tenure.LeaseConfig{Holder: "b"}).AcquireOrSteal(ctx)
			require.NoError(t, err)
			require.Greater(t, next.Token(), term.Token())
			await(t, "the watch tells the present state", func() bool {
				change, ok := watch.Last()
				return ok && change.Object.Version == is.Version
			})
		})
	}
}

func TestTheJobOfAHolderThatIsCutOffHasEndedBeforeTheNextOneBegins(t *testing.T) {
	url := start(t).client
	const leases, ttl = 100, 4 * time.Second
	first, second := open(t, url), open(t, url)
	var replicas sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	defer replicas.Wait()
	defer cancel()
	var cut atomic.Bool
	var jobs [leases]ledger
	faulty := storetest.Faulty(first, func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
		if cut.Load() {
			<-ctx.Done()
			return ctx.Err()
		}
		return do(ctx)
	})
	begin := func(store tenure.Store, holder string, i int, job func(context.Context) error) *tenure.Coordinator {
		lease := newLease(t, store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: fmt.Sprint(i)}, Holder: holder, TTL: ttl})
		c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Reconcile: job, Logger: quiet})
		require.NoError(t, err)
		replicas.Go(func() { _ = c.Run(ctx) })
		return c
	}
	var holders, standbys []*tenure.Coordinator
	for i := range leases {
		holders = append(holders, begin(faulty, "a", i, jobs[i].job))
	}
	for i := range leases {
		await(t, "the first holds", holders[i].IsHolder)
		standbys = append(standbys, begin(second, "b", i, jobs[i].job))
	}
	for i := range leases {
		await(t, "the second waits", func() bool { return standbys[i].Status().Holder != "" })
	}
	cut.Store(true)
	for i := range leases {
		await(t, "the second holds", standbys[i].IsHolder)
		require.EqualValues(t, 1, jobs[i].most.Load(), "jobs at once of lease %d", i)
	}
}

// A writer that was stopped between its check and its write is the danger of every lease. Each
// race gives it a fenced write that is under way while the next term begins.
func TestOfAThousandForcedRacesNoStaleWriteIsAccepted(t *testing.T) {
	url := start(t).client
	forceRaces(t, 4, 250, func(int) *etcdtenure.Store { return open(t, url) })
}

// forceRaces makes races for some leases at once, on stores that open makes.
func forceRaces(t *testing.T, leases, races int, open func(i int) *etcdtenure.Store) {
	var accepted, refused atomic.Int32
	var all sync.WaitGroup
	for lease := range leases {
		first, second := open(2*lease), open(2*lease+1)
		all.Go(func() {
			var late time.Duration // the takeover's, adapted so that each side wins about as often
			for range races {
				ok, took := race(t, first, second, fmt.Sprint("lease-", lease), late)
				if ok {
					accepted.Add(1)
					late -= took / 4
				} else {
					refused.Add(1)
					late += took / 4
				}
			}
		})
	}
	all.Wait()
	t.Logf("%d fenced writes came before the takeover, %d were refused after it", accepted.Load(), refused.Load())
	require.EqualValues(t, leases*races, accepted.Load()+refused.Load())
	require.Greater(t, min(accepted.Load(), refused.Load()), int32(leases*races/20))
}

// race reports whether the fenced write came first, and how long a write takes.
func race(t *testing.T, first, second *etcdtenure.Store, id string, late time.Duration) (ok bool, took time.Duration) {
	ctx := t.Context()
	lease := newLease(t, first, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: id}})
	term, err := lease.TryAcquire(ctx)
	require.NoError(t, err)
	fenced, err := first.Fence(term)
	require.NoError(t, err)
	key := tenure.Key{Type: "widget", ID: id}
	sent := time.Now()
	before, err := first.PutIf(ctx, tenure.Object{Key: key, Payload: []byte("before")}, tenure.Unconditional())
	require.NoError(t, err)
	took = time.Since(sent)
	record, err := second.Get(ctx, lease.Key())
	require.NoError(t, err)
	record.Payload = []byte(`{"holder":"b","term":"x","ttl_ms":1000}`)

	began := make(chan struct{})
	sent = time.Now()
	wait := func(d time.Duration) {
		for time.Since(sent) < d { // a timer is too slow
			runtime.Gosched()
		}
	}
	go func() {
		defer close(began)
		wait(late)
		record, err = second.PutIf(ctx, record, tenure.MatchVersion(record.Version)) // a takeover, whatever the TTL
	}()
	wait(-late)
	landed, stale := fenced.PutIf(ctx, tenure.Object{Key: key, Payload: []byte("stale")}, tenure.Unconditional())
	<-began
	require.NoError(t, err)
	is, err := second.Get(ctx, key)
	require.NoError(t, err)
	if stale == nil {
		require.Less(t, landed.Version, record.Version, "a fenced write that came after the takeover")
		require.Equal(t, landed.Version, is.Version)
	} else {
		require.ErrorIs(t, stale, tenure.ErrLost)
		require.Equal(t, before.Version, is.Version)
		var lost *tenure.LostError
		require.ErrorAs(t, stale, &lost)
		require.Equal(t, "b", lost.To.Holder)
	}
	require.NoError(t, second.DeleteIf(ctx, record.Key, record.Version))
	return stale == nil, took
}
