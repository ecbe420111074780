package tenure_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/record"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

func newPrimary() *storetest.Mem {
	primary := storetest.NewMem()
	primary.Lineages = true
	return primary
}

func failoverLease(t *testing.T, store tenure.Store, holder string) *tenure.Lease {
	return testkit.NewLease(t, store, tenure.LeaseConfig{Holder: holder, TTL: failoverTTL})
}

// failover has two replicas of a lease on a server that will fail over.
type failover struct {
	*testing.T
	jobs     testkit.Jobs
	primary  *storetest.Mem
	a, b     *testkit.Movable
	replicas []*tenure.Coordinator
}

const failoverTTL = 30 * time.Second

func newFailover(t *testing.T) *failover {
	primary := newPrimary()
	return &failover{T: t, primary: primary, a: testkit.NewMovable(primary), b: testkit.NewMovable(primary)}
}

// start runs a replica, and returns a func that stops it.
func (f *failover) start(store tenure.Store, name string) (c *tenure.Coordinator, stop func()) {
	lease := testkit.NewLease(f, store, tenure.LeaseConfig{Holder: name, TTL: failoverTTL})
	c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Reconcile: f.jobs.Run, Logger: testkit.Quiet})
	require.NoError(f, err)
	f.replicas = append(f.replicas, c)
	return c, testkit.RunCoordinator(f, context.Background(), c)
}

// keepsHolding requires that a replica alone keeps holding for three TTLs, under the same term.
func (f *failover) keepsHolding(c *tenure.Coordinator, term *tenure.Term) {
	f.Helper()
	for range 90 {
		time.Sleep(time.Second)
		require.True(f, c.IsHolder())
	}
	require.True(f, term.Valid())
	require.Equal(f, term.ID(), f.jobs.Term.Load().ID(), "the same term")
	require.EqualValues(f, 1, f.jobs.Most.Load())
}

func TestAHolderWhoseAcquireAFailoverHasLostGoesOn(t *testing.T) {
	for _, late := range []time.Duration{0, 3 * time.Second} {
		synctest.Test(t, func(t *testing.T) { goesOnWithoutItsAcquire(t, late, func(s tenure.Store) tenure.Store { return s }) })
	}
}

func TestAWrapperOfAStoreKeepsTheRulesOfFailovers(t *testing.T) {
	for name, wrap := range map[string]func(tenure.Store) tenure.Store{
		"that hides everything": testkit.Bare,
		"that counts":           func(s tenure.Store) tenure.Store { return &counted{Store: s} },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { goesOnWithoutItsAcquire(t, 3*time.Second, wrap) })
		})
	}
}

// counted is a store that counts its writes, as a program's wrapper for metrics does.
type counted struct {
	tenure.Store
	puts, deletes int
}

func (c *counted) Unwrap() tenure.Store { return c.Store }

func (c *counted) PutIf(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
	c.puts++
	return c.Store.PutIf(ctx, obj, cond)
}

func (c *counted) DeleteIf(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
	c.deletes++
	return c.Store.DeleteIf(ctx, key, cond)
}

func TestAWrapperThatCanBeUnwrappedDoesWhatItsStoreCan(t *testing.T) {
	inBubble(t, func(t *scene) {
		store := &counted{Store: t.store}
		t.store = store
		a, b := t.start("a"), t.start("b")
		other := testkit.NewLease(t, store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "other"}})
		term := testkit.MustAcquire(t, other)
		fenced, err := tenure.Fence(store, term)
		require.NoError(t, err)
		_, err = fenced.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}}, tenure.IfAbsent())
		require.NoError(t, err)
		for _, err := range tenure.List(t.Context(), store, "t") {
			require.NoError(t, err)
		}
		require.True(t, tenure.Watch(store, testkit.LeaseKey).Live())
		a.stop()
		time.Sleep(5 * time.Millisecond)
		t.wantHolder(b)
		require.Equal(t, 4, store.puts, "acquires, one of which was refused")
		require.NoError(t, other.Release(t.Context(), term))
		require.Equal(t, 2, store.deletes, "releases")
	})
}

