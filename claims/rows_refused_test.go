package claims_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
)

// The table takes only sessions whose IDs are UUIDs, and a remote worker's ID is not one.
func TestASessionThatTheTableRefusesKeepsNoRowFromOthers(t *testing.T) {
	eachRowsServer(t, tasks, func(db *rowsDB) {
		if db.pool != nil {
			db.exec(`ALTER TABLE tasks ADD CHECK (length(session) = 36)`)
		} else {
			db.exec(`CREATE TRIGGER refuses BEFORE UPDATE ON tasks WHEN length(NEW.session) <> 36 BEGIN SELECT RAISE(ABORT, 'refused'); END`)
		}
		a := db.worker(claims.SessionConfig{}, tasks)
		remote, other := db.remote("worker 1", 30*time.Second), db.remote(strings.Repeat("w", 36), 30*time.Second)
		for _, n := range []int{3, 1} {
			db.exec(`DELETE FROM tasks`)
			db.add(1, 4)
			require.Len(db, a.take(1), 1)
			got, err := a.rows.TryTakeFor(db.Context(), remote, claims.TakeOptions{N: n})
			require.Empty(db, got)
			if n == 3 {
				require.ErrorContains(db, err, `refuses to have any of 3 rows taken for session "worker 1"`)
			}
			got, err = a.rows.TryTakeFor(db.Context(), other, claims.TakeOptions{N: 1}) // by the queue, which has just skipped all rows for the first
			require.NoError(db, err)
			require.Equal(db, []string{"2"}, takenIDs(got))
			require.Equal(db, []string{"3", "4"}, takenIDs(a.take(9)))
		}
	})
}

// All rows are refused, and soon they are not: it need not be the rows' fault.
func TestRowsThatWereRefusedForAMomentAreTakenSoon(t *testing.T) {
	inRowsBubble(t, effect, 8, func(w *rowsWorld) {
		_, err := w.db.Exec(`CREATE TRIGGER refuses BEFORE UPDATE ON tasks BEGIN SELECT RAISE(ABORT, 'no partition'); END`)
		require.NoError(w, err)
		rows := w.rowsOf(w.start("a"), effect)
		began := time.Now()
		time.AfterFunc(4*time.Second, func() {
			if _, err := w.db.Exec(`DROP TRIGGER refuses`); err != nil {
				w.Error(err)
			}
		})
		require.Len(w, takeOf(w, rows, 8), 8)
		require.Less(w, time.Since(began), ttl/2)
	})
}

func TestASessionIDThatTheColumnCannotHoldIsNamed(t *testing.T) {
	db := rowsOnPostgres(t)
	db.exec(`CREATE TABLE tasks (id bigint PRIMARY KEY, status text NOT NULL DEFAULT 'queued', priority integer NOT NULL DEFAULT 0, session varchar(32))`)
	db.exec(testkit.Must(tasks.PostgresDDL()))
	s, err := claims.NewSession(db.open(), claims.SessionConfig{Logger: testkit.Quiet})
	require.NoError(t, err)
	rows, err := newRows(s, tasks)
	require.NoError(t, err)
	err = rows.Check(t.Context())
	require.ErrorIs(t, err, tenure.ErrSetup)
	require.ErrorContains(t, err, `column "session" holds only 32 characters, and the ID of a session has 36`)

	db.exec(`ALTER TABLE tasks ALTER COLUMN session TYPE varchar(36)`)
	require.NoError(t, rows.Check(t.Context()))
	db.add(1, 2)
	_, err = rows.TryTakeFor(t.Context(), strings.Repeat("é", 37), claims.TakeOptions{N: 1})
	require.ErrorIs(t, err, tenure.ErrInvalid)
	require.ErrorContains(t, err, "has 37 characters")
	got, err := rows.TryTakeFor(t.Context(), db.remote(strings.Repeat("é", 36), 30*time.Second), claims.TakeOptions{N: 1})
	require.NoError(t, err)
	require.Len(t, got, 1)
}

