package tenure_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

// newEvents returns a store without a clock, on which every change is an event.
func newEvents() *storetest.Mem {
	store := storetest.NewMem()
	store.Events = true
	return store
}

// inEventBubble runs a test in virtual time, on a store without a clock on which every change
// is an event.
func inEventBubble(t *testing.T, test func(t *scene, store *storetest.Mem)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		store := newEvents()
		test(newScene(t, store), store)
	})
}

func TestWhereRenewalsAreEventsAStandbyReadsNothingAndAHolderOnlyRenews(t *testing.T) {
	inEventBubble(t, func(t *scene, _ *storetest.Mem) {
		a := t.start("a")
		time.Sleep(time.Second)
		b := t.start("b")
		time.Sleep(time.Minute)
		var traffic testkit.Calls
		latency := testkit.Slowly(300 * time.Microsecond)
		a.store.SetHook(traffic.Count("holder ", latency))
		b.store.SetHook(traffic.Count("standby ", latency))
		time.Sleep(100 * 30 * time.Second)
		require.Equal(t, map[string]int{"holder put": 300}, traffic.Take(), "in 100 TTLs")
		require.Less(t, time.Since(b.Status().RenewedAt), 11*time.Second, "what the standby knows about the holder")
	})
}

func TestWhereRenewalsAreEventsAStandbyCountsTheSilenceAndReadsOnce(t *testing.T) {
	inEventBubble(t, func(t *scene, _ *storetest.Mem) {
		a, b, _ := t.three() // the last renewal was a second ago
		var traffic testkit.Calls
		b.store.SetHook(traffic.Count("", nil))
		a.store.SetHook(testkit.Hang)
		time.Sleep(29*time.Second - time.Millisecond)
		require.Empty(t, traffic.Take(), "before the TTL has passed")
		time.Sleep(10 * time.Millisecond)
		gets := traffic.Take()["get"]
		require.True(t, gets == 1 || gets == 2 && !b.IsHolder(), "%d reads: one, and another if the other standby was faster", gets)
		require.NotEqual(t, "a", b.Status().Holder, "the holder's name, a TTL after its last renewal")
	})
}

// frozen is a store whose watches deliver no change after the first.
type frozen struct {
	*storetest.Mem
	hints chan struct{}
}

type frozenWatch struct {
	tenure.ChangeSubscription
	frozen
	last tenure.Change
}

func (s frozen) Watch(key tenure.Key) tenure.Subscription {
	watch := s.Mem.Watch(key).(tenure.ChangeSubscription)
	last, _ := watch.Last()
	return frozenWatch{watch, s, last}
}

func (w frozenWatch) C() <-chan struct{}          { return w.hints }
func (w frozenWatch) Live() bool                  { return true }
func (w frozenWatch) Stop()                       {}
func (w frozenWatch) Last() (tenure.Change, bool) { return w.last, true }

func TestAStandbyThatMissesEveryChangeDoesNotTakeTheLeaseFromALiveHolder(t *testing.T) {
	inEventBubble(t, func(t *scene, store *storetest.Mem) {
		a := t.start("a")
		t.store = frozen{Mem: store}
		b := t.start("b")
		var traffic testkit.Calls
		b.store.SetHook(traffic.Count("", nil))
		time.Sleep(10 * 30 * time.Second)
		t.wantHolder(a)
		require.LessOrEqual(t, traffic.Take()["get"], 10, "reads in 10 TTLs")
	})
}

func TestAChangeThatARecordHasOvertakenDoesNotProlongTheSilence(t *testing.T) {
	inEventBubble(t, func(t *scene, store *storetest.Mem) {
		a := t.start("a")
		hints := make(chan struct{}, 1)
		t.store = frozen{Mem: store, hints: hints}
		time.Sleep(time.Second)
		b := t.start("b")
		time.Sleep(31 * time.Second) // b has read the record a second ago
		a.store.SetHook(testkit.Hang)
		time.Sleep(14 * time.Second)
		hints <- struct{}{} // of the first change
		time.Sleep(15*time.Second + 50*time.Millisecond)
		require.Equal(t, "b", b.Status().Holder)
	})
}

func TestAStandbyPollsWhileChangesDoNotArrive(t *testing.T) {
	inEventBubble(t, func(t *scene, store *storetest.Mem) {
		a, b := t.start("a"), t.start("b")
		time.Sleep(time.Minute + time.Second) // the last renewal was a second ago
		var traffic testkit.Calls
		b.store.SetHook(traffic.Count("", nil))
		store.SetLive(false)
		time.Sleep(5 * time.Minute)
		require.InDelta(t, 68, traffic.Take()["get"], 10, "reads in 5 minutes")
		t.wantHolder(a)
		a.stop()
		time.Sleep(5 * time.Second) // an AcquireInterval
		t.wantHolder(b)
		store.SetLive(true)
		c := t.start("c")
		time.Sleep(time.Minute)
		b.stop()
		synctest.Wait()
		t.wantHolder(c)
	})
}

