package claims_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
	"github.com/tenurelib/tenure/internal/pgobjects"
	"github.com/tenurelib/tenure/internal/sqliteobjects"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

var (
	lateTrials = flag.Int("rows.trials", 80, "late results that are forced on each database")
	rowsSeeds  = flag.Uint64("rows.seeds", 3, "how many schedules of faults the workers on rows go through")
	manyRows   = flag.Int("rows.many", 30_000, "rows of the table whose plans are looked at")
)

// S2: the worker is paused, its row is taken by another, and then its result comes.
func TestALateResultIsNeverAccepted(t *testing.T) {
	testkit.Slow(t)
	eachRowsServer(t, tasks, func(db *rowsDB) {
		db.exec(`CREATE TABLE results (task integer NOT NULL, worker text NOT NULL)`)
		cfg := tasks
		cfg.Done = "" // the row may be finished again and again
		a, b := db.worker(claims.SessionConfig{}, cfg), db.worker(claims.SessionConfig{}, cfg)
		db.add(1, 1)
		refused, first := 0, 0
		insert := func(who string) func(exec) error {
			return writing(fmt.Sprintf(`INSERT INTO results VALUES (1, '%s')`, who), nil)
		}
		for trial := range *lateTrials {
			got := a.take(1)
			var both sync.WaitGroup
			var late, released error
			both.Go(func() {
				time.Sleep(rand.N(2 * time.Millisecond))
				switch trial % 3 {
				case 0:
					late = db.finish(a.rows, got, insert("late"))
				case 1:
					late = db.byStatementAnd(a.rows, got[0], insert("late"))
				case 2: // by value, where no session is
					late = db.finish(b.rows, got, insert("late"))
				}
			})
			// What the process does that has removed the session of a.
			time.Sleep(rand.N(2 * time.Millisecond))
			_, released = db.sql.Exec(`UPDATE tasks SET session = NULL WHERE id = 1 AND token = ` + fmt.Sprint(got[0].Token))
			require.NoError(db, released)
			next := b.take(1)
			before := db.count(`SELECT count(*) FROM results WHERE worker = 'late'`)
			both.Wait()
			after := db.count(`SELECT count(*) FROM results WHERE worker = 'late'`)
			require.Equal(db, before, after, "it was written after the next claim began")
			switch {
			case late == nil:
				first++
			case errors.Is(late, tenure.ErrLost):
				refused++
			default:
				db.Fatal(late)
			}
			require.Equal(db, first, after)
			require.NoError(db, db.finish(b.rows, next, insert("next")))
			if a.rows.Len() > 0 {
				_ = a.rows.Finish(db.Context(), got...)
			}
		}
		db.Logf("%d were first, %d were refused", first, refused)
		require.NotZero(db, refused)
		require.NotZero(db, first)
		require.Equal(db, *lateTrials, db.count(`SELECT count(*) FROM results WHERE worker = 'next'`))
	})
}

// Many workers of several processes, some of which crash, finish each row once.
func TestEachRowIsFinishedOnceOnAServer(t *testing.T) {
	testkit.Slow(t)
	cfg := tasks
	cfg.Done = "status = 'done', priority = priority + 1"
	eachRowsServer(t, cfg, func(db *rowsDB) {
		const n = 1500
		db.add(1, n)
		ctx, cancel := context.WithCancel(db.Context())
		defer cancel()
		var served sync.WaitGroup
		for range 3 {
			w := db.worker(claims.SessionConfig{}, cfg)
			served.Go(func() {
				err := w.rows.Serve(ctx, 16, func(ctx context.Context, c claims.Claim) error {
					if rand.N(20) == 0 {
						return db.finish(w.rows, []claims.Claim{c}, writing(`UPDATE tasks SET result = 'x' WHERE id = `+c.Key.ID, nil))
					}
					return nil
				})
				if err != nil {
					db.Error(err)
				}
			})
		}
		testkit.Await(t, "all are done", func() bool { return db.count(`SELECT count(*) FROM tasks WHERE status = 'queued'`) == 0 })
		cancel()
		served.Wait()
		require.Equal(db, n, db.count(`SELECT count(*) FROM tasks WHERE status = 'done' AND priority = 1 AND attempts = 1 AND session IS NULL`))
	})
}

func TestRowsOfAProcessThatStoppedRenewingAreTakenOnAServer(t *testing.T) {
	testkit.Slow(t)
	eachRowsServer(t, tasks, func(db *rowsDB) {
		db.add(1, 2200) // which are read a thousand at a time
		a := db.worker(claims.SessionConfig{TTL: 6 * time.Second}, tasks)
		got := slices.Concat(a.take(1000), a.take(1000), a.take(1000))
		require.Len(db, got, 2200)
		b := db.worker(claims.SessionConfig{}, tasks)
		owned, err := b.rows.OwnedBy(db.Context(), a.session.ID())
		require.NoError(db, err)
		require.ElementsMatch(db, got, owned)
		require.NoError(db, a.store.Close())
		more := b.take(50)
		require.NotEmpty(db, more)
		require.Greater(db, more[0].Token, got[0].Token)
		require.Equal(db, 2, more[0].Attempt)
		testkit.Await(db.T, "all are free", func() bool {
			return db.count(`SELECT count(*) FROM tasks WHERE session = '`+got[0].Session+`'`) == 0
		})
	})
}

// A plan that was made while the table was small would read all of it.
func TestAFinishFindsItsRowByTheIndexThoughTheTableHasGrown(t *testing.T) {
	testkit.Slow(t)
	db := rowsOnPostgres(t)
	db.exec(`CREATE TABLE tasks (id bigint PRIMARY KEY, status text NOT NULL DEFAULT 'queued', priority integer NOT NULL DEFAULT 0, result text) WITH (autovacuum_enabled = off)`)
	ddl, err := tasks.PostgresDDL()
	require.NoError(t, err)
	db.exec(ddl)
	w := db.worker(claims.SessionConfig{}, tasks)
	finish := func() {
		for range 10 { // the server keeps the plan of a statement that was executed five times
			require.NoError(t, db.finish(w.rows, w.take(4), func(exec) error { return nil }))
			require.NoError(t, db.finish(w.rows, w.take(1), func(exec) error { return nil }))
		}
	}
	db.add(1, 2000)
	finish()
	db.add(2001, 50_000)
	finish()
	w.stop()
	require.NoError(t, w.store.Close()) // its sessions then tell what they have read
	testkit.Await(t, "all is told", func() bool {
		return db.count(`SELECT n_tup_upd FROM pg_stat_user_tables WHERE relname = 'tasks'`) >= 200
	})
	require.Less(t, db.count(`SELECT seq_tup_read FROM pg_stat_user_tables WHERE relname = 'tasks'`), 50_000)
}