// exhausted is a table whose rows have one attempt.
func exhausted(onExhausted func(context.Context, claims.Claim) error) claims.QueueConfig {
	cfg := effect
	cfg.MaxAttempts, cfg.OnExhausted = 1, onExhausted
	if onExhausted == nil {
		cfg.Exhausted = "status = 'failed'"
	}
	return cfg
}

// waits takes rows for a time, for the session or for another one, and returns how many it gets.
func (w *rowsWorld) waits(rows *workedQueue, session string, d time.Duration) (n int) {
	w.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	for ctx.Err() == nil {
		var got []claims.Claim
		var err error
		if session == "" {
			got, err = rows.Take(ctx, 8)
		} else {
			got, err = rows.TakeFor(ctx, session, claims.TakeOptions{N: 8})
		}
		if ctx.Err() == nil {
			require.NoError(w, err)
		}
		n += len(got)
	}
	return n
}

// eachTaker runs a test with rows of the session's own, and with those of a remote worker's. The first
// row of eight has had all its attempts.
func eachTaker(t *testing.T, cfg claims.QueueConfig, test func(w *rowsWorld, rows *workedQueue, session string)) {
	for _, session := range []string{"", "remote"} {
		t.Run("session "+session, func(t *testing.T) {
			inRowsBubble(t, cfg, 8, func(w *rowsWorld) {
				p := w.startWith("a", claims.SessionConfig{Logger: logTo(&w.log)})
				if session != "" {
					testkit.AcquireBriefly(w.T, w.store, tenure.LeaseConfig{Key: claims.SessionKey(session), TTL: 24 * time.Hour})
				}
				_, err := w.db.Exec(`UPDATE tasks SET attempts = 1 WHERE id = 1`)
				require.NoError(w, err)
				test(w, w.rowsOf(p, cfg), session)
			})
		})
	}
}

// Nothing else would recover the panic, so the process would end, and then one replica after the other.
func TestAnOnExhaustedThatPanicsIsCalledAgainLater(t *testing.T) {
	testkit.Slow(t)
	for name, end := range map[string]func(){"panic": func() { panic("no such account") }, "Goexit": runtime.Goexit} {
		t.Run(name, func(t *testing.T) {
			var calls atomic.Int64
			cfg := exhausted(func(context.Context, claims.Claim) error { calls.Add(1); end(); return nil })
			eachTaker(t, cfg, func(w *rowsWorld, rows *workedQueue, session string) {
				calls.Store(0)
				require.Equal(w, 7, w.waits(rows, session, time.Minute))
				require.Greater(w, calls.Load(), int64(2))
				require.Less(w, calls.Load(), int64(9), "it is called all the time")
				if name == "panic" {
					require.Contains(w, w.log.String(), "no such account")
					require.Contains(w, w.log.String(), "rows_refused_test.go", "the log has no stack")
				}
			})
		})
	}
}

// Each failure makes the others be taken again, which counts as an attempt.
func TestARowThatCannotBeGivenUpKeepsNoOther(t *testing.T) {
	eachTaker(t, exhausted(nil), func(w *rowsWorld, rows *workedQueue, session string) {
		for _, query := range []string{
			`UPDATE tasks SET attempts = 1`,
			`CREATE TRIGGER refuses BEFORE UPDATE ON tasks WHEN NEW.id = 3 AND NEW.status = 'failed' BEGIN SELECT RAISE(ABORT, 'refused'); END`,
		} {
			_, err := w.db.Exec(query)
			require.NoError(w, err)
		}
		require.Zero(w, w.waits(rows, session, time.Minute))
		require.Equal(w, 7, w.count(`SELECT count(*) FROM tasks WHERE status = 'failed' AND attempts = 2 AND session IS NULL`))
		require.Less(w, w.count(`SELECT attempts FROM tasks WHERE id = 3`), 10, "it is taken all the time")
	})
}

