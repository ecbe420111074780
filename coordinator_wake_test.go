package tenure_test

import (
	"context"
	"errors"
	"maps"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/proof/kit"
	"github.com/tenurelib/tenure/storetest"
)

// hinted is a store whose hints come from the test.
type hinted struct {
	*storetest.Mem
	live  atomic.Bool
	hints chan struct{}

	watches atomic.Int32
}

// hint gives the store of a scene hints that the test controls.
func (t *scene) hint(live bool) *hinted {
	h := &hinted{Mem: storetest.NewMem(), hints: make(chan struct{}, 1)}
	h.live.Store(live)
	t.store = h
	return h
}

// Watch gives hints to the second replica that asks; the first is the holder, and gets none.
func (h *hinted) Watch(tenure.Key) tenure.Subscription {
	if h.watches.Add(1) == 1 {
		return hintedWatch{h, nil}
	}
	return hintedWatch{h, h.hints}
}

type hintedWatch struct {
	*hinted
	c chan struct{}
}

func (h hintedWatch) C() <-chan struct{} { return h.c }
func (h hintedWatch) Live() bool         { return h.live.Load() }
func (h hintedWatch) Stop()              {}

func TestInSteadyStateAHolderOnlyRenewsAndAStandbyReadsOncePerTTL(t *testing.T) {
	inBubble(t, func(t *scene) {
		a := t.start("a")
		time.Sleep(time.Second)
		b := t.start("b")
		time.Sleep(time.Minute)
		var traffic kit.Calls
		latency := kit.Slowly(300 * time.Microsecond) // as databases have
		a.store.SetHook(traffic.Count("holder ", latency))
		b.store.SetHook(traffic.Count("standby ", latency))
		time.Sleep(100 * 30 * time.Second)
		require.Equal(t, map[string]int{"holder put": 300, "standby get": 100}, traffic.Take(), "in 100 TTLs")
	})
}

func TestAStandbyThatIsNotWokenTriesWhenTheRecordWouldExpire(t *testing.T) {
	inBubble(t, func(t *scene) {
		t.hint(true)
		a, b := t.start("a"), t.start("b")
		time.Sleep(time.Minute + time.Second) // the last renewal was a second ago
		a.stop()
		time.Sleep(29*time.Second + 10*time.Millisecond)
		t.wantHolder(b)
	})
}

func TestAStandbyPollsWhereItCannotRelyOnHints(t *testing.T) {
	for name, end := range map[string]func(t *scene, store *hinted){ // of the term before, by a second after the minute
		"the watch is not live": func(t *scene, store *hinted) {
			store.live.Store(false)
			a := t.start("a")
			t.start("b")
			time.Sleep(time.Minute)
			a.stop()
		},
		"the watch is no longer live": func(t *scene, store *hinted) {
			a := t.start("a")
			t.start("b")
			time.Sleep(time.Minute)
			store.live.Store(false)
			store.hints <- struct{}{}
			synctest.Wait()
			a.stop()
		},
		"another program holds": func(t *scene, store *hinted) {
			putRecord(t, store, `{"holder":"another program","acquired_at_ms":1}`)
			t.start("b")
			time.Sleep(time.Second)
			kit.RemoveRecord(t, store)
		},
		"only what it has observed counts": func(t *scene, store *hinted) {
			a := t.start("a")
			t.startWith(tenure.LeaseConfig{Holder: "b", Expiry: tenure.Observed}, tenure.CoordinatorConfig{})
			time.Sleep(time.Minute + 11*time.Second) // the last renewal was a second ago
			a.store.SetHook(kit.Hang)
			time.Sleep(29 * time.Second)
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *scene) {
				end(t, t.hint(true))
				time.Sleep(5 * time.Second) // an AcquireInterval
				t.wantHolder(t.replicas[len(t.replicas)-1])
			})
		})
	}
}

func TestSpuriousHintsCostAStandbyNoMoreThanPolling(t *testing.T) {
	inBubble(t, func(t *scene) {
		store := t.hint(true)
		a, b := t.start("a"), t.start("b")
		time.Sleep(time.Second)
		var traffic kit.Calls
		b.store.SetHook(traffic.Count("", nil))
		hint := func() {
			select {
			case store.hints <- struct{}{}:
			default:
			}
		}
		hint()
		synctest.Wait()
		require.Equal(t, 1, traffic.Take()["put"], "attempts after the first hint")
		for range 60_000 {
			hint()
			time.Sleep(time.Millisecond)
		}
		require.InDelta(t, 18, traffic.Take()["put"], 7, "attempts in a minute of hints")
		t.wantHolder(a)
		time.Sleep(time.Minute)
		traffic.Take()
		time.Sleep(time.Minute)
		require.Equal(t, map[string]int{"get": 2}, traffic.Take(), "in two TTLs without a hint")
		a.stop()
		hint()
		synctest.Wait()
		t.wantHolder(b) // woken at once, after a quiet time
	})
}

// aheadStore shows versions as if the clock of the database had been an hour ahead.
type aheadStore struct {
	*storetest.Mem
	ahead atomic.Bool
}

func (s *aheadStore) Get(ctx context.Context, key tenure.Key) (tenure.Object, error) {
	obj, err := s.Mem.Get(ctx, key)
	if s.ahead.Load() {
		obj.Version += time.Hour.Microseconds()
	}
	return obj, err
}

