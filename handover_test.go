package tenure_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/record"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

// settleRequest returns when a request has been obeyed.
func (t *scene) settleRequest() {
	if t.polls {
		time.Sleep(10 * time.Second) // until the next renewal
	}
	t.settle()
}

func TestAHolderThatIsAskedHandsTheLeaseOver(t *testing.T) {
	inBubbles(t, func(t *scene) {
		a, b, c := t.three()
		require.NoError(t, b.lease.RequestRelease(t.Context()))
		t.settleRequest()
		require.False(t, a.IsHolder())
		require.True(t, b.IsHolder() || c.IsHolder(), t.jobs)
		require.Contains(t, t.jobs.String(), "a ends: lease resigned: on request")
	})
}

func TestTheNamedReplicaIsNext(t *testing.T) {
	inBubbles(t, func(t *scene) {
		from, to, other := t.three()
		for range 20 {
			before := from.Status().Token
			t.request(other, to)
			t.settleRequest()
			time.Sleep(10 * time.Millisecond) // in which a replica that has just resigned ignores hints
			synctest.Wait()
			t.wantHolder(to)
			require.Greater(t, to.Status().Token, before)
			holding, err := other.lease.Read(t.Context())
			require.NoError(t, err)
			require.NotEmpty(t, holding.Holder)
			require.Empty(t, holding.Labels, "what is left of the request")
			time.Sleep(time.Minute + time.Second)
			from, to = to, from
		}
	})
}

func TestTheNamedReplicaIsNextHoweverTheTermEnds(t *testing.T) {
	for range 10 { // or it might be next by chance
		inBubble(t, func(t *scene) { // by a shutdown, before the holder has seen the request
			a, b, _ := t.three()
			silent := testkit.NewLease(t, testkit.Bare(t.store), tenure.LeaseConfig{})
			require.NoError(t, silent.RequestHandover(t.Context(), "b"))
			a.stop()
			time.Sleep(time.Second)
			t.wantHolder(b)
		})
		inBubble(t, func(t *scene) { // before its takeover is confirmed
			t.takeover(t.fencing(testkit.UntilDone))
			c, d := t.start("c"), t.start("d")
			time.Sleep(time.Second)
			t.request(c, d)
			time.Sleep(12 * time.Second)
			t.wantHolder(d)
		})
	}
}

func TestAnOfferThatIsNotTakenGoesToAnyReplica(t *testing.T) {
	anOfferLasts(t, time.Second, tenure.CoordinatorConfig{}, func(store tenure.Store) tenure.Store { return store })
}

// Standbys that poll, or have a Check, need that long.
func TestAnOfferLastsUntilTheNamedReplicaHasFoundIt(t *testing.T) {
	t.Run("polling", func(t *testing.T) { anOfferLasts(t, 6250*time.Millisecond, tenure.CoordinatorConfig{}, testkit.Bare) })
	t.Run("after its check", func(t *testing.T) {
		anOfferLasts(t, 4*time.Second, tenure.CoordinatorConfig{Check: func(context.Context, tenure.Role) error { return nil }, CheckTimeout: 3 * time.Second},
			func(store tenure.Store) tenure.Store { return store })
	})
}

// anOfferLasts lets a holder with that config offer its lease to a replica that does not exist,
// and another replica take it.
func anOfferLasts(t *testing.T, want time.Duration, cfg tenure.CoordinatorConfig, see func(tenure.Store) tenure.Store) {
	inBubble(t, func(t *scene) {
		t.store = see(t.store)
		a := t.start("a", cfg)
		cfg := t.fencing(testkit.Succeeds) // there is nothing to confirm
		cfg.Confirmations = 3
		b := t.start("b", cfg)
		time.Sleep(time.Minute + time.Second)
		require.NoError(t, b.lease.RequestHandover(t.Context(), "nobody"))
		for deadline := time.Now().Add(time.Minute); a.Status().Role == tenure.RoleHolder && time.Now().Before(deadline); {
			time.Sleep(time.Millisecond) // until a is woken, or renews
		}
		time.Sleep(want - 10*time.Millisecond)
		t.wantHolder(nil)
		holding, err := b.lease.Read(t.Context())
		require.NoError(t, err)
		require.Empty(t, holding.Holder)
		require.Equal(t, "nobody", holding.OfferedTo)
		time.Sleep(30 * time.Millisecond)
		t.wantHolder(b)
		require.Equal(t, []string{"b works"}, t.said())
		require.Contains(t, t.jobs.String(), "a ends")
		require.Equal(t, 1, a.Status().Terms)
	})
}