// Without NotBefore the session keeps a row, or passes over it, until the time has come.
func TestARowThatCannotBeGivenUpIsLeftForAWhileWithoutNotBefore(t *testing.T) {
	cfg := exhausted(func(context.Context, claims.Claim) error { return errors.New("not yet") })
	cfg.NotBefore = ""
	eachTaker(t, cfg, func(w *rowsWorld, rows *workedQueue, session string) {
		require.Equal(w, 7, w.waits(rows, session, time.Minute))
		require.Less(w, w.count(`SELECT attempts FROM tasks WHERE id = 1`), 10, "it is taken all the time")
	})
}

func TestAFuncThatEndsByGoexitHasFailed(t *testing.T) {
	inRowsBubble(t, effect, 3, func(w *rowsWorld) {
		rows := w.rowsOf(w.startWith("a", claims.SessionConfig{Logger: logTo(&w.log)}), effect)
		var calls atomic.Int64
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		require.NoError(w, rows.Serve(ctx, 2, func(_ context.Context, c claims.Claim) error {
			if c.Key.ID == "1" {
				calls.Add(1)
				runtime.Goexit()
			}
			return nil
		}))
		require.Equal(w, 2, w.count(`SELECT count(*) FROM tasks WHERE status = 'done'`))
		require.Greater(w, calls.Load(), int64(2), "its worker is gone")
		require.Less(w, calls.Load(), int64(10))
		require.Contains(w, w.log.String(), "Goexit")
		require.Equal(w, 1, w.count(`SELECT count(*) FROM tasks WHERE id = 1 AND session IS NULL AND not_before IS NOT NULL`))
	})
}

// The config's Backoff is called on a goroutine of the library as well.
func TestABackoffThatPanicsEndsNothing(t *testing.T) {
	cfg := exhausted(func(context.Context, claims.Claim) error { return errors.New("not yet") })
	cfg.Backoff = func(claims.Claim) time.Duration { panic("no idea") }
	eachTaker(t, cfg, func(w *rowsWorld, rows *workedQueue, session string) {
		require.Equal(w, 7, w.waits(rows, session, time.Minute))
		require.Contains(w, w.log.String(), "no idea")
	})
}

func TestAReleaseRequestedThatPanicsEndsNothing(t *testing.T) {
	inBubble(t, func(w *world) {
		var log testkit.SyncBuffer
		a := w.startWith("a", claims.SessionConfig{Logger: logTo(&log), ReleaseRequested: func(claims.Claim) { panic("no idea") }})
		c := a.claimOne("k")
		require.NoError(w, a.keys.RequestRelease(w.Context(), "k"))
		time.Sleep(ttl)
		require.Contains(w, log.String(), "no idea")
		require.True(w, a.keys.Holds(c))
	})
}

// A func of FinishPostgres has the only connection of the application's pool.
func TestRowsAreEndedByValueWhereTheApplicationHasNoConnection(t *testing.T) {
	db := rowsOnPostgres(t)
	db.exec(`CREATE TABLE tasks (id bigint PRIMARY KEY, status text NOT NULL DEFAULT 'queued', priority integer NOT NULL DEFAULT 0)`)
	db.exec(testkit.Must(tasks.PostgresDDL()))
	db.add(1, 9)
	cfg := db.pool.Config()
	cfg.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	store, err := tenure.NewPostgresStore(pool, tenure.PostgresConfig{Logger: testkit.Quiet})
	require.NoError(t, err)
	t.Cleanup(func() { _ = store.Close() })
	s, err := claims.NewSession(store, claims.SessionConfig{Logger: testkit.Quiet})
	require.NoError(t, err)
	rows, err := newRows(s, tasks)
	require.NoError(t, err)
	got, err := rows.TryTakeFor(t.Context(), db.remote("worker", time.Minute), claims.TakeOptions{N: 9})
	require.NoError(t, err)
	require.Len(t, got, 9)
	other, err := newRows(testkit.Must(claims.NewSession(store, claims.SessionConfig{Logger: testkit.Quiet})), tasks) // which has not looked at the table
	require.NoError(t, err)
	require.NoError(t, rows.FinishPostgres(t.Context(), got[:1], func(pgx.Tx) error {
		return errors.Join(
			rows.Queue.Release(t.Context(), got[1:3]...), rows.Finish(t.Context(), got[3:5]...), rows.ReleaseAfter(t.Context(), time.Hour, got[5:7]...),
			other.Check(t.Context()), other.Finish(t.Context(), got[7:9]...))
	}))
	require.Equal(t, 5, db.count(`SELECT count(*) FROM tasks WHERE status = 'done'`))
	require.Equal(t, 2, db.count(`SELECT count(*) FROM tasks WHERE not_before > now()`))
	require.Zero(t, db.count(`SELECT count(*) FROM tasks WHERE session IS NOT NULL`))
}

