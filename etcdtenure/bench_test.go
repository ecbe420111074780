//go:build unix

package etcdtenure_test

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/etcdtenure"
	"github.com/tenurelib/tenure/storetest"
)

func median(all []time.Duration) time.Duration {
	slices.Sort(all)
	return all[len(all)/2]
}

// settled is how long a standby rests after it has begun to watch, before it is measured. A
// watch of etcd's election begins at a revision that is not new any more, so for up to 100 ms
// the server tells it of changes late.
const settled = 150 * time.Millisecond

// onDisk returns the address of a server that syncs to a disk.
func onDisk(b *testing.B) string {
	b.Helper()
	s := newServer(b, "test", b.TempDir())
	s.begin(b)
	s.awaitHealth(b)
	return s.client
}

// BenchmarkHandover is from the call that gives a lease up until the next job runs, in turn
// for this library, for an election by hand on the same client (create, watch, delete when the
// job has returned) and for etcd's own (campaign, resign). In that one the next holder has
// written before, so it costs one write less.
//
//	go test -run '^$' -bench Handover -benchtime 200x
func BenchmarkHandover(b *testing.B) {
	url := onDisk(b)
	var ours, hands, etcds []time.Duration
	elect, first, second := newElection(b, url), open(b, url), open(b, url)
	one, two := connect(b, url), connect(b, url)
	for b.Loop() {
		ours = append(ours, handover(b, first, second))
		hands = append(hands, handoverByHand(b, one, two))
		etcds = append(etcds, elect.handover(b))
	}
	report(b, ours, etcds)
	b.ReportMetric(float64(median(hands).Microseconds()), "by-hand-p50-µs")
	b.ReportMetric(float64(median(ours))/float64(median(hands)), "ratio-by-hand")
}

func report(b *testing.B, ours, etcds []time.Duration) {
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(float64(median(ours).Microseconds()), "tenure-p50-µs")
	if etcds != nil {
		b.ReportMetric(float64(median(etcds).Microseconds()), "etcd-p50-µs")
		b.ReportMetric(float64(median(ours))/float64(median(etcds)), "ratio")
	}
}

func handover(b *testing.B, a, second *etcdtenure.Store) time.Duration {
	b.Helper()
	var jobs ledger
	first := run(b, &jobs, a, "a", 30*time.Second)
	await(b, "the first holds", first.IsHolder)
	lease := newLease(b, second, tenure.LeaseConfig{Holder: "b"})
	began := make(chan time.Time, 1)
	c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Logger: quiet, Reconcile: func(ctx context.Context) error {
		began <- time.Now()
		<-ctx.Done()
		return nil
	}})
	require.NoError(b, err)
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() { _ = c.Run(ctx) })
	watch := second.Watch(lease.Key())
	await(b, "the second waits", func() bool { return watch.Live() && c.Status().Holder == "a" })
	watch.Stop()
	time.Sleep(settled)
	sent := time.Now()
	go func() { _ = first.Resign(context.Background()) }()
	took := (<-began).Sub(sent)
	first.stop()
	cancel()
	done.Wait()
	return took
}

func handoverByHand(b *testing.B, first, second *clientv3.Client) time.Duration {
	b.Helper()
	const key = "leader"
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	create := func(client *clientv3.Client, value string) int64 {
		resp, err := client.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).Then(clientv3.OpPut(key, value)).Commit()
		require.NoError(b, err)
		require.True(b, resp.Succeeded)
		return resp.Header.Revision
	}
	revision := create(first, "a")
	events := second.Watch(ctx, key, clientv3.WithRev(revision+1), clientv3.WithCreatedNotify())
	<-events
	began := make(chan time.Time, 1)
	go func() {
		<-events
		create(second, "b")
		go func() { began <- time.Now() }()
	}()
	job, stop := context.WithCancel(ctx)
	stopped := make(chan struct{})
	go func() { <-job.Done(); close(stopped) }()
	time.Sleep(settled)
	sent := time.Now()
	stop()
	<-stopped
	_, err := first.Delete(ctx, key)
	require.NoError(b, err)
	took := (<-began).Sub(sent)
	_, err = second.Delete(ctx, key)
	require.NoError(b, err)
	return took
}

// election is etcd's own, with a session for each of its two.
type election struct{ first, second *concurrency.Election }