func TestAReplicaThatRestartsDoesNotTakeBackWhatItHasOffered(t *testing.T) {
	inBubble(t, func(t *scene) {
		unique := tenure.LeaseConfig{Holder: "pod-0", AssumeUniqueHolder: true}
		a := t.startWith(unique, tenure.CoordinatorConfig{})
		time.Sleep(time.Minute)
		record.Restart()
		restarted := testkit.NewLease(t, t.store, unique)
		require.NoError(t, restarted.RequestHandover(t.Context(), "pod-1"))
		synctest.Wait()
		a.stop()
		_, err := restarted.AcquireOrSteal(t.Context())
		require.ErrorIs(t, err, tenure.ErrHeld)
		testkit.MustAcquire(t, testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "pod-1"}))
	})
}

func TestNobodyWaitsForAnOfferForLongerThanTheTTL(t *testing.T) {
	inBubble(t, func(t *scene) {
		cfg := tenure.CoordinatorConfig{AcquireInterval: 10 * time.Minute}
		t.store = testkit.Bare(t.store)
		t.start("a", cfg)
		b := t.start("b", cfg)
		time.Sleep(time.Minute)
		require.NoError(t, b.lease.RequestHandover(t.Context(), "a misspelt one"))
		time.Sleep(10*time.Second + 2*31*time.Second) // until the holder has found it, b the offer, and its end
		t.wantHolder(b)
	})
}

// This holds although it has just ended a term, is not woken, or cannot look when it is woken.
func TestAReplicaThatStaysAwayTakesWhatItIsOffered(t *testing.T) {
	t.Run("right after its term", func(t *testing.T) {
		for _, gap := range []time.Duration{0, time.Millisecond, 4 * time.Millisecond, 6 * time.Millisecond, 20 * time.Millisecond} {
			inBubble(t, func(t *scene) {
				a, b, c := t.three()
				t.request(c, b)
				synctest.Wait()
				time.Sleep(gap)
				t.wantHolder(b)
				for _, next := range []*replica{a, b, c, a} {
					t.request(c, next)
					time.Sleep(20 * time.Millisecond)
					t.wantHolder(next)
				}
			})
		}
	})
	t.Run("by polling", func(t *testing.T) {
		inBubble(t, func(t *scene) {
			t.store = testkit.Bare(t.store)
			a, _, c := t.three()
			require.NoError(t, a.StandDown(t.Context()))
			time.Sleep(time.Minute)
			t.request(c, a)
			time.Sleep(10*time.Second + 5*time.Second) // until the holder's next renewal, and a's next look
			t.wantHolder(a)
		})
	})
	t.Run("when its look has failed", func(t *testing.T) {
		inBubble(t, func(t *scene) {
			a, b := t.start("a"), t.start("b")
			time.Sleep(time.Second)
			require.NoError(t, a.StandDown(t.Context()))
			time.Sleep(time.Minute)
			a.store.SetHook(testkit.Refuse)
			t.request(b, a)
			time.Sleep(time.Second)
			a.store.SetHook(nil)
			time.Sleep(2 * time.Second) // it looks again within a quarter of the AcquireInterval
			t.wantHolder(a)
		})
	})
	t.Run("when its last try has failed", func(t *testing.T) {
		inBubble(t, func(t *scene) {
			a, mem := t.start("a"), t.store
			t.store = storetest.Faulty(mem, testkit.Once(testkit.Refuse))
			b := t.start("b")
			time.Sleep(time.Second)
			t.request(a, b)
			time.Sleep(time.Second)
			t.wantHolder(b)
		})
	})
}

// A request writes to the record, which makes it look younger.
func TestARequestToAHolderThatHasVanishedDelaysNoTakeover(t *testing.T) {
	for _, expiry := range []tenure.ExpiryPolicy{tenure.ExpiryStoreClock, tenure.ExpiryObserved} {
		inBubble(t, func(t *scene) {
			gone := testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "gone"})
			testkit.MustAcquire(t, gone)
			b := t.startWith(tenure.LeaseConfig{Holder: "b", Expiry: expiry}, tenure.CoordinatorConfig{})
			for range 28 {
				time.Sleep(time.Second)
				require.NoError(t, b.lease.RequestHandover(t.Context(), "c"))
			}
			holding, err := gone.Read(t.Context())
			require.NoError(t, err)
			require.InDelta(t, 28*time.Second, holding.Age, float64(time.Second))
			time.Sleep(time.Second)
			t.wantHolder(nil)
			time.Sleep(time.Second + 35*time.Millisecond) // and 28 roundings of an age
			t.wantHolder(b)
		})
	}
}

