package tenure_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

// drainable is a replica with a coordinator that can be drained.
type drainable struct {
	drain       *tenure.Drain
	coordinator *tenure.Coordinator
	acquired    atomic.Int64 // terms
}

func newDrainable(t *testing.T, store tenure.Store, name string) *drainable {
	d := &drainable{drain: testkit.Must(tenure.NewDrain(store, name, testkit.Quiet))}
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: name})
	d.coordinator = testkit.Must(tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
		Drain: d.drain, Trace: &tenure.Trace{Acquired: func(*tenure.Term, *tenure.Holding) { d.acquired.Add(1) }},
	}))
	return d
}

// run runs the replica until the test ends.
func (d *drainable) run(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var drained, ran = make(chan error, 1), make(chan error, 1)
	go func() { drained <- d.drain.Run(ctx) }()
	go func() { ran <- d.coordinator.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := errors.Join(<-drained, <-ran); err != nil {
			t.Error(err)
		}
	})
}

func TestADrainedReplicaGivesItsLeaseBackAndTakesNone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		a, b := newDrainable(t, store, "a"), newDrainable(t, store, "b")
		a.run(t)
		synctest.Wait()
		require.True(t, a.coordinator.IsHolder())
		b.run(t)
		synctest.Wait()

		require.NoError(t, tenure.SetDrain(t.Context(), store, tenure.Drained{Replica: "a", Left: time.Hour, By: "ops"}))
		time.Sleep(20 * time.Millisecond)
		require.True(t, a.drain.Active())
		require.False(t, a.coordinator.IsHolder())
		require.True(t, a.coordinator.Status().StandsDown)
		require.True(t, b.coordinator.IsHolder())

		require.NoError(t, tenure.SetDrain(t.Context(), store, tenure.Drained{Replica: "b", Left: time.Minute}))
		time.Sleep(59 * time.Second)
		require.False(t, a.coordinator.IsHolder() || b.coordinator.IsHolder())
		time.Sleep(time.Second + 20*time.Millisecond)
		require.True(t, b.coordinator.IsHolder(), "its mark has expired")
		_, err := store.Get(t.Context(), tenure.Key{Type: "tenure.drain", ID: "b"})
		require.ErrorIs(t, err, tenure.ErrNotFound, "and is deleted")

		require.NoError(t, tenure.SetDrain(t.Context(), store, tenure.Drained{Replica: "b", Left: time.Minute}))
		time.Sleep(20 * time.Millisecond)
		require.NoError(t, tenure.ClearDrain(t.Context(), store, "a"))
		time.Sleep(20 * time.Millisecond)
		require.True(t, a.coordinator.IsHolder(), "it competes at once")
		require.ErrorIs(t, tenure.ClearDrain(t.Context(), store, "a"), tenure.ErrNotFound)
	})
}

func TestAReplicaThatIsDrainedStaysSoWhenItStarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		faulty := storetest.Faulty(storetest.NewMem(), nil)
		require.NoError(t, tenure.SetDrain(t.Context(), faulty, tenure.Drained{Replica: "a", Left: 3 * time.Hour}))
		faulty.SetHook(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			if call.Key.Type == "tenure.drain" {
				return testkit.ErrReset
			}
			return do(ctx)
		})
		a := newDrainable(t, faulty, "a")
		require.True(t, a.drain.Active(), "it is not known yet")
		a.run(t)
		time.Sleep(time.Hour)
		require.False(t, a.coordinator.IsHolder(), "the mark cannot be read")
		faulty.SetHook(nil)
		time.Sleep(time.Hour)
		require.False(t, a.coordinator.IsHolder())
		time.Sleep(time.Hour + time.Minute)
		require.True(t, a.coordinator.IsHolder())
		faulty.SetHook(testkit.Refuse)
		time.Sleep(time.Second)
		require.False(t, a.drain.Active(), "an error changes nothing")
	})
}

func TestADrainedReplicaLeavesAnOfferToOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		a, b := newDrainable(t, store, "a"), newDrainable(t, store, "b")
		a.run(t)
		synctest.Wait()
		b.run(t)
		synctest.Wait()
		require.NoError(t, tenure.SetDrain(t.Context(), store, tenure.Drained{Replica: "b", Left: time.Hour}))
		synctest.Wait()
		lease := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "ops"})
		require.NoError(t, lease.RequestHandover(t.Context(), "b"))
		time.Sleep(20 * time.Millisecond)
		require.False(t, a.coordinator.IsHolder())
		require.False(t, b.coordinator.IsHolder())
		time.Sleep(time.Minute)
		require.True(t, a.coordinator.IsHolder())
		require.Zero(t, b.acquired.Load())

		b.coordinator.Compete() // says nothing about the drain
		require.NoError(t, a.coordinator.StandDown(t.Context()))
		time.Sleep(time.Minute)
		require.False(t, b.coordinator.IsHolder())
		require.NoError(t, tenure.ClearDrain(t.Context(), store, "b"))
		time.Sleep(time.Second)
		require.True(t, b.coordinator.IsHolder())
		require.True(t, a.coordinator.Status().StandsDown)
	})
}

func TestStartReturnsWhenAllIsGivenBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		a := &drainable{drain: testkit.Must(tenure.NewDrain(store, "a", testkit.Quiet))}
		lease := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "a"})
		a.coordinator = testkit.Must(tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
			Drain: a.drain,
			Watch: func(ctx context.Context) error {
				<-ctx.Done()
				time.Sleep(time.Second)
				return nil
			},
		}))
		a.run(t)
		synctest.Wait()
		require.True(t, a.coordinator.IsHolder())
		short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		require.ErrorIs(t, a.drain.Start(short), context.DeadlineExceeded)
		began := time.Now()
		require.NoError(t, a.drain.Start(t.Context()))
		require.Equal(t, time.Second-time.Millisecond, time.Since(began).Round(time.Millisecond))
		_, err := lease.Read(t.Context())
		require.ErrorIs(t, err, tenure.ErrNotFound)
		time.Sleep(time.Hour)
		require.False(t, a.coordinator.IsHolder())

		require.NoError(t, tenure.SetDrain(t.Context(), store, tenure.Drained{Replica: "a", Left: time.Hour}))
		synctest.Wait()
		a.drain.Stop()
		require.True(t, a.drain.Active())
		time.Sleep(59 * time.Minute)
		require.False(t, a.coordinator.IsHolder(), "the mark says so")
		time.Sleep(2 * time.Minute)
		require.True(t, a.coordinator.IsHolder())
	})
}

func TestMarksOfDrainedReplicas(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		for _, d := range []tenure.Drained{{Replica: "", Left: time.Hour}, {Replica: "a"}, {Replica: "a", Left: -time.Hour}} {
			require.ErrorIs(t, tenure.SetDrain(t.Context(), store, d), tenure.ErrInvalid)
		}
		require.NoError(t, tenure.SetDrain(t.Context(), store, tenure.Drained{Replica: "a", Left: time.Hour, By: "ops"}))
		require.NoError(t, tenure.SetDrain(t.Context(), store, tenure.Drained{Replica: "a", Left: 2 * time.Hour, By: "ops"}))
		require.NoError(t, tenure.SetDrain(t.Context(), store, tenure.Drained{Replica: "b", Left: time.Minute}))
		mark, err := store.Get(t.Context(), tenure.Key{Type: "tenure.drain", ID: "a"})
		require.NoError(t, err)
		require.Equal(t, `{"for_ms":7200000,"by":"ops"}`, string(mark.Payload), "as docs/formats.md says")
		time.Sleep(time.Hour)
		all, err := tenure.Drains(t.Context(), store)
		require.NoError(t, err)
		require.Equal(t, []tenure.Drained{{Replica: "a", Left: time.Hour, By: "ops"}}, all)
		_, err = store.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "tenure.drain", ID: "c"}, Payload: []byte("{")}, tenure.IfAbsent())
		require.NoError(t, err)
		all, err = tenure.Drains(t.Context(), store)
		require.NoError(t, err)
		require.Contains(t, all, tenure.Drained{Replica: "c", Left: 24 * time.Hour})
		_, err = tenure.NewDrain(nil, "a", nil)
		require.ErrorIs(t, err, tenure.ErrInvalid)
		_, err = tenure.NewDrain(store, "a\x00", nil)
		require.ErrorIs(t, err, tenure.ErrInvalid)
	})
}

// The answer to an acquire came after the replica was drained.
func TestATermThatBeginsWhileAReplicaIsDrainedEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		drain := testkit.Must(tenure.NewDrain(store, "a", testkit.Quiet))
		require.NoError(t, drain.Start(t.Context()))
		lease := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "a"})
		c := testkit.Must(tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Drain: drain}))
		began := time.Now()
		require.ErrorIs(t, c.Hold(t.Context(), testkit.MustAcquire(t, lease)), tenure.ErrResigned)
		require.Less(t, time.Since(began), time.Second)
	})
}

func TestAnErrorOfTheStoreChangesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		faulty := storetest.Faulty(storetest.NewMem(), nil)
		require.NoError(t, tenure.SetDrain(t.Context(), faulty, tenure.Drained{Replica: "a", Left: 24 * time.Hour}))
		a := newDrainable(t, faulty, "a")
		a.run(t)
		synctest.Wait()
		require.True(t, a.drain.Active())
		faulty.SetHook(testkit.Refuse)
		time.Sleep(time.Hour)
		require.True(t, a.drain.Active())
	})
}

