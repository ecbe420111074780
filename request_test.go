package tenure_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/proof/kit"
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
			silent := kit.NewLease(t, kit.Bare(t.store), tenure.LeaseConfig{})
			require.NoError(t, silent.RequestHandover(t.Context(), "b"))
			a.stop()
			time.Sleep(time.Second)
			t.wantHolder(b)
		})
		inBubble(t, func(t *scene) { // before its takeover is confirmed
			t.takeover(t.fencing(kit.UntilDone))
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
	t.Run("polling", func(t *testing.T) { anOfferLasts(t, 6250*time.Millisecond, tenure.CoordinatorConfig{}, kit.Bare) })
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
		cfg := t.fencing(kit.Succeeds) // there is nothing to confirm
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
		restarted := kit.NewLease(t, t.store, unique)
		require.NoError(t, restarted.RequestHandover(t.Context(), "pod-1"))
		synctest.Wait()
		a.stop()
		_, err := restarted.AcquireOrSteal(t.Context())
		require.ErrorIs(t, err, tenure.ErrHeld)
		kit.MustAcquire(t, kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "pod-1"}))
	})
}

func TestNobodyWaitsForAnOfferForLongerThanTheTTL(t *testing.T) {
	inBubble(t, func(t *scene) {
		cfg := tenure.CoordinatorConfig{AcquireInterval: 10 * time.Minute}
		t.store = kit.Bare(t.store)
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
			t.store = kit.Bare(t.store)
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
			a.store.SetHook(kit.Refuse)
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
			t.store = storetest.Faulty(mem, kit.Once(kit.Refuse))
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
	for _, expiry := range []tenure.ExpiryPolicy{tenure.StoreClock, tenure.Observed} {
		inBubble(t, func(t *scene) {
			gone := kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "gone"})
			kit.MustAcquire(t, gone)
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
		lease := kit.NewLease(t, storetest.Faulty(mem, kit.Only("get", func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
			ahead.Store(int64(time.Hour))
			defer ahead.Store(0)
			return do(ctx)
		})), tenure.LeaseConfig{})
		kit.MustAcquire(t, lease)
		time.Sleep(20 * time.Second)
		require.NoError(t, lease.RequestRelease(t.Context()))
		holding, err := kit.NewLease(t, mem, tenure.LeaseConfig{}).Read(t.Context())
		require.NoError(t, err)
		require.Equal(t, 20*time.Second, holding.Age)
		require.Equal(t, 20*time.Second, time.Since(holding.RenewedAt))
	})
}

func TestARequestThatCannotBeMetSaysWhy(t *testing.T) {
	inBubbles(t, func(t *scene) {
		lease := kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "a"})
		require.ErrorIs(t, lease.RequestRelease(t.Context()), tenure.ErrNotFound)
		require.ErrorIs(t, lease.RequestHandover(t.Context(), "b\x00"), tenure.ErrInvalid)
		require.ErrorIs(t, lease.RequestHandover(t.Context(), strings.Repeat("b", tenure.MaxPayload)), tenure.ErrInvalid)
		putRecord(t, t.store, `{"holder":"another program"}`)
		before := kit.Get(t, t.store, kit.LeaseKey)
		require.ErrorIs(t, lease.RequestRelease(t.Context()), errors.ErrUnsupported)
		require.Equal(t, before.Version, kit.Get(t, t.store, kit.LeaseKey).Version)
	})
}

func TestARequestThatIsMetOrWasMadeAlreadyIsNotWrittenAgain(t *testing.T) {
	inBubble(t, func(t *scene) {
		a, _, c := t.three()
		silent := kit.NewLease(t, kit.Bare(t.store), tenure.LeaseConfig{}) // gives no hint
		request := func(lease *tenure.Lease, to string) (written bool) {
			t.Helper()
			before := kit.Get(t, t.store, kit.LeaseKey)
			require.NoError(t, lease.RequestHandover(t.Context(), to))
			return kit.Get(t, t.store, kit.LeaseKey).Version != before.Version
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
				return kit.ErrReset
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
			return kit.UntilDone(ctx)
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
		ours := kit.NewLease(t, t.store, tenure.LeaseConfig{})
		kit.MustAcquire(t, ours)
		require.NoError(t, ours.RequestRelease(t.Context()))
		time.Sleep(30 * time.Second)
		for range 60 {
			obj := kit.Get(t, t.store, kit.LeaseKey)
			require.NotEmpty(t, obj.Labels)
			obj.Payload = []byte(`{"holder":"another program","acquired_at_ms":1}`)
			kit.Put(t, t.store, obj)
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
			var traffic kit.Calls
			a.store.SetHook(traffic.Count("", nil))
			for end := time.Now().Add(10 * time.Minute); time.Now().Before(end); time.Sleep(every) {
				require.NoError(t, waker.Wake(t.Context(), kit.LeaseKey))
			}
			got := traffic.Take()
			require.InDelta(t, 92, got["put"], 33, "renewals in 60 intervals, with a hint each %v", every)
			require.Len(t, got, 1)
		})
	}
}

// On real databases; each replica has a store of its own, as in separate processes.
func TestALeaseGoesRoundByRequestInMilliseconds(t *testing.T) {
	kit.EachStore(t, func(t *testing.T, open func() tenure.Store) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		key := tenure.Key{Type: "lease", ID: "round"}
		began := make(chan string, 16)
		for i := range 3 {
			store := open().(kit.StoreWatcher)
			c, err := tenure.NewCoordinator(kit.NewLease(t, store, tenure.LeaseConfig{Key: key, Holder: fmt.Sprint(i), TTL: 10 * time.Minute}), tenure.CoordinatorConfig{
				AcquireInterval: 50 * time.Millisecond, // a former holder stays away for twice that
				Watch: func(ctx context.Context) error {
					began <- tenure.TermFromContext(ctx).Holder()
					return kit.UntilDone(ctx)
				},
			})
			require.NoError(t, err)
			kit.LiveWatch(t, store, key)
			var running sync.WaitGroup
			running.Go(func() { c.Run(ctx) })
			t.Cleanup(running.Wait) // before the store is closed
			if i == 0 {
				<-began
			}
		}
		asker := kit.NewLease(t, open(), tenure.LeaseConfig{Key: key})
		for round := range 9 {
			next := fmt.Sprint((round + 1) % 3)
			sent := time.Now()
			require.NoError(t, asker.RequestHandover(t.Context(), next))
			select {
			case got := <-began:
				t.Logf("%s after %v", got, time.Since(sent).Round(100*time.Microsecond))
				require.Equal(t, next, got, "round %d", round)
			case <-time.After(kit.Patience): // a renewal comes after three
				t.Fatalf("round %d: no replica holds after %v", round, time.Since(sent))
			}
		}
	})
}