// The record ages as if the request had not been written, whatever clock the writer saw.
func TestARequestLeavesTheRecordAsOldAsItIs(t *testing.T) {
	inBubble(t, func(t *scene) {
		mem := storetest.NewMem()
		var ahead atomic.Int64
		mem.Now = func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }
		lease := testkit.NewLease(t, storetest.Faulty(mem, testkit.Only("get", func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
			ahead.Store(int64(time.Hour))
			defer ahead.Store(0)
			return do(ctx)
		})), tenure.LeaseConfig{})
		testkit.MustAcquire(t, lease)
		time.Sleep(20 * time.Second)
		require.NoError(t, lease.RequestRelease(t.Context()))
		holding, err := testkit.NewLease(t, mem, tenure.LeaseConfig{}).Read(t.Context())
		require.NoError(t, err)
		require.Equal(t, 20*time.Second, holding.Age)
		require.Equal(t, 20*time.Second, time.Since(holding.RenewedAt))
	})
}

func TestARequestThatCannotBeMetSaysWhy(t *testing.T) {
	inBubbles(t, func(t *scene) {
		lease := testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "a"})
		require.ErrorIs(t, lease.RequestRelease(t.Context()), tenure.ErrNotFound)
		require.ErrorIs(t, lease.RequestHandover(t.Context(), "b\x00"), tenure.ErrInvalid)
		require.ErrorIs(t, lease.RequestHandover(t.Context(), strings.Repeat("b", tenure.MaxPayload)), tenure.ErrInvalid)
		putRecord(t, t.store, `{"holder":"another program"}`)
		before := testkit.Get(t, t.store, testkit.LeaseKey)
		require.ErrorIs(t, lease.RequestRelease(t.Context()), errors.ErrUnsupported)
		require.Equal(t, before.Version, testkit.Get(t, t.store, testkit.LeaseKey).Version)
	})
}

func TestARequestThatIsMetOrWasMadeAlreadyIsNotWrittenAgain(t *testing.T) {
	inBubble(t, func(t *scene) {
		a, _, c := t.three()
		silent := testkit.NewLease(t, testkit.Bare(t.store), tenure.LeaseConfig{}) // gives no hint
		request := func(lease *tenure.Lease, to string) (written bool) {
			t.Helper()
			before := testkit.Get(t, t.store, testkit.LeaseKey)
			require.NoError(t, lease.RequestHandover(t.Context(), to))
			return testkit.Get(t, t.store, testkit.LeaseKey).Version != before.Version
		}
		require.False(t, request(c.lease, "a"), "which holds the lease")
		require.True(t, request(silent, "gone"))
		require.False(t, request(silent, "gone"))
		require.True(t, request(silent, "a"), "which takes back the other request")
		time.Sleep(time.Minute)
		t.wantHolder(a)
		require.NotContains(t, t.jobs.String(), "a ends")
		require.NoError(t, c.lease.RequestHandover(t.Context(), "gone"))
		time.Sleep(time.Second / 2)
		for _, to := range []string{"gone", "c"} {
			require.ErrorIs(t, c.lease.RequestHandover(t.Context(), to), tenure.ErrNotFound)
		}
	})
}

func TestAHandoverWhoseAnswerWasLostTakesPlace(t *testing.T) {
	inBubble(t, func(t *scene) {
		a, b, c := t.three()
		lost := 0
		a.store.SetHook(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			err := do(ctx)
			if err == nil && call.Op == "put" && strings.Contains(string(call.Object.Payload), "offered") {
				lost++
				return testkit.ErrReset
			}
			return err
		})
		t.request(c, b)
		time.Sleep(5 * time.Second)
		synctest.Wait()
		t.wantHolder(b)
		require.Equal(t, 1, lost)
	})
}

func TestAWriteFencedByATermThatWasHandedOverIsRefused(t *testing.T) {
	inBubble(t, func(t *scene) {
		terms := make(chan *tenure.Term, 1)
		a := t.start("a", tenure.CoordinatorConfig{Watch: func(ctx context.Context) error {
			terms <- tenure.TermFromContext(ctx)
			return testkit.UntilDone(ctx)
		}})
		fenced, err := tenure.Fence(t.store, <-terms)
		require.NoError(t, err)
		require.NoError(t, a.lease.RequestHandover(t.Context(), "b"))
		time.Sleep(time.Second) // offered, and not taken by any replica
		_, err = fenced.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}}, tenure.IfAbsent())
		require.ErrorIs(t, err, tenure.ErrLost)
	})
}