func goesOnWithoutItsAcquire(t *testing.T, late time.Duration, wrap func(tenure.Store) tenure.Store) {
	f := newFailover(t)
	standby := f.primary.Fork()
	a, _ := f.start(wrap(f.a), "a")
	synctest.Wait()
	require.True(t, a.IsHolder())
	term := f.jobs.Term.Load()
	b, _ := f.start(wrap(f.b), "b")
	time.Sleep(time.Second)
	f.b.Store(standby) // b comes first, and finds no record
	time.Sleep(late)
	f.a.Store(standby)
	f.keepsHolding(a, term)
	require.False(t, b.IsHolder())
	obj, err := standby.Get(t.Context(), testkit.LeaseKey)
	require.NoError(t, err)
	require.Equal(t, term.Record(), obj.Payload)
	require.Greater(t, obj.Version, term.Token())
}

func TestAHolderWhoseHandoverAFailoverHasLostGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFailover(t)
		a, stop := f.start(f.a, "a")
		synctest.Wait()
		require.True(t, a.IsHolder())
		standby := f.primary.Fork()
		time.Sleep(time.Second)
		b, _ := f.start(f.b, "b")
		stop()
		time.Sleep(failoverTTL)
		require.True(t, b.IsHolder())
		term := f.jobs.Term.Load()
		third, _ := f.start(f.a, "c")
		f.a.Store(standby) // there, a still holds, and its record has expired
		time.Sleep(time.Second)
		f.b.Store(standby)
		f.keepsHolding(b, term)
		require.False(t, third.IsHolder())
	})
}

func TestALeaseWhoseHolderDoesNotComeBackIsTakenATTLAfterTheFailover(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFailover(t)
		standby := f.primary.Fork()
		a, _ := f.start(f.a, "a")
		synctest.Wait()
		require.True(t, a.IsHolder())
		b, _ := f.start(testkit.NewMovable(standby), "b")
		began := time.Now()
		for !b.IsHolder() {
			require.Less(t, time.Since(began), failoverTTL+b.Config().AcquireInterval)
			time.Sleep(10 * time.Millisecond)
		}
		require.GreaterOrEqual(t, time.Since(began), failoverTTL)
	})
}

func TestALeaseThatIsReleasedAfterAFailoverIsTakenAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFailover(t)
		standby := f.primary.Fork()
		a, stop := f.start(f.a, "a")
		synctest.Wait()
		f.a.Store(standby)
		f.b.Store(standby)
		time.Sleep(a.Config().RenewInterval + time.Second) // it has written its record again
		b, _ := f.start(f.b, "b")
		stop()
		time.Sleep(b.Config().AcquireInterval * 5 / 4)
		require.True(t, b.IsHolder())
		require.EqualValues(t, 1, f.jobs.Most.Load())
	})
}

func TestARestartOfTheServerIsNoFailover(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFailover(t)
		a, stop := f.start(f.a, "a")
		synctest.Wait()
		term := f.jobs.Term.Load()
		f.primary.Restart()
		f.keepsHolding(a, term)
		b, _ := f.start(f.b, "b")
		time.Sleep(time.Second)
		stop()
		f.primary.Restart()
		time.Sleep(b.Config().AcquireInterval * 5 / 4)
		require.True(t, b.IsHolder(), "no replica waits")
	})
}

// What was decided on one server is never done on another.
func TestAWriteThatNamesAnotherServerIsRefused(t *testing.T) {
	store := newPrimary()
	was, err := store.Lineage(t.Context())
	require.NoError(t, err)
	store.Restart()
	_, err = store.PutIf(t.Context(), tenure.Object{Key: testkit.LeaseKey}, tenure.IfAbsent().OnServer(was.Server, 0))
	require.ErrorIs(t, err, tenure.ErrMoved)
	require.ErrorIs(t, err, tenure.ErrConflict)
	is, err := store.Lineage(t.Context())
	require.NoError(t, err)
	require.Equal(t, was.Mark, is.Mark)
	obj, err := store.PutIf(t.Context(), tenure.Object{Key: testkit.LeaseKey}, tenure.IfAbsent().OnServer(is.Server, 1<<60))
	require.NoError(t, err)
	require.EqualValues(t, 1<<60+1, obj.Version)
}

