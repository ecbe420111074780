package claims_test

import (
	"context"
	"database/sql"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

func (p *process) detach(cs ...claims.Claim) {
	p.w.Helper()
	require.NoError(p.w, p.keys.Detach(cs...))
}

// releaseValue releases a claim as the process does to which it was handed.
func (w *world) releaseValue(c claims.Claim) {
	w.Helper()
	require.NoError(w, claims.ReleaseDetached(context.Background(), w.store, c))
}

func TestADetachedClaimIsNobodysUntilItIsReleased(t *testing.T) {
	testkit.Slow(t)
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		c, other := a.claimOne("one"), a.claimOne("two")
		a.detach(c)
		require.False(w, a.keys.Holds(c))
		require.True(w, a.keys.Holds(other))
		require.Equal(w, 1, a.keys.Len())
		for range 3 {
			require.Empty(w, a.claim("one"), "its own session")
			require.Empty(w, b.claim("one"))
			time.Sleep(time.Hour)
		}
		require.ErrorIs(w, a.keys.Do(w.Context(), c, testkit.Succeeds), tenure.ErrLost)
		require.ErrorIs(w, a.keys.Release(w.Context(), c), tenure.ErrLost)
		written := func(*sql.Tx) error { return nil }
		require.NoError(w, w.store.(*tenure.SQLiteStore).Fenced(w.Context(), c, written))

		began := time.Now()
		time.AfterFunc(3*time.Second, func() { w.releaseValue(c) })
		next := b.wait("one")
		require.Equal(w, 3*time.Second, time.Since(began).Round(10*time.Millisecond), "the call that waits is woken")
		require.ErrorIs(w, claims.ReleaseDetached(w.Context(), w.store, c), tenure.ErrLost)
		require.ErrorIs(w, w.store.(*tenure.SQLiteStore).Fenced(w.Context(), c, written), tenure.ErrLost)
		require.True(w, b.keys.Holds(next))
		require.NoError(w, b.keys.Release(w.Context(), next))
		require.Greater(w, a.claimOne("one").Token, c.Token)
	})
}

// S5: the session looks after claims whose answers were lost, and not after those that were
// detached.
func TestADetachedClaimIsNotTakenForOneWhoseAnswerWasLost(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		a.claimOne("known")
		a.fault(testkit.Only("claims.take", testkit.Once(testkit.LoseAnswer)))
		_, err := a.keys.TryClaim(w.Context(), "one", "two")
		require.ErrorIs(w, err, testkit.ErrReset)
		c := a.claimOne("one")
		a.detach(c)
		require.Empty(w, a.claim("one"))
		time.Sleep(2 * time.Minute)
		require.Empty(w, b.claim("one"))
		b.claimOne("two") // no session knew of this one
		w.releaseValue(c)
		b.claimOne("one")
	})
}

func TestASessionThatClosesFreesWhatItHasDetached(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		c := a.claimOne("one")
		a.detach(c)
		a.stop()
		b.claimOne("one")
		require.ErrorIs(w, claims.ReleaseDetached(w.Context(), w.store, c), tenure.ErrLost)
	})
}

func TestAClaimIsReleasedByAnotherProcessOnAServer(t *testing.T) {
	testkit.Slow(t)
	eachServer(t, func(t *testing.T, open func() tenure.Database) {
		a, b := newWorld(t, open()).start("a"), newWorld(t, open()).start("b")
		got := a.claim(names(1200)...)
		a.detach(got...)
		require.Zero(t, a.keys.Len())
		require.Empty(t, b.claim(names(1200)...))
		require.ErrorIs(t, claims.ReleaseDetached(t.Context(), b.w.store, append(got, claims.Claim{Key: tenure.Key{Type: "tenant", ID: "x"}, Session: "s", Token: 1})...), tenure.ErrLost)
		require.Empty(t, b.claim(names(1200)...), "none was released")
		require.NoError(t, claims.ReleaseDetached(t.Context(), b.w.store, got...))
		require.Len(t, b.claim(names(1200)...), 1200)
	})
}