// Waiting for locked rows takes none of the few connections.
func TestRowsThatAreEndedTogetherWaitForALockWithoutAConnection(t *testing.T) {
	db := rowsOnPostgres(t)
	db.exec(`CREATE TABLE tasks (id bigint PRIMARY KEY, status text NOT NULL DEFAULT 'queued', priority integer NOT NULL DEFAULT 0)`)
	db.exec(testkit.Must(tasks.PostgresDDL()))
	db.add(1, 30)
	a := db.worker(claims.SessionConfig{TTL: 60 * time.Second}, tasks)
	got := a.take(30)
	require.NoError(t, a.rows.Detach(got...))
	tx, err := db.sql.Begin()
	require.NoError(t, err)
	defer tx.Rollback()
	_, err = tx.Exec(`SELECT 1 FROM tasks WHERE id <= 20 FOR SHARE`)
	require.NoError(t, err)
	released := make(chan error, 10)
	for i := range 10 {
		go func() { released <- a.rows.Queue.Release(context.Background(), got[2*i:2*i+2]...) }()
	}
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	for i := 20; i < 30; i += 2 {
		require.NoError(t, a.rows.Queue.Release(ctx, got[i:i+2]...))
	}
	require.Empty(t, released)
	require.NoError(t, tx.Rollback())
	for range 10 {
		require.NoError(t, <-released)
	}
	require.Zero(t, db.count(`SELECT count(*) FROM tasks WHERE session IS NOT NULL`))
}

// A key of six kilobytes fits in no index.
func TestAKeyThatIsTooLongKeepsNoOther(t *testing.T) {
	url := testkit.PostgresURL(t)
	w := newWorld(t, testkit.OpenPostgres(t, url, tenure.PostgresConfig{}))
	a := w.start("a")
	long := randomText(6000)
	_, err := a.keys.TryClaim(t.Context(), "b", long)
	require.ErrorIs(t, err, tenure.ErrInvalid)
	require.ErrorContains(t, err, "6006 bytes together with its kind: the database's indexes allow 2600")
	_, err = a.keys.Claim(t.Context(), "b", long)
	require.ErrorIs(t, err, tenure.ErrInvalid)
	require.ErrorIs(t, a.keys.RequestRelease(t.Context(), long), tenure.ErrInvalid)
	_, err = claims.NewKeys(a.session, long)
	require.ErrorIs(t, err, tenure.ErrInvalid)
	a.claimOne("b")

	fits := randomText(2600 - len("tenant"))
	got := a.claimOne(fits)
	require.NoError(t, a.keys.RequestRelease(t.Context(), fits))
	require.NoError(t, a.keys.Release(t.Context(), got))

	// An index of the user's has more columns.
	db := testkit.OpenSQL(t, "pgx", url)
	testkit.ExecSQL(t, db, `TRUNCATE objects_claims`) // an index has rows that were deleted, too, while an older snapshot sees them
	testkit.ExecSQL(t, db, `CREATE INDEX ON objects_claims (id, session, (repeat(id, 2)))`)
	some, err := a.keys.TryClaim(t.Context(), "c", fits, "d")
	require.Len(t, some, 2)
	require.ErrorIs(t, err, tenure.ErrInvalid)
	require.ErrorContains(t, err, "use a hash of it")
}