// The new primary's clock is behind, and versions count from there.
func TestAfterAFailoverATokenIsAboveEachThatThisReplicaKnows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		primary := newPrimary()
		primary.Now = func() time.Time { return time.Now().Add(time.Hour) }
		standby := primary.Fork()
		standby.Now = nil
		store := testkit.NewMovable(primary)
		lease := failoverLease(t, store, "a")
		lost, err := lease.TryAcquire(t.Context())
		require.NoError(t, err)
		store.Store(standby)
		_, err = lease.AcquireOrSteal(t.Context())
		var held *tenure.HeldError
		require.True(t, errors.As(err, &held), "%v", err)
		require.ErrorContains(t, err, "failover")
		time.Sleep(failoverTTL)
		term, err := lease.AcquireOrSteal(t.Context())
		require.NoError(t, err)
		require.Greater(t, term.Token(), lost.Token())
	})
}

func TestAfterAFailoverARecordOfThisReplicaIsNotReclaimed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		primary := newPrimary()
		store := testkit.NewMovable(primary)
		first := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "a", TTL: failoverTTL, AssumeUniqueHolder: true})
		_, err := first.TryAcquire(t.Context())
		require.NoError(t, err)
		store.Store(primary.Fork())
		record.Restart()
		again := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "a", TTL: failoverTTL, AssumeUniqueHolder: true})
		_, err = again.AcquireOrSteal(t.Context())
		require.ErrorIs(t, err, tenure.ErrHeld)
		time.Sleep(failoverTTL)
		_, err = again.AcquireOrSteal(t.Context())
		require.NoError(t, err)
	})
}

// An acquire that is under way during a failover was decided on what the old primary held.
func TestAnAcquireThatWasSentBeforeAFailoverIsRefusedAfterIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		primary := newPrimary()
		standby := primary.Fork()
		store := testkit.NewMovable(primary)
		slow := storetest.Faulty(store, func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			if call.Op == "put" {
				time.Sleep(time.Second)
			}
			return do(ctx)
		})
		lost, err := failoverLease(t, primary, "a").TryAcquire(t.Context())
		require.NoError(t, err)
		require.NoError(t, failoverLease(t, primary, "a").Release(t.Context(), lost))
		acquired := make(chan error, 1)
		go func() {
			_, err := failoverLease(t, slow, "b").AcquireOrSteal(t.Context())
			acquired <- err
		}()
		synctest.Wait() // it is sent
		_, err = failoverLease(t, primary, "a").TryAcquire(t.Context())
		require.NoError(t, err)
		store.Store(standby)
		require.ErrorIs(t, <-acquired, tenure.ErrHeld)
	})
}

// The new primary's clock is behind, so the versions after the one that it holds have been used before.
func TestAfterAFailoverARecordIsWrittenAgainAboveAllThatItsTermHad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		primary := newPrimary()
		standby := primary.Fork()
		standby.Now = func() time.Time { return time.Now().Add(-failoverTTL / 2) }
		store := testkit.NewMovable(primary)
		lease := failoverLease(t, store, "a")
		term, err := lease.TryAcquire(t.Context())
		require.NoError(t, err)
		time.Sleep(time.Second)
		require.NoError(t, lease.Renew(t.Context(), term))
		had, err := primary.Get(t.Context(), lease.Key())
		require.NoError(t, err)
		store.Store(standby)
		require.NoError(t, lease.Renew(t.Context(), term))
		is, err := standby.Get(t.Context(), lease.Key())
		require.NoError(t, err)
		require.Greater(t, is.Version, had.Version)
	})
}

