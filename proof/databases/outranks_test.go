package databases_test

import (
	"context"
	"flag"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

var outranksRounds = flag.Int("outranks.rounds", 1, "how often a preferred replica returns, and how often it dies as soon as it has asked")

// dying is a store whose process ends when a request for the lease has landed.
type dying struct {
	tenure.Database
	died func()
}

func (s dying) PutIf(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
	stored, err := s.Database.PutIf(ctx, obj, cond)
	if _, asked := obj.Labels["tenure.release"]; asked && err == nil {
		_ = s.Wake(ctx, obj.Key)
		s.died()
		<-ctx.Done()
		return tenure.Object{}, ctx.Err()
	}
	return stored, err
}

// The times are in the log: how much later than Settle a preferred replica holds the lease, and for how long nobody
// does if it has died in between.
func TestAPreferredReplicaReturns(t *testing.T) {
	testkit.Slow(t)
	const settle = 500 * time.Millisecond
	testkit.EachStore(t, func(t *testing.T, open func() tenure.Store) {
		led, told := make(chan string, 100), make(chan time.Time, 1000)
		start := func(store tenure.Store, name string, outranks bool) (stop func()) {
			cfg := tenure.CoordinatorConfig{AcquireInterval: 200 * time.Millisecond, Reconcile: func(ctx context.Context) error {
				led <- name
				<-ctx.Done()
				told <- time.Now()
				return nil
			}}
			if outranks {
				cfg.Outranks, cfg.Settle = func(h tenure.Holding) bool { return h.Holder != name }, settle
			}
			return testkit.RunCoordinator(t, t.Context(), testkit.Must(tenure.NewCoordinator(testkit.NewLease(t, store, tenure.LeaseConfig{Holder: name}), cfg)))
		}
		store := open()
		start(open(), "lesser", false)
		require.Equal(t, "lesser", <-led)
		var late, alone []time.Duration
		for range *outranksRounds {
			began := time.Now()
			stop := start(store, "preferred", true)
			require.Equal(t, "preferred", <-led)
			late = append(late, time.Since(began)-settle)
			time.Sleep(100 * time.Millisecond)
			stop()
			require.Equal(t, "lesser", <-led)
			require.Empty(t, led, "it moves once, and back")
		}
		for len(told) > 0 {
			<-told
		}
		for range *outranksRounds {
			died := make(chan struct{})
			stop := start(dying{store.(tenure.Database), func() { close(died) }}, "dying", true)
			<-died
			stop()
			require.Equal(t, "lesser", <-led)
			alone = append(alone, time.Since(<-told))
		}
		t.Logf("a preferred replica holds the lease %v after Settle, at most %v; if it dies, nobody holds it for %v, at most %v",
			testkit.Percentile(late, 50), testkit.Percentile(late, 100-1), testkit.Percentile(alone, 50), testkit.Percentile(alone, 100-1))
	})
}