func TestARowWhoseIDIsTooLongForAnIndexKeepsNoOther(t *testing.T) {
	db := rowsOnPostgres(t)
	db.exec(`CREATE TABLE tasks (id text PRIMARY KEY, status text NOT NULL DEFAULT 'queued', priority integer NOT NULL DEFAULT 0)`)
	db.exec(testkit.Must(tasks.PostgresDDL()))
	_, err := db.sql.Exec(`INSERT INTO tasks (id, priority) VALUES ($1, 0), ('b', -1), ('c', -2)`, randomText(2670))
	require.NoError(t, err)
	a := db.worker(claims.SessionConfig{}, tasks)
	require.Equal(t, []string{"b"}, takenIDs(a.take(1)))
	require.Equal(t, []string{"c"}, takenIDs(a.take(3)))
	_, err = a.rows.TryTakeFor(t.Context(), randomText(6000), claims.TakeOptions{N: 1})
	require.ErrorIs(t, err, tenure.ErrInvalid)
}

// randomText can't be compressed.
func randomText(n int) string {
	const letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"
	b := make([]byte, n)
	for i := range b {
		b[i] = letters[rand.N(len(letters))]
	}
	return string(b)
}

// However many rows the database refuses to have taken, those behind them have their turn.
func TestManyRowsThatAreRefusedKeepNoRowFromAWorkerThatTakesOne(t *testing.T) {
	inRowsBubble(t, effect, 300, func(w *rowsWorld) {
		testkit.ExecSQL(t, w.db, `CREATE TRIGGER refuses BEFORE UPDATE ON tasks WHEN NEW.id < 300 BEGIN SELECT RAISE(ABORT, 'refused'); END`)
		rows := w.rowsOf(w.start("a"), effect)
		ctx, cancel := context.WithTimeout(w.Context(), time.Hour)
		defer cancel()
		began := time.Now()
		got, err := rows.Take(ctx, 1)
		require.NoError(w, err)
		require.Equal(w, []string{"300"}, takenIDs(got))
		require.Less(w, time.Since(began), ttl)
	})
}

// The others are taken by the same call.
func TestARowThatTheDatabaseRefusesIsTriedByItselfOnceAndThenLeftForAWhile(t *testing.T) {
	inRowsBubble(t, effect, 20, func(w *rowsWorld) {
		testkit.ExecSQL(t, w.db, `CREATE TRIGGER refuses BEFORE UPDATE ON tasks WHEN NEW.id = 3 BEGIN SELECT RAISE(ABORT, 'refused'); END`)
		a := w.start("a")
		rows := w.rowsOf(a, effect)
		var traffic testkit.Calls
		a.fault(traffic.Count("", nil))
		require.Equal(w, []string{"1", "2", "4", "5", "6"}, takenIDs(takeOf(w, rows, 5)))
		require.Equal(w, 1+6, traffic.Take()["queue.take"], "one for all, and one for each")
		require.Equal(w, []string{"7", "8", "9"}, takenIDs(takeOf(w, rows, 3)))
		require.Equal(w, 1, traffic.Take()["queue.take"])
		testkit.ExecSQL(t, w.db, `DROP TRIGGER refuses`)
		time.Sleep(ttl / 8)
		require.Equal(w, []string{"3", "10"}, takenIDs(takeOf(w, rows, 2)))
	})
}

// On SQLite a row whose ID is not UTF-8 can't be claimed.
func TestRowsThatCannotBeNamedKeepNoRowFromAWorkerThatTakesOne(t *testing.T) {
	testkit.Slow(t)
	inRowsBubble(t, effect, 0, func(w *rowsWorld) {
		testkit.ExecSQL(w.T, w.db, `DROP TABLE tasks`)
		testkit.ExecSQL(w.T, w.db, `CREATE TABLE tasks (id TEXT PRIMARY KEY NOT NULL, status TEXT NOT NULL DEFAULT 'queued', priority INTEGER NOT NULL DEFAULT 0, effects INTEGER NOT NULL DEFAULT 0)`)
		testkit.ExecSQL(w.T, w.db, testkit.Must(effect.SQLiteDDL()))
		testkit.ExecSQL(w.T, w.db, `WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1010)
			INSERT INTO tasks (id, priority) SELECT CAST(X'FF' || i AS TEXT), 1 FROM n`) // more than a statement takes
		testkit.ExecSQL(w.T, w.db, `INSERT INTO tasks (id) VALUES ('good')`)
		require.Equal(w, []string{"good"}, takenIDs(takeOf(w, w.rowsOf(w.start("a"), effect), 1)))
	})
}

