package testkit

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

// RunCoordinator runs a coordinator until the test ends, or until stop, which waits for it.
func RunCoordinator(t testing.TB, ctx context.Context, c *tenure.Coordinator) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	returned := make(chan struct{})
	go func() {
		defer close(returned)
		if err := c.Run(ctx); err != nil {
			t.Errorf("Run of %s: %v", c.Status().Replica, err)
		}
	}()
	stop = func() { cancel(); <-returned }
	t.Cleanup(stop)
	return stop
}

// StartCoordinator runs a replica until the test ends, or until stop, which waits for it. Its job
// is recorded in the log, unless cfg has a job.
func StartCoordinator(t testing.TB, l *JobLog, store tenure.Store, name string, cfg tenure.CoordinatorConfig) (c *tenure.Coordinator, stop func()) {
	t.Helper()
	if cfg.Watch == nil && cfg.Reconcile == nil {
		cfg.Reconcile = func(ctx context.Context) error { l.Run(ctx, name); return nil }
	}
	c, err := tenure.NewCoordinator(NewLease(t, store, tenure.LeaseConfig{Holder: name}), cfg)
	require.NoError(t, err)
	return c, RunCoordinator(t, context.Background(), c)
}

// FencingStore is a store that can fence its own writes.
type FencingStore interface {
	tenure.Store
	tenure.Fencer
}

// Jobs counts the running jobs of a lease, of which there must never be two. Its fields are safe
// for concurrent use.
type Jobs struct {
	Running atomic.Int32
	Most    atomic.Int32                // the most that ever ran at once
	Term    atomic.Pointer[tenure.Term] // of the last one
}

// Run is a job that works until its context ends.
func (j *Jobs) Run(ctx context.Context) error {
	n := j.Running.Add(1)
	j.Term.Store(tenure.TermFromContext(ctx))
	j.Most.Store(max(j.Most.Load(), n))
	<-ctx.Done()
	j.Running.Add(-1)
	return nil
}

// Replica is a coordinator that runs until the test ends, or until Stop.
type Replica struct {
	*tenure.Coordinator
	Jobs  *Jobs
	Store FencingStore
	Lease *tenure.Lease
	Stop  func()
}

// StartReplica starts a replica.
func StartReplica(t testing.TB, jobs *Jobs, store FencingStore, name string, ttl time.Duration) *Replica {
	t.Helper()
	lease := NewLease(t, store, tenure.LeaseConfig{Holder: name, TTL: ttl})
	c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Reconcile: jobs.Run, Logger: Quiet})
	require.NoError(t, err)
	return &Replica{c, jobs, store, lease, RunCoordinator(t, context.Background(), c)}
}

// Fence returns the store with its writes fenced by the term of the running job.
func (r *Replica) Fence(t testing.TB) tenure.Store {
	t.Helper()
	fenced, err := r.Store.Fence(r.Jobs.Term.Load())
	require.NoError(t, err)
	return fenced
}

// Holder returns the replica that holds the lease, or nil.
func Holder(replicas ...*Replica) *Replica {
	for _, r := range replicas {
		if r.IsHolder() {
			return r
		}
	}
	return nil
}

// RunRestarts restarts the server of two replicas. No acknowledged write may be lost, no token may
// go back, and no two jobs may run at once.
func RunRestarts(t *testing.T, jobs *Jobs, a, b *Replica, rounds int, restart func()) {
	t.Helper()
	holds := func() bool { return Holder(a, b) != nil }
	Await(t, "one holds", holds)
	first := Holder(a, b).Status().Token
	for range rounds {
		obj, err := a.Store.Get(t.Context(), a.Lease.Key())
		require.NoError(t, err)
		restart()
		var is tenure.Object
		Await(t, "the server answers", func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			is, err = a.Store.Get(ctx, a.Lease.Key())
			return err == nil
		})
		require.GreaterOrEqual(t, is.Version, obj.Version, "what was acknowledged")
		Await(t, "one holds", holds)
		require.GreaterOrEqual(t, Holder(a, b).Status().Token, first)
	}
	before := Holder(a, b)
	before.Stop()
	Await(t, "the other holds", holds)
	require.NotSame(t, before, Holder(a, b))
	require.Greater(t, Holder(a, b).Status().Token, first)
	require.EqualValues(t, 1, jobs.Most.Load())
}

// RunCutOff cuts off a process that holds a hundred leases, with the first store, from the server.
// Its jobs must have ended before those of the process with the second store begin.
func RunCutOff(t *testing.T, first, second FencingStore, ttl time.Duration) {
	t.Helper()
	const leases = 100
	var jobs [leases]Jobs
	var works [leases]atomic.Bool // the second one's job
	faulty := storetest.Faulty(first, nil)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel() // all at once; each is awaited when the test ends
	begin := func(store tenure.Store, holder string, i int, job func(context.Context) error) *tenure.Coordinator {
		lease := NewLease(t, store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: fmt.Sprint(i)}, Holder: holder, TTL: ttl})
		c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Reconcile: job, Logger: Quiet})
		require.NoError(t, err)
		RunCoordinator(t, ctx, c)
		return c
	}
	var holders, standbys []*tenure.Coordinator
	for i := range leases {
		holders = append(holders, begin(faulty, "a", i, jobs[i].Run))
	}
	for i := range leases {
		Await(t, "the first holds", holders[i].IsHolder)
		standbys = append(standbys, begin(second, "b", i, func(ctx context.Context) error { works[i].Store(true); return jobs[i].Run(ctx) }))
	}
	for i := range leases {
		Await(t, "the second waits", func() bool { return standbys[i].Status().Holder != "" })
	}
	faulty.SetHook(Hang)
	for i := range leases {
		Await(t, "the second works", works[i].Load)
		require.EqualValues(t, 1, jobs[i].Most.Load(), "jobs at once of lease %d", i)
	}
}