// S5, S1: the process that a detached claim was handed to works alone, whatever becomes of what the
// owner sends, and even if others want the key.
func TestNoOtherProcessWorksUnderADetachedClaim(t *testing.T) {
	testkit.Slow(t)
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		late := func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
			d := rand.N(20 * time.Second)
			go func() {
				time.Sleep(d)
				_ = do(context.WithoutCancel(ctx))
			}()
			return testkit.ErrReset
		}
		hooks := []storetest.Hook{nil, testkit.Only("claims.take", testkit.Once(testkit.LoseAnswer)), testkit.Only("claims.take", testkit.Once(late)), testkit.Only("claims.free", testkit.Once(late))}
		ctx, cancel := context.WithTimeout(w.Context(), 15*time.Minute)
		defer cancel()
		var working sync.WaitGroup
		passed, first := 0, make(chan struct{}) // b, which may get the key each time, begins after the first
		working.Go(func() {
			for ctx.Err() == nil {
				got, _ := a.keys.Claim(ctx, "one")
				for _, c := range got {
					a.detach(c)
					if passed++; passed == 1 {
						close(first)
					}
					working.Go(func() {
						w.jobs.begin("worker", c)
						time.Sleep(rand.N(time.Minute))
						w.jobs.end("worker", c)
						w.releaseValue(c)
					})
				}
			}
		})
		working.Go(func() {
			select {
			case <-first:
				b.actors(ctx, []string{"one"})
			case <-ctx.Done():
			}
		})
		for ctx.Err() == nil {
			a.fault(hooks[rand.IntN(len(hooks))])
			testkit.Sleep(ctx, rand.N(30*time.Second))
		}
		a.fault(nil)
		working.Wait()
		require.NotZero(w, passed)
	})
}

func TestBadInputToClaimsAsValues(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		mine, other, running := a.claimOne("mine"), b.claimOne("other"), a.claimOne("running")
		a.work(running, 0)
		time.Sleep(time.Second)
		for _, bad := range []struct {
			claims []claims.Claim
			want   error
		}{
			{nil, tenure.ErrInvalid}, {[]claims.Claim{mine, mine}, tenure.ErrInvalid}, {[]claims.Claim{{}}, tenure.ErrInvalid},
			{[]claims.Claim{mine, other}, tenure.ErrLost}, {[]claims.Claim{mine, running}, tenure.ErrInvalid},
			{[]claims.Claim{mine, {Key: tenure.Key{Type: "kind", ID: "x"}}}, tenure.ErrInvalid},
		} {
			require.ErrorIs(w, a.keys.Detach(bad.claims...), bad.want, "%v", bad.claims)
		}
		require.True(w, a.keys.Holds(mine))

		good := claims.Claim{Key: tenure.Key{Type: "tenant", ID: "x"}, Session: "s", Token: 1}
		for _, bad := range [][]claims.Claim{nil, {mine, mine}, {{}}, {mine, {Key: good.Key}}, {mine, {Key: good.Key, Session: "s"}}, {mine, {Key: good.Key, Session: "\xff", Token: 1}}, {mine, {Session: "s", Token: 1}}} {
			require.ErrorIs(w, claims.ReleaseDetached(w.Context(), w.store, bad...), tenure.ErrInvalid, "%v", bad)
		}
		require.ErrorIs(w, claims.ReleaseDetached(w.Context(), nil, good), tenure.ErrInvalid)
		require.ErrorIs(w, claims.ReleaseDetached(w.Context(), tenure.Static(), good), errors.ErrUnsupported)
		require.ErrorIs(w, claims.ReleaseDetached(w.Context(), w.store, mine, good), tenure.ErrLost)
		require.NoError(w, w.store.(*tenure.SQLiteStore).Fenced(w.Context(), mine, func(*sql.Tx) error { return nil }), "none was released")
	})
}

// A session that goes on elsewhere.

