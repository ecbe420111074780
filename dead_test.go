package tenure_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/witnessed"
	"github.com/tenurelib/tenure/proof/kit"
	"github.com/tenurelib/tenure/storetest"
)

// under acquires a lease as a process of a witness does.
func (t *scene) under(witness string, cfg tenure.LeaseConfig) (*tenure.Lease, *tenure.Term) {
	t.Helper()
	lease := kit.NewLease(t, t.store, cfg)
	term, err := lease.AcquireOrSteal(witnessed.Own(witnessed.With(t.Context(), witness)))
	require.NoError(t, err)
	require.Equal(t, witness != "", term.Witnessed())
	return lease, term
}

// witness is the lease with which a witness looks.
func (t *scene) witness() *tenure.Lease { return kit.NewLease(t, t.store, tenure.LeaseConfig{}) }

func (t *scene) wantLeft(witness string, older time.Duration, why error) {
	t.Helper()
	before := t.record()
	released, err := t.witness().ReleaseDead(t.Context(), witness, older)
	require.False(t, released)
	kit.WantErr(t, err, why)
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
		kit.WantErr(t, lease.Renew(t.Context(), term), nil)
		hints := tenure.Watch(t.store, lease.Key())
		defer hints.Stop()
		released, err := t.witness().ReleaseDead(t.Context(), "w", 0)
		require.NoError(t, err)
		require.True(t, released)
		next := kit.MustAcquire(t, kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "next"}))
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
		kit.WantErr(t, kit.NewLease(t, t.store, tenure.LeaseConfig{}).Release(t.Context(), term), nil)
		t.under("", tenure.LeaseConfig{Holder: "without a witness"})
		t.wantLeft("w", 0, nil)
		_, err := t.witness().ReleaseDead(t.Context(), "", 0)
		kit.WantErr(t, err, tenure.ErrInvalid)
	})
}

func TestATermThatWasYoungWhenItsProcessDiedIsLeftToExpire(t *testing.T) {
	inBubbles(t, func(t *scene) {
		lease, term := t.under("w", tenure.LeaseConfig{})
		time.Sleep(9 * time.Second)
		kit.WantErr(t, lease.Renew(t.Context(), term), nil)
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
		next := kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "next"})
		resumed := t.resume(next, term)
		require.False(t, resumed.Witnessed())
		t.wantLeft("w", 0, tenure.ErrHeld)
		kit.WantErr(t, next.Renew(t.Context(), resumed), nil)
		t.wantLeft("w", 0, tenure.ErrHeld)
	})
}

func TestASealedTermOfADeadProcessIsReleased(t *testing.T) {
	inBubbles(t, func(t *scene) {
		lease, term := t.under("w", tenure.LeaseConfig{})
		kit.WantErr(t, lease.Seal(t.Context(), term), nil)
		released, err := t.witness().ReleaseDead(t.Context(), "w", 0)
		require.NoError(t, err)
		require.True(t, released)
	})
}

// A request that a dead holder had not obeyed is dropped, as by a release.
func TestARequestToADeadHolderEndsWithItsTerm(t *testing.T) {
	inBubbles(t, func(t *scene) {
		t.under("w", tenure.LeaseConfig{Holder: "dead"})
		kit.WantErr(t, t.witness().RequestHandover(t.Context(), "b"), nil)
		released, err := t.witness().ReleaseDead(t.Context(), "w", 0)
		require.NoError(t, err)
		require.True(t, released)
		kit.MustAcquire(t, kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "c"}))
	})
}

