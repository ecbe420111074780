package claims_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

// claimed claims a key as soon as it is free.
func (p *process) claimed(id string) claims.Claim {
	p.w.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	defer cancel()
	got, err := p.keys.Claim(ctx, id)
	require.NoError(p.w, err, "%s is not free", id)
	return got[0]
}

func (p *process) sql() *sql.DB { return p.w.store.(*tenure.SQLiteStore).DB() }

// refusing makes the database refuse to free any row of a table, and returns what ends that.
func refusing(t *testing.T, db *sql.DB, table string) (allow func()) {
	t.Helper()
	if strings.HasSuffix(t.Name(), "postgres") {
		testkit.ExecSQL(t, db, fmt.Sprintf(`CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
			BEGIN IF NEW.session IS NULL THEN RAISE EXCEPTION 'no partition for the audit'; END IF; RETURN NEW; END $$;
			CREATE TRIGGER refuses BEFORE UPDATE ON %s FOR EACH ROW EXECUTE FUNCTION refuse()`, table))
		return func() { testkit.ExecSQL(t, db, `DROP TRIGGER refuses ON `+table) }
	}
	testkit.ExecSQL(t, db, fmt.Sprintf(`CREATE TRIGGER refuses BEFORE UPDATE ON %s WHEN NEW.session IS NULL BEGIN SELECT RAISE(ABORT, 'refused'); END`, table))
	return func() { testkit.ExecSQL(t, db, `DROP TRIGGER refuses`) }
}

func TestKeysThatTheDatabaseRefusesToFreeAreFreedWhenItRefusesNoLonger(t *testing.T) {
	testkit.Slow(t)
	eachServer(t, func(t *testing.T, open func() tenure.Database) {
		w := newWorld(t, open())
		a, b := w.startWith("a", claims.SessionConfig{TTL: 3 * time.Second}), newWorld(t, open()).start("b")
		db := serverDB(t, w.store)
		released, done := a.claim("one", "two"), a.claimOne("three")
		allow := refusing(t, db, "objects_claims")
		require.NoError(t, a.keys.Release(t.Context(), released...), "the caller does not wait for it")
		require.NoError(t, a.keys.Do(t.Context(), done, testkit.Succeeds))
		require.Len(t, w.owned(a.session.ID()), 3)
		allow()
		for _, id := range []string{"one", "two", "three"} {
			b.claimed(id)
		}
	})
}

// serverDB returns a database handle of a store on a server.
func serverDB(t *testing.T, store tenure.Store) *sql.DB {
	if s, ok := store.(*tenure.SQLiteStore); ok {
		return s.DB()
	}
	return testkit.OpenSQL(t, "pgx", store.(*tenure.PostgresStore).Pool().Config().ConnString())
}

func TestRowsThatTheDatabaseRefusesToFreeAreFreedWhenItRefusesNoLonger(t *testing.T) {
	testkit.Slow(t)
	t.Parallel()
	eachRowsServer(t, tasks, func(db *rowsDB) {
		db.add(1, 8)
		a, b := db.worker(claims.SessionConfig{TTL: 3 * time.Second}, tasks), db.worker(claims.SessionConfig{}, tasks)
		got := a.take(8)
		allow := refusing(db.T, db.sql, "tasks")
		require.NoError(db, a.rows.Release(db.Context(), got[:4]...))
		for _, c := range got[4:] {
			require.NoError(db, a.rows.Do(db.Context(), c, testkit.Succeeds))
		}
		b.takesNone()
		allow()
		for taken := 0; taken < 8; {
			taken += len(b.take(8))
		}
	})
}

// Its attempt counts, so a func that makes the database refuse its row does not get the row forever.
func TestTheAttemptOfARowThatTheDatabaseRefusedToFreeIsNotTakenBack(t *testing.T) {
	inRowsBubble(t, effect, 1, func(w *rowsWorld) {
		a := w.start("a")
		rows := w.rowsOf(a, effect)
		got := takeOf(w, rows, 1)
		testkit.ExecSQL(t, w.db, `CREATE TRIGGER refuses BEFORE UPDATE ON tasks WHEN NEW.session IS NULL BEGIN SELECT RAISE(ABORT, 'refused'); END`)
		require.NoError(w, rows.Release(w.Context(), got...))
		testkit.ExecSQL(t, w.db, `DROP TRIGGER refuses`)
		again := takeOf(w, rows, 1)
		require.Greater(w, again[0].Token, got[0].Token)
		require.Equal(w, 2, again[0].Attempt)
	})
}

