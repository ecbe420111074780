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
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/record"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/witnessed"
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
		var traffic testkit.Calls
		latency := testkit.Slowly(300 * time.Microsecond) // as databases have
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
			testkit.RemoveRecord(t, store)
		},
		"only what it has observed counts": func(t *scene, store *hinted) {
			a := t.start("a")
			t.startWith(tenure.LeaseConfig{Holder: "b", Expiry: tenure.ExpiryObserved}, tenure.CoordinatorConfig{})
			time.Sleep(time.Minute + 11*time.Second) // the last renewal was a second ago
			a.store.SetHook(testkit.Hang)
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
		var traffic testkit.Calls
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
		var traffic testkit.Calls
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
		testkit.MustAcquire(t, testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "dead", TTL: time.Hour}))
		b := t.start("b")
		time.Sleep(time.Minute)
		testkit.RemoveRecord(t, t.store)
		time.Sleep(30 * time.Second)
		t.wantHolder(b)
	})
}

// A host is restarted with another config, and then fails for good. The standby knows the
// record from before the restart, which would have stood for longer.
func TestALeaseThatIsTakenBackWithAShorterTTLIsMissedWhenThatHasPassed(t *testing.T) {
	inBubbles(t, func(t *scene) {
		testkit.MustAcquire(t, testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "a", TTL: time.Hour}))
		time.Sleep(time.Minute)
		b := t.startWith(tenure.LeaseConfig{Holder: "b", TTL: time.Hour}, tenure.CoordinatorConfig{})
		record.Restart()
		restarted := t.startWith(tenure.LeaseConfig{Holder: "a", AssumeUniqueHolder: true}, tenure.CoordinatorConfig{})
		restarted.store.SetHook(testkit.Hang)
		time.Sleep(40 * time.Second) // its TTL, and b's AcquireInterval
		t.wantHolder(b)
	})
}