func TestPredecessorsThatWereNotConfirmedArePassedOnByTheWitness(t *testing.T) {
	inBubble(t, func(t *scene) {
		a := t.start("a", t.fencing(kit.Succeeds))
		t.run = witnessed.With(t.run, "w")
		b := t.startWith(tenure.LeaseConfig{Holder: "b", Name: "its name"}, t.fencing(kit.UntilDone))
		time.Sleep(time.Minute)
		a.store.SetHook(kit.Hang)
		time.Sleep(40 * time.Second)
		require.Equal(t, tenure.RoleConfirming, b.Status().Role)
		b.store.SetHook(kit.Hang) // it is dead
		released, err := t.witness().ReleaseDead(t.Context(), "w", 0)
		require.NoError(t, err)
		require.True(t, released)
		require.Equal(t, "its name", t.record().Name)
		t.start("c", t.fencing(kit.Succeeds))
		time.Sleep(time.Second)
		require.Equal(t, []string{"a works", "b fences a at ", "c fences a at ", "c works"}, t.said())
	})
}

// Only its holder knows of a term that followed the one in the record and was lost.
func TestAfterAFailoverAWitnessWaitsAsEverybodyDoes(t *testing.T) {
	for _, key := range []tenure.Key{kit.LeaseKey, claims.SessionKey("s")} {
		synctest.Test(t, func(t *testing.T) {
			primary := newPrimary()
			ctx := witnessed.Own(witnessed.With(t.Context(), "w"))
			dead := kit.NewLease(t, primary, tenure.LeaseConfig{Key: key, Holder: "dead"})
			term, err := dead.AcquireOrSteal(ctx)
			require.NoError(t, err)
			standby := primary.Fork()
			kit.WantErr(t, dead.Release(ctx, term), nil)
			witness := kit.NewLease(t, standby, tenure.LeaseConfig{Key: key, Holder: "witness"})
			released, err := witness.ReleaseDead(t.Context(), "w", 0)
			require.False(t, released)
			kit.WantErr(t, err, tenure.ErrHeld)
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
		store := kit.NewMovable(primary)
		dead := failoverLease(t, store, "dead")
		term, err := dead.AcquireOrSteal(witnessed.Own(witnessed.With(t.Context(), "w")))
		require.NoError(t, err)
		time.Sleep(time.Second)
		store.Store(primary.Fork())
		kit.WantErr(t, dead.Renew(t.Context(), term), nil)
		released, err := failoverLease(t, store, "witness").ReleaseDead(t.Context(), "w", 0)
		require.NoError(t, err)
		require.True(t, released)
		kit.MustAcquire(t, failoverLease(t, store, "next"))
	})
}

// A server that acquires for a worker behind it may be killed before another server has resumed the term, while the worker
// keeps working.
func TestATermThatAProgramAcquiresItselfIsNotReleasedAtItsDeath(t *testing.T) {
	inBubbles(t, func(t *scene) {
		lease := kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "worker"})
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
	lease := kit.NewLease(t, store, tenure.LeaseConfig{})
	require.Zero(t, testing.AllocsPerRun(100, func() {
		if name, err := witnessed.Tell(t.Context(), "lease", "web"); name != "" || err != nil {
			t.Fatal(name, err)
		}
	}))
	term := kit.MustAcquire(t, lease)
	require.NotContains(t, string(term.Record()), "witness")
	require.False(t, term.Witnessed())
}

// A witness looks again only for an acquire that was under way when the process died.
func TestAWitnessIsToldOfEachAcquireAndOfItsAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.Faulty(storetest.NewMem(), nil)
		key := [2]string{kit.LeaseKey.Type, kit.LeaseKey.ID}
		acquires, answered := witnessed.Line{Key: key, Answers: true}, witnessed.Line{Answered: key}
		tries := func(want error, lines ...witnessed.Line) {
			t.Helper()
			var said []witnessed.Line
			ctx := witnessed.Own(witnessed.With(t.Context(), "w", func(line witnessed.Line) { said = append(said, line) }))
			_, err := kit.NewLease(t, store, tenure.LeaseConfig{}).TryAcquire(ctx)
			kit.WantErr(t, err, want)
			require.Equal(t, lines, said)
		}
		tries(nil, acquires, answered)
		tries(tenure.ErrHeld, acquires, answered)
		store.SetHook(kit.LoseAnswer)
		tries(kit.ErrReset, acquires)
	})
}
