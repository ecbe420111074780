package claims_test

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

// failingOver is a database that says that it has failed over.
type failingOver struct {
	*tenure.SQLiteStore
	at atomic.Pointer[time.Time]
}

func (f *failingOver) Lineage(context.Context) (tenure.Lineage, error) {
	at := *f.at.Load()
	return tenure.Lineage{Server: at.String(), Mark: at.String(), Age: time.Since(at)}, nil
}

func (f *failingOver) failOver() {
	now := time.Now()
	f.at.Store(&now)
}

func TestASessionWhoseRenewalsAFailoverMayHaveLostIsNotRemovedForATTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := &failingOver{SQLiteStore: testkit.OpenSQLite(t, ":memory:")}
		db.failOver()
		time.Sleep(time.Hour)
		w := newWorld(t, db)
		a := w.start("a")
		a.claim("1")
		b := w.start("b")
		var named tenure.WriteCondition
		b.fault(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			if call.Op == "delete" {
				named = call.Condition
			}
			return do(ctx)
		})
		key := claims.SessionKey(a.session.ID())
		time.Sleep(time.Second)
		a.crash()
		time.Sleep(ttl - 2*time.Second)
		db.failOver()
		time.Sleep(ttl - 100*time.Millisecond)
		_, err := w.store.Get(w.Context(), key)
		require.NoError(w, err, "it may live")
		time.Sleep(ttl)
		_, err = w.store.Get(w.Context(), key)
		require.ErrorIs(w, err, tenure.ErrNotFound)
		on, err := db.Lineage(t.Context())
		require.NoError(t, err)
		require.NoError(t, named.CheckServer(on.Server))
		require.Error(t, named.CheckServer("another"), "it names the server on which that was decided")
	})
}

// failoverWorld is a database whose tables can be set back to a backup, as a failover does that loses commits.
type failoverWorld struct {
	*testing.T
	db *memDB
}

// member is a process with a session.
type member struct {
	session *claims.Session
	keys    *claims.Keys
	store   *storetest.FaultyStore
	log     *testkit.SyncBuffer
}

func eachFailover(t *testing.T, test func(w *failoverWorld)) {
	synctest.Test(t, func(t *testing.T) {
		db := newMemDB(time.Now)
		db.lineages, db.records.Lineages = true, true
		test(&failoverWorld{t, db})
	})
}

func (w *failoverWorld) join(ttl time.Duration, hook storetest.Hook) *member {
	m := &member{store: storetest.Faulty(w.db, hook), log: new(testkit.SyncBuffer)}
	var err error
	m.session, err = claims.NewSession(m.store, claims.SessionConfig{TTL: ttl, Logger: logTo(m.log)})
	require.NoError(w, err)
	m.keys, err = claims.NewKeys(m.session, "tenant")
	require.NoError(w, err)
	ctx, cancel := context.WithCancel(context.Background())
	over := make(chan struct{})
	go func() { defer close(over); _ = m.session.Run(ctx) }()
	w.Cleanup(func() { cancel(); <-over })
	synctest.Wait()
	return m
}

func (w *failoverWorld) backUp() (b backup) {
	w.db.locked(func() { b = w.db.backUp() })
	return b
}

func (w *failoverWorld) failOver(to backup) { w.db.locked(func() { w.db.restore(to) }) }

func (w *failoverWorld) claim(m *member, id string) claims.Claim {
	w.Helper()
	got, err := m.keys.TryClaim(w.Context(), id)
	require.NoError(w, err)
	require.Len(w, got, 1)
	return got[0]
}

func TestWhatAFailoverHasLostOfASessionIsWrittenAgain(t *testing.T) {
	eachFailover(t, func(w *failoverWorld) {
		nothing := w.backUp()
		a := w.join(ttl, nil)
		held, detached := w.claim(a, "1"), w.claim(a, "2")
		require.NoError(w, a.keys.Detach(detached))
		id, told := a.session.ID(), error(nil)
		go func() {
			told = a.keys.Do(w.Context(), held, func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })
		}()
		b := w.join(ttl, nil)
		w.failOver(nothing)
		for range 3 * ttl / time.Second {
			time.Sleep(time.Second)
			got, err := b.keys.TryClaim(w.Context(), "1", "2")
			require.NoError(w, err)
			require.Empty(w, got)
			require.True(w, a.keys.Holds(held))
		}
		require.NoError(w, told)
		require.Equal(w, id, a.session.ID())
		require.Contains(w, a.log.String(), `the database has failed over and lost claims" kind=tenant written_again=2 ended=0`)
		standing, err := b.keys.Standing(w.Context(), "1", "2")
		require.NoError(w, err)
		require.ElementsMatch(w, []claims.Claim{held, detached}, standing, "with the same tokens")
	})
}