func TestRefusalsOfManyRowsAreOneLineEachTime(t *testing.T) {
	testkit.Slow(t)
	inRowsBubble(t, effect, 0, func(w *rowsWorld) {
		var log testkit.SyncBuffer
		a := w.startWith("a", claims.SessionConfig{Logger: logTo(&log)})
		got := a.claim(names(200)...)
		testkit.ExecSQL(t, w.db, `CREATE TRIGGER refuses BEFORE UPDATE ON objects_claims WHEN NEW.session IS NULL BEGIN SELECT RAISE(ABORT, 'refused'); END`)
		require.NoError(w, a.keys.Release(w.Context(), got...))
		time.Sleep(10 * ttl)
		lines := strings.Count(log.String(), "refuses to free a key")
		require.Positive(w, lines)
		require.Less(w, lines, 20)
		testkit.ExecSQL(t, w.db, `DROP TRIGGER refuses`)
	})
}

// A trigger that suppresses an update is no lock of another transaction, and a row that it keeps is not finished.
func TestATriggerThatSuppressesTheUpdateIsNamedWhoeverFinishesARow(t *testing.T) {
	eachRowsServer(t, tasks, func(db *rowsDB) {
		db.add(1, 3)
		a := db.worker(claims.SessionConfig{TTL: 4 * time.Second}, tasks)
		got := a.take(3)
		if db.pool != nil {
			db.exec(`CREATE FUNCTION suppress() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'`)
			db.exec(`CREATE TRIGGER suppresses BEFORE UPDATE ON tasks FOR EACH ROW WHEN (NEW.id < 3 AND NEW.session IS NULL) EXECUTE FUNCTION suppress()`)
		} else {
			db.exec(`CREATE TRIGGER suppresses BEFORE UPDATE ON tasks WHEN NEW.id < 3 AND NEW.session IS NULL BEGIN SELECT RAISE(IGNORE); END`)
		}
		ctx := db.Context()
		for what, end := range map[string]func() error{
			"Finish of one":    func() error { return a.rows.Finish(ctx, got[0]) },
			"Finish of some":   func() error { return a.rows.Finish(ctx, got...) },
			"with a func":      func() error { return db.finish(a.rows, got[:1], writing(`SELECT 1`, nil)) },
			"with a func, all": func() error { return db.finish(a.rows, got, writing(`SELECT 1`, nil)) },
			"Release":          func() error { return a.rows.Queue.Release(ctx, got[1]) },
			"ReleaseAfter":     func() error { return a.rows.ReleaseAfter(ctx, time.Second, got[1]) },
		} {
			err := end()
			require.ErrorContains(db, err, "trigger", what)
			require.NotErrorIs(db, err, tenure.ErrLost, what)
			require.NotErrorIs(db, err, tenure.ErrInvalid, what)
			require.NotContains(db, err.Error(), "locked", what)
		}
		require.Equal(db, 3, db.count(`SELECT count(*) FROM tasks WHERE session IS NOT NULL AND status = 'queued'`))
		err := a.rows.FinishEach(ctx, got...)
		require.ErrorContains(db, err, "trigger")
		require.NotErrorIs(db, err, tenure.ErrLost)
		require.Equal(db, 1, db.count(`SELECT count(*) FROM tasks WHERE id = 3 AND session IS NULL AND status = 'done'`), "the others are finished")
		db.exec(map[bool]string{true: `DROP TRIGGER suppresses ON tasks`, false: `DROP TRIGGER suppresses`}[db.pool != nil])
		require.NoError(db, a.rows.Finish(ctx, got[:2]...))
	})
}