// A term that is over may have been followed by a valid one whose record is lost.
func TestAfterAFailoverTheReleaseOfATermThatIsOverFreesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		primary := newPrimary()
		store := testkit.NewMovable(primary)
		lease := failoverLease(t, store, "a")
		term, err := lease.TryAcquire(t.Context())
		require.NoError(t, err)
		standby := primary.Fork()
		time.Sleep(failoverTTL)
		_, err = failoverLease(t, primary, "b").AcquireOrSteal(t.Context())
		require.NoError(t, err)
		store.Store(standby)
		require.Error(t, lease.Release(t.Context(), term))
		_, err = failoverLease(t, store, "c").AcquireOrSteal(t.Context())
		require.ErrorIs(t, err, tenure.ErrHeld)
	})
}

func TestAfterAFailoverAnOrphanIsLeftWhereItIs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		primary := newPrimary()
		store := testkit.NewMovable(primary)
		faulty := storetest.Faulty(store, func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			if call.Op == "delete" {
				return errors.New("connection reset")
			}
			return do(ctx)
		})
		lease := failoverLease(t, faulty, "a")
		term, err := lease.TryAcquire(t.Context())
		require.NoError(t, err)
		standby := primary.Fork()
		require.Error(t, lease.Release(t.Context(), term))
		faulty.SetHook(nil)
		store.Store(standby)
		_, err = lease.AcquireOrSteal(t.Context())
		var held *tenure.HeldError
		require.ErrorAs(t, err, &held, "no release is tried")
		_, err = standby.Get(t.Context(), lease.Key())
		require.NoError(t, err)
	})
}

func TestWritesThatNameAnotherServerAreRefused(t *testing.T) {
	store := testkit.OpenPostgres(t, testkit.PostgresURL(t), tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	on, err := store.Lineage(t.Context())
	require.NoError(t, err)
	const other = "1"
	for name, store := range map[string]tenure.Store{"alone": store, "in a group": groupedStore{store}} {
		t.Run(name, func(t *testing.T) {
			obj := tenure.Object{Key: tenure.Key{Type: "t", ID: name}}
			_, err := store.PutIf(t.Context(), obj, tenure.IfAbsent().OnServer(other, 0))
			require.ErrorIs(t, err, tenure.ErrMoved)
			_, err = store.Get(t.Context(), obj.Key)
			require.ErrorIs(t, err, tenure.ErrNotFound, "nothing was written")
			was, err := store.PutIf(t.Context(), obj, tenure.IfAbsent().OnServer(on.Server, 1<<60))
			require.NoError(t, err)
			require.EqualValues(t, 1<<60+1, was.Version)
			_, err = store.PutIf(t.Context(), obj, tenure.IfVersion(was.Version).OnServer(other, 0))
			require.ErrorIs(t, err, tenure.ErrMoved)
			err = store.DeleteIf(t.Context(), obj.Key, tenure.IfVersion(was.Version).OnServer(other, 0))
			require.ErrorIs(t, err, tenure.ErrMoved)
			stands, err := store.Get(t.Context(), obj.Key)
			require.NoError(t, err)
			require.Equal(t, was.Version, stands.Version)
			is, err := store.PutIf(t.Context(), obj, tenure.IfVersion(was.Version).OnServer(on.Server, was.Version+9))
			require.NoError(t, err)
			require.EqualValues(t, was.Version+10, is.Version)
			require.NoError(t, store.DeleteIf(t.Context(), obj.Key, tenure.IfVersion(is.Version).OnServer(on.Server, 0)))
			_, err = store.PutIf(t.Context(), obj, tenure.IfAbsent().OnServer(other, 0))
			require.ErrorIs(t, err, tenure.ErrMoved)
		})
	}
}

// The release landed and another replica's term began; both records are lost. Releasing again proves
// nothing.
func TestAReleaseWhoseAnswerWasLostFreesNothingAfterAFailover(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		primary := newPrimary()
		store := testkit.NewMovable(primary)
		faulty := storetest.Faulty(store, func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			err := do(ctx)
			if call.Op == "delete" {
				return errors.New("connection reset")
			}
			return err
		})
		a := failoverLease(t, faulty, "a")
		term, err := a.TryAcquire(t.Context())
		require.NoError(t, err)
		standby := primary.Fork()
		require.Error(t, a.Release(t.Context(), term))
		next, err := failoverLease(t, primary, "b").TryAcquire(t.Context())
		require.NoError(t, err)
		store.Store(standby)
		time.Sleep(time.Second)
		require.Error(t, a.Release(t.Context(), term))
		_, err = failoverLease(t, standby, "c").AcquireOrSteal(t.Context())
		require.ErrorIs(t, err, tenure.ErrHeld)
		require.True(t, next.Valid())
	})
}