// The other program's record keeps our label, and its renewals leave the label as it is.
func TestAnotherProgramThatTookOverAnAskedLeaseIsNotTakenToBeSilent(t *testing.T) {
	inBubbles(t, func(t *scene) {
		ours := testkit.NewLease(t, t.store, tenure.LeaseConfig{})
		testkit.MustAcquire(t, ours)
		require.NoError(t, ours.RequestRelease(t.Context()))
		time.Sleep(30 * time.Second)
		for range 60 {
			obj := testkit.Get(t, t.store, testkit.LeaseKey)
			require.NotEmpty(t, obj.Labels)
			obj.Payload = []byte(`{"holder":"another program","acquired_at_ms":1}`)
			testkit.Put(t, t.store, obj)
			t.wantHeld(ours)
			time.Sleep(2 * time.Second)
		}
		t.wantTakeoverAfter(28*time.Second, ours)
	})
}

func TestSpuriousHintsMakeAHolderRenewLittleMore(t *testing.T) {
	for _, every := range []time.Duration{time.Millisecond, 11 * time.Millisecond, time.Second} {
		inBubble(t, func(t *scene) {
			a := t.start("a")
			waker := t.store.(tenure.Notifier)
			var traffic testkit.Calls
			a.store.SetHook(traffic.Count("", nil))
			for end := time.Now().Add(10 * time.Minute); time.Now().Before(end); time.Sleep(every) {
				require.NoError(t, waker.Wake(t.Context(), testkit.LeaseKey))
			}
			got := traffic.Take()
			require.InDelta(t, 92, got["put"], 33, "renewals in 60 intervals, with a hint each %v", every)
			require.Len(t, got, 1)
		})
	}
}

// On real databases; each replica has a store of its own, as in separate processes.
func TestALeaseGoesRoundByRequestInMilliseconds(t *testing.T) {
	testkit.EachStore(t, func(t *testing.T, open func() tenure.Store) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		key := tenure.Key{Type: "lease", ID: "round"}
		began := make(chan string, 16)
		for i := range 3 {
			store := open().(testkit.StoreWatcher)
			c, err := tenure.NewCoordinator(testkit.NewLease(t, store, tenure.LeaseConfig{Key: key, Holder: fmt.Sprint(i), TTL: 10 * time.Minute}), tenure.CoordinatorConfig{
				AcquireInterval: 50 * time.Millisecond, // a former holder stays away for twice that
				Watch: func(ctx context.Context) error {
					began <- tenure.TermFromContext(ctx).Holder()
					return testkit.UntilDone(ctx)
				},
			})
			require.NoError(t, err)
			testkit.LiveWatch(t, store, key)
			var running sync.WaitGroup
			running.Go(func() { c.Run(ctx) })
			t.Cleanup(running.Wait) // before the store is closed
			if i == 0 {
				<-began
			}
		}
		asker := testkit.NewLease(t, open(), tenure.LeaseConfig{Key: key})
		for round := range 9 {
			next := fmt.Sprint((round + 1) % 3)
			sent := time.Now()
			require.NoError(t, asker.RequestHandover(t.Context(), next))
			select {
			case got := <-began:
				t.Logf("%s after %v", got, time.Since(sent).Round(100*time.Microsecond))
				require.Equal(t, next, got, "round %d", round)
			case <-time.After(testkit.Patience): // a renewal comes after three
				t.Fatalf("round %d: no replica holds after %v", round, time.Since(sent))
			}
		}
	})
}

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
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: name})
	r.Coordinator = testkit.Must(tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
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
		require.NoError(t, testkit.NewLease(t, store, tenure.LeaseConfig{}).RequestHandover(t.Context(), "other"))
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
		var log testkit.SyncBuffer
		store := storetest.NewMem()
		startRanked(t, store, "low")
		startRanked(t, store, "mid") // takes the lease at once, while high and low stay away
		lease := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "high", Logger: slog.New(slog.NewTextHandler(&log, nil))})
		high := new(ranked)
		high.Coordinator = testkit.Must(tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
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
		var calls testkit.Calls
		faulty := storetest.Faulty(mem, nil)
		high := startRanked(t, faulty, "high", "low")
		faulty.SetHook(calls.Count("", func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			if call.Op == "put" {
				return testkit.ErrReset
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
	lease := testkit.NewLease(t, storetest.NewMem(), tenure.LeaseConfig{})
	for _, cfg := range []tenure.CoordinatorConfig{{Settle: time.Second}, {Settle: -1, Outranks: func(tenure.Holding) bool { return true }}} {
		_, err := tenure.NewCoordinator(lease, cfg)
		require.ErrorIs(t, err, tenure.ErrInvalid)
		require.ErrorContains(t, err, "Settle")
	}
	c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Outranks: func(tenure.Holding) bool { return true }})
	require.NoError(t, err)
	require.Equal(t, 4*tenure.DefaultTTL, c.Config().Settle)
}
