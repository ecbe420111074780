package tenure_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/proof/kit"
	"github.com/tenurelib/tenure/storetest"
)

// began returns a term that another process has begun, its lease, and the lease of a process
// that will continue the term.
func (t *scene) began(cfg tenure.LeaseConfig) (term *tenure.Term, former, next *tenure.Lease) {
	t.Helper()
	former = kit.NewLease(t, t.store, cfg)
	return kit.MustAcquire(t, former), former, kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "next"})
}

func (t *scene) resume(lease *tenure.Lease, term *tenure.Term) *tenure.Term {
	t.Helper()
	resumed, err := lease.Resume(t.Context(), term.ID(), term.Token())
	require.NoError(t, err)
	return resumed
}

// wantExpiryNow fails unless a record that was just written expires after the TTL.
func (t *scene) wantExpiryNow(ttl time.Duration) {
	t.Helper()
	thief := kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "thief"})
	t.wantHeld(thief) // on a store without a clock, silence counts from the first look
	time.Sleep(ttl - time.Millisecond)
	t.wantHeld(thief)
	time.Sleep(5 * time.Millisecond) // stores stamp in milliseconds
	kit.MustAcquire(t, thief)
}

func TestATermGoesOnInAnotherProcess(t *testing.T) {
	inBubbles(t, func(t *scene) {
		labels := map[string]string{"addr": "10.0.0.1"}
		term, former, next := t.began(tenure.LeaseConfig{Holder: "former", TTL: time.Minute, Labels: labels})
		time.Sleep(20 * time.Second)
		for range 3 {
			resumed := t.resume(next, term)
			require.Equal(t, []any{term.ID(), term.Token(), "former", term.Record(), true},
				[]any{resumed.ID(), resumed.Token(), resumed.Holder(), resumed.Record(), resumed.AcquiredAt().Equal(term.AcquiredAt())})
			require.Equal(t, 58*time.Second, resumed.Remaining(), "the record's TTL less 1/30 of it")
			time.Sleep(45 * time.Second)
		}
		resumed := t.resume(next, term)
		time.Sleep(45 * time.Second)
		require.NoError(t, next.Renew(t.Context(), resumed))
		holding, err := next.Read(t.Context())
		require.NoError(t, err)
		require.Equal(t, []any{"former", term.ID(), time.Minute, labels}, []any{holding.Holder, holding.Term, holding.TTL, holding.Labels})
		require.Zero(t, holding.Age)

		require.ErrorIs(t, former.Renew(t.Context(), term), tenure.ErrLost)
		require.ErrorIs(t, former.Release(t.Context(), term), tenure.ErrLost)
		require.NoError(t, next.Renew(t.Context(), resumed), "the former process has removed the record")
		require.NoError(t, next.Release(t.Context(), resumed))
		_, err = next.Read(t.Context())
		require.ErrorIs(t, err, tenure.ErrNotFound)
	})
}

func TestTheTrustInAResumedTermCountsFromBeforeItWasSent(t *testing.T) {
	inBubbles(t, func(t *scene) {
		term, _, _ := t.began(tenure.LeaseConfig{})
		slow := storetest.Faulty(t.store, kit.AnswerAfter(5*time.Second))
		next := kit.NewLease(t, slow, tenure.LeaseConfig{})
		require.Equal(t, 24*time.Second, t.resume(next, term).Remaining())
		slow.SetHook(kit.AnswerAfter(time.Minute))
		_, err := next.Resume(t.Context(), term.ID(), term.Token())
		require.ErrorIs(t, err, tenure.ErrDeadline)
	})
}

func TestATermThatIsOverIsNotResumed(t *testing.T) {
	inBubbles(t, func(t *scene) {
		term, former, next := t.began(tenure.LeaseConfig{Holder: "former"})
		refused := func(why string) {
			t.Helper()
			resumed, err := next.Resume(t.Context(), term.ID(), term.Token())
			require.Nil(t, resumed)
			var lost *tenure.LostError
			require.ErrorAs(t, err, &lost)
			require.ErrorIs(t, err, tenure.ErrLost)
			require.ErrorContains(t, err, why)
		}
		require.NoError(t, former.Seal(t.Context(), term))
		refused("is being ended by the process that began it")
		require.NoError(t, former.Renew(t.Context(), term))
		refused("is being ended by the process that began it")
		require.NoError(t, former.Release(t.Context(), term))
		refused("is gone")
		kit.MustAcquire(t, former)
		refused("is held by former")
		putRecord(t, t.store, `{"holder":"x","term":"`+term.ID()+`","ttl_ms":30000,"offered":true}`)
		refused("is offered to x")
	})
}