// resume goes on with a process's session, as another process does that knows its term.
func (w *world) resume(id string) error {
	w.Helper()
	lease := testkit.NewLease(w, w.store, tenure.LeaseConfig{Key: claims.SessionKey(id)})
	holding, err := lease.Read(w.Context())
	require.NoError(w, err)
	_, err = lease.Resume(w.Context(), holding.Term, holding.Version)
	return err
}

// S5: the funcs of the other process run under what the rows name.
func TestClosingASessionThatWasResumedElsewhereFreesNothing(t *testing.T) {
	for name, fault := range map[string]storetest.Hook{"sure of its last renewal": nil, "unsure of its last renewal": testkit.Only("put", testkit.Refuse)} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(w *world) {
				a := w.start("a")
				a.claim("one", "two")
				id := a.session.ID()
				a.fault(fault)
				time.Sleep(11 * time.Second)
				require.Equal(w, id, a.session.ID())
				require.NoError(w, w.resume(id))
				a.fault(nil)
				a.stop()
				require.Len(w, w.owned(id), 2)
				require.NoError(w, w.resume(id), "its record was deleted")
			})
		})
	}
}

func TestASessionThatIsClosingIsNotResumed(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		a.work(a.claimOne("one"), time.Hour)
		a.claimOne("two")
		time.Sleep(time.Second)
		id := a.session.ID()
		closed := make(chan struct{})
		go func() { a.stop(); close(closed) }()
		for range 100 {
			time.Sleep(15 * time.Second)
			require.ErrorIs(w, w.resume(id), tenure.ErrLost)
		}
		b.claimOne("two")
		<-closed
		b.claimOne("one")
	})
}

// The session of a worker that servers keep for it.
func TestASessionThatIsResumedIsNotRemoved(t *testing.T) {
	testkit.Slow(t)
	eachServer(t, func(t *testing.T, open func() tenure.Database) {
		w := newWorld(t, open())
		b := w.startWith("b", claims.SessionConfig{TTL: 5 * time.Second})
		const id = "9d6e7a52-7a4c-4b86-9c0e-3a1d1f2b5c77"
		lease := testkit.NewLease(t, w.store, tenure.LeaseConfig{Key: claims.SessionKey(id), TTL: 5 * time.Second})
		term := testkit.MustAcquire(t, lease)
		_, err := w.table.Take(t.Context(), id, "tenant", nil, nil, []string{"one"}, testkit.Patience)
		require.NoError(t, err)
		go func() { _, _ = b.keys.Claim(t.Context(), "one") }() // which looks when a session can expire
		for end := time.Now().Add(6 * time.Second); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
			_, err := testkit.NewLease(t, w.store, tenure.LeaseConfig{Key: lease.Key()}).Resume(t.Context(), term.ID(), term.Token())
			require.NoError(t, err)
			require.Len(t, w.owned(id), 1)
		}
		testkit.Await(t, "it expires", func() bool { return len(w.owned(id)) == 0 })
	})
}