func TestAStandbyThatIsWokenAndFailsTriesAgain(t *testing.T) {
	inBubble(t, func(t *scene) {
		a, b := t.start("a"), t.start("b")
		time.Sleep(time.Minute)
		var traffic testkit.Calls
		b.store.SetHook(traffic.Count("", testkit.Once(testkit.Refuse)))
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
	traffic   testkit.Calls
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
		fails := tenure.CoordinatorConfig{Logger: testkit.Quiet, Reconcile: func(ctx context.Context) error {
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

// under acquires a lease as a process of a witness does.
func (t *scene) under(witness string, cfg tenure.LeaseConfig) (*tenure.Lease, *tenure.Term) {
	t.Helper()
	lease := testkit.NewLease(t, t.store, cfg)
	term, err := lease.AcquireOrSteal(witnessed.Own(witnessed.With(t.Context(), witness)))
	require.NoError(t, err)
	require.Equal(t, witness != "", term.Witnessed())
	return lease, term
}

// witness is the lease with which a witness looks.
func (t *scene) witness() *tenure.Lease { return testkit.NewLease(t, t.store, tenure.LeaseConfig{}) }

func (t *scene) wantLeft(witness string, older time.Duration, why error) {
	t.Helper()
	before := t.record()
	released, err := t.witness().ReleaseDead(t.Context(), witness, older)
	require.False(t, released)
	testkit.WantErr(t, err, why)
	require.Equal(t, before.Version, t.record().Version, "the record has changed")
}

func (t *scene) record() tenure.Object {
	t.Helper()
	obj, err := t.store.Get(t.Context(), t.witness().Key())
	require.NoError(t, err)
	return obj
}

func TestTheLeaseOfADeadProcessIsReleasedOnTheWordOfItsWitness(t *testing.T) {
	inBubbles(t, func(t *scene) {
		lease, term := t.under("w", tenure.LeaseConfig{Holder: "dead", Name: "another name"})
		testkit.WantErr(t, lease.Renew(t.Context(), term), nil)
		hints := tenure.Watch(t.store, lease.Key())
		defer hints.Stop()
		released, err := t.witness().ReleaseDead(t.Context(), "w", 0)
		require.NoError(t, err)
		require.True(t, released)
		next := testkit.MustAcquire(t, testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "next"}))
		require.Greater(t, next.Token(), term.Token())
		require.False(t, next.Witnessed())
		for range 2 { // late, and again
			t.wantLeft("w", 0, nil)
		}
	})
}

func TestAWitnessReleasesNothingButWhatItsOwnProcessesHeld(t *testing.T) {
	inBubbles(t, func(t *scene) {
		_, term := t.under("other", tenure.LeaseConfig{Holder: "alive"})
		t.wantLeft("w", 0, nil)
		testkit.WantErr(t, testkit.NewLease(t, t.store, tenure.LeaseConfig{}).Release(t.Context(), term), nil)
		t.under("", tenure.LeaseConfig{Holder: "without a witness"})
		t.wantLeft("w", 0, nil)
		_, err := t.witness().ReleaseDead(t.Context(), "", 0)
		testkit.WantErr(t, err, tenure.ErrInvalid)
	})
}

func TestATermThatWasYoungWhenItsProcessDiedIsLeftToExpire(t *testing.T) {
	inBubbles(t, func(t *scene) {
		lease, term := t.under("w", tenure.LeaseConfig{})
		time.Sleep(9 * time.Second)
		testkit.WantErr(t, lease.Renew(t.Context(), term), nil)
		t.wantLeft("w", 10*time.Second, tenure.ErrHeld)
		time.Sleep(time.Second + time.Millisecond)
		released, err := t.witness().ReleaseDead(t.Context(), "w", 10*time.Second)
		require.NoError(t, err)
		require.True(t, released)
	})
}

func TestATermThatAnotherProcessGoesOnWithOutlivesItsWitness(t *testing.T) {
	inBubbles(t, func(t *scene) {
		_, term := t.under("w", tenure.LeaseConfig{Holder: "former"})
		next := testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "next"})
		resumed := t.resume(next, term)
		require.False(t, resumed.Witnessed())
		t.wantLeft("w", 0, tenure.ErrHeld)
		testkit.WantErr(t, next.Renew(t.Context(), resumed), nil)
		t.wantLeft("w", 0, tenure.ErrHeld)
	})
}

func TestASealedTermOfADeadProcessIsReleased(t *testing.T) {
	inBubbles(t, func(t *scene) {
		lease, term := t.under("w", tenure.LeaseConfig{})
		testkit.WantErr(t, lease.Seal(t.Context(), term), nil)
		released, err := t.witness().ReleaseDead(t.Context(), "w", 0)
		require.NoError(t, err)
		require.True(t, released)
	})
}

// A request that a dead holder had not obeyed is dropped, as by a release.
func TestARequestToADeadHolderEndsWithItsTerm(t *testing.T) {
	inBubbles(t, func(t *scene) {
		t.under("w", tenure.LeaseConfig{Holder: "dead"})
		testkit.WantErr(t, t.witness().RequestHandover(t.Context(), "b"), nil)
		released, err := t.witness().ReleaseDead(t.Context(), "w", 0)
		require.NoError(t, err)
		require.True(t, released)
		testkit.MustAcquire(t, testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "c"}))
	})
}

func TestPredecessorsThatWereNotConfirmedArePassedOnByTheWitness(t *testing.T) {
	inBubble(t, func(t *scene) {
		a := t.start("a", t.fencing(testkit.Succeeds))
		t.run = witnessed.With(t.run, "w")
		b := t.startWith(tenure.LeaseConfig{Holder: "b", Name: "its name"}, t.fencing(testkit.UntilDone))
		time.Sleep(time.Minute)
		a.store.SetHook(testkit.Hang)
		time.Sleep(40 * time.Second)
		require.Equal(t, tenure.RoleConfirming, b.Status().Role)
		b.store.SetHook(testkit.Hang) // it is dead
		released, err := t.witness().ReleaseDead(t.Context(), "w", 0)
		require.NoError(t, err)
		require.True(t, released)
		require.Equal(t, "its name", t.record().Name)
		t.start("c", t.fencing(testkit.Succeeds))
		time.Sleep(time.Second)
		require.Equal(t, []string{"a works", "b fences a at ", "c fences a at ", "c works"}, t.said())
	})
}