// late lets a call fail, and arrive all the same a while later.
func late(d time.Duration) storetest.Hook {
	return func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
		time.AfterFunc(d, func() { _ = do(context.WithoutCancel(ctx)) })
		return testkit.ErrReset
	}
}

func TestAStatementThatLandsVeryLateOwnsItsRowsForATTL(t *testing.T) {
	for _, by := range []time.Duration{ttl + 3*time.Second, 5*time.Minute + 3*time.Second, 55*time.Minute + 3*time.Second} {
		t.Run(by.String(), func(t *testing.T) {
			inRowsBubble(t, effect, 3, func(w *rowsWorld) {
				a, b := w.start("a"), w.start("b")
				rows := w.rowsOf(a, effect)
				time.Sleep(time.Second)
				held, heldRow := a.claimOne("held"), takeOf(w, rows, 1)[0]
				a.fault(testkit.Only("claims.take", testkit.Once(late(by))))
				_, err := a.keys.TryClaim(w.Context(), "one")
				require.ErrorIs(w, err, testkit.ErrReset)
				var takes atomic.Int64
				a.fault(testkit.Only("queue.take", func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
					if takes.Add(1) == 1 {
						return late(by)(ctx, call, do)
					}
					return testkit.Refuse(ctx, call, do)
				}))
				ctx, cancel := context.WithTimeout(w.Context(), time.Millisecond)
				defer cancel()
				_, err = rows.Take(ctx, 2)
				require.Error(w, err)
				a.fault(nil)

				time.Sleep(by + time.Second)
				require.Empty(w, b.claim("one"))
				require.Equal(w, 3, w.count(`SELECT count(*) FROM tasks WHERE session IS NOT NULL`))
				time.Sleep(2 * ttl)
				b.claimOne("one")
				require.Equal(w, 1, w.count(`SELECT count(*) FROM tasks WHERE session IS NOT NULL`))
				require.True(w, a.keys.Holds(held))
				require.True(w, rows.Holds(heldRow))
			})
		})
	}
}

func TestAStatementThatLandsLateOnAServerOwnsItsRowsForATTL(t *testing.T) {
	testkit.Slow(t)
	eachServer(t, func(t *testing.T, open func() tenure.Database) {
		a, b := newWorld(t, open()).startWith("a", claims.SessionConfig{TTL: 3 * time.Second}), newWorld(t, open()).start("b")
		a.claimOne("held")
		landed := make(chan struct{})
		a.fault(testkit.Only("claims.take", testkit.Once(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			return late(8*time.Second)(ctx, call, func(ctx context.Context) error {
				defer close(landed)
				return a.w.beginTake(ctx, a.session.ID(), "one")
			})
		})))
		_, err := a.keys.TryClaim(t.Context(), "one")
		require.ErrorIs(t, err, testkit.ErrReset)
		<-landed
		require.Empty(t, b.claim("one", "held"))
		b.claimed("one")
		require.Empty(t, b.claim("held"))
	})
}

// beginTake makes a session the owner of a key.
func (w *world) beginTake(ctx context.Context, session, id string) error {
	_, err := w.table.Take(ctx, session, "tenant", nil, nil, []string{id}, testkit.Patience)
	return err
}

// failover is what a promoted standby lacks: the rows of a table are as they were when it was made.
type failover struct {
	t     *testing.T
	db    *sql.DB
	table string
}

func beginFailover(t *testing.T, db *sql.DB, table string) failover {
	testkit.ExecSQL(t, db, fmt.Sprintf(`CREATE TABLE standby AS SELECT * FROM %s`, table))
	return failover{t, db, table}
}

func (f failover) end() {
	tx, err := f.db.Begin()
	require.NoError(f.t, err)
	defer tx.Rollback()
	for _, query := range []string{`DELETE FROM %s`, `INSERT INTO %s SELECT * FROM standby`} {
		_, err := tx.Exec(fmt.Sprintf(query, f.table))
		require.NoError(f.t, err)
	}
	require.NoError(f.t, tx.Commit())
}