// A server keeps a session for a worker that cannot reach the database.
func TestRowsAreTakenForAWorkerAndFinishedByValue(t *testing.T) {
	eachRowsServer(t, tasks, func(db *rowsDB) {
		db.add(1, 4)
		store := db.open()
		server, err := claims.NewSession(store, claims.SessionConfig{Logger: testkit.Quiet}) // which is never run
		require.NoError(db, err)
		rows, err := newRows(server, tasks)
		require.NoError(db, err)
		lease := testkit.NewLease(db.T, store, tenure.LeaseConfig{Key: claims.SessionKey("worker 1")})
		testkit.MustAcquire(db.T, lease)
		got, err := rows.TryTakeFor(db.Context(), "worker 1", claims.TakeOptions{N: 3})
		require.NoError(db, err)
		require.Equal(db, []string{"1", "2", "3"}, takenIDs(got))
		owned, err := rows.OwnedBy(db.Context(), "worker 1")
		require.NoError(db, err)
		require.Equal(db, got, owned)

		wire, err := json.Marshal(got)
		require.NoError(db, err)
		var came []claims.Claim
		require.NoError(db, json.Unmarshal(wire, &came))
		require.NoError(db, db.finish(rows, came[:2], writing(`UPDATE tasks SET result = 'ok' WHERE id < 3`, nil)))
		require.ErrorIs(db, rows.Finish(db.Context(), came[0]), tenure.ErrLost)
		require.NoError(db, rows.Queue.Release(db.Context(), came[2]))
		require.NoError(db, db.byStatementOf(rows, "worker 1"))
		require.Equal(db, 3, db.count(`SELECT count(*) FROM tasks WHERE status = 'done'`))
	})
}

func (db *rowsDB) byStatementOf(rows *workedQueue, session string) error {
	got, err := rows.TryTakeFor(db.Context(), session, claims.TakeOptions{N: 1})
	require.NoError(db, err)
	require.Len(db, got, 1)
	return db.byStatement(rows, got[0])
}

// A row that the database refuses to change keeps no other.
func TestARowThatCannotBeFreedKeepsNoOther(t *testing.T) {
	testkit.Slow(t)
	eachRowsServer(t, tasks, func(db *rowsDB) {
		db.add(1, 30)
		cfg := claims.SessionConfig{TTL: 3 * time.Second}
		a, b := db.worker(cfg, tasks), db.worker(cfg, tasks)
		require.Len(db, a.take(30), 30)
		if strings.HasSuffix(db.Name(), "postgres") {
			db.exec(`ALTER TABLE tasks ADD CHECK (id <> 7 OR session IS NOT NULL) NOT VALID`)
		} else {
			db.exec(`CREATE TRIGGER refuses BEFORE UPDATE ON tasks WHEN NEW.id = 7 AND NEW.session IS NULL BEGIN SELECT RAISE(ABORT, 'refused'); END`)
		}
		require.NoError(db, a.store.Close())
		ctx, cancel := context.WithTimeout(db.Context(), testkit.Patience)
		defer cancel()
		for taken := 0; taken < 29; {
			got, err := b.rows.Take(ctx, 100)
			require.NoError(db, err)
			taken += len(got)
		}
		require.Equal(db, 1, db.count(`SELECT count(*) FROM tasks WHERE id = 7 AND attempts = 1`))
	})
}

func TestARowThatCannotBeTakenKeepsNoOther(t *testing.T) {
	testkit.Slow(t)
	eachRowsServer(t, tasks, func(db *rowsDB) {
		db.add(1, 30)
		refuse := `CREATE TRIGGER refuses BEFORE UPDATE ON tasks WHEN NEW.id IN (1, 7) AND NEW.session IS NOT NULL BEGIN SELECT RAISE(ABORT, 'refused'); END`
		allow := `DROP TRIGGER refuses`
		if db.pool != nil {
			refuse, allow = `ALTER TABLE tasks ADD CONSTRAINT refuses CHECK (id NOT IN (1, 7) OR session IS NULL)`, `ALTER TABLE tasks DROP CONSTRAINT refuses`
		}
		db.exec(refuse)
		a := db.worker(claims.SessionConfig{TTL: 3 * time.Second}, tasks)
		require.Equal(db, []string{"2"}, takenIDs(a.take(1)))
		var ids []string
		for i := 3; i <= 30; i++ {
			if i != 7 {
				ids = append(ids, fmt.Sprint(i))
			}
		}
		got, err := db.worker(claims.SessionConfig{}, tasks).rows.TryTakeFor(db.Context(), db.remote("r", 30*time.Second), claims.TakeOptions{N: 9})
		require.NoError(db, err)
		require.Equal(db, ids[:9], takenIDs(got))
		require.Equal(db, ids[9:], takenIDs(a.take(100)))
		a.takesNone()
		db.exec(allow)
		require.NotEmpty(db, a.take(2), "it is tried again")
	})
}

func TestARowWhoseUpdateATriggerIgnoresKeepsNoOther(t *testing.T) {
	eachRowsServer(t, tasks, func(db *rowsDB) {
		db.add(1, 3)
		if db.pool != nil {
			db.exec(`CREATE FUNCTION ignores() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$`)
			db.exec(`CREATE TRIGGER ignores BEFORE UPDATE ON tasks FOR EACH ROW WHEN (NEW.id = 1) EXECUTE FUNCTION ignores()`)
		} else {
			db.exec(`CREATE TRIGGER ignores BEFORE UPDATE ON tasks WHEN NEW.id = 1 BEGIN SELECT RAISE(IGNORE); END`)
		}
		a := db.worker(claims.SessionConfig{}, tasks)
		require.Equal(db, []string{"2"}, takenIDs(a.take(1)))
		require.Equal(db, []string{"3"}, takenIDs(a.take(5)))
		a.takesNone()
	})
}

