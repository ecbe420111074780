package storelife

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

// CutOff cuts the process with the first store, which holds a hundred leases, off from its
// server. Its jobs must have ended before those of the second one begin.
func CutOff(t *testing.T, first, second Store, ttl time.Duration) {
	t.Helper()
	const leases = 100
	var replicas sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	defer replicas.Wait()
	defer cancel()
	var cut atomic.Bool
	var jobs [leases]Jobs
	var works [leases]atomic.Bool // the second one's job
	faulty := storetest.Faulty(first, func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
		if cut.Load() {
			<-ctx.Done()
			return ctx.Err()
		}
		return do(ctx)
	})
	begin := func(store tenure.Store, holder string, i int, job func(context.Context) error) *tenure.Coordinator {
		lease := NewLease(t, store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: fmt.Sprint(i)}, Holder: holder, TTL: ttl})
		c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Reconcile: job, Logger: Quiet})
		require.NoError(t, err)
		replicas.Go(func() { _ = c.Run(ctx) })
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
	cut.Store(true)
	for i := range leases {
		Await(t, "the second works", works[i].Load)
		require.EqualValues(t, 1, jobs[i].Most.Load(), "jobs at once of lease %d", i)
	}
}