// The row is the session's, of a claim that it has ended since.
func TestALaterClaimThatAFailoverHasLostIsWrittenOverAnEarlierOne(t *testing.T) {
	eachFailover(t, func(w *failoverWorld) {
		a := w.join(ttl, nil)
		earlier, other := w.claim(a, "1"), w.claim(a, "2")
		before := w.backUp()
		require.NoError(w, a.keys.Release(w.Context(), earlier))
		held := w.claim(a, "1")
		w.failOver(before)
		time.Sleep(2 * ttl)
		standing, err := a.keys.Standing(w.Context(), "1", "2")
		require.NoError(w, err)
		require.ElementsMatch(w, []claims.Claim{held, other}, standing)
		require.True(w, a.keys.Holds(held))
	})
}

// A write under the claim need neither wait for the next renewal nor fail.
func TestAFenceHasALostClaimWrittenAgainAtOnce(t *testing.T) {
	eachFailover(t, func(w *failoverWorld) {
		a := w.join(ttl, nil)
		before := w.backUp()
		held := w.claim(a, "1")
		w.failOver(before)
		fence, err := held.Fence()
		require.NoError(w, err)
		began := time.Now()
		again, err := fence.Reassert(w.Context())
		require.NoError(w, err)
		require.True(w, again)
		require.Less(w, time.Since(began), time.Second)
		standing, err := a.keys.Standing(w.Context(), "1")
		require.NoError(w, err)
		require.Equal(w, []claims.Claim{held}, standing)

		elsewhere := held
		elsewhere.Session = "another process's"
		fence, err = elsewhere.Fence()
		require.NoError(w, err)
		again, err = fence.Reassert(w.Context())
		require.NoError(w, err)
		require.False(w, again)
	})
}

type noJobsWatcher struct{}

func (noJobsWatcher) jobTaken(context.Context, *memJob)                        {}
func (noJobsWatcher) jobFreed(context.Context, objects.Claim, *objects.Ending) {}

func TestARowWhoseTakeAFailoverHasLostIsFinished(t *testing.T) {
	eachFailover(t, func(w *failoverWorld) {
		jobs := map[string]*memJob{}
		for _, id := range []string{"1", "2", "3"} {
			jobs[id] = &memJob{Claim: objects.Claim{Kind: "jobs", ID: id}}
		}
		w.db.table = &memRows{d: w.db, watcher: noJobsWatcher{}, jobs: jobs}
		a := w.join(ttl, nil)
		queue := testkit.Must(claims.NewQueue(a.store, claims.QueueConfig{Table: "jobs", Ready: "true", Done: "done = true"}))
		worker := testkit.Must(claims.NewWorker(a.session, queue))
		rows, err := worker.Take(w.Context(), 3)
		require.NoError(w, err)
		require.Len(w, rows, 3)
		w.failOver(w.backUp())
		w.db.locked(func() {
			for _, j := range jobs {
				j.Session, j.Token = "", 1
			}
		})
		began := time.Now()
		require.NoError(w, queue.Finish(w.Context(), rows[0]))
		require.NoError(w, queue.Finish(w.Context(), rows[1:]...))
		require.Less(w, time.Since(began), time.Second)
		w.db.locked(func() {
			for _, j := range jobs {
				require.True(w, j.done, j.ID)
			}
		})
		w.db.locked(func() { jobs["1"].Token++ })
		require.ErrorIs(w, queue.Finish(w.Context(), rows[0]), tenure.ErrLost)
	})
}

// Until the failover has settled, the session may still trust a claim that it has lost by it.
func TestNothingIsClaimedBeforeAFailoverHasSettled(t *testing.T) {
	calls := map[string]func(ctx context.Context, keys *claims.Keys, seen claims.Claim) ([]claims.Claim, error){
		"Claim": func(ctx context.Context, keys *claims.Keys, _ claims.Claim) ([]claims.Claim, error) {
			return keys.Claim(ctx, "1")
		},
		"Move": func(ctx context.Context, keys *claims.Keys, seen claims.Claim) ([]claims.Claim, error) {
			return keys.Move(ctx, seen)
		},
	}
	for what, longest := range map[string]time.Duration{"by the own TTL": ttl, "by the longest TTL of a session": 3 * ttl} {
		for name, call := range calls {
			t.Run(name+" "+what, func(t *testing.T) {
				eachFailover(t, func(w *failoverWorld) {
					a, b := w.join(longest, nil), w.join(ttl, nil)
					seen := w.claim(a, "moved")
					w.failOver(w.backUp())
					began := time.Now()
					got, err := b.keys.TryClaim(w.Context(), "2")
					require.NoError(w, err)
					require.Empty(w, got)
					got, err = call(w.Context(), b.keys, seen)
					require.NoError(w, err)
					require.Len(w, got, 1)
					require.GreaterOrEqual(w, time.Since(began), longest)
					require.Less(w, time.Since(began), longest+time.Second)
					w.claim(b, "2")
				})
			})
		}
	}
}