// SQLite stores values of any type in any column.
func TestARowWhoseIDIsABlobKeepsNoOther(t *testing.T) {
	db := rowsOnSQLite(t)
	db.exec(`CREATE TABLE tasks (id text NOT NULL PRIMARY KEY, status text NOT NULL DEFAULT 'queued', priority integer NOT NULL DEFAULT 0)`)
	ddl, err := tasks.SQLiteDDL()
	require.NoError(t, err)
	db.exec(ddl)
	db.exec(`INSERT INTO tasks (id, priority) VALUES (x'6162', 1), ('b', 0), ('c', 0)`)
	a := db.worker(claims.SessionConfig{}, tasks)
	require.Equal(t, []string{"b"}, takenIDs(a.take(1)))
	require.Equal(t, []string{"c"}, takenIDs(a.take(1)))
	a.takesNone()
}

// The user's SQL fails for a row as it is now, and may not when the row has changed.
func TestTakeGoesOnAlthoughReadyFailsForARow(t *testing.T) {
	cfg := tasks
	cfg.Ready, cfg.OrderBy = "(priority + 2147483647) > 0", "id"
	db := rowsOnPostgres(t)
	db.exec(`CREATE TABLE tasks (id bigint PRIMARY KEY, status text NOT NULL DEFAULT 'queued', priority integer NOT NULL DEFAULT 0)`)
	ddl, err := cfg.PostgresDDL()
	require.NoError(t, err)
	db.exec(strings.ReplaceAll(ddl, " AND ((priority + 2147483647) > 0)", "")) // an index would refuse the row itself
	db.add(1, 2)
	a := db.worker(claims.SessionConfig{}, cfg)
	require.Len(t, a.take(1), 1)
	db.exec(`UPDATE tasks SET priority = 1`)
	a.takesNone()
	db.exec(`UPDATE tasks SET priority = 0`)
	require.Len(t, a.take(1), 1)
}

// A token that another program has written keeps neither its row nor the others from being taken.
func TestRowsAreFreedWhateverTheirTokensAre(t *testing.T) {
	testkit.Slow(t)
	eachRowsServer(t, tasks, func(db *rowsDB) {
		if db.pool != nil {
			db.exec(`ALTER TABLE tasks ALTER COLUMN token DROP NOT NULL`)
		} else {
			db.exec(`ALTER TABLE tasks DROP COLUMN token`)
			db.exec(`ALTER TABLE tasks ADD COLUMN token INTEGER`)
		}
		for _, token := range []string{"NULL", "0", "-1"} {
			db.exec(`DELETE FROM tasks`)
			db.add(1, 5)
			a := db.worker(claims.SessionConfig{}, tasks)
			require.Len(db, a.take(5), 5)
			db.exec(`UPDATE tasks SET token = ` + token + ` WHERE id = 3`)
			a.stop()
			require.Zero(db, db.count(`SELECT count(*) FROM tasks WHERE session IS NOT NULL`), token)
			require.Len(db, db.worker(claims.SessionConfig{}, tasks).take(5), 5, token)
		}
	})
}

// If a crash of the database undoes that, the rows name a session that is gone, and a sweep frees
// them again. A worker does not know that it would have to release a row again.
func TestOnlyTheRowsOfARemovedSessionAreFreedWithoutWaitingForTheDisk(t *testing.T) {
	testkit.Slow(t)
	db := rowsOnPostgres(t)
	db.exec(`CREATE TABLE tasks (id bigint PRIMARY KEY, status text NOT NULL DEFAULT 'queued', priority integer NOT NULL DEFAULT 0, log text NOT NULL DEFAULT '')`)
	ddl, err := tasks.PostgresDDL()
	require.NoError(t, err)
	db.exec(ddl)
	db.exec(`CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
		NEW.log = OLD.log || CASE WHEN NEW.session IS NULL THEN 'free ' ELSE 'take ' END || current_setting('synchronous_commit') || ', '; RETURN NEW; END $$`)
	db.exec(`CREATE TRIGGER note BEFORE UPDATE ON tasks FOR EACH ROW EXECUTE FUNCTION note()`)
	db.add(1, 1)
	a := db.worker(claims.SessionConfig{}, tasks)
	require.NoError(t, a.rows.Release(t.Context(), a.take(1)...))
	_, err = a.rows.TryTakeFor(t.Context(), db.remote("short", time.Second), claims.TakeOptions{N: 1})
	require.NoError(t, err)
	b := db.worker(claims.SessionConfig{}, tasks)
	require.NoError(t, b.rows.Finish(t.Context(), b.take(1)...))
	var log string
	require.NoError(t, db.sql.QueryRow(`SELECT log FROM tasks`).Scan(&log))
	require.Equal(t, "take on, free on, take on, free off, take on, free on, ", log)
}

// A row that is deleted when it was taken for the last time keeps no other from being given up.
func TestRowsAreGivenUpAlthoughOneOfThemIsGone(t *testing.T) {
	cfg := tasks
	cfg.MaxAttempts, cfg.Exhausted = 1, "status = 'failed'"
	eachRowsServer(t, cfg, func(db *rowsDB) {
		if db.pool != nil {
			db.exec(`CREATE FUNCTION purge() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
				DELETE FROM tasks WHERE id = 1 AND session IS NOT NULL; RETURN NULL; END $$`)
			db.exec(`CREATE TRIGGER purge AFTER UPDATE ON tasks FOR EACH STATEMENT EXECUTE FUNCTION purge()`)
		} else {
			db.exec(`CREATE TRIGGER purge AFTER UPDATE ON tasks WHEN NEW.id = 1 AND NEW.session IS NOT NULL BEGIN DELETE FROM tasks WHERE id = 1; END`)
		}
		db.add(1, 3)
		db.exec(`UPDATE tasks SET attempts = 1`)
		w := db.worker(claims.SessionConfig{}, cfg)
		testkit.Await(db.T, "the others are given up", func() bool {
			w.takesNone()
			return db.count(`SELECT count(*) FROM tasks WHERE status = 'failed' AND session IS NULL`) == 2
		})
	})
}