func TestWhereNothingCanBeLostNobodyWaitsWhateverTheExpiry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		primary := newPrimary()
		_, err := testkit.NewLease(t, primary, tenure.LeaseConfig{Expiry: tenure.ExpiryObserved}).TryAcquire(t.Context())
		require.NoError(t, err)
	})
}

// A request, or the release of a term that is over, makes a record from before the failover look younger than
// the term whose record is lost.
func TestAfterAFailoverNothingThatIsWrittenIntoAnOldRecordEndsTheTermThatIsLost(t *testing.T) {
	for name, write := range map[string]func(t *testing.T, store tenure.Store, former *tenure.Lease, term *tenure.Term){
		"a request": func(t *testing.T, store tenure.Store, _ *tenure.Lease, _ *tenure.Term) {
			require.NoError(t, failoverLease(t, store, "operator").RequestHandover(t.Context(), "b"))
		},
		"a late release": func(t *testing.T, _ tenure.Store, former *tenure.Lease, term *tenure.Term) {
			require.Error(t, former.Release(t.Context(), term))
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				primary := newPrimary()
				store := testkit.NewMovable(primary)
				former := failoverLease(t, store, "a")
				over, err := former.TryAcquire(t.Context())
				require.NoError(t, err)
				standby := primary.Fork()
				time.Sleep(failoverTTL)
				holder := failoverLease(t, store, "b")
				term, err := holder.AcquireOrSteal(t.Context())
				require.NoError(t, err)
				time.Sleep(time.Second)
				store.Store(standby)
				write(t, store, former, over)
				time.Sleep(time.Second)
				require.NoError(t, holder.Renew(t.Context(), term))
			})
		})
	}
}

// Versions that are ahead of the clock count by one, on both servers.
func TestADeletionThatWasDecidedBeforeAFailoverDeletesNothingAfterIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		primary := newPrimary()
		primary.Now = func() time.Time { return time.Now().Add(time.Hour) }
		_, err := primary.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}}, tenure.IfAbsent())
		require.NoError(t, err)
		primary.Now = nil
		standby := primary.Fork()
		store := testkit.NewMovable(primary)
		former := failoverLease(t, storetest.Faulty(store, func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			if call.Op == "delete" {
				store.Store(standby) // on its way
			}
			return do(ctx)
		}), "a")
		over, err := former.TryAcquire(t.Context())
		require.NoError(t, err)
		holder := failoverLease(t, standby, "b")
		_, err = holder.AcquireOrSteal(t.Context())
		require.ErrorIs(t, err, tenure.ErrHeld)
		time.Sleep(failoverTTL)
		term, err := holder.AcquireOrSteal(t.Context())
		require.NoError(t, err)
		require.Equal(t, over.Token(), term.Token(), "as where a clock once was ahead")
		require.Error(t, former.Release(t.Context(), over))
		_, err = failoverLease(t, standby, "c").AcquireOrSteal(t.Context())
		require.ErrorIs(t, err, tenure.ErrHeld)
	})
}

