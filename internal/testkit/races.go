package testkit

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
)

// RunForcedRaces makes fenced writes while the next term begins, for several leases at once, with
// two stores for each lease. No write may be accepted after that term has begun.
//
// The danger for every lease is a writer that is paused between its check and its write.
func RunForcedRaces[S FencingStore](t *testing.T, leases, races int, open func(i int) S) {
	t.Helper()
	var accepted, refused atomic.Int32
	var all sync.WaitGroup
	for lease := range leases {
		first, second := open(2*lease), open(2*lease+1)
		all.Go(func() {
			var late time.Duration // the takeover's delay, adapted so that each side wins about as often
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
func race(t *testing.T, first, second FencingStore, id string, late time.Duration) (ok bool, took time.Duration) {
	ctx := t.Context()
	lease := NewLease(t, first, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: id}})
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
		record, err = second.PutIf(ctx, record, tenure.IfVersion(record.Version)) // a takeover, whatever the TTL
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
		require.ErrorContains(t, stale, "is held by b")
	}
	require.NoError(t, second.DeleteIf(ctx, record.Key, tenure.IfVersion(record.Version)))
	return stale == nil, took
}