func TestARowThatIsLockedKeepsNoOther(t *testing.T) {
	db := rowsOnPostgres(t)
	db.exec(`CREATE TABLE tasks (id bigint PRIMARY KEY, status text NOT NULL DEFAULT 'queued', priority integer NOT NULL DEFAULT 0)`)
	ddl, err := tasks.PostgresDDL()
	require.NoError(t, err)
	db.exec(ddl)
	db.add(1, 2)
	a := db.worker(claims.SessionConfig{}, tasks)
	got := a.take(2)
	tx, err := db.sql.Begin()
	require.NoError(t, err)
	defer tx.Rollback()
	_, err = tx.Exec(`SELECT 1 FROM tasks WHERE id = 1 FOR SHARE`)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, a.rows.Release(ctx, got[0]), context.DeadlineExceeded)
	ctx, cancel = context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	require.NoError(t, a.rows.Release(ctx, got[1]))
	require.Equal(t, []string{"2"}, takenIDs(a.take(2)))
	require.NoError(t, tx.Rollback())
	require.Equal(t, []string{"1"}, takenIDs(a.take(1)))
}

func TestARowThatIsLockedKeepsNoOtherFromBeingFinished(t *testing.T) {
	testkit.Slow(t)
	db := rowsOnPostgres(t)
	db.exec(`CREATE TABLE tasks (id bigint PRIMARY KEY, status text NOT NULL DEFAULT 'queued', priority integer NOT NULL DEFAULT 0)`)
	ddl, err := tasks.PostgresDDL()
	require.NoError(t, err)
	db.exec(ddl)
	db.add(1, 20)
	a := db.worker(claims.SessionConfig{}, tasks) // its statements have 5 seconds
	got := a.take(20)
	lock := func(query string) *sql.Tx {
		tx, err := db.sql.Begin()
		require.NoError(t, err)
		t.Cleanup(func() { _ = tx.Rollback() })
		_, err = tx.Exec(query)
		require.NoError(t, err)
		return tx
	}
	lock(`SELECT 1 FROM tasks WHERE id <= 8 FOR SHARE`)
	shortly := lock(`SELECT 1 FROM tasks WHERE id = 9 FOR UPDATE`)
	deletes := lock(`DELETE FROM tasks WHERE id = 10`)
	finish := func(of []claims.Claim) []chan error {
		var results []chan error
		for _, c := range of {
			result := make(chan error, 1)
			go func() { result <- a.rows.Finish(t.Context(), c) }()
			results = append(results, result)
		}
		return results
	}
	began := time.Now()
	locked := finish(got[:10])
	time.Sleep(50 * time.Millisecond)
	for _, c := range got[10:] {
		require.NoError(t, a.rows.Finish(t.Context(), c))
	}
	require.Less(t, time.Since(began), 3*time.Second)
	require.NoError(t, shortly.Rollback())
	require.NoError(t, <-locked[8])
	require.NoError(t, deletes.Commit())
	require.ErrorIs(t, <-locked[9], tenure.ErrLost)
	for i, result := range locked[:8] {
		err := <-result
		if !errors.Is(err, context.DeadlineExceeded) { // of the last try, on a busy machine
			require.ErrorContains(t, err, "locked")
		}
		require.Error(t, err)
		require.NotErrorIs(t, err, tenure.ErrLost)
		require.True(t, a.rows.Holds(got[i]))
	}
	require.Less(t, time.Since(began), 9*time.Second, "each has its own time")
}

// When the row is unlocked, most of the time for waiting has passed. The statement that then ends the claim has
// its own.
func TestAFinishIsNotCutShortByWhatItWaitedForALock(t *testing.T) {
	testkit.Slow(t)
	t.Parallel()
	db := rowsOnPostgres(t)
	db.exec(`CREATE TABLE tasks (id bigint PRIMARY KEY, status text NOT NULL DEFAULT 'queued', priority integer NOT NULL DEFAULT 0)`)
	db.exec(testkit.Must(tasks.PostgresDDL()))
	db.add(1, 1)
	open := db.open
	db.open = func() tenure.Database {
		store := open()
		return struct {
			tenure.Database
			backend
		}{store, storetest.Faulty(store, testkit.Only("queue.end", func(ctx context.Context, _ storetest.Call, send func(context.Context) error) error {
			if err := send(ctx); err != nil || db.count(`SELECT count(*) FROM tasks WHERE status = 'done'`) == 0 {
				return err
			}
			pace.Sleep(ctx, 2*time.Second)
			return ctx.Err()
		}))}
	}
	a := db.worker(claims.SessionConfig{}, tasks) // its statements have 5 seconds
	got := a.take(1)
	tx, err := db.sql.Begin()
	require.NoError(t, err)
	defer tx.Rollback()
	_, err = tx.Exec(`SELECT 1 FROM tasks FOR UPDATE`)
	require.NoError(t, err)
	time.AfterFunc(3800*time.Millisecond, func() { _ = tx.Rollback() })
	began := time.Now()
	require.NoError(t, a.rows.Finish(t.Context(), got...))
	require.Greater(t, time.Since(began), 5*time.Second)
	require.False(t, a.rows.Holds(got[0]))
	require.Equal(t, 1, db.count(`SELECT count(*) FROM tasks WHERE status = 'done' AND session IS NULL`))
}

// The statements use no names that a table of the user may have.
func TestATableMayHaveAnyName(t *testing.T) {
	testkit.Slow(t)
	for _, open := range []func(*testing.T) *rowsDB{rowsOnPostgres, rowsOnSQLite} {
		db := open(t)
		for _, name := range []string{"locked", "ready", "named", "given", "taken", "r"} {
			cfg := tasks
			cfg.Table, cfg.MaxAttempts, cfg.Exhausted = name, 9, "status = 'failed'"
			ddl, err := cfg.SQLiteDDL()
			if db.pool != nil {
				ddl, err = cfg.PostgresDDL()
			}
			require.NoError(t, err)
			db.exec(`CREATE TABLE ` + name + ` (id integer NOT NULL PRIMARY KEY, status text NOT NULL DEFAULT 'queued', priority integer NOT NULL DEFAULT 0)`)
			db.exec(ddl)
			db.exec(`INSERT INTO ` + name + ` (id) VALUES (1), (2), (3), (4), (5), (6)`)
			a := db.worker(claims.SessionConfig{}, cfg)
			got := a.take(6)
			require.Len(t, got, 6, name)
			require.NoError(t, a.rows.Release(db.Context(), got[0]), name)
			require.NoError(t, a.rows.Finish(db.Context(), got[1]), name)
			require.NoError(t, a.rows.Finish(db.Context(), got[2:4]...), name)
			require.NoError(t, db.byStatement(a.rows, got[4]), name)
			db.removeSession(got[5].Session)
			b := db.worker(claims.SessionConfig{}, cfg)
			require.Equal(t, []string{"1"}, takenIDs(b.take(1)), name)
			require.Equal(t, []string{"6"}, takenIDs(b.take(1)), name)
			require.Zero(t, b.session.Status().SweepErrors, name)
			a.stop()
			b.stop()
		}
	}
}

