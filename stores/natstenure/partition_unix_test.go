//go:build unix

package natstenure_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

var partitions = flag.Int("partitions", 1, "how often the holders of 10 leases are cut off with the leader of the stream")

// The stream's leader is cut off from the other servers, together with holders that reach no other
// server. It still answers them. The standbys' jobs begin only when the holders' jobs have ended,
// and no write of the holders is left.
func TestOnTheSmallSideOfAPartitionJobsEndBeforeTheNextBegin(t *testing.T) {
	t.Parallel()
	c := startCluster(t)
	openReplicated(t, c.urls())
	overlaps := 0
	for round := range *partitions {
		overlaps += partition(t, c, round)
	}
	t.Logf("%d overlaps of %d", overlaps, 10**partitions)
	require.Zero(t, overlaps)
}

func partition(t *testing.T, c *cluster, round int) (overlaps int) {
	const leases, ttl = 10, 2 * time.Second
	c.awaitWhole(t)
	leads := c.leader(t)
	t.Logf("round %d: %s leads", round, leads.url)
	first, second := openReplicated(t, leads.url), openReplicated(t, c.others(leads))
	ctx, cancel := context.WithCancel(t.Context())
	var replicas sync.WaitGroup
	defer replicas.Wait()
	defer cancel()
	var jobs [leases]testkit.Jobs
	begin := func(store tenure.Store, holder string, i int) *tenure.Coordinator {
		key := tenure.Key{Type: "lease", ID: fmt.Sprint(round, "-", i)}
		coordinator, err := tenure.NewCoordinator(testkit.NewLease(t, store, tenure.LeaseConfig{Key: key, Holder: holder, TTL: ttl}),
			tenure.CoordinatorConfig{Reconcile: jobs[i].Run, Logger: testkit.Quiet})
		require.NoError(t, err)
		replicas.Go(func() { _ = coordinator.Run(ctx) })
		return coordinator
	}
	var holders, standbys []*tenure.Coordinator
	var terms []*tenure.Term
	var written []tenure.Object
	for i := range leases {
		holders = append(holders, begin(first, "a", i))
	}
	for i := range leases {
		testkit.Await(t, "the first's job runs", func() bool { return jobs[i].Term.Load() != nil })
		terms = append(terms, jobs[i].Term.Load())
		standbys = append(standbys, begin(second, "b", i))
		obj := tenure.Object{Key: tenure.Key{Type: "widget", ID: terms[i].Key().ID}, Payload: []byte("before")}
		obj, err := second.PutIf(t.Context(), obj, tenure.IfAbsent())
		require.NoError(t, err)
		written = append(written, obj)
	}
	for i := range leases {
		testkit.Await(t, "the second waits", func() bool { return standbys[i].Status().Holder == "a" })
	}

	c.isolate(leads)
	var stale sync.WaitGroup
	for i := range leases {
		fenced, err := first.Fence(terms[i])
		require.NoError(t, err)
		stale.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 12*time.Second)
			defer cancel()
			if _, err := fenced.PutIf(ctx, tenure.Object{Key: written[i].Key, Payload: []byte("stale")}, tenure.IfVersion(written[i].Version)); err == nil {
				t.Error("a write on the small side was acknowledged")
			}
		})
	}
	for i := range leases {
		testkit.Await(t, "the second's job runs", func() bool { return standbys[i].IsHolder() && jobs[i].Term.Load() != terms[i] })
		require.False(t, holders[i].IsHolder())
		require.Greater(t, jobs[i].Term.Load().Token(), terms[i].Token())
	}
	c.heal()
	stale.Wait()
	for i := range leases {
		fenced, err := first.Fence(terms[i])
		require.NoError(t, err)
		testkit.Await(t, "a late write of the old term is refused", func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, err = fenced.PutIf(ctx, written[i], tenure.Unconditional())
			require.Error(t, err)
			return errors.Is(err, tenure.ErrLost)
		})
		is, err := second.Get(t.Context(), written[i].Key)
		require.NoError(t, err)
		require.Equal(t, written[i].Version, is.Version)
		if jobs[i].Most.Load() > 1 {
			overlaps++
		}
	}
	return overlaps
}