// reconnect cuts the looks for others off for a while.
func (w *world) reconnect(processes ...*process) {
	for _, p := range processes {
		p.fault(testkit.Only("claims.sessions", testkit.Refuse))
	}
	time.Sleep(2 * ttl)
	for _, p := range processes {
		p.fault(nil)
	}
}

func (w *world) anotherServer(processes ...*process) {
	for _, p := range processes {
		p.server.number.Add(1)
	}
}

// lost begins a func for a claim, and returns what Do will.
func (p *process) lost(c claims.Claim) (returned chan error) {
	returned = make(chan error, 1)
	go func() {
		returned <- p.keys.Do(context.Background(), c, func(ctx context.Context) error { <-ctx.Done(); return nil })
	}()
	return returned
}

func TestAfterAFailoverThatLacksTheLastCommitsAllClaimsAreWhatTheRowsSay(t *testing.T) {
	for how, reconnects := range map[string]func(w *world, processes ...*process){
		"while it cannot be reached": (*world).reconnect, "to another server": (*world).anotherServer, "unnoticed": nil,
	} {
		t.Run(how, func(t *testing.T) {
			inBubble(t, func(w *world) {
				a, b := w.start("a"), w.start("b")
				kept, released, passed := a.claimOne("kept"), a.claimOne("released"), a.claimOne("passed")
				a.detach(passed)
				standby := beginFailover(t, a.sql(), "objects_claims")
				require.NoError(w, a.keys.Release(w.Context(), released))
				again, undone, working := a.claimOne("released"), a.claimOne("undone"), a.claimOne("working")
				ofB := b.claimOne("b's")
				returned := a.lost(working)
				time.Sleep(time.Second)
				standby.end()
				other := b.claimOne("working")
				within := compareEvery + 2*ttl
				if reconnects != nil {
					within = 2 * ttl
					reconnects(w, a, b)
				}
				time.Sleep(within)
				require.True(w, a.keys.Holds(kept))
				require.Equal(w, 1, a.keys.Len())
				for _, c := range []claims.Claim{again, undone, working} {
					require.False(w, a.keys.Holds(c), c)
				}
				require.False(w, b.keys.Holds(ofB))
				require.True(w, b.keys.Holds(other))
				err := <-returned
				require.ErrorIs(w, err, tenure.ErrLost)
				require.ErrorContains(w, err, "tenant/working")
				b.claimOne("released")
				b.claimOne("undone")
				require.Empty(w, b.claim("passed", "kept"), "another process has the detached one")
			})
		})
	}
}

// compareEvery is how often a session compares all its rows although nothing is in doubt.
const compareEvery = time.Hour

func TestAfterAFailoverOfAServerAllClaimsAreWhatTheRowsSay(t *testing.T) {
	t.Parallel()
	s := testkit.StartPostgres(t)
	open := func() tenure.Database { return testkit.OpenPostgres(t, s.URL(), tenure.PostgresConfig{}) }
	w := newWorld(t, open())
	a, b := w.startWith("a", claims.SessionConfig{TTL: 9 * time.Second}), newWorld(t, open()).startWith("b", claims.SessionConfig{TTL: 9 * time.Second})
	kept, released := a.claimed("kept"), a.claimed("released")
	id, db := a.session.ID(), testkit.OpenSQL(t, "pgx", s.URL())
	standby := beginFailover(t, db, "objects_claims")
	require.NoError(t, a.keys.Release(t.Context(), released))
	undone := a.claimOne("undone")
	returned := a.lost(undone)
	standby.end()
	require.NoError(t, db.Close())
	require.NoError(t, s.Restart("fast"))
	b.claimed("released")
	require.ErrorIs(t, <-returned, tenure.ErrLost)
	if a.session.ID() == id { // on a slow machine it may have been lost
		require.True(t, a.keys.Holds(kept))
	}
	require.False(t, a.keys.Holds(undone))
}