func TestNoRowIsTakenForARemoteWorkerBeforeAFailoverHasSettled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := &failingOver{SQLiteStore: testkit.OpenSQLite(t, ":memory:")}
		db.failOver()
		testkit.MigrateClaims(t, db)
		cfg := claims.QueueConfig{Table: "tasks", Ready: "true"}
		testkit.ExecSQL(t, db.DB(), `CREATE TABLE tasks (id integer PRIMARY KEY)`)
		queue := testkit.Must(claims.NewQueue(db, cfg))
		testkit.ExecSQL(t, db.DB(), testkit.Must(cfg.SQLiteDDL()))
		testkit.ExecSQL(t, db.DB(), `INSERT INTO tasks (id) VALUES (1)`)
		worker := testkit.Must(tenure.NewLease(db, tenure.LeaseConfig{Key: claims.SessionKey("w")}))
		_, err := worker.TryAcquire(t.Context())
		require.NoError(t, err)
		got, err := queue.TryTakeFor(t.Context(), "w", claims.TakeOptions{N: 1})
		require.NoError(t, err)
		require.Empty(t, got)
		began := time.Now()
		got, err = queue.TakeFor(t.Context(), "w", claims.TakeOptions{N: 1, Have: []claims.Claim{}})
		require.NoError(t, err)
		require.Len(t, got, 1)
		require.GreaterOrEqual(t, time.Since(began), tenure.DefaultTTL)
	})
}

// The statement was sent before the failover, and comes after it.
func TestAStatementThatClaimsNamesItsServer(t *testing.T) {
	eachFailover(t, func(w *failoverWorld) {
		a := w.join(ttl, nil)
		require.NoError(w, a.keys.Release(w.Context(), w.claim(a, "1")))
		before := w.backUp()
		b := w.join(ttl, func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			if call.Op == "claims.take" && slices.Contains(call.IDs, "1") {
				w.failOver(before)
			}
			return do(ctx)
		})
		held := w.claim(a, "2")
		go func() { _, _ = b.keys.Claim(w.Context(), "1") }()
		synctest.Wait()
		rows, err := w.db.Look(w.Context(), "tenant", []string{"1"}, time.Second)
		require.NoError(w, err)
		require.Len(w, rows, 1)
		require.Empty(w, rows[0].Session)
		require.True(w, a.keys.Holds(held))
	})
}

// The statement is done before the failover, and its answer comes after the claims were compared.
func TestAClaimWhoseAnswerComesAfterAFailoverIsCompared(t *testing.T) {
	eachFailover(t, func(w *failoverWorld) {
		a := w.join(ttl, nil)
		before := w.backUp()
		a.store.SetHook(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			err := do(ctx)
			if call.Op == "claims.take" {
				w.failOver(before)
				time.Sleep(ttl/3 + ttl/12) // a renewal begins meanwhile
			}
			return err
		})
		held := w.claim(a, "1")
		a.store.SetHook(nil)
		b := w.join(ttl, nil)
		time.Sleep(2 * ttl)
		require.True(w, a.keys.Holds(held))
		got, err := b.keys.TryClaim(w.Context(), "1")
		require.NoError(w, err)
		require.Empty(w, got)
	})
}

// The database refuses to have it written again.
func TestAClaimThatCannotBeWrittenAgainEnds(t *testing.T) {
	eachFailover(t, func(w *failoverWorld) {
		a := w.join(ttl, nil)
		w.claim(a, "2")
		require.NoError(w, a.keys.Release(w.Context(), w.claim(a, "1")))
		before := w.backUp()
		time.Sleep(time.Second)
		held := w.claim(a, "1")
		told := make(chan error, 1)
		go func() {
			_ = a.keys.Do(w.Context(), held, func(ctx context.Context) error {
				<-ctx.Done()
				told <- context.Cause(ctx)
				return nil
			})
		}()
		w.failOver(before)
		w.db.locked(func() { w.db.refused = map[string]bool{"1": true} })
		select {
		case cause := <-told:
			require.ErrorIs(w, cause, tenure.ErrLost)
		case <-time.After(ttl):
			require.Fail(w, "its func goes on")
		}
		require.False(w, a.keys.Holds(held))
		require.True(w, a.session.Valid())
	})
}