// The worker is late, and no replica has taken the lease over.
func TestARecordThatHasExpiredIsResumed(t *testing.T) {
	inBubbles(t, func(t *scene) {
		term, _, next := t.began(tenure.LeaseConfig{})
		time.Sleep(time.Hour)
		require.True(t, t.resume(next, term).Valid())
		t.wantExpiryNow(30 * time.Second)
		_, err := next.Resume(t.Context(), term.ID(), term.Token())
		require.ErrorIs(t, err, tenure.ErrLost)
	})
}

// S5: what a process gives up before it releases the lease must not belong to another process
// by then.
func TestATermThatWasResumedElsewhereCannotBeSealed(t *testing.T) {
	inBubbles(t, func(t *scene) {
		unsure := storetest.Faulty(t.store, nil)
		former := kit.NewLease(t, unsure, tenure.LeaseConfig{})
		next := kit.NewLease(t, t.store, tenure.LeaseConfig{})
		term := kit.MustAcquire(t, former)
		unsure.SetHook(kit.Refuse) // the former process does not know what became of its renewal
		require.Error(t, former.Renew(t.Context(), term))
		unsure.SetHook(nil)
		resumed := t.resume(next, term)
		err := former.Seal(t.Context(), term)
		require.ErrorIs(t, err, tenure.ErrLost, "it took the other's renewal for its own")
		require.ErrorContains(t, err, "was resumed elsewhere")
		require.False(t, term.Valid())
		require.ErrorIs(t, next.Seal(t.Context(), resumed), tenure.ErrInvalid)
		require.NoError(t, next.Renew(t.Context(), resumed))
	})
}

// A request left in the record would make it look as old as it was when the request was
// written.
func TestAResumedRecordIsAsYoungAsItsRenewal(t *testing.T) {
	inBubbles(t, func(t *scene) {
		term, former, next := t.began(tenure.LeaseConfig{})
		for range 3 {
			time.Sleep(20 * time.Second)
			require.NoError(t, former.RequestRelease(t.Context()))
			t.resume(next, term)
		}
		t.wantExpiryNow(30 * time.Second)
	})
}

func TestACoordinatorHoldsAResumedTerm(t *testing.T) {
	inBubbles(t, func(t *scene) {
		term, former, next := t.began(tenure.LeaseConfig{Holder: "former"})
		require.NoError(t, former.RequestHandover(t.Context(), "other"))
		began := make(chan *tenure.Term, 1)
		c, err := tenure.NewCoordinator(next, tenure.CoordinatorConfig{Reconcile: func(ctx context.Context) error {
			began <- tenure.TermFromContext(ctx)
			return kit.UntilDone(ctx)
		}})
		require.NoError(t, err)
		require.ErrorIs(t, c.Hold(t.Context(), t.resume(next, term)), tenure.ErrResigned, "it was requested")
		require.Equal(t, term.Token(), (<-began).Token())

		term, err = kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "other"}).AcquireOrSteal(t.Context())
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		require.NoError(t, c.Hold(ctx, t.resume(next, term)))
		require.Equal(t, term.Token(), (<-began).Token())
		_, err = next.Read(t.Context())
		require.ErrorIs(t, err, tenure.ErrNotFound)

		short := kit.MustAcquire(t, kit.NewLease(t, t.store, tenure.LeaseConfig{TTL: 20 * time.Second}))
		ctx, cancel = context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		require.ErrorIs(t, c.Hold(ctx, t.resume(next, short)), tenure.ErrInvalid)
	})
}

// Two processes that hold one term find out.
func TestAResumedTermThatIsResumedAgainElsewhereIsLost(t *testing.T) {
	inBubbles(t, func(t *scene) {
		term, _, next := t.began(tenure.LeaseConfig{})
		held := t.resume(next, term)
		t.resume(kit.NewLease(t, t.store, tenure.LeaseConfig{}), term)
		require.ErrorIs(t, next.Renew(t.Context(), held), tenure.ErrLost)
	})
}