func newElection(b *testing.B, url string) election {
	b.Helper()
	candidate := func() *concurrency.Election {
		session, err := concurrency.NewSession(connect(b, url), concurrency.WithTTL(30))
		require.NoError(b, err)
		return concurrency.NewElection(session, "election/")
	}
	return election{candidate(), candidate()}
}

func (e election) handover(b *testing.B) time.Duration {
	b.Helper()
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	require.NoError(b, e.first.Campaign(ctx, "a"))
	began := make(chan time.Time, 1)
	go func() {
		if err := e.second.Campaign(ctx, "b"); err == nil {
			go func() { began <- time.Now() }()
		}
	}()
	job, stop := context.WithCancel(ctx)
	stopped := make(chan struct{})
	go func() { <-job.Done(); close(stopped) }()
	time.Sleep(settled) // the second has begun to wait
	sent := time.Now()
	stop()
	<-stopped
	require.NoError(b, e.first.Resign(ctx))
	took := (<-began).Sub(sent)
	require.NoError(b, e.second.Resign(ctx))
	return took
}

// BenchmarkFailover is from the last renewal of a holder that is cut off until the next job
// runs, minus the TTL; in turn for this library and for etcd's own election, whose holder is
// cut off from its own server's proxy and whose TTLs are whole seconds.
//
//	go test -run '^$' -bench Failover -benchtime 20x
func BenchmarkFailover(b *testing.B) {
	url := onDisk(b)
	var ours, etcds []time.Duration
	for b.Loop() {
		ours = append(ours, failover(b, url))
		etcds = append(etcds, electionFailover(b, url))
	}
	report(b, ours, etcds)
}

// electionFailover is from the last answer to a keepalive until the next candidate is elected,
// minus the TTL.
func electionFailover(b *testing.B, url string) time.Duration {
	b.Helper()
	const ttl = 2 // its clients renew every third of it
	link := newProxy(b, url)
	far, near := connect(b, link.url), connect(b, url)
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	granted, err := far.Grant(ctx, ttl)
	require.NoError(b, err)
	renewed := time.Now()
	answers, err := far.KeepAlive(ctx, granted.ID)
	require.NoError(b, err)
	first, err := concurrency.NewSession(far, concurrency.WithLease(granted.ID))
	require.NoError(b, err)
	require.NoError(b, concurrency.NewElection(first, "failover/").Campaign(ctx, "a"))
	second, err := concurrency.NewSession(near, concurrency.WithTTL(30))
	require.NoError(b, err)
	elected := make(chan time.Time, 1)
	next := concurrency.NewElection(second, "failover/")
	go func() {
		if err := next.Campaign(ctx, "b"); err == nil {
			elected <- time.Now()
		}
	}()
	for range 2 {
		<-answers
		renewed = time.Now()
	}
	link.cut()
	took := (<-elected).Sub(renewed) - ttl*time.Second
	require.NoError(b, next.Resign(ctx))
	require.NoError(b, second.Close())
	first.Orphan()
	return took
}

func failover(b *testing.B, url string) time.Duration {
	b.Helper()
	const ttl = 900 * time.Millisecond
	var cut atomic.Bool
	var renewed atomic.Pointer[time.Time]
	faulty := storetest.Faulty(open(b, url), func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
		if cut.Load() {
			<-ctx.Done()
			return ctx.Err()
		}
		err := do(ctx)
		if now := time.Now(); err == nil && call.Op == "put" {
			renewed.Store(&now)
		}
		return err
	})
	holder, err := tenure.NewCoordinator(newLease(b, faulty, tenure.LeaseConfig{Holder: "a", TTL: ttl}), tenure.CoordinatorConfig{Logger: quiet})
	require.NoError(b, err)
	began := make(chan time.Time, 1)
	standby, err := tenure.NewCoordinator(newLease(b, open(b, url), tenure.LeaseConfig{Holder: "b", TTL: ttl}),
		tenure.CoordinatorConfig{Logger: quiet, Reconcile: func(ctx context.Context) error {
			began <- time.Now()
			<-ctx.Done()
			return nil
		}})
	require.NoError(b, err)
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() { _ = holder.Run(ctx) })
	await(b, "the first holds", holder.IsHolder)
	done.Go(func() { _ = standby.Run(ctx) })
	await(b, "the second waits", func() bool { return standby.Status().Holder == "a" })
	time.Sleep(ttl / 2) // it has renewed
	cut.Store(true)
	took := (<-began).Sub(*renewed.Load()) - ttl
	cancel()
	done.Wait()
	return took
}
