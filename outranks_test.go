package tenure_test

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/proof/kit"
	"github.com/tenurelib/tenure/storetest"
)

// ranked is a replica that outranks the replicas it is given.
type ranked struct {
	*tenure.Coordinator
	acquired atomic.Int64
	unfit    atomic.Bool
	stop     func()
}

const settle = 47 * time.Second // no multiple of anything else

func startRanked(t *testing.T, store tenure.Store, name string, over ...string) *ranked {
	r := new(ranked)
	lease := kit.NewLease(t, store, tenure.LeaseConfig{Holder: name})
	r.Coordinator = kit.Must(tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
		Outranks: func(h tenure.Holding) bool {
			for _, o := range over {
				if h.Holder == o {
					return true
				}
			}
			return false
		},
		Settle: settle,
		Check: func(context.Context, tenure.Role) error {
			if r.unfit.Load() {
				return errors.New("unfit")
			}
			return nil
		},
		Trace: &tenure.Trace{Acquired: func(*tenure.Term, *tenure.Holding) { r.acquired.Add(1) }},
	}))
	r.run(t)
	return r
}

func (r *ranked) run(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	ran := make(chan error, 1)
	go func() { ran <- r.Run(ctx) }()
	done := false
	r.stop = func() {
		if cancel(); !done {
			done = true
			if err := <-ran; err != nil {
				t.Error(err)
			}
		}
	}
	t.Cleanup(r.stop)
	synctest.Wait()
}

func TestAReplicaThatOutranksTheHolderAsksForTheLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		low := startRanked(t, store, "low")
		high := startRanked(t, store, "high", "low")
		time.Sleep(settle - time.Second)
		require.True(t, low.IsHolder())
		time.Sleep(time.Second + 50*time.Millisecond)
		require.True(t, high.IsHolder())
		time.Sleep(24 * time.Hour)
		require.EqualValues(t, 1, high.acquired.Load())
		require.EqualValues(t, 1, low.acquired.Load(), "one move")

		require.NoError(t, high.Resign(t.Context()))
		synctest.Wait()
		require.True(t, low.IsHolder())
		time.Sleep(settle + 20*time.Second)
		require.True(t, high.IsHolder(), "it held for long, so it does not wait any longer")
	})
}

func TestAReplicaAsksOnlyWhileItIsFitAndTheTermIsTheSame(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		low := startRanked(t, store, "low")
		high := startRanked(t, store, "high", "low")
		time.Sleep(settle / 2)
		high.unfit.Store(true)
		time.Sleep(time.Hour)
		require.True(t, low.IsHolder(), "high is unfit")
		high.unfit.Store(false)
		time.Sleep(settle - time.Second)
		require.True(t, low.IsHolder(), "the time begins anew")
		high.stop()
		low.stop()

		startRanked(t, store, "low")
		high = startRanked(t, store, "high", "low", "other")
		other := startRanked(t, store, "other")
		time.Sleep(settle / 2)
		require.NoError(t, kit.NewLease(t, store, tenure.LeaseConfig{}).RequestHandover(t.Context(), "other"))
		time.Sleep(settle - time.Second)
		require.True(t, other.IsHolder(), "the time begins anew with each term")
		time.Sleep(10 * time.Second) // it may have seen the term a moment late
		require.True(t, high.IsHolder())
	})
}

// A replica whose job fails, or that another replica outranks in turn, asks less and less
// often.
func TestRequestsDouble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log kit.SyncBuffer
		store := storetest.NewMem()
		startRanked(t, store, "low")
		startRanked(t, store, "mid") // takes the lease at once, while high and low stay away
		lease := kit.NewLease(t, store, tenure.LeaseConfig{Holder: "high", Logger: slog.New(slog.NewTextHandler(&log, nil))})
		high := new(ranked)
		high.Coordinator = kit.Must(tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
			Outranks: func(h tenure.Holding) bool { return h.Holder != "high" }, Settle: settle,
			Watch: func(context.Context) error { time.Sleep(time.Second); return errors.New("it always fails") },
			Trace: &tenure.Trace{Acquired: func(*tenure.Term, *tenure.Holding) { high.acquired.Add(1) }},
		}))
		high.run(t)
		due, pause := time.Now(), time.Duration(0)
		for moves := range 12 {
			time.Sleep(time.Until(due.Add(30 * time.Second)))
			require.EqualValues(t, moves, high.acquired.Load(), "after %v", pause)
			if pause = min(2*pause, time.Hour); pause == 0 {
				pause = settle
			}
			due = time.Now().Add(pause)
		}
		require.Contains(t, log.String(), "do two replicas outrank each other")
	})
}

func TestTwoThatOutrankEachOtherMoveTheLeaseLessAndLess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		a, b := startRanked(t, store, "a", "b"), startRanked(t, store, "b", "a")
		time.Sleep(24 * time.Hour)
		moves := a.acquired.Load() + b.acquired.Load()
		require.Less(t, moves, int64(100), "of 1,440 that Settle alone would permit")
		require.Greater(t, moves, int64(20)) // hour after hour
		a.stop()
		b.stop()
	})
}

// A request that fails is repeated, and not at once.
func TestARequestThatFailsIsRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem := storetest.NewMem()
		startRanked(t, mem, "low")
		var calls kit.Calls
		faulty := storetest.Faulty(mem, nil)
		high := startRanked(t, faulty, "high", "low")
		faulty.SetHook(calls.Count("", func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			if call.Op == "put" {
				return kit.ErrReset
			}
			return do(ctx)
		}))
		time.Sleep(settle + time.Minute)
		puts := calls.Take()["put"]
		require.Greater(t, puts, 5)
		require.Less(t, puts, 30)
		faulty.SetHook(nil)
		time.Sleep(10 * time.Second)
		require.True(t, high.IsHolder())
	})
}

func TestSettleNeedsOutranks(t *testing.T) {
	lease := kit.NewLease(t, storetest.NewMem(), tenure.LeaseConfig{})
	for _, cfg := range []tenure.CoordinatorConfig{{Settle: time.Second}, {Settle: -1, Outranks: func(tenure.Holding) bool { return true }}} {
		_, err := tenure.NewCoordinator(lease, cfg)
		require.ErrorIs(t, err, tenure.ErrInvalid)
		require.ErrorContains(t, err, "Settle")
	}
	c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Outranks: func(tenure.Holding) bool { return true }})
	require.NoError(t, err)
	require.Equal(t, 4*tenure.DefaultTTL, c.Config().Settle)
}