func TestAfterAFailoverAllClaimsOfRowsAreWhatTheRowsSay(t *testing.T) {
	inRowsBubble(t, effect, 2, func(w *rowsWorld) {
		a, b := w.start("a"), w.start("b")
		ofA, ofB := w.rowsOf(a, effect), w.rowsOf(b, effect)
		finished := takeOf(w, ofA, 1)
		standby := beginFailover(t, w.db, "tasks")
		require.NoError(w, ofA.Finish(w.Context(), finished...))
		undone := takeOf(w, ofA, 1)
		began, returned := make(chan struct{}), make(chan error, 1)
		goOn := make(chan struct{})
		done := sync.OnceFunc(func() { close(goOn) })
		defer done()
		go func() {
			returned <- ofA.Do(w.Context(), undone[0], func(ctx context.Context) error {
				close(began)
				<-ctx.Done()
				<-goOn
				return nil
			})
		}()
		<-began
		standby.end()
		w.reconnect(a)
		time.Sleep(2 * ttl)
		require.False(w, ofA.Holds(undone[0]))
		require.ElementsMatch(w, []string{"1", "2"}, takenIDs(takeOf(w, ofB, 2)), "what was finished is to be done again")
		done()
		require.ErrorIs(w, <-returned, tenure.ErrLost)
		require.Equal(w, 2, w.count(`SELECT count(*) FROM tasks WHERE session IS NOT NULL`), "the func's row is another's by now")
	})
}

// S5: the row came back while the func that had finished it still ran.
func TestARowWhoseFuncStillRunsIsNotFreed(t *testing.T) {
	inRowsBubble(t, effect, 1, func(w *rowsWorld) {
		a := w.start("a")
		rows := w.rowsOf(a, effect)
		got := takeOf(w, rows, 1)
		standby := beginFailover(t, w.db, "tasks")
		goOn, returned := make(chan struct{}), make(chan error, 1)
		go func() {
			returned <- rows.Do(w.Context(), got[0], func(context.Context) error {
				err := rows.Finish(context.Background(), got...)
				<-goOn
				return err
			})
		}()
		time.Sleep(time.Second)
		standby.end()
		w.reconnect(a)
		time.Sleep(3 * ttl)
		require.Equal(w, 1, w.count(`SELECT count(*) FROM tasks WHERE session IS NOT NULL`))
		close(goOn)
		require.NoError(w, <-returned)
		time.Sleep(2 * ttl)
		require.Zero(w, w.count(`SELECT count(*) FROM tasks WHERE session IS NOT NULL`))
	})
}

// Many claims are compared with their rows while others begin and end, and the claims that match their rows
// stay.
func TestALookAtManyRowsEndsOnlyWhatTheRowsDeny(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		ids := names(5000)
		got := a.claim(ids...)
		gone := ids[1234]
		testkit.ExecSQL(t, a.sql(), `UPDATE objects_claims SET session = NULL WHERE id = ?`, gone)
		testkit.ExecSQL(t, a.sql(), `INSERT INTO objects_claims (kind, id, session, token) VALUES ('tenant', 'unknown', ?, 5)`, a.session.ID())
		a.fault(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			if call.Op == "claims.owned" { // others begin and end meanwhile
				c, err := a.keys.TryClaim(ctx, fmt.Sprint("new ", time.Now().UnixNano()))
				if err != nil || len(c) != 1 {
					w.Error(c, err)
				}
				time.Sleep(time.Millisecond)
			}
			return do(ctx)
		})
		time.Sleep(compareEvery + 2*ttl)
		a.fault(nil)
		for _, c := range got {
			require.Equal(w, c.Key.ID != gone, a.keys.Holds(c), c)
		}
		b.claimOne(gone)
		b.claimOne("unknown")
		require.Greater(w, a.keys.Len(), 5000)
	})
}

// The look sees as many rows as claims are held, but not the same ones.
func TestAClaimThatEndsDuringALookHidesNoneThatItsRowDenies(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.start("a")
		got := a.claim(names(2500)...)
		slices.SortFunc(got, func(x, y claims.Claim) int { return strings.Compare(x.Key.ID, y.Key.ID) })
		time.Sleep(time.Minute)
		testkit.ExecSQL(t, a.sql(), `UPDATE objects_claims SET session = NULL WHERE id = ?`, got[2000].Key.ID)
		var pages atomic.Int64
		a.fault(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			if call.Op == "claims.owned" && pages.Add(1) == 2 {
				if err := a.keys.Release(ctx, got[0]); err != nil { // which was seen already
					w.Error(err)
				}
			}
			return do(ctx)
		})
		time.Sleep(compareEvery + ttl)
		require.Greater(w, pages.Load(), int64(1))
		require.False(w, a.keys.Holds(got[2000]))
		require.Equal(w, 2498, a.keys.Len())
	})
}