// S2.
func TestAStoreThatIsFencedByAClaimWritesOnlyWhileItStands(t *testing.T) {
	eachServer(t, func(t *testing.T, open func() tenure.Database) {
		a, b := newWorld(t, open()).start("a"), newWorld(t, open()).start("b")
		c := a.claimOne("acme")
		var store tenure.Store = open()
		fenced, err := tenure.Fence(store, c)
		require.NoError(t, err)
		ctx := t.Context()
		obj, err := fenced.PutIf(ctx, tenure.Object{Key: c.Key}, tenure.IfAbsent()) // also the object of the same key
		require.NoError(t, err)
		obj, err = fenced.PutIf(ctx, obj, tenure.IfVersion(obj.Version))
		require.NoError(t, err)
		_, err = fenced.PutIf(ctx, obj, tenure.IfVersion(obj.Version-1))
		require.ErrorIs(t, err, tenure.ErrConflict)
		_, err = tenure.Fence(fenced, c)
		require.ErrorIs(t, err, errors.ErrUnsupported)
		_, err = tenure.Fence(fenced, testkit.MustAcquire(t, testkit.NewLease(t, store, tenure.LeaseConfig{})))
		require.ErrorIs(t, err, errors.ErrUnsupported)

		require.NoError(t, a.keys.Release(ctx, c))
		next := b.claimOne("acme")
		for _, cond := range []tenure.WriteCondition{tenure.IfVersion(obj.Version), tenure.Unconditional()} {
			_, err = fenced.PutIf(ctx, tenure.Object{Key: obj.Key, Name: "late"}, cond)
			require.ErrorIs(t, err, tenure.ErrLost)
		}
		_, err = fenced.PutIf(ctx, tenure.Object{Key: tenure.Key{Type: "late", ID: "1"}}, tenure.IfAbsent())
		require.ErrorIs(t, err, tenure.ErrLost)
		require.ErrorIs(t, fenced.DeleteIf(ctx, obj.Key, tenure.IfVersion(obj.Version)), tenure.ErrLost)
		require.ErrorIs(t, fenced.(tenure.Notifier).DeleteAndWake(ctx, obj.Key, tenure.IfVersion(obj.Version)), tenure.ErrLost)
		now, err := store.Get(ctx, obj.Key)
		require.NoError(t, err)
		require.Equal(t, obj.Version, now.Version)
		_, err = store.Get(ctx, tenure.Key{Type: "late", ID: "1"})
		require.ErrorIs(t, err, tenure.ErrNotFound)
		fenced, err = tenure.Fence(store, next)
		require.NoError(t, err)
		require.NoError(t, fenced.DeleteIf(ctx, obj.Key, tenure.IfVersion(obj.Version)))

		for _, bad := range []struct {
			store tenure.Store
			c     claims.Claim
			want  error
		}{{nil, c, tenure.ErrInvalid}, {store, claims.Claim{}, tenure.ErrInvalid}, {tenure.Static(), c, errors.ErrUnsupported}} {
			_, err := tenure.Fence(bad.store, bad.c)
			require.ErrorIs(t, err, bad.want)
		}
	})
}

// S1: a repeated release may overtake the next claim of the key, which it must not free.
func TestOnPostgresALateReleaseLeavesTheNextClaim(t *testing.T) {
	testkit.Slow(t)
	t.Parallel()
	w := newWorld(t, testkit.OpenPostgres(t, testkit.PostgresURL(t), tenure.PostgresConfig{}))
	a := w.start("a")
	ids := names(1000)
	last := ids[len(ids)-1]
	for range 30 {
		got := a.claim(ids...)
		require.Len(t, got, len(ids))
		a.detach(got...)
		var one claims.Claim
		for _, c := range got {
			if c.Key.ID == last {
				one = c
			}
		}
		var both sync.WaitGroup
		both.Go(func() { _ = claims.ReleaseDetached(t.Context(), w.store, got...) })
		both.Go(func() {
			time.Sleep(rand.N(20 * time.Millisecond))
			_ = claims.ReleaseDetached(t.Context(), w.store, one)
		})
		var next []claims.Claim
		for len(next) == 0 {
			next = a.claim(last)
		}
		both.Wait()
		rows, err := w.table.Look(t.Context(), "tenant", []string{last}, testkit.Patience)
		require.NoError(t, err)
		require.Equal(t, next[0].Session, rows[0].Session, "who owns the row, which the session holds: %v", a.keys.Holds(next[0]))
		require.NoError(t, a.keys.Release(t.Context(), next...))
		for _, c := range got { // those that were not released, if the one came first
			_ = claims.ReleaseDetached(t.Context(), w.store, c)
			break
		}
		rest, err := w.table.Look(t.Context(), "tenant", ids, testkit.Patience)
		require.NoError(t, err)
		for _, r := range rest {
			if r.Session != "" {
				_, err := w.table.Free(t.Context(), r.Session, "tenant", []string{r.ID}, []int64{r.Token}, objects.Freeing{}, testkit.Patience)
				require.NoError(t, err)
			}
		}
	}
}
