package claims_test

import (
	"context"
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

// tell runs a func for a claim, and returns why it was told to return.
func (w *failoverWorld) tell(m *member, c claims.Claim) (told chan error) {
	told = make(chan error, 1)
	go func() {
		_ = m.keys.Do(context.WithoutCancel(w.Context()), c, func(ctx context.Context) error {
			<-ctx.Done()
			told <- context.Cause(ctx)
			return nil
		})
	}()
	return told
}

// The session, and what the failover has not lost, go on.
func TestAClaimThatAFailoverHasLostEndsBeforeAnotherCanHaveIt(t *testing.T) {
	eachFailover(t, func(w *failoverWorld) {
		a := w.join(ttl, nil)
		kept, passed := w.claim(a, "kept"), w.claim(a, "passed")
		require.NoError(w, a.keys.Detach(passed))
		before := w.backUp()
		held, detached := w.claim(a, "1"), w.claim(a, "2")
		require.NoError(w, a.keys.Detach(detached))
		id, told := a.session.ID(), w.tell(a, held)
		b := w.join(ttl, nil)
		w.failOver(before)
		began := time.Now()
		select {
		case cause := <-told:
			var ended *claims.EndedError
			require.ErrorAs(w, cause, &ended)
			require.ErrorIs(w, cause, tenure.ErrLost)
			require.Equal(w, []claims.Claim{held}, ended.Claims)
		case <-time.After(ttl / 2):
			require.Fail(w, "its func goes on")
		}
		synctest.Wait() // it is logged after its func was told
		require.Contains(w, a.log.String(), `claims have ended, because the database has failed over and lost them" kind=tenant claims=2`)
		got := []claims.Claim(nil)
		for len(got) == 0 {
			time.Sleep(time.Second)
			require.True(w, a.keys.Holds(kept))
			require.False(w, a.keys.Holds(held))
			var err error
			got, err = b.keys.TryClaim(w.Context(), "1", "2", "kept", "passed")
			require.NoError(w, err)
		}
		require.Len(w, got, 2, "what was lost is free")
		require.GreaterOrEqual(w, time.Since(began), ttl)
		require.Less(w, time.Since(began), ttl+ttl/3+2*time.Second, "of the first answer, to its renewal")
		require.Greater(w, got[0].Token, max(held.Token, detached.Token))
		require.Equal(w, id, a.session.ID())
		standing, err := b.keys.Standing(w.Context(), "kept", "passed")
		require.NoError(w, err)
		require.ElementsMatch(w, []claims.Claim{kept, passed}, standing)
	})
}

// The failover has lost the end of the first claim and the whole second one. A write under the first one, which lands
// late, would overtake what was written under the second.
func TestOverAFailoverNoWriteUnderAClaimThatWasReleasedLands(t *testing.T) {
	for name, next := range map[string]func(w *failoverWorld, a, b *member, first claims.Claim, runOn func(*member, claims.Claim)) (*member, claims.Claim){
		"the next claim is another session's": func(w *failoverWorld, a, b *member, first claims.Claim, _ func(*member, claims.Claim)) (*member, claims.Claim) {
			require.NoError(w, a.keys.Release(w.Context(), first))
			return b, w.claim(b, "1")
		},
		"the next claim is the same session's, and its func runs on": func(w *failoverWorld, a, b *member, first claims.Claim, runOn func(*member, claims.Claim)) (*member, claims.Claim) {
			require.NoError(w, a.keys.Release(w.Context(), first))
			later := w.claim(a, "1")
			runOn(a, later)
			return a, later
		},
		"it is moved, and its func runs on": func(w *failoverWorld, a, b *member, first claims.Claim, runOn func(*member, claims.Claim)) (*member, claims.Claim) {
			runOn(a, first)
			moved, err := b.keys.Move(w.Context(), first)
			require.NoError(w, err)
			require.Len(w, moved, 1)
			time.Sleep(time.Second) // its session is told
			require.False(w, a.keys.Holds(first))
			return b, moved[0]
		},
	} {
		t.Run(name, func(t *testing.T) {
			eachFailover(t, func(w *failoverWorld) {
				a, b := w.join(ttl, nil), w.join(ttl, nil)
				released, other := w.claim(a, "1"), w.claim(a, "2")
				before := w.backUp()
				end := make(chan bool)
				defer close(end)
				next, later := next(w, a, b, released, func(m *member, c claims.Claim) {
					go m.keys.Do(w.Context(), c, func(context.Context) error { <-end; return nil })
					synctest.Wait()
				})
				w.failOver(before)
				a.store.SetHook(testkit.Only("claims.free", testkit.Once(testkit.Refuse)))
				landed := false
				for range 2 * ttl / (100 * time.Millisecond) {
					require.Error(w, w.db.fenced(w.Context(), rowOf(released), 0), "it is late")
					require.Error(w, w.db.fenced(w.Context(), rowOf(later), 0), "it is lost")
					landed = landed || w.db.fenced(w.Context(), rowOf(other), 0) == nil
					time.Sleep(100 * time.Millisecond)
				}
				require.True(w, landed)
				require.False(w, next.keys.Holds(later))
				require.True(w, a.keys.Holds(other))
				w.claim(b, "1")
			})
		})
	}
}

// A write under the claim need not wait for the next renewal.
func TestWhoeverWritesUnderAClaimHasItsSessionRenewedAtOnceAfterAFailover(t *testing.T) {
	eachFailover(t, func(w *failoverWorld) {
		a := w.join(ttl, nil)
		kept := w.claim(a, "kept")
		before := w.backUp()
		lost := w.claim(a, "lost")
		w.failOver(before)
		require.ErrorIs(w, w.db.fenced(w.Context(), rowOf(kept), 0), tenure.ErrMoved)
		began := time.Now()
		renewals := a.store.Backend().Renewals()
		renewed, err := renewals.Renew(w.Context(), kept.Session)
		require.NoError(w, err)
		require.True(w, renewed)
		require.Less(w, time.Since(began), time.Second)
		require.True(w, a.keys.Holds(kept))
		require.False(w, a.keys.Holds(lost), "the claims were compared first")
		require.NoError(w, w.db.fenced(w.Context(), rowOf(kept), 0))

		renewed, err = renewals.Renew(w.Context(), "another process's")
		require.NoError(w, err)
		require.False(w, renewed)
	})
}

type noJobsWatcher struct{}

func (noJobsWatcher) jobTaken(context.Context, *memJob)                        {}
func (noJobsWatcher) jobFreed(context.Context, objects.Claim, *objects.Ending) {}

func TestARowWhoseTakeAFailoverHasLostIsNotFinished(t *testing.T) {
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
		require.ErrorIs(w, queue.Finish(w.Context(), rows[0]), tenure.ErrLost)
		require.ErrorIs(w, queue.Finish(w.Context(), rows[1:2]...), tenure.ErrLost)
		time.Sleep(ttl / 2)
		require.False(w, worker.Holds(rows[2]), "it was compared with its row")
		w.db.locked(func() {
			for _, j := range jobs {
				require.False(w, j.done, j.ID)
			}
		})
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
		got, err = takeFor(t.Context(), queue, "w", claims.TakeOptions{N: 1, Have: []claims.Claim{}})
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

// The statement is done before the failover, and its answer comes after the next renewal has begun, or even after the session
// has compared its claims without waiting for it any longer.
func TestAClaimWhoseAnswerComesAfterAFailoverDoesNotCountUncompared(t *testing.T) {
	for _, answer := range []time.Duration{ttl / 12, ttl / 2} {
		t.Run(answer.String(), func(t *testing.T) {
			eachFailover(t, func(w *failoverWorld) {
				a := w.join(ttl, nil)
				kept := w.claim(a, "kept")
				before := w.backUp()
				a.store.SetHook(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
					if ctx.Err() != nil {
						return ctx.Err()
					}
					err := do(ctx)
					if call.Op == "claims.take" && slices.Contains(call.IDs, "1") {
						w.failOver(before)
						time.Sleep(ttl/3 + answer) // a renewal begins meanwhile
					}
					return err
				})
				got, err := a.keys.TryClaim(w.Context(), "1")
				a.store.SetHook(nil)
				if answer > ttl/4 {
					require.NoError(w, err, "nothing is claimed before the failover has settled")
					require.Empty(w, got)
				}
				require.True(w, a.keys.Holds(kept))
				b := w.join(ttl, nil)
				taken := []claims.Claim(nil)
				for len(taken) == 0 {
					taken, err = b.keys.TryClaim(w.Context(), "1")
					require.NoError(w, err)
					time.Sleep(time.Second)
				}
				for _, c := range got {
					require.False(w, a.keys.Holds(c))
				}
				require.Equal(w, taken[0].Session, b.session.ID())
				require.True(w, a.session.Valid())
			})
		})
	}
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

// A table that is locked so that no row can be freed costs nothing.
func TestAKindWhoseRowsCannotBeFreedAfterAFailoverDoesNotHoldUpTheSession(t *testing.T) {
	eachFailover(t, func(w *failoverWorld) {
		a := w.join(ttl, nil)
		kept, released := w.claim(a, "kept"), w.claim(a, "1")
		before := w.backUp()
		require.NoError(w, a.keys.Release(w.Context(), released))
		id := a.session.ID()
		w.failOver(before)
		a.store.SetHook(testkit.Only("claims.free", func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
			time.Sleep(2 * ttl) // longer than its limit, as where the driver waits for an answer
			return do(ctx)
		}))
		time.Sleep(2 * ttl)
		a.store.SetHook(nil)
		require.Equal(w, id, a.session.ID())
		require.True(w, a.keys.Holds(kept))
		require.True(w, a.session.Valid())
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
			if call.Op == "claims.owned" && call.Key.Type == "other" {
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
		require.Contains(w, a.log.String(), `after a failover" kind=other claims=1 error=`)
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