// A look that begins between the statement that ends a claim and its answer sees a row that is
// free, and a claim that is held.
func TestALookEndsNoClaimWhoseEndIsNotAnsweredYet(t *testing.T) {
	inRowsBubble(t, effect, 1, func(w *rowsWorld) {
		a := w.start("a")
		rows := w.rowsOf(a, effect)
		got := takeOf(w, rows, 1)
		a.fault(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			if call.Op == "queue.end" {
				defer time.Sleep(5 * time.Second)
			}
			return do(ctx)
		})
		time.Sleep(compareEvery - 3*time.Minute)
		for range 60 { // one of them is open when the session looks
			require.NoError(w, rows.Do(w.Context(), got[0], func(ctx context.Context) error {
				err := rows.Finish(context.WithoutCancel(ctx), got...)
				require.NoError(w, context.Cause(ctx))
				return err
			}))
			testkit.ExecSQL(t, w.db, `UPDATE tasks SET status = 'queued'`)
			got = takeOf(w, rows, 1)
		}
	})
}

// A million claims are compared once an hour, in pages, and nothing is kept for each.
func TestAtRestTheRowsAreComparedOnceAnHour(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.start("a")
		a.claim(names(2500)...)
		time.Sleep(time.Minute)
		var traffic testkit.Calls
		a.fault(traffic.Count("", nil))
		time.Sleep(compareEvery)
		sent := traffic.Take()
		require.Equal(w, 3, sent["claims.owned"])
		require.Zero(w, sent["claims.look"])
		require.Equal(w, 2500, a.keys.Len())
	})
}

func TestASessionThatEndsDuringALookAtManyRowsReturns(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.start("a")
		a.claim(names(2500)...)
		id := a.session.ID()
		var pages atomic.Int64
		stopped := make(chan struct{})
		a.fault(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			err := do(ctx)
			if call.Op == "claims.owned" && pages.Add(1) == 1 {
				go func() {
					defer close(stopped)
					a.stop()
				}()
				time.Sleep(time.Second)
			}
			return err
		})
		<-stopped
		require.Empty(w, w.owned(id))
	})
}

// Its sweep finds no row that names it, and no server that would tell that it is another.
func TestASessionWhoseClaimsAreAllUndoneHearsOfIt(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.start("a")
		c := a.claimOne("one")
		returned := a.lost(c)
		time.Sleep(ttl + time.Second)
		testkit.ExecSQL(t, a.sql(), `DELETE FROM objects_claims`)
		time.Sleep(2 * ttl)
		require.False(w, a.keys.Holds(c))
		require.ErrorIs(w, <-returned, tenure.ErrLost)
	})
}

// rowsByTwoNames returns the rows of one table by two names: on SQLite names are not case-sensitive.
func (w *rowsWorld) rowsByTwoNames(p *process) (one, two *workedQueue) {
	other := effect
	other.Table = "TASKS"
	return w.rowsOf(p, effect), w.rowsOf(p, other)
}

// Two tables of one user may be the same.
func TestTwoNamesOfOneTableDisturbEachOtherNot(t *testing.T) {
	inRowsBubble(t, effect, 2, func(w *rowsWorld) {
		a := w.start("a")
		one, two := w.rowsByTwoNames(a)
		ofOne, ofTwo := takeOf(w, one, 1)[0], takeOf(w, two, 1)[0]
		time.Sleep(compareEvery + 2*ttl)
		require.True(w, one.Holds(ofOne))
		require.True(w, two.Holds(ofTwo))
		require.Equal(w, 2, w.count(`SELECT count(*) FROM tasks WHERE session IS NOT NULL`))
	})
}

// The session frees the rows of each table, whichever name it has.
func TestARowWhoseFuncRunsUnderAnotherNameOfItsTableIsKeptWhileTheSessionCloses(t *testing.T) {
	inRowsBubble(t, effect, 2, func(w *rowsWorld) {
		a := w.start("a")
		one, two := w.rowsByTwoNames(a)
		goOn := make(chan struct{})
		var closed sync.WaitGroup
		for _, of := range []*workedQueue{one, two} {
			got := takeOf(w, of, 1)[0]
			closed.Go(func() {
				_ = of.Do(context.Background(), got, func(context.Context) error { <-goOn; return nil })
			})
		}
		time.Sleep(time.Second)
		closed.Go(a.stop)
		time.Sleep(time.Minute)
		kept := w.count(`SELECT count(*) FROM tasks WHERE session IS NOT NULL`)
		close(goOn)
		closed.Wait()
		require.Equal(w, 2, kept)
		require.Zero(w, w.count(`SELECT count(*) FROM tasks WHERE session IS NOT NULL`))
	})
}