func TestOnAStoreWithoutAClockOnlyObservedSilenceCounts(t *testing.T) {
	for name, expiry := range map[string]tenure.ExpiryPolicy{"by default": tenure.ExpiryStoreClock, "if it was chosen": tenure.ExpiryObserved} {
		t.Run(name, func(t *testing.T) {
			inEventBubble(t, func(t *scene, store *storetest.Mem) {
				testkit.MustAcquire(t, testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "dead"}))
				time.Sleep(time.Hour)
				for _, store := range []tenure.Store{
					liar{store}, // the ages of a store without a clock mean nothing
					storetest.Faulty(liar{store}, nil),
				} {
					standby := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "b", Expiry: expiry})
					t.wantHeld(standby)
					time.Sleep(30*time.Second - time.Millisecond)
					t.wantHeld(standby)
				}
			})
		})
	}
}

type liar struct{ *storetest.Mem }

func (s liar) Get(ctx context.Context, key tenure.Key) (tenure.Object, error) {
	obj, err := s.Mem.Get(ctx, key)
	obj.Age = time.Hour
	return obj, err
}

func TestAHolderThatSeesItsRecordChangeFindsOutAtOnce(t *testing.T) {
	for name, change := range map[string]func(t *scene, store tenure.Store){
		"gone":      func(t *scene, store tenure.Store) { testkit.RemoveRecord(t, store) },
		"another's": func(t *scene, store tenure.Store) { putRecord(t, store, robbersRecord) },
		"with a request": func(t *scene, store tenure.Store) {
			require.NoError(t, t.replicas[0].lease.RequestRelease(t.Context()))
		},
	} {
		t.Run(name, func(t *testing.T) {
			inEventBubble(t, func(t *scene, store *storetest.Mem) {
				a := t.start("a")
				time.Sleep(time.Minute + time.Second) // between two renewals
				require.True(t, a.IsHolder())
				change(t, store)
				synctest.Wait()
				require.False(t, a.IsHolder())
			})
		})
	}
}

// A handle that was closed is no database that is down: it never answers again.
func TestAStoreThatIsClosedForGoodEndsRunAndIsUnhealthy(t *testing.T) {
	for _, holds := range []bool{true, false} {
		t.Run(fmt.Sprintf("holds: %v", holds), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := testkit.OpenSQLite(t, ":memory:")
				testkit.Migrate(t, store)
				if !holds {
					testkit.MustAcquire(t, testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "other"}))
				}
				var cause error
				c, err := tenure.NewCoordinator(testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "a"}), tenure.CoordinatorConfig{
					Reconcile: func(ctx context.Context) error {
						<-ctx.Done()
						cause = context.Cause(ctx)
						return nil
					},
				})
				require.NoError(t, err)
				done := make(chan error, 1)
				go func() { done <- c.Run(t.Context()) }()
				time.Sleep(time.Second)
				require.Equal(t, holds, c.IsHolder())
				require.NoError(t, c.Healthy(time.Second))
				require.NoError(t, store.DB().Close())
				time.Sleep(15 * time.Second)
				require.ErrorIs(t, c.Healthy(time.Second), tenure.ErrClosed)
				time.Sleep(time.Minute)
				require.ErrorIs(t, <-done, tenure.ErrClosed)
				if holds {
					require.ErrorIs(t, cause, tenure.ErrDeadline, "the job has returned first")
				}
			})
		})
	}
}

func TestASessionWhoseStoreIsClosedForGoodEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := testkit.OpenSQLite(t, ":memory:")
		testkit.Migrate(t, store)
		require.NoError(t, claims.Migrate(t.Context(), store))
		session, err := claims.NewSession(store, claims.SessionConfig{Logger: testkit.Quiet})
		require.NoError(t, err)
		keys, err := claims.NewKeys(session, "k")
		require.NoError(t, err)
		done := make(chan error, 1)
		go func() { done <- session.Run(t.Context()) }()
		_, err = keys.Claim(t.Context(), "1")
		require.NoError(t, err)
		require.NoError(t, store.DB().Close())
		time.Sleep(2 * time.Minute)
		require.ErrorIs(t, <-done, tenure.ErrClosed)
		_, err = keys.Claim(t.Context(), "2")
		require.ErrorIs(t, err, claims.ErrClosed)
	})
}

// Neither package exports the error of a handle that was closed.
func TestTheErrorsOfClosedHandlesAreKnown(t *testing.T) {
	pool, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/none")
	require.NoError(t, err)
	down := pool.Ping(t.Context())
	pool.Close()
	_, closed := pool.Exec(t.Context(), "SELECT 1")
	db := sql.OpenDB(untouched{t})
	require.NoError(t, db.Close())
	for err, want := range map[error]bool{
		closed: true, db.Ping(): true, fmt.Errorf("get: %w", tenure.ErrClosed): true,
		down: false, context.DeadlineExceeded: false, sql.ErrConnDone: false, errors.New("connection is closed"): false,
	} {
		require.Error(t, err)
		require.Equal(t, want, objects.IsClosed(err), "%v", err)
	}
	require.False(t, objects.IsClosed(nil))
}