func TestAPredecessorIsFencedAlthoughTheTermWasResumed(t *testing.T) {
	inBubble(t, func(t *scene) {
		kit.MustAcquire(t, kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "dead"}))
		time.Sleep(30*time.Second + time.Millisecond)
		crashes := t.start("crashes", tenure.CoordinatorConfig{FencePredecessor: func(context.Context, tenure.Holding) error { return errors.New("not yet") }})
		time.Sleep(10 * time.Second)
		crashes.store.SetHook(kit.Hang)
		next := kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "next"})
		holding, err := next.Read(t.Context())
		require.NoError(t, err)
		require.Equal(t, "crashes", holding.Holder)
		c, err := tenure.NewCoordinator(next, t.fencing(kit.Succeeds))
		require.NoError(t, err)
		for range 2 { // it stays in the record
			_, err = next.Resume(t.Context(), holding.Term, holding.Version)
			require.NoError(t, err)
		}
		resumed, err := next.Resume(t.Context(), holding.Term, holding.Version)
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		require.NoError(t, c.Hold(ctx, resumed))
		require.Equal(t, "crashes fences dead at ", t.said()[0])
	})
}

// Servers that relay heartbeats do not get in each other's way.
func TestAWorkersHeartbeatsMayArriveAnywhere(t *testing.T) {
	kit.EachStore(t, func(t *testing.T, open func() tenure.Store) {
		lease := kit.NewLease(t, open(), tenure.LeaseConfig{})
		term := kit.MustAcquire(t, lease)
		var servers sync.WaitGroup
		for range 4 {
			server := kit.NewLease(t, open(), tenure.LeaseConfig{})
			servers.Go(func() {
				for range 25 {
					resumed, err := server.Resume(t.Context(), term.ID(), term.Token())
					if err != nil || resumed.Token() != term.Token() {
						t.Error(resumed, err)
					}
				}
			})
		}
		servers.Wait()
		require.ErrorIs(t, lease.Renew(t.Context(), term), tenure.ErrLost)

		server := kit.NewLease(t, open(), tenure.LeaseConfig{})
		resumed, err := server.Resume(t.Context(), term.ID(), term.Token())
		require.NoError(t, err)
		before, err := server.Read(t.Context())
		require.NoError(t, err)
		time.Sleep(5 * time.Millisecond)
		require.NoError(t, server.RequestRelease(t.Context()))
		_, err = server.Resume(t.Context(), term.ID(), term.Token())
		require.NoError(t, err)
		after, err := server.Read(t.Context())
		require.NoError(t, err)
		require.True(t, after.RenewedAt.After(before.RenewedAt), "the record looks as old as the request found it")
		require.ErrorIs(t, server.Release(t.Context(), resumed), tenure.ErrLost, "another has resumed it since")
		resumed, err = server.Resume(t.Context(), term.ID(), term.Token())
		require.NoError(t, err)
		fenced, err := tenure.Fence(open(), resumed)
		require.NoError(t, err)
		_, err = fenced.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "result", ID: "1"}}, tenure.IfAbsent())
		require.NoError(t, err)
		require.NoError(t, server.Release(t.Context(), resumed), "the worker said goodbye")
	})
}

// S5: if one process ends a term and another continues it, exactly one succeeds.
func TestATermIsEitherSealedOrResumed(t *testing.T) {
	kit.EachStore(t, func(t *testing.T, open func() tenure.Store) {
		store := open()
		former, next := kit.NewLease(t, store, tenure.LeaseConfig{}), kit.NewLease(t, open(), tenure.LeaseConfig{})
		sealedFirst, resumedFirst := 0, 0
		for trial := range 200 {
			term := kit.MustAcquire(t, former)
			var both sync.WaitGroup
			var sealed, resumed error
			both.Go(func() {
				time.Sleep(rand.N(2 * time.Millisecond))
				sealed = former.Seal(t.Context(), term)
			})
			both.Go(func() {
				time.Sleep(rand.N(2 * time.Millisecond))
				_, resumed = next.Resume(t.Context(), term.ID(), term.Token())
			})
			both.Wait()
			switch {
			case sealed == nil && errors.Is(resumed, tenure.ErrLost):
				sealedFirst++
			case resumed == nil && errors.Is(sealed, tenure.ErrLost):
				resumedFirst++
			default:
				t.Fatalf("trial %d: sealed: %v; resumed: %v", trial, sealed, resumed)
			}
			kit.RemoveRecord(t, store)
		}
		t.Logf("%d sealed, %d resumed", sealedFirst, resumedFirst)
		if sealedFirst == 0 || resumedFirst == 0 {
			t.Error("they never raced")
		}
	})
}

// queries counts what is sent to Postgres.
type queries struct{ n atomic.Int64 }