func TestARowWithTheMostAttemptsKeepsNoOther(t *testing.T) {
	testkit.Slow(t)
	for kind, most := range map[string]string{"smallint": "32767", "integer": "2147483647", "bigint": "9223372036854775807"} {
		db := rowsOnPostgres(t)
		db.exec(`CREATE TABLE tasks (id bigint PRIMARY KEY, status text NOT NULL DEFAULT 'queued', priority integer NOT NULL DEFAULT 0, attempts ` + kind + `)`)
		ddl, err := tasks.PostgresDDL()
		require.NoError(t, err)
		db.exec(ddl)
		db.add(1, 2)
		db.exec(`UPDATE tasks SET attempts = ` + most + ` WHERE id = 1`)
		got := db.worker(claims.SessionConfig{}, tasks).take(2)
		require.Equal(t, []string{"1", "2"}, takenIDs(got))
		require.Equal(t, most, fmt.Sprint(got[0].Attempt))
		require.Equal(t, 1, got[1].Attempt)
	}
}

func TestSQLOfTheUserMayEndInAComment(t *testing.T) {
	cfg := tasks
	cfg.Ready, cfg.OrderBy = "status = 'queued' -- those that wait", "priority DESC, id -- in turn"
	eachRowsServer(t, cfg, func(db *rowsDB) {
		db.add(1, 1)
		require.Len(db, db.worker(claims.SessionConfig{}, cfg).take(1), 1)
	})
}

// Concurrent takes share a statement, and none gets the rows of another.
func TestTakesAtTheSameTimeShareStatements(t *testing.T) {
	eachRowsServer(t, tasks, func(db *rowsDB) {
		db.add(1, 200)
		w := db.worker(claims.SessionConfig{}, tasks)
		w.take(1)
		var all sync.WaitGroup
		var mu sync.Mutex
		seen := map[string]bool{"1": true}
		var given atomic.Int64
		for i := range 40 {
			all.Go(func() {
				ctx, cancel := context.WithTimeout(db.Context(), testkit.Patience)
				if i%10 == 0 {
					ctx, cancel = context.WithTimeout(db.Context(), time.Millisecond)
				}
				defer cancel()
				got, err := w.rows.Take(ctx, 1+i%5)
				if err != nil && i%10 != 0 {
					db.Error(err)
				}
				mu.Lock()
				defer mu.Unlock()
				for _, c := range got {
					if seen[c.Key.ID] || !w.rows.Holds(c) {
						db.Errorf("%s was given before, or is not held", c)
					}
					seen[c.Key.ID] = true
				}
				given.Add(int64(len(got)))
			})
		}
		all.Wait()
		testkit.Await(db.T, "the rows that no take got are free", func() bool { return db.count(`SELECT count(*) FROM tasks WHERE session IS NOT NULL`) == len(seen) })
	})
}

func TestIDsOfEachType(t *testing.T) {
	testkit.Slow(t)
	dbs := map[string]*rowsDB{"postgres": rowsOnPostgres(t), "sqlite": rowsOnSQLite(t)}
	cfg := claims.QueueConfig{Table: `my "tasks"`, ID: "the id", Session: "Owner", Token: "fence", OrderBy: `"the id"`}
	take := func(db *rowsDB, ids ...string) {
		w := db.worker(claims.SessionConfig{}, cfg)
		got := w.take(10)
		require.Equal(db, ids, takenIDs(got))
		require.NoError(db, w.rows.Finish(db.Context(), got[0]))
		require.NoError(db, w.rows.Release(db.Context(), got[1]))
		require.NoError(db, db.byStatement(w.rows, got[2]))
		require.ErrorIs(db, db.byStatement(w.rows, got[2]), tenure.ErrLost)
		other := got[0]
		other.Key.ID = "no such row"
		require.Error(db, w.rows.Finish(db.Context(), other))
		require.ErrorIs(db, w.rows.Finish(db.Context(), got[0]), tenure.ErrLost)
		owned, err := w.rows.OwnedBy(db.Context(), w.session.ID())
		require.NoError(db, err)
		require.Empty(db, owned)
	}
	for name, ids := range map[string][]string{
		"text": {"a", "b", "c'\"d"}, "varchar(40)": {"1", "10", "2"}, "integer": {"-3", "1", "20"}, "bigint": {"1", "20", "9007199254740993"},
		"uuid": {"00000000-0000-0000-0000-000000000001", "00000000-0000-0000-0000-000000000002", "f0000000-0000-0000-0000-000000000003"},
	} {
		for dialect, db := range dbs {
			if dialect == "sqlite" && name == "uuid" {
				continue // there it is text
			}
			t.Run(dialect+" "+name, func(t *testing.T) {
				db.T = t
				ddl, err := cfg.PostgresDDL()
				if dialect == "sqlite" {
					ddl, err = cfg.SQLiteDDL()
				}
				require.NoError(t, err)
				db.exec(fmt.Sprintf(`CREATE TABLE "my ""tasks""" ("the id" %s PRIMARY KEY)`, name))
				db.exec(ddl)
				for _, id := range ids {
					db.exec(`INSERT INTO "my ""tasks""" ("the id") VALUES ('` + strings.ReplaceAll(id, "'", "''") + `')`)
				}
				take(db, ids...)
				db.exec(`DROP TABLE "my ""tasks"""`)
			})
		}
	}
}