// Only its holder knows of a term that followed the one in the record and was lost.
func TestAfterAFailoverAWitnessWaitsAsEverybodyDoes(t *testing.T) {
	for _, key := range []tenure.Key{testkit.LeaseKey, claims.SessionKey("s")} {
		synctest.Test(t, func(t *testing.T) {
			primary := newPrimary()
			ctx := witnessed.Own(witnessed.With(t.Context(), "w"))
			dead := testkit.NewLease(t, primary, tenure.LeaseConfig{Key: key, Holder: "dead"})
			term, err := dead.AcquireOrSteal(ctx)
			require.NoError(t, err)
			standby := primary.Fork()
			testkit.WantErr(t, dead.Release(ctx, term), nil)
			witness := testkit.NewLease(t, standby, tenure.LeaseConfig{Key: key, Holder: "witness"})
			released, err := witness.ReleaseDead(t.Context(), "w", 0)
			require.False(t, released)
			testkit.WantErr(t, err, tenure.ErrHeld)
			time.Sleep(failoverTTL)
			released, err = witness.ReleaseDead(t.Context(), "w", 0)
			require.NoError(t, err)
			require.True(t, released)
		})
	}
}

func TestATermThatWasRenewedSinceTheFailoverIsReleasedAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		primary := newPrimary()
		store := testkit.NewMovable(primary)
		dead := failoverLease(t, store, "dead")
		term, err := dead.AcquireOrSteal(witnessed.Own(witnessed.With(t.Context(), "w")))
		require.NoError(t, err)
		time.Sleep(time.Second)
		store.Store(primary.Fork())
		testkit.WantErr(t, dead.Renew(t.Context(), term), nil)
		released, err := failoverLease(t, store, "witness").ReleaseDead(t.Context(), "w", 0)
		require.NoError(t, err)
		require.True(t, released)
		testkit.MustAcquire(t, failoverLease(t, store, "next"))
	})
}

// A server that acquires for a worker behind it may be killed before another server has resumed the term, while the worker
// keeps working.
func TestATermThatAProgramAcquiresItselfIsNotReleasedAtItsDeath(t *testing.T) {
	inBubbles(t, func(t *scene) {
		lease := testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "worker"})
		term, err := lease.AcquireOrSteal(witnessed.With(t.Context(), "w"))
		require.NoError(t, err)
		require.False(t, term.Witnessed())
		released, err := t.witness().ReleaseDead(t.Context(), "w", 0)
		require.NoError(t, err)
		require.False(t, released)
		_, err = lease.Resume(t.Context(), term.ID(), term.Token())
		require.NoError(t, err)
	})
}

// A process without a witness pays nothing more for an acquire, and stores what it always stored.
func TestWithoutAWitnessAnAcquireAllocatesNoMoreAndStoresTheSame(t *testing.T) {
	store := storetest.NewMem()
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
	require.Zero(t, testing.AllocsPerRun(100, func() {
		if name, err := witnessed.Tell(t.Context(), "lease", "web"); name != "" || err != nil {
			t.Fatal(name, err)
		}
	}))
	term := testkit.MustAcquire(t, lease)
	require.NotContains(t, string(term.Record()), "witness")
	require.False(t, term.Witnessed())
}

// A witness looks again only for an acquire that was under way when the process died.
func TestAWitnessIsToldOfEachAcquireAndOfItsAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.Faulty(storetest.NewMem(), nil)
		key := [2]string{testkit.LeaseKey.Type, testkit.LeaseKey.ID}
		acquires, answered := witnessed.Line{Key: key, Answers: true}, witnessed.Line{Answered: key}
		tries := func(want error, lines ...witnessed.Line) {
			t.Helper()
			var said []witnessed.Line
			ctx := witnessed.Own(witnessed.With(t.Context(), "w", func(line witnessed.Line) { said = append(said, line) }))
			_, err := testkit.NewLease(t, store, tenure.LeaseConfig{}).TryAcquire(ctx)
			testkit.WantErr(t, err, want)
			require.Equal(t, lines, said)
		}
		tries(nil, acquires, answered)
		tries(tenure.ErrHeld, acquires, answered)
		store.SetHook(testkit.LoseAnswer)
		tries(testkit.ErrReset, acquires)
	})
}