// A look that finds a claim's row missing may come before the renewal that writes it again.
func TestARegularLookEndsNoClaimThatIsYetToBeWrittenAgain(t *testing.T) {
	eachFailover(t, func(w *failoverWorld) {
		a := w.join(ttl, nil)
		before := w.backUp()
		held := w.claim(a, "1")
		w.failOver(before)
		a.store.SetHook(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			if call.Op == "put" { // the renewal
				return errors.New("connection refused")
			}
			return do(ctx)
		})
		require.NoError(w, a.keys.LookAtAll())
		require.True(w, a.keys.Holds(held))
		a.store.SetHook(nil)
		time.Sleep(ttl)
		require.NoError(w, a.keys.LookAtAll())
		require.True(w, a.keys.Holds(held))
	})
}

// Some keys are claimed, or moved, before the failover, and the others can't be yet: the caller gets the first ones.
func TestACallThatAFailoverInterruptsReturnsWhatItHas(t *testing.T) {
	interrupt := func(w *failoverWorld, m *member, op string) {
		calls := 0
		m.store.SetHook(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			if call.Op == op {
				if calls++; calls == 2 {
					w.failOver(w.backUp())
				}
			}
			return do(ctx)
		})
	}
	t.Run("TryClaim", func(t *testing.T) {
		eachFailover(t, func(w *failoverWorld) {
			a := w.join(ttl, nil)
			interrupt(w, a, "claims.look")
			got, err := a.keys.TryClaim(w.Context(), names(1500)...)
			require.NoError(w, err)
			require.Len(w, got, 1000)
			require.Equal(w, 1000, a.keys.Len())
		})
	})
	t.Run("Move", func(t *testing.T) {
		eachFailover(t, func(w *failoverWorld) {
			a, b := w.join(ttl, nil), w.join(ttl, nil)
			seen, err := a.keys.TryClaim(w.Context(), names(1500)...)
			require.NoError(w, err)
			interrupt(w, b, "claims.move")
			got, err := b.keys.Move(w.Context(), seen...)
			require.NoError(w, err)
			require.Len(w, got, 1500)
			require.Equal(w, 1500, b.keys.Len())
		})
	})
}

// A table that can't be read costs the claims on its rows, and not the session.
func TestAKindThatCannotBeComparedEndsAlone(t *testing.T) {
	eachFailover(t, func(w *failoverWorld) {
		a := w.join(ttl, nil)
		other, err := claims.NewKeys(a.session, "other")
		require.NoError(w, err)
		held := w.claim(a, "1")
		unreadable, err := other.TryClaim(w.Context(), "1")
		require.NoError(w, err)
		id := a.session.ID()
		w.failOver(w.backUp())
		a.store.SetHook(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			switch {
			case call.Op == "claims.owned": // of either kind; then each row is looked at
				return errors.New("unreadable")
			case call.Op == "claims.look" && call.Key.Type == "other":
				<-ctx.Done()
				return ctx.Err()
			}
			return do(ctx)
		})
		time.Sleep(2 * ttl)
		a.store.SetHook(nil)
		require.Equal(w, id, a.session.ID())
		require.True(w, a.keys.Holds(held))
		require.False(w, other.Holds(unreadable[0]))
		require.Contains(w, a.log.String(), `lost claims" kind=other written_again=0 ended=1 error=`)
	})
}

// The server does not know the worker's claims, so its renewal shows nothing about them.
func TestASessionOfARemoteWorkerIsNotResumedBeforeAFailoverHasSettled(t *testing.T) {
	eachFailover(t, func(w *failoverWorld) {
		lease := func() *tenure.Lease {
			return testkit.Must(tenure.NewLease(w.db, tenure.LeaseConfig{Key: claims.SessionKey("r"), TTL: ttl}))
		}
		term, err := lease().TryAcquire(w.Context())
		require.NoError(w, err)
		server := lease()
		resumed, err := server.Resume(w.Context(), term.ID(), term.Token())
		require.NoError(w, err)
		w.failOver(w.backUp())
		require.ErrorIs(w, server.Renew(w.Context(), resumed), tenure.ErrHeld)
		_, err = server.Resume(w.Context(), term.ID(), term.Token())
		require.ErrorIs(w, err, tenure.ErrHeld)
	})
}