func TestTheCheckOfATableNamesWhatIsWrong(t *testing.T) {
	testkit.Slow(t)
	check := func(db *rowsDB, cfg claims.QueueConfig) error {
		s, err := claims.NewSession(db.open(), claims.SessionConfig{Logger: testkit.Quiet})
		require.NoError(db, err)
		rows, err := newRows(s, cfg)
		require.NoError(db, err)
		return rows.Check(db.Context())
	}
	type wrong struct{ ddl, says string }
	cases := func(db *rowsDB, fit string, cases []wrong) {
		for _, c := range cases {
			db.exec(`DROP TABLE IF EXISTS tasks`)
			if fit != "" && strings.HasPrefix(c.ddl, "+") {
				db.exec(fit)
			}
			db.exec(strings.TrimPrefix(c.ddl, "+"))
			err := check(db, tasks)
			require.ErrorIs(db, err, tenure.ErrSetup, c.ddl)
			require.ErrorContains(db, err, c.says, c.ddl)
		}
	}
	t.Run("postgres", func(t *testing.T) {
		db := rowsOnPostgres(t)
		ddl, err := tasks.PostgresDDL()
		require.NoError(t, err)
		fit := `CREATE TABLE tasks (id bigint PRIMARY KEY, status text, priority int); ` + ddl
		cases(db, fit, []wrong{
			{`SELECT 1`, "does not exist"},
			{`CREATE TABLE tasks (id bigint PRIMARY KEY, status text, priority int)`, ddl},
			{`+ALTER TABLE tasks DROP COLUMN token`, `column "token" for the token is missing`},
			{`+DROP INDEX tasks_by_session`, `CREATE INDEX IF NOT EXISTS "tasks_by_session"`},
			{`+ALTER TABLE tasks DROP CONSTRAINT tasks_pkey`, "alone in a unique index"},
			{`+ALTER TABLE tasks ALTER token TYPE integer`, "it must be bigint"},
			{`+ALTER TABLE tasks DROP COLUMN status`, "Ready and OrderBy"},
			{`+CREATE UNIQUE INDEX ON tasks (session)`, "part of a unique key"},
			{`+ALTER TABLE tasks ALTER session SET NOT NULL`, "NULL is a free row"},
			{`+DROP INDEX tasks_by_session; CREATE INDEX ON tasks (session, id) WHERE session = 'x'`, "no index"},
		})
		db.exec(`DROP TABLE tasks; ` + fit)
		require.NoError(t, check(db, tasks))
		db.exec(`ALTER TABLE tasks RENAME TO others; CREATE VIEW tasks AS SELECT * FROM others`)
		require.ErrorContains(t, check(db, tasks), "a view")
	})
	t.Run("sqlite", func(t *testing.T) {
		db := rowsOnSQLite(t)
		ddl, err := tasks.SQLiteDDL()
		require.NoError(t, err)
		fit := `CREATE TABLE tasks (id INTEGER PRIMARY KEY, status TEXT, priority INTEGER); ` + ddl
		cases(db, fit, []wrong{
			{`SELECT 1`, "does not exist"},
			{`CREATE TABLE tasks (id INTEGER PRIMARY KEY, status TEXT, priority INTEGER)`, ddl},
			{`+DROP INDEX tasks_by_session`, `CREATE INDEX IF NOT EXISTS "tasks_by_session"`},
			{`+DROP INDEX tasks_ready; DROP INDEX tasks_due; ALTER TABLE tasks DROP COLUMN status`, "Ready and OrderBy"},
			{strings.Replace(fit, "id INTEGER PRIMARY KEY", "id INTEGER", 1), "primary key"},
		})
		db.exec(`DROP TABLE tasks; ` + fit)
		require.NoError(t, check(db, tasks))
	})
	t.Run("role", func(t *testing.T) {
		url, owner := testkit.AsWorker(t)
		ddl, err := tasks.PostgresDDL()
		require.NoError(t, err)
		testkit.ExecPostgres(t, owner, `CREATE TABLE tasks (id bigint PRIMARY KEY, status text, priority int); `+ddl+`; GRANT SELECT ON tasks TO public`)
		db := &rowsDB{T: t, open: func() tenure.Database { return testkit.OpenPostgres(t, url, tenure.PostgresConfig{}) }}
		require.ErrorContains(t, check(db, tasks), `GRANT UPDATE ON "public"."tasks" TO "worker_`)
		testkit.ExecPostgres(t, owner, `GRANT UPDATE ON tasks TO public; ALTER TABLE tasks ENABLE ROW LEVEL SECURITY`)
		require.ErrorContains(t, check(db, tasks), "row-level security")
	})
}