func (q *queries) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	q.n.Add(1)
	return ctx
}
func (q *queries) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func TestOnPostgresAHeartbeatIsOneStatement(t *testing.T) {
	config, err := pgxpool.ParseConfig(kit.PostgresURL(t))
	require.NoError(t, err)
	var sent queries
	config.ConnConfig.Tracer = &sent
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	store, err := tenure.NewPostgresStore(pool, tenure.PostgresConfig{Logger: kit.Quiet})
	require.NoError(t, err)
	t.Cleanup(func() { store.Close() })
	kit.Migrate(t, store)
	lease := kit.NewLease(t, store, tenure.LeaseConfig{Labels: map[string]string{"addr": "10.0.0.1"}})
	term := kit.MustAcquire(t, lease)
	resume := func() {
		_, err := lease.Resume(t.Context(), term.ID(), term.Token())
		require.NoError(t, err)
	}
	resume()
	sent.n.Store(0)
	for range 10 {
		resume()
	}
	require.EqualValues(t, 10, sent.n.Load())
	holding, err := lease.Read(t.Context())
	require.NoError(t, err)
	require.Equal(t, map[string]string{"addr": "10.0.0.1"}, holding.Labels)
	before, err := store.Get(t.Context(), lease.Key())
	require.NoError(t, err)
	_, err = lease.Resume(t.Context(), "another", 1)
	require.ErrorIs(t, err, tenure.ErrLost)
	after, err := store.Get(t.Context(), lease.Key())
	require.NoError(t, err)
	require.Equal(t, before.Version, after.Version, "the record is another term's")
}

func TestBadInputToResume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.Faulty(storetest.NewMem(), nil)
		lease := kit.NewLease(t, store, tenure.LeaseConfig{})
		term := kit.MustAcquire(t, lease)
		store.SetHook(func(context.Context, storetest.Call, func(context.Context) error) error {
			t.Error("the store was called")
			return nil
		})
		for _, bad := range []struct {
			id    string
			token int64
		}{{"", 1}, {"\xff", 1}, {term.ID(), 0}, {term.ID(), -1}} {
			_, err := lease.Resume(t.Context(), bad.id, bad.token)
			require.ErrorIs(t, err, tenure.ErrInvalid)
		}
		require.ErrorIs(t, lease.Seal(t.Context(), nil), tenure.ErrInvalid)
		require.ErrorIs(t, kit.NewLease(t, store, tenure.LeaseConfig{Key: tenure.Key{Type: "a", ID: "b"}}).Seal(t.Context(), term), tenure.ErrInvalid)
		store.SetHook(nil)
		_, err := lease.Resume(t.Context(), term.ID(), term.Token()+time.Hour.Microseconds())
		require.ErrorIs(t, err, tenure.ErrInvalid)
		_, err = lease.Resume(t.Context(), `"`, 1)
		require.ErrorIs(t, err, tenure.ErrLost)
	})
}

// Each may take the other's renewal for its own unanswered one.
func TestOfTwoThatHaveResumedATermOnlyTheLaterHasIt(t *testing.T) {
	for name, try := range map[string]func(*tenure.Lease, context.Context, *tenure.Term) error{
		"renew": (*tenure.Lease).Renew, "release": (*tenure.Lease).Release,
	} {
		t.Run(name, func(t *testing.T) {
			inBubbles(t, func(t *scene) {
				term, _, c := t.began(tenure.LeaseConfig{})
				unsure := storetest.Faulty(t.store, nil)
				b := kit.NewLease(t, unsure, tenure.LeaseConfig{Holder: "b"})
				resumed := t.resume(b, term)
				unsure.SetHook(kit.Refuse)
				require.Error(t, b.Renew(t.Context(), resumed))
				unsure.SetHook(nil)
				later := t.resume(c, term)
				require.ErrorIs(t, try(b, t.Context(), resumed), tenure.ErrLost)
				require.NoError(t, c.Renew(t.Context(), later))
				t.wantHeld(kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "thief"}))
			})
		})
	}
}

// The record names the replica that began the term, which may have been restarted since.
func TestAResumedTermIsNotReclaimed(t *testing.T) {
	inBubbles(t, func(t *scene) {
		cfg := tenure.LeaseConfig{Holder: "pod-0", AssumeUniqueHolder: true}
		term, _, next := t.began(cfg)
		t.resume(next, term)
		restarted := kit.NewLease(t, t.store, cfg)
		_, err := restarted.AcquireOrSteal(t.Context())
		require.ErrorIs(t, err, tenure.ErrHeld)
		t.resume(restarted, term)
		_, err = restarted.AcquireOrSteal(t.Context())
		require.ErrorIs(t, err, tenure.ErrHeld)
	})
}