// A server that renews a session for a worker elsewhere does not know its claims, which the failover may have
// lost.
func TestASessionIsRenewedOverAFailoverOnlyWithItsClaims(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := testkit.NewMovable(newPrimary())
		lease := testkit.NewLease(t, store, tenure.LeaseConfig{Key: tenure.Key{Type: objects.SessionType, ID: "s"}, TTL: failoverTTL})
		term, err := lease.TryAcquire(t.Context())
		require.NoError(t, err)
		require.NoError(t, lease.Renew(t.Context(), term))
		store.Store(store.Load().Fork())
		time.Sleep(time.Second)
		left := term.Remaining()
		for range 2 {
			require.ErrorIs(t, lease.Renew(t.Context(), term), tenure.ErrHeld)
			require.Equal(t, left, term.Remaining())
		}
		other := testkit.NewLease(t, store, lease.Config())
		_, err = other.Resume(t.Context(), term.ID(), term.Token())
		require.ErrorIs(t, err, tenure.ErrHeld, "that record makes no other process right")
		lost, compared := errors.New("not compared"), 0
		right, err := term.Fence()
		require.NoError(t, err)
		right.OnFailover(func(context.Context, objects.Lineage) error {
			compared++
			return lost
		})
		require.ErrorIs(t, lease.Renew(t.Context(), term), lost)
		require.Equal(t, left, term.Remaining())
		lost = nil
		require.NoError(t, lease.Renew(t.Context(), term))
		require.NoError(t, lease.Renew(t.Context(), term))
		require.Equal(t, 2, compared)
		require.Greater(t, term.Remaining(), left)
	})
}

// The failover has lost the acquire of a holder that hangs. Nobody knows its name, so whoever takes the lease first is asked
// to cut off whoever it was, and nobody after that.
func TestAHolderThatAFailoverMayHaveLostIsFencedOnce(t *testing.T) {
	for _, stands := range []bool{false, true} { // a record of an earlier holder, which has expired
		t.Run(fmt.Sprint("a record stands: ", stands), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				primary := newPrimary()
				if stands {
					testkit.MustAcquire(t, failoverLease(t, primary, "earlier"))
				}
				promoted := primary.Fork()
				time.Sleep(failoverTTL)
				testkit.MustAcquire(t, failoverLease(t, primary, "hung"))
				var said []string
				run := func(name string) (stop func()) {
					c, err := tenure.NewCoordinator(failoverLease(t, promoted, name), tenure.CoordinatorConfig{
						FencePredecessor: func(_ context.Context, prev tenure.Holding) error {
							said = append(said, name+" fences "+prev.Holder)
							return nil
						},
						Reconcile: func(ctx context.Context) error {
							said = append(said, name+" works")
							<-ctx.Done()
							return nil
						},
						Logger: testkit.Quiet,
					})
					require.NoError(t, err)
					return testkit.RunCoordinator(t, context.Background(), c)
				}
				want := []string{"b fences unknown", "b works", "c works"}
				if stands {
					want = append([]string{"b fences earlier"}, want...)
				}
				for _, name := range []string{"b", "c"} {
					stop := run(name)
					time.Sleep(3 * failoverTTL)
					stop()
				}
				require.Equal(t, want, said)
			})
		})
	}
}

// The former holder was paused, and finds its own record on the new primary.
func TestAFormerHolderWritesNothingAfterAFailoverThatLosesTheSteal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		primary := newPrimary()
		store := testkit.NewMovable(primary)
		former := failoverLease(t, store, "former")
		term := testkit.MustAcquire(t, former)
		promoted := primary.Fork()
		time.Sleep(failoverTTL)
		next := testkit.NewMovable(primary)
		lease := failoverLease(t, next, "next")
		following := testkit.MustAcquire(t, lease)
		require.Greater(t, following.Token(), term.Token())
		write := func(term *tenure.Term) error {
			fenced, err := tenure.Fence(promoted, term)
			require.NoError(t, err)
			_, err = fenced.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "effect", ID: "1"}}, tenure.Unconditional())
			return err
		}
		require.ErrorIs(t, write(term), tenure.ErrMoved)
		store.Store(promoted)
		require.ErrorIs(t, former.Renew(t.Context(), term), tenure.ErrDeadline) // it has read the record
		require.ErrorIs(t, write(term), tenure.ErrMoved)
		next.Store(promoted)
		require.NoError(t, lease.Renew(t.Context(), following))
		require.NoError(t, write(following))
		require.ErrorIs(t, write(term), tenure.ErrLost)
	})
}