func TestBadInputToRows(t *testing.T) {
	store := testkit.OpenSQLite(t, ":memory:")
	s, err := claims.NewSession(store, claims.SessionConfig{})
	require.NoError(t, err)
	fail := func(context.Context, claims.Claim) error { return nil }
	for says, cfg := range map[string]claims.QueueConfig{
		"Table is empty":                   {},
		"both the column":                  {Table: "t", Session: "x", Token: "x"},
		"set Attempts":                     {Table: "t", MaxAttempts: 1, Exhausted: "x = 1"},
		"set Exhausted or OnExhausted":     {Table: "t", MaxAttempts: 1, Attempts: "a"},
		"need MaxAttempts or Limit":        {Table: "t", Exhausted: "x = 1"},
		"Limit need the column":            {Table: "t", Limit: "l", Exhausted: "x = 1"},
		"Expires and Limit are both":       {Table: "t", Limit: "l", Expires: "l"},
		"set Deadline":                     {Table: "t", Expires: "e"},
		"set NotBefore":                    {Table: "t", LostBackoff: 1},
		"LostBackoff -1ns is negative":     {Table: "t", LostBackoff: -1},
		"one of them decides":              {Table: "t", MaxAttempts: 1, Attempts: "a", Exhausted: "x = 1", OnExhausted: fail},
		"MaxAttempts -1 is negative":       {Table: "t", MaxAttempts: -1},
		"PerKey.Limit -1 is negative":      {Table: "t", PerKey: claims.PerKey{Column: "c", Limit: -1}},
		"set PerKey.Column":                {Table: "t", PerKey: claims.PerKey{Limit: 1}},
		"set PerKey.Limit":                 {Table: "t", PerKey: claims.PerKey{Column: "c"}},
		"ID and PerKey.Column are both":    {Table: "t", PerKey: claims.PerKey{Column: "id", Limit: 1}},
		"Deadline -1s is negative":         {Table: "t", Deadline: -time.Second},
		"PollInterval -1s is negative":     {Table: "t", PollInterval: -time.Second},
		`Ready "\x00" is not UTF-8 text`:   {Table: "t", Ready: "\x00"},
		`Session "\xff" is not UTF-8 text`: {Table: "t", Session: "\xff"},
	} {
		_, err := newRows(s, cfg)
		require.ErrorIs(t, err, tenure.ErrInvalid, says)
		require.ErrorContains(t, err, says)
		_, err = cfg.PostgresDDL()
		require.ErrorContains(t, err, says)
	}
	_, err = claims.NewQueue(nil, tasks)
	require.ErrorIs(t, err, tenure.ErrInvalid)
	_, err = claims.NewWorker(nil, testkit.Must(claims.NewQueue(store, tasks)))
	require.ErrorIs(t, err, tenure.ErrInvalid)
	_, err = claims.NewWorker(s, nil)
	require.ErrorIs(t, err, tenure.ErrInvalid)
	_, err = claims.NewWorker(s, testkit.Must(claims.NewQueue(testkit.OpenSQLite(t, ":memory:"), tasks)))
	require.ErrorContains(t, err, "is not in the session's store")
	without := tasks
	without.NotBefore = ""
	rows, err := newRows(s, without)
	require.NoError(t, err)
	_, err = newRows(s, tasks)
	require.ErrorIs(t, err, tenure.ErrInvalid, "twice")
	c := claims.Claim{Key: tenure.Key{Type: "tasks", ID: "1"}, Session: "s", Token: 1}
	never := func(*sql.Tx) error { t.Error("called"); return nil }
	ctx := t.Context()
	for i, err := range []error{
		rows.Finish(ctx), rows.Finish(ctx, c, c), rows.Finish(ctx, claims.Claim{}), rows.Release(ctx),
		rows.Finish(ctx, claims.Claim{Key: tenure.Key{Type: "other", ID: "1"}, Session: "s", Token: 1}),
		rows.Release(ctx, claims.Claim{Key: c.Key, Session: "s"}), rows.Queue.Release(ctx), rows.ReleaseAfter(ctx, time.Second, c),
		rows.FinishSQLite(ctx, nil, never), rows.FinishSQLite(ctx, []claims.Claim{c}, nil), rows.FinishPostgres(ctx, []claims.Claim{c}, nil),
		rows.Serve(ctx, 0, fail), rows.Serve(ctx, 1, nil),
		second(rows.Take(ctx, 0)), second(rows.TryTakeFor(ctx, "", claims.TakeOptions{N: 1})), second(rows.TryTakeFor(ctx, "s", claims.TakeOptions{N: 0})), second(rows.TryTakeFor(ctx, "\xff", claims.TakeOptions{N: 1})),
	} {
		require.ErrorIs(t, err, tenure.ErrInvalid, i)
	}
	_, _, err = rows.FinishStatement(claims.Claim{})
	require.ErrorIs(t, err, tenure.ErrInvalid)
	testkit.MigrateClaims(t, store)
	require.ErrorIs(t, rows.Finish(ctx, c), tenure.ErrSetup)
}

func TestTheDDLHasEachIndexOfAConfig(t *testing.T) {
	cfg := tasks
	cfg.Expires, cfg.Deadline = "expires_at", time.Hour
	for order, due := range map[string]bool{"priority DESC, id": true, "": true, "not_before_day": true, "not_before, id": false, `"not_before"`: false} {
		cfg.OrderBy = order
		for _, ddl := range []string{testkit.Must(cfg.PostgresDDL()), testkit.Must(cfg.SQLiteDDL())} {
			require.Equal(t, due, strings.Contains(ddl, "tasks_due"), "%s: %s", order, ddl)
			require.Contains(t, ddl, "tasks_expires")
		}
	}
}

// A million rows that are due next week cost an idle worker nothing.
func TestRowsThatAreDueLaterAreNotRead(t *testing.T) {
	testkit.Slow(t)
	tasks := tasks
	tasks.OrderBy = ""
	t.Run("postgres", func(t *testing.T) {
		db := rowsOnPostgres(t)
		db.exec(`CREATE TABLE tasks (id bigint PRIMARY KEY, status text NOT NULL DEFAULT 'queued')`)
		db.exec(testkit.Must(tasks.PostgresDDL()))
		db.exec(`INSERT INTO tasks (id, not_before) SELECT i, now() + interval '7 days' FROM generate_series(1, 20000) i`)
		db.exec(`VACUUM ANALYZE tasks`)
		rows := db.open().(*tenure.PostgresStore).Backend().Rows(objects.RowsConfig{
			Table: "tasks", ID: "id", Session: "session", Token: "token", Attempts: "attempts", NotBefore: "not_before", Ready: tasks.Ready, Done: tasks.Done,
		}, testkit.Quiet).(*pgobjects.Rows)
		require.NoError(t, rows.Check(t.Context(), time.Minute))
		statements, args := rows.Statements("s0", []string{"1"}, []int64{1})
		err := pgx.BeginFunc(t.Context(), db.pool, func(tx pgx.Tx) error {
			testkit.ExecPostgres(t, tx, `SET LOCAL plan_cache_mode = force_custom_plan`) // as all are sent
			got, err := tx.Query(t.Context(), "EXPLAIN (ANALYZE, COSTS off, TIMING off) "+statements["take"], args["take"]...)
			if err != nil {
				return err
			}
			plan, err := pgx.CollectRows(got, pgx.RowTo[string])
			require.Contains(t, strings.Join(plan, "\n"), "tasks_due")
			require.NotContains(t, strings.Join(plan, "\n"), "Rows Removed by Filter")
			return err
		})
		require.NoError(t, err)
	})
	t.Run("sqlite", func(t *testing.T) {
		db := rowsOnSQLite(t)
		db.exec(`CREATE TABLE tasks (id bigint PRIMARY KEY, status text NOT NULL DEFAULT 'queued')`)
		db.exec(testkit.Must(tasks.SQLiteDDL()))
		db.exec(`INSERT INTO tasks (id, not_before) WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 200000) SELECT i, 99999999999999 FROM n`)
		rows := db.open().(*tenure.SQLiteStore).Backend().Rows(objects.RowsConfig{
			Table: "tasks", ID: "id", Session: "session", Token: "token", Attempts: "attempts", NotBefore: "not_before", Ready: tasks.Ready, Done: tasks.Done,
		}, testkit.Quiet)
		take := objects.Taking{Session: "s", N: 1}
		began := time.Now()
		for range 100 { // 15 s if each reads all rows
			taken, err := rows.TakeReady(t.Context(), take, time.Minute)
			require.NoError(t, err)
			require.Empty(t, taken)
		}
		require.Less(t, time.Since(began), 5*time.Second)
		for _, due := range []string{`0`, `NULL`} {
			db.exec(`UPDATE tasks SET not_before = ` + due + ` WHERE id = 17`)
			taken, err := rows.TakeReady(t.Context(), take, time.Minute)
			require.NoError(t, err)
			require.Len(t, taken, 1)
			db.exec(`UPDATE tasks SET session = NULL WHERE id = 17`)
		}
	})
}

