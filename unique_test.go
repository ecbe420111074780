package tenure_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

// A program makes a second lease by mistake. It must not take the first one's record for what a crash has left.
func TestASecondLeaseWithTheUniqueHolderOfThisProcessStandsBy(t *testing.T) {
	unique := tenure.LeaseConfig{Holder: "pod-0", AssumeUniqueHolder: true}
	t.Run("its job does not run beside the first one's", func(t *testing.T) {
		inBubbles(t, func(t *scene) {
			var running, most atomic.Int32
			cfg := tenure.CoordinatorConfig{Reconcile: func(ctx context.Context) error {
				most.Store(max(most.Load(), running.Add(1)))
				defer running.Add(-1)
				return testkit.UntilDone(ctx)
			}}
			a, b := t.startWith(unique, cfg), t.startWith(unique, cfg)
			time.Sleep(5 * time.Minute)
			t.wantHolder(a)
			a.stop()
			time.Sleep(time.Minute)
			t.wantHolder(b)
			require.EqualValues(t, 1, most.Load(), "jobs that ran at once")
		})
	})
	t.Run("if the first one does not release the lease, it waits for the TTL", func(t *testing.T) {
		inBubbles(t, func(t *scene) {
			testkit.MustAcquire(t, testkit.NewLease(t, t.store, unique))
			second := testkit.NewLease(t, t.store, unique)
			t.wantHeld(second)
			time.Sleep(tenure.DefaultTTL + time.Millisecond)
			testkit.MustAcquire(t, second)
		})
	})
	t.Run("through another store", func(t *testing.T) {
		testkit.EachStore(t, func(t *testing.T, open func() tenure.Store) {
			a, b := testkit.NewLease(t, open(), unique), testkit.NewLease(t, open(), unique)
			term := testkit.MustAcquire(t, a)
			_, err := b.AcquireOrSteal(t.Context())
			require.ErrorIs(t, err, tenure.ErrHeld)
			require.NoError(t, a.Release(t.Context(), term))
			testkit.MustAcquire(t, b)
		})
	})
}