// misdated is a store that reports the same age for all objects.
type misdated struct {
	tenure.Store
	age time.Duration
}

func (s misdated) Get(ctx context.Context, key tenure.Key) (tenure.Object, error) {
	o, err := s.Store.Get(ctx, key)
	o.Age = s.age
	return o, err
}

func TestAMarkExpiresWhateverTheStoresClockSays(t *testing.T) {
	for _, age := range []time.Duration{0, -100 * time.Hour} { // there is none, or it was ahead when the mark was written
		synctest.Test(t, func(t *testing.T) {
			store := misdated{storetest.NewMem(), age}
			require.NoError(t, tenure.SetDrain(t.Context(), store, tenure.Drained{Replica: "a", Left: time.Hour}))
			d := testkit.Must(tenure.NewDrain(store, "a", testkit.Quiet))
			ctx, cancel := context.WithCancel(t.Context())
			ran := make(chan error)
			go func() { ran <- d.Run(ctx) }()
			time.Sleep(59 * time.Minute)
			require.True(t, d.Active())
			time.Sleep(2 * time.Minute)
			require.False(t, d.Active())
			cancel()
			require.NoError(t, <-ran)
		})
	}
}

func TestADrainedReplicaRetriesARelease(t *testing.T) {
	for range 20 { // the pauses are random
		synctest.Test(t, func(t *testing.T) {
			faulty := storetest.Faulty(storetest.NewMem(), nil)
			a := newDrainable(t, faulty, "a")
			a.run(t)
			synctest.Wait()
			require.True(t, a.coordinator.IsHolder())
			faulty.SetHook(testkit.Refuse)
			started := make(chan error, 1)
			go func() { started <- a.drain.Start(t.Context()) }()
			time.Sleep(5 * time.Second)
			require.Empty(t, started, "the release has failed")
			faulty.SetHook(nil)
			time.Sleep(10 * time.Second)
			require.NoError(t, <-started)
			b := newDrainable(t, faulty, "b")
			b.run(t)
			synctest.Wait()
			require.True(t, b.coordinator.IsHolder(), "long before the TTL has passed")
			require.NoError(t, a.drain.Start(t.Context()), "it has nothing")
			time.Sleep(time.Minute)
			require.Equal(t, "b", a.coordinator.Status().Holder, "what it shows is not what it saw when it was drained")
		})
	}
}

func TestAReplicaThatHasNotBegunHasNothingToGiveBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		faulty := storetest.Faulty(storetest.NewMem(), testkit.Refuse) // so its mark can't be read
		a := newDrainable(t, faulty, "a")
		a.run(t)
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		require.NoError(t, a.drain.Start(ctx))
		faulty.SetHook(nil)
		time.Sleep(time.Hour)
		require.False(t, a.coordinator.IsHolder())
		a.drain.Stop()
		synctest.Wait()
		require.True(t, a.coordinator.IsHolder())
	})
}

func TestStartEndsWhenTheReplicaTakesPartAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		drain := testkit.Must(tenure.NewDrain(store, "a", testkit.Quiet))
		lease := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "a"})
		a := &drainable{drain: drain, coordinator: testkit.Must(tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
			Drain: drain, Watch: func(ctx context.Context) error { <-ctx.Done(); time.Sleep(time.Minute); return nil },
		}))}
		a.run(t)
		synctest.Wait()
		started := make(chan error, 1)
		go func() { started <- drain.Start(t.Context()) }()
		time.Sleep(time.Second)
		drain.Stop()
		require.ErrorContains(t, <-started, "takes part again")
		require.ErrorIs(t, drain.Run(t.Context()), tenure.ErrInvalid, "it is running")
	})
}

func TestAReplicaIsDrainedWhileTheApplicationUsesItsWholePool(t *testing.T) {
	t.Parallel()
	url := testkit.PostgresURL(t)
	operators := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	require.NoError(t, operators.Migrate(t.Context()))
	config := testkit.Must(pgxpool.ParseConfig(url))
	config.MaxConns = 1
	pool := testkit.Must(pgxpool.NewWithConfig(t.Context(), config))
	t.Cleanup(pool.Close)
	store := testkit.Must(tenure.NewPostgresStore(pool, tenure.PostgresConfig{Logger: testkit.Quiet}))
	t.Cleanup(func() { store.Close() })
	conn := testkit.Must(pool.Acquire(t.Context()))
	t.Cleanup(conn.Release)

	a := newDrainable(t, store, "a")
	a.run(t)
	testkit.Await(t, "it competes", a.coordinator.IsHolder)
	require.NoError(t, tenure.SetDrain(t.Context(), operators, tenure.Drained{Replica: "a", Left: time.Hour}))
	testkit.Await(t, "it gives its lease back", func() bool { return a.coordinator.Status().StandsDown && !a.coordinator.IsHolder() })
}