// The replica gives the lease up for others, and must not take that as a reason to try again at
// once.
func TestAReplicaThatRefusesATokenIsNotWokenByItself(t *testing.T) {
	inBubble(t, func(t *scene) {
		store := &aheadStore{Mem: storetest.NewMem()}
		t.store = store
		a := t.start("a")
		time.Sleep(time.Minute + time.Second) // between two renewals
		store.ahead.Store(true)
		_, err := a.lease.Read(t.Context())
		require.NoError(t, err)
		store.ahead.Store(false)
		var traffic kit.Calls
		a.store.SetHook(traffic.Count("", nil))
		require.NoError(t, a.Resign(t.Context()))
		time.Sleep(time.Minute)
		require.Contains(t, a.Status().LastError, "fencing token")
		require.Equal(t, 1, a.Status().Terms)
		require.LessOrEqual(t, traffic.Take()["put"], 3, "one each 22.5 s at the most")
	})
}

func TestARecordDeletedWithoutAHintIsMissedWithinTheStandbysOwnTTL(t *testing.T) {
	inBubble(t, func(t *scene) {
		t.hint(true)
		kit.MustAcquire(t, kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "dead", TTL: time.Hour}))
		b := t.start("b")
		time.Sleep(time.Minute)
		kit.RemoveRecord(t, t.store)
		time.Sleep(30 * time.Second)
		t.wantHolder(b)
	})
}

// A host is restarted with another config, and then fails for good. The standby knows the
// record from before the restart, which would have stood for longer.
func TestALeaseThatIsTakenBackWithAShorterTTLIsMissedWhenThatHasPassed(t *testing.T) {
	inBubbles(t, func(t *scene) {
		kit.MustAcquire(t, kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "a", TTL: time.Hour}))
		time.Sleep(time.Minute)
		b := t.startWith(tenure.LeaseConfig{Holder: "b", TTL: time.Hour}, tenure.CoordinatorConfig{})
		restarted := t.startWith(tenure.LeaseConfig{Holder: "a", AssumeUniqueHolder: true}, tenure.CoordinatorConfig{})
		restarted.store.SetHook(kit.Hang)
		time.Sleep(40 * time.Second) // its TTL, and b's AcquireInterval
		t.wantHolder(b)
	})
}

func TestAStandbyThatIsWokenAndFailsTriesAgain(t *testing.T) {
	inBubble(t, func(t *scene) {
		a, b := t.start("a"), t.start("b")
		time.Sleep(time.Minute)
		var traffic kit.Calls
		b.store.SetHook(traffic.Count("", kit.Once(kit.Refuse)))
		a.stop()
		synctest.Wait()
		require.NotEmpty(t, traffic.Take())
		time.Sleep(5 * time.Second)
		t.wantHolder(b)
	})
}

// race is some replicas that compete for one lease, whose calls take a round trip each.
type race struct {
	*scene
	roundTrip time.Duration
	traffic   kit.Calls
}

func (r *race) start(name string) *replica {
	replica := r.scene.start(name)
	replica.store.SetHook(r.traffic.Count(name+" ", func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
		time.Sleep(r.roundTrip / 2)
		defer time.Sleep(r.roundTrip / 2)
		return do(ctx)
	}))
	time.Sleep(time.Second)
	return replica
}

// stop stops the holder, and returns what the others call in the second after that.
func (r *race) stop(holder *replica) map[string]int {
	r.traffic.Take()
	holder.stop()
	time.Sleep(time.Second)
	calls := r.traffic.Take()
	maps.DeleteFunc(calls, func(call string, _ int) bool { return strings.HasSuffix(call, " delete") })
	return calls
}

// beat lets two replicas race, and returns the winner and the other one.
func (r *race) beat() (winner, loser *replica, losers string) {
	a, b, c := r.start("a"), r.start("b"), r.start("c")
	r.stop(a)
	if b.IsHolder() {
		return b, c, "c"
	}
	return c, b, "b"
}

// Otherwise, at each release all standbys but one would write for nothing, while the winner
// waits for the same server.
func TestAStandbyThatWasBeatenGivesTheOthersAHeadStartUntilItHasWon(t *testing.T) {
	inBubble(t, func(t *scene) {
		r := &race{scene: t, roundTrip: 300 * time.Microsecond}
		winner, loser, name := r.beat()
		d := r.start("d")
		require.Equal(t, map[string]int{"d put": 1, name + " get": 1}, r.stop(winner), "d was never beaten")
		t.wantHolder(d)
		require.Equal(t, map[string]int{name + " get": 1, name + " put": 1}, r.stop(d), "there is no other")
		t.wantHolder(loser)
		e := r.start("e")
		require.NoError(t, loser.Resign(t.Context()))
		time.Sleep(time.Minute)
		require.Equal(t, map[string]int{name + " put": 1}, r.stop(e), "it has won since")
		t.wantHolder(loser)
	})
}

func TestAStandbyWithASlowStoreDoesNotYield(t *testing.T) {
	inBubble(t, func(t *scene) {
		r := &race{scene: t, roundTrip: 20 * time.Millisecond}
		winner, loser, name := r.beat()
		require.Equal(t, map[string]int{name + " put": 1}, r.stop(winner))
		t.wantHolder(loser)
	})
}

// They would keep it if the last holder always went first.
func TestTwoReplicasWhoseJobsFailDoNotKeepTheLeaseFromAThird(t *testing.T) {
	inBubble(t, func(t *scene) {
		fails := tenure.CoordinatorConfig{Logger: kit.Quiet, Reconcile: func(ctx context.Context) error {
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(20 * time.Second):
				return errors.New("no disk")
			}
		}}
		r := &race{scene: t, roundTrip: 300 * time.Microsecond}
		t.start("a", fails)
		time.Sleep(time.Second)
		t.start("b", fails)
		c := r.start("c")
		for range 100 {
			if c.IsHolder() {
				return
			}
			time.Sleep(20 * time.Second)
		}
		t.Error("c does not hold after a hundred terms of others")
	})
}