func second[T any](_ T, err error) error { return err }

// The statements find what they need by the partial indexes, however many rows are done.
func TestThePlansUseThePartialIndexes(t *testing.T) {
	testkit.Slow(t)
	t.Parallel()
	tasks := tasks
	tasks.Expires, tasks.Deadline = "expires_at", time.Hour
	many := func(db *rowsDB, ddl string) {
		db.exec(`CREATE TABLE tasks (id bigint PRIMARY KEY, status text NOT NULL DEFAULT 'queued', priority integer NOT NULL DEFAULT 0, result text)`)
		db.exec(ddl)
		db.add(1, *manyRows)
		db.exec(`UPDATE tasks SET token = 1, status = CASE WHEN id % 100 < 80 THEN 'done' ELSE 'queued' END, session = CASE WHEN id % 100 >= 90 THEN 's' || id % 3 END`)
		if db.pool != nil {
			db.exec(`UPDATE tasks SET expires_at = now() + id * interval '1 second'`)
		} else {
			db.exec(`UPDATE tasks SET expires_at = 1999999999999 + id`)
		}
		db.exec(`ANALYZE`)
	}
	judge := func(t *testing.T, name, plan string) {
		t.Log(name, plan)
		require.NotContains(t, plan, "Seq Scan on tasks", name)
		require.NotRegexp(t, `SCAN (tasks|r)\b[^\n]*($|\n)`, strings.ReplaceAll(plan, "SCAN tasks USING", ""), name)
		switch name {
		case "take", "ready", "take for", "ready for":
			if name == "take" && strings.Contains(plan, "SEARCH") {
				break // SQLite's takes by ID what ready has found
			}
			require.Contains(t, plan, "tasks_ready", name)
		case "due": // of rows that are all due, it reads one
		case "expired", "any expired":
			require.Contains(t, plan, "tasks_expires", name)
			require.NotContains(t, plan, "Sort", name)
			require.NotContains(t, plan, "TEMP B-TREE", name)
		case "owned", "owned after", "sessions":
			require.Contains(t, plan, "tasks_by_session", name)
			require.NotContains(t, plan, "Sort", name)
		default:
			require.NotContains(t, plan, "tasks_by_session", name)
		}
	}
	t.Run("postgres", func(t *testing.T) {
		db := rowsOnPostgres(t)
		ddl, err := tasks.PostgresDDL()
		require.NoError(t, err)
		many(db, ddl)
		store := db.open().(*tenure.PostgresStore)
		rows := store.Backend().Rows(objects.RowsConfig{
			Table: tasks.Table, ID: "id", Session: "session", Token: "token", Attempts: tasks.Attempts, NotBefore: tasks.NotBefore, Ready: tasks.Ready, OrderBy: tasks.OrderBy, Done: tasks.Done,
			Expires: tasks.Expires,
		}, testkit.Quiet).(*pgobjects.Rows)
		require.NoError(t, rows.Check(t.Context(), time.Minute))
		var ids []string
		var tokens []int64
		for i := range 1000 {
			ids, tokens = append(ids, fmt.Sprint(90+i*100)), append(tokens, 1)
		}
		statements, args := rows.Statements("s0", ids, tokens)
		for name, query := range statements {
			err := pgx.BeginFunc(t.Context(), db.pool, func(tx pgx.Tx) error {
				testkit.ExecPostgres(t, tx, `SET LOCAL plan_cache_mode = force_custom_plan; SET LOCAL random_page_cost = 0.1`) // as all are sent
				got, err := tx.Query(t.Context(), "EXPLAIN (COSTS off) "+query, args[name]...)
				if err != nil {
					return err
				}
				lines, err := pgx.CollectRows(got, pgx.RowTo[string])
				judge(t, name, strings.Join(lines, "\n"))
				return err
			})
			require.NoError(t, err, name)
		}
	})
	t.Run("sqlite", func(t *testing.T) {
		db := rowsOnSQLite(t)
		ddl, err := tasks.SQLiteDDL()
		require.NoError(t, err)
		many(db, ddl)
		rows := db.open().(*tenure.SQLiteStore).Backend().Rows(objects.RowsConfig{
			Table: tasks.Table, ID: "id", Session: "session", Token: "token", Attempts: tasks.Attempts, NotBefore: tasks.NotBefore, Ready: tasks.Ready, OrderBy: tasks.OrderBy, Done: tasks.Done,
			Expires: tasks.Expires,
		}, testkit.Quiet).(*sqliteobjects.Rows)
		for name, query := range rows.Statements() {
			got, err := db.sql.Query("EXPLAIN QUERY PLAN "+query, "1", "2", "3", "4", "5")
			require.NoError(t, err, name)
			var plan []string
			for got.Next() {
				var id, parent, unused int
				var detail string
				require.NoError(t, got.Scan(&id, &parent, &unused, &detail))
				plan = append(plan, detail)
			}
			got.Close()
			judge(t, name, strings.Join(plan, "\n"))
		}
	})
}
