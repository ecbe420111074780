// Package storelife is for the tests of stores in modules of their own: replicas that work
// under leases in such a store, and what must be so on every one of them.
package storelife

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
)

// Quiet drops what is logged.
var Quiet = slog.New(slog.DiscardHandler)

// Store is a store that can fence its own writes.
type Store interface {
	tenure.Store
	tenure.Fencer
}

// Jobs has the jobs of a lease that run, which must never be two. Its fields are safe for
// concurrent use.
type Jobs struct {
	Running atomic.Int32
	Most    atomic.Int32                // that ever ran at once
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
	Store Store
	Lease *tenure.Lease
	Stop  func()
}

// Start starts a replica.
func Start(t testing.TB, jobs *Jobs, store Store, name string, ttl time.Duration) *Replica {
	t.Helper()
	lease := NewLease(t, store, tenure.LeaseConfig{Holder: name, TTL: ttl})
	c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Reconcile: jobs.Run, Logger: Quiet})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() { _ = c.Run(ctx) })
	r := &Replica{c, jobs, store, lease, func() { cancel(); done.Wait() }}
	t.Cleanup(r.Stop)
	return r
}

// Fence returns the store with its writes fenced by the term of the job that runs.
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

// NewLease returns a lease that logs nothing.
func NewLease(t testing.TB, store tenure.Store, cfg tenure.LeaseConfig) *tenure.Lease {
	t.Helper()
	cfg.Logger = Quiet
	lease, err := tenure.NewLease(store, cfg)
	require.NoError(t, err)
	return lease
}

// Await waits until something is so, for a minute at most.
func Await(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(2 * time.Millisecond) {
		require.True(t, time.Now().Before(end), "waited until %s", what)
	}
}