func TestAnAttemptThatIsSpentUnderAnotherNameOfTheTableIsNotTakenBack(t *testing.T) {
	cfg := effect
	cfg.NotBefore = "" // so that the session keeps the row after its func has failed
	inRowsBubble(t, effect, 2, func(w *rowsWorld) {
		a := w.start("a")
		other := cfg
		other.Table = "TASKS"
		for _, of := range []*workedQueue{w.rowsOf(a, cfg), w.rowsOf(a, other)} { // the session frees the rows of one before those of the other
			ctx, cancel := context.WithCancel(w.Context())
			require.NoError(w, of.Serve(ctx, 1, func(context.Context, claims.Claim) error { cancel(); return errors.New("no") }))
		}
		a.stop()
		require.Equal(w, 2, w.count(`SELECT count(*) FROM tasks WHERE session IS NULL AND attempts = 1`))
	})
}

// The promise that no two funcs run for a key is a session's. Two sessions are as two processes.
func TestTwoSessionsOfAProcessAreAsTwoProcesses(t *testing.T) {
	inRowsBubble(t, effect, 1, func(w *rowsWorld) {
		a, b := w.start("a"), w.start("b")
		ofA, ofB := w.rowsOf(a, effect), w.rowsOf(b, effect)
		goOn, returned := make(chan struct{}), make(chan error, 1)
		got := takeOf(w, ofA, 1)
		go func() {
			returned <- ofA.Do(w.Context(), got[0], func(context.Context) error { <-goOn; return nil })
		}()
		time.Sleep(time.Second)
		a.fault(testkit.Refuse)
		next := takeOf(w, ofB, 1) // although the func has not returned
		require.NoError(w, ofB.Release(w.Context(), next...))
		a.fault(nil)
		b.stop()
		time.Sleep(time.Minute)
		ctx, cancel := context.WithTimeout(w.Context(), time.Minute)
		defer cancel()
		_, err := ofA.Take(ctx, 1)
		require.ErrorIs(w, err, context.DeadlineExceeded, "its own session waits until it has returned")
		close(goOn)
		require.ErrorIs(w, <-returned, tenure.ErrDeadline)
		require.Len(w, takeOf(w, ofA, 1), 1)
	})
}

// A look that began again at once would spin forever, and the session would never end.
func TestALookThatIsUnderWayEndsWithItsSession(t *testing.T) {
	defer time.AfterFunc(testkit.Patience, func() { panic("a look spins") }).Stop() // no virtual time passes while it does
	closeDuring := func(w *world, a *process, op string) {
		closing, closed := make(chan struct{}), make(chan struct{})
		a.fault(testkit.Only(op, testkit.Once(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			close(closing)
			return testkit.AnswerAfter(time.Second)(ctx, call, do)
		})))
		go func() { defer close(closed); <-closing; a.stop() }()
		<-closed
		require.Empty(w, w.owned(a.session.ID()))
	}
	t.Run("of all rows", func(t *testing.T) {
		inBubble(t, func(w *world) {
			a := w.start("a")
			a.claim(names(2500)...)
			closeDuring(w, a, "claims.owned") // of which there are several pages
		})
	})
	t.Run("of nothing, for nothing is in doubt", func(t *testing.T) {
		inBubble(t, func(w *world) {
			a := w.start("a")
			a.claim("one")
			time.Sleep(time.Minute)
			a.stop()
		})
	})
	t.Run("of rows that are in doubt", func(t *testing.T) {
		inBubble(t, func(w *world) {
			a := w.start("a")
			a.fault(testkit.Only("claims.take", testkit.LoseAnswer))
			for some := range slices.Chunk(names(2500), 1000) { // as many as a statement takes
				_, err := a.keys.TryClaim(w.Context(), some...)
				require.Error(w, err)
			}
			closeDuring(w, a, "claims.look")
		})
	})
}
