package natstenure_test

import (
	"context"
	"slices"
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

func median(all []time.Duration) time.Duration {
	slices.Sort(all)
	return all[len(all)/2]
}

// settled is how long a standby rests after it has begun to watch, before it is measured.
const settled = 20 * time.Millisecond

// BenchmarkHandover is from the call that gives a lease up until the next job runs, in turn
// for this library and for an election by hand on the same client, in a key-value bucket: create,
// watch, delete when the job has returned.
//
//	go test -run '^$' -bench Handover -benchtime 200x
func BenchmarkHandover(b *testing.B) {
	url := start(b).ClientURL()
	var ours, byHand []time.Duration
	elect, first, second := newElection(b, url), open(b, url), open(b, url)
	for b.Loop() {
		ours = append(ours, handover(b, first, second))
		byHand = append(byHand, elect.handover(b))
	}
	report(b, ours, byHand)
}

func report(b *testing.B, ours, byHand []time.Duration) {
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(float64(median(ours).Microseconds()), "tenure-p50-µs")
	if byHand != nil {
		b.ReportMetric(float64(median(byHand).Microseconds()), "by-hand-p50-µs")
		b.ReportMetric(float64(median(ours))/float64(median(byHand)), "ratio")
	}
}

func handover(b *testing.B, a, second *natstenure.Store) time.Duration {
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

// election is one by hand.
type election struct{ first, second jetstream.KeyValue }

func newElection(b *testing.B, url string) election {
	b.Helper()
	bucket := func() jetstream.KeyValue {
		kv, err := connect(b, url).CreateOrUpdateKeyValue(b.Context(), jetstream.KeyValueConfig{Bucket: "election", Storage: jetstream.FileStorage})
		require.NoError(b, err)
		return kv
	}
	return election{bucket(), bucket()}
}

func (e election) handover(b *testing.B) time.Duration {
	b.Helper()
	const key = "leader"
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	revision, err := e.first.Create(ctx, key, []byte("a"))
	require.NoError(b, err)
	watcher, err := e.second.Watch(ctx, key)
	require.NoError(b, err)
	defer watcher.Stop()
	began := make(chan time.Time, 1)
	waits := make(chan struct{})
	go func() {
		initial := true
		for entry := range watcher.Updates() {
			switch {
			case entry == nil:
				initial = false
				close(waits)
			case !initial && entry.Operation() == jetstream.KeyValueDelete:
				if _, err := e.second.Update(ctx, key, []byte("b"), entry.Revision()); err == nil {
					go func() { began <- time.Now() }()
					return
				}
			}
		}
	}()
	job, stop := context.WithCancel(ctx)
	stopped := make(chan struct{})
	go func() { <-job.Done(); close(stopped) }()
	<-waits
	time.Sleep(settled)
	sent := time.Now()
	stop()
	<-stopped
	require.NoError(b, e.first.Delete(ctx, key, jetstream.LastRevision(revision)))
	took := (<-began).Sub(sent)
	require.NoError(b, e.second.Delete(ctx, key))
	return took
}

// BenchmarkFailover is from the last renewal of a holder that is cut off until the next job
// runs, minus the TTL.
//
//	go test -run '^$' -bench Failover -benchtime 20x
func BenchmarkFailover(b *testing.B) {
	url := start(b).ClientURL()
	var all []time.Duration
	for b.Loop() {
		all = append(all, failover(b, url))
	}
	report(b, all, nil)
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
