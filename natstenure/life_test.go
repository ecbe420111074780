package natstenure_test

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/natstenure"
	"github.com/tenurelib/tenure/storetest"
)

// replica is a coordinator that runs until the test ends.
type replica struct {
	*tenure.Coordinator
	jobs  *ledger
	store *natstenure.Store
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

func run(t testing.TB, jobs *ledger, store *natstenure.Store, name string, ttl time.Duration) *replica {
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
	t.Parallel()
	url := start(t).ClientURL()
	var jobs ledger
	const ttl = time.Second
	a := run(t, &jobs, open(t, url), "a", ttl)
	await(t, "a holds", a.IsHolder)
	b := run(t, &jobs, open(t, url), "b", ttl)
	await(t, "b knows a", func() bool { return b.Status().Holder == "a" })
	time.Sleep(ttl)
	released := time.Now()
	a.stop()
	await(t, "b holds", b.IsHolder)
	require.Less(t, time.Since(released), ttl/2)
	require.EqualValues(t, 1, jobs.most.Load())
}

func TestReplicasSurviveARestartOfTheServer(t *testing.T) {
	for name, restart := range map[string]func(c *child){
		"killed":  (*child).kill,
		"stopped": func(c *child) { _ = c.stdin.Close(); _ = c.cmd.Wait() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := startChild(t)
			var jobs ledger
			const ttl = 3 * time.Second
			a, b := run(t, &jobs, open(t, c.url), "a", ttl), run(t, &jobs, open(t, c.url), "b", ttl)
			await(t, "one holds", func() bool { return holder(a, b) != nil })
			first := holder(a, b).Status().Token
			for range 3 {
				obj, err := a.store.Get(t.Context(), a.lease.Key())
				require.NoError(t, err)
				restart(c)
				c.again(t)
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

func TestAWatchThatBreaksIsNotLiveAndTellsThePresentStateWhenItIsAgain(t *testing.T) {
	t.Parallel()
	c := startChild(t)
	key := tenure.Key{Type: "widget", ID: "a"}
	store := open(t, c.url)
	watch := store.Watch(key).(tenure.ChangeSubscription)
	defer watch.Stop()
	await(t, "the watch is live", watch.Live)
	change, _ := watch.Last()
	require.True(t, change.Deleted)
	obj, err := store.PutIf(t.Context(), tenure.Object{Key: key}, tenure.MustCreate())
	require.NoError(t, err)
	await(t, "the change has arrived", func() bool { change, ok := watch.Last(); return ok && change.Object.Version == obj.Version })
	for len(watch.C()) > 0 {
		<-watch.C()
	}

	c.kill()
	select {
	case <-watch.C():
	case <-time.After(10 * time.Second):
		t.Fatal("nothing says that the watch broke")
	}
	require.False(t, watch.Live())
	c.again(t)
	other := open(t, c.url)
	obj, err = other.PutIf(t.Context(), tenure.Object{Key: key}, tenure.MatchVersion(obj.Version))
	require.NoError(t, err)
	began := time.Now()
	await(t, "the watch tells the present state", func() bool { change, ok := watch.Last(); return ok && change.Object.Version == obj.Version })
	require.Less(t, time.Since(began), 5*time.Second)
}

func TestAWatchWhoseConsumerIsRemovedMakesAnother(t *testing.T) {
	t.Parallel()
	url := start(t).ClientURL()
	js, store := connect(t, url), open(t, url)
	watch := store.Watch(tenure.Key{Type: "widget", ID: "a"}).(tenure.ChangeSubscription)
	defer watch.Stop()
	await(t, "the watch is live", watch.Live)
	stream, err := js.Stream(t.Context(), "TENURE")
	require.NoError(t, err)
	for name := range stream.ConsumerNames(t.Context()).Name() {
		require.NoError(t, stream.DeleteConsumer(t.Context(), name))
	}
	await(t, "it is not live", func() bool { return !watch.Live() })
	await(t, "it is live again", watch.Live)
	watch.Stop()
	stopped := time.Now()
	await(t, "its consumer is removed", func() bool {
		info, err := stream.Info(t.Context())
		return err == nil && info.State.Consumers == 0
	})
	require.Less(t, time.Since(stopped), 20*time.Second, "after 30 s the server removes it by itself")
}

func TestTokensGoOnAboveThoseOfAStreamThatWasRemoved(t *testing.T) {
	url := start(t).ClientURL()
	js, store := connect(t, url), open(t, url)
	a, b := newLease(t, store, tenure.LeaseConfig{Holder: "a"}), newLease(t, store, tenure.LeaseConfig{Holder: "b"})
	before, err := a.TryAcquire(t.Context())
	require.NoError(t, err)
	require.NoError(t, js.DeleteStream(t.Context(), "TENURE"))
	require.Error(t, a.Renew(t.Context(), before))
	require.NoError(t, store.Migrate(t.Context()))
	require.ErrorIs(t, a.Renew(t.Context(), before), tenure.ErrLost)
	after, err := b.TryAcquire(t.Context())
	require.NoError(t, err)
	require.Greater(t, after.Token(), before.Token())
}

func TestAStreamThatCountsFromOneAgainIsRefusedByThoseThatKnowAGreaterToken(t *testing.T) {
	url := start(t).ClientURL()
	js, store := connect(t, url), open(t, url)
	holder, witness := newLease(t, store, tenure.LeaseConfig{Holder: "a"}), newLease(t, store, tenure.LeaseConfig{Holder: "b"})
	term, err := holder.TryAcquire(t.Context())
	require.NoError(t, err)
	_, err = witness.TryAcquire(t.Context())
	require.ErrorIs(t, err, tenure.ErrHeld)

	require.NoError(t, js.DeleteStream(t.Context(), "TENURE"))
	_, err = js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "TENURE", Subjects: []string{"TENURE.>"}, AllowAtomicPublish: true, MaxMsgsPerSubject: 1})
	require.NoError(t, err)
	require.ErrorIs(t, holder.Renew(t.Context(), term), tenure.ErrLost)
	for _, lease := range []*tenure.Lease{witness, holder} {
		_, err = lease.AcquireOrSteal(t.Context())
		require.ErrorIs(t, err, tenure.ErrSetup)
		require.ErrorContains(t, err, "fencing token")
	}
	stream, err := js.Stream(t.Context(), "TENURE")
	require.NoError(t, err)
	require.NoError(t, stream.Purge(t.Context(), jetstream.WithPurgeSequence(uint64(term.Token())+1))) // as the error says
	next, err := witness.AcquireOrSteal(t.Context())
	require.NoError(t, err)
	require.Greater(t, next.Token(), term.Token())
}

func TestTheJobOfAHolderThatIsCutOffHasEndedBeforeTheNextOneBegins(t *testing.T) {
	t.Parallel()
	url := start(t).ClientURL()
	const leases, ttl = 100, 3 * time.Second
	first, second := open(t, url), open(t, url)
	var replicas sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	defer replicas.Wait()
	defer cancel()
	var cut atomic.Bool
	var jobs [leases]ledger
	var next atomic.Int32
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
		standbys = append(standbys, begin(second, "b", i, func(ctx context.Context) error { next.Add(1); return jobs[i].job(ctx) }))
	}
	for i := range leases {
		await(t, "the second waits", func() bool { return standbys[i].Status().Holder == "a" })
	}
	cut.Store(true)
	await(t, "the second holds everywhere", func() bool { return next.Load() == leases })
	for i := range leases {
		require.EqualValues(t, 1, jobs[i].most.Load(), "jobs at once of lease %d", i)
	}
}

// A writer that was stopped between its check and its write is the danger of every lease. Each
// race gives it a fenced write that is under way while the next term begins.
func TestOfAThousandForcedRacesNoStaleWriteIsAccepted(t *testing.T) {
	url := start(t).ClientURL()
	forceRaces(t, 4, 250, func(int) *natstenure.Store { return open(t, url) })
}

// forceRaces makes races for some leases at once, on stores that open makes.
func forceRaces(t *testing.T, leases, races int, open func(i int) *natstenure.Store) {
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
func race(t *testing.T, first, second *natstenure.Store, id string, late time.Duration) (ok bool, took time.Duration) {
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
