package claims_test

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/pgobjects"
	"github.com/tenurelib/tenure/internal/testkit"
)

// tasks is the table of most tests.
var tasks = claims.QueueConfig{
	Table: "tasks", Attempts: "attempts", NotBefore: "not_before",
	Ready: "status = 'queued'", OrderBy: "priority DESC, id", Done: "status = 'done'", PollInterval: 50 * time.Millisecond,
}

// rowsDB is a database with a table of the user.
type rowsDB struct {
	*testing.T
	sql    *sql.DB
	pool   *pgxpool.Pool          // nil on SQLite
	open   func() tenure.Database // another process's store
	finish func(r *workedQueue, c []claims.Claim, fn func(exec) error) error
}

// workedQueue is a queue with the worker of a session.
type workedQueue struct {
	*claims.Queue
	*claims.Worker
}

func (q *workedQueue) Release(ctx context.Context, c ...claims.Claim) error {
	return q.Worker.Release(ctx, c...)
}

func (q *workedQueue) TakeFor(ctx context.Context, session string, o claims.TakeOptions) ([]claims.Claim, error) {
	return takeFor(ctx, q.Queue, session, o)
}

// takeFor takes rows for a remote worker, as a server does that waits until there are some.
func takeFor(ctx context.Context, q *claims.Queue, session string, o claims.TakeOptions) ([]claims.Claim, error) {
	for {
		got, err := q.TryTakeFor(context.WithoutCancel(ctx), session, o)
		if err != nil || len(got) > 0 || q.AwaitReady(ctx, o.Where, o.Args...) != nil {
			return got, err
		}
		o.Have = nil
	}
}

func newRows(s *claims.Session, cfg claims.QueueConfig) (*workedQueue, error) {
	cfg.Logger = cmp.Or(cfg.Logger, s.Config().Logger)
	q, err := claims.NewQueue(claims.StoreOf(s), cfg)
	if err != nil {
		return nil, err
	}
	w, err := claims.NewWorker(s, q)
	return &workedQueue{q, w}, err
}

// eachRowsServer runs a test on a real Postgres and on a SQLite file.
func eachRowsServer(t *testing.T, cfg claims.QueueConfig, test func(db *rowsDB)) {
	t.Run("postgres", func(t *testing.T) {
		t.Parallel() // most of these tests wait until something has expired
		test(rowsTableOnPostgres(t, cfg))
	})
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		db := rowsOnSQLite(t)
		db.exec(fmt.Sprintf(createTasks, "integer"))
		ddl, err := cfg.SQLiteDDL()
		require.NoError(t, err)
		db.exec(ddl)
		test(db)
	})
}

const createTasks = `CREATE TABLE tasks (id %s PRIMARY KEY, status text NOT NULL DEFAULT 'queued', priority integer NOT NULL DEFAULT 0, result text)`

func rowsTableOnPostgres(t *testing.T, cfg claims.QueueConfig) *rowsDB {
	db := rowsOnPostgres(t)
	db.exec(fmt.Sprintf(createTasks, "bigint"))
	ddl, err := cfg.PostgresDDL()
	require.NoError(t, err)
	db.exec(ddl)
	return db
}

func rowsOnPostgres(t *testing.T) *rowsDB { return rowsOnPostgresAt(t, testkit.PostgresURL(t)) }

func rowsOnPostgresAt(t *testing.T, url string) *rowsDB {
	db := &rowsDB{T: t, sql: testkit.OpenSQL(t, "pgx", url), pool: testkit.PostgresPool(t, url), open: func() tenure.Database { return testkit.OpenPostgres(t, url, tenure.PostgresConfig{}) }}
	testkit.MigrateClaims(t, db.open())
	db.finish = func(r *workedQueue, c []claims.Claim, fn func(exec) error) error {
		return r.FinishPostgres(db.Context(), c, func(tx pgx.Tx) error {
			return fn(func(ctx context.Context, query string, args ...any) error {
				_, err := tx.Exec(ctx, query, args...)
				return err
			})
		})
	}
	return db
}

func rowsOnSQLite(t *testing.T) *rowsDB {
	path := filepath.Join(t.TempDir(), "tenure.db")
	db := &rowsDB{T: t, open: func() tenure.Database { return testkit.OpenSQLite(t, path) }}
	testkit.MigrateClaims(t, db.open())
	escaped := (&url.URL{Path: path}).EscapedPath() // the name of a fuzz test has a # in it
	db.sql = testkit.OpenSQL(t, "sqlite", "file:"+escaped+"?_txlock=immediate&_pragma=busy_timeout(10000)")
	db.finish = func(r *workedQueue, c []claims.Claim, fn func(exec) error) error {
		return r.FinishSQLite(db.Context(), c, func(tx *sql.Tx) error { return fn(execIn(tx)) })
	}
	return db
}

func execIn(tx *sql.Tx) exec {
	return func(ctx context.Context, query string, args ...any) error {
		_, err := tx.ExecContext(ctx, query, args...)
		return err
	}
}

// writing returns a func that makes one write and returns an error.
func writing(query string, err error) func(exec) error {
	return func(do exec) error { return errors.Join(do(context.Background(), query), err) }
}

// byStatement finishes a row in a transaction of another driver.
func (db *rowsDB) byStatement(r *workedQueue, c claims.Claim) error {
	return db.byStatementAnd(r, c, func(exec) error { return nil })
}

// byStatementAnd finishes a row in a transaction of another driver that also writes.
func (db *rowsDB) byStatementAnd(r *workedQueue, c claims.Claim, write func(exec) error) error {
	tx, err := db.sql.Begin()
	require.NoError(db, err)
	defer tx.Rollback()
	query, args, err := r.FinishStatement(c)
	require.NoError(db, err)
	if _, err := tx.Exec(query, args...); err != nil {
		return tenure.FenceError(err)
	}
	if err := write(execIn(tx)); err != nil {
		return err
	}
	return tx.Commit()
}

func (db *rowsDB) exec(query string) { db.Helper(); testkit.ExecSQL(db.T, db.sql, query) }

// expire makes claims of [expiring] expire now.
func (db *rowsDB) expire(cs ...claims.Claim) {
	db.Helper()
	now := `clock_timestamp()`
	if db.pool == nil {
		now = `0`
	}
	for _, c := range cs {
		db.exec(`UPDATE tasks SET expires_at = ` + now + ` WHERE id = ` + c.Key.ID)
	}
}

func (db *rowsDB) count(query string) (n int) {
	db.Helper()
	require.NoError(db, db.sql.QueryRow(query).Scan(&n))
	return n
}

// add adds rows with the IDs from one to another.
func (db *rowsDB) add(from, to int) {
	db.Helper()
	db.exec(fmt.Sprintf(`WITH RECURSIVE n(i) AS (SELECT %d UNION ALL SELECT i + 1 FROM n WHERE i < %d) INSERT INTO tasks (id) SELECT i FROM n`, from, to))
}

// removeSession deletes the record of a session, as if it had expired.
func (db *rowsDB) removeSession(session string) {
	db.Helper()
	store := db.open()
	testkit.Await(db.T, "the session is removed", func() bool { // it may be renewed meanwhile
		record, err := store.Get(db.Context(), claims.SessionKey(session))
		require.NoError(db, err)
		return store.DeleteIf(db.Context(), record.Key, tenure.IfVersion(record.Version)) == nil
	})
}

// endedSession begins a session and ends it, which has old tombstones pruned.
func (db *rowsDB) endedSession(id string) {
	db.Helper()
	store := db.open()
	if p, ok := store.(*tenure.PostgresStore); ok { // it prunes once an hour
		p.Backend().(*pgobjects.Table).SetPruned(time.Time{})
	}
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: claims.SessionKey(id), Logger: testkit.Quiet})
	require.NoError(db, err)
	require.NoError(db, lease.Release(db.Context(), testkit.MustAcquire(db.T, lease)))
}

// worker is a process that works on rows.
type worker struct {
	db      *rowsDB
	session *claims.Session
	rows    *workedQueue
	store   tenure.Database
	stop    func()
}

func (db *rowsDB) worker(session claims.SessionConfig, cfg claims.QueueConfig) *worker {
	db.Helper()
	w := &worker{db: db, store: db.open()}
	session.Logger = cmp.Or(session.Logger, testkit.Quiet)
	var err error
	w.session, err = claims.NewSession(w.store, session)
	require.NoError(db, err)
	w.rows, err = newRows(w.session, cfg)
	require.NoError(db, err)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = w.session.Run(ctx) })
	w.stop = func() { cancel(); running.Wait() }
	db.Cleanup(w.stop)
	return w
}

func (w *worker) take(n int) []claims.Claim {
	w.db.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	defer cancel()
	got, err := w.rows.Take(ctx, n)
	require.NoError(w.db, err)
	return got
}

// takesNone checks that nothing is ready for a while.
func (w *worker) takesNone() {
	w.db.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	got, err := w.rows.Take(ctx, 1)
	require.ErrorIs(w.db, err, context.DeadlineExceeded)
	require.Empty(w.db, got)
}

func takenIDs(got []claims.Claim) (ids []string) {
	for _, c := range got {
		ids = append(ids, c.Key.ID)
	}
	return ids
}

func TestRowsAreTakenInOrderAndFinished(t *testing.T) {
	testkit.Slow(t)
	eachRowsServer(t, tasks, func(db *rowsDB) {
		db.add(1, 5)
		db.exec(`UPDATE tasks SET priority = 1 WHERE id = 4`)
		db.exec(`UPDATE tasks SET status = 'held' WHERE id = 2`)
		a, b := db.worker(claims.SessionConfig{}, tasks), db.worker(claims.SessionConfig{}, tasks)
		got := a.take(3)
		require.Equal(db, []string{"4", "1", "3"}, takenIDs(got))
		for _, c := range got {
			require.Equal(db, "tasks", c.Key.Type)
			require.Equal(db, a.session.ID(), c.Session)
			require.Equal(db, 1, c.Attempt)
			require.True(db, a.rows.Holds(c))
		}
		rest := b.take(100)
		require.Equal(db, []string{"5"}, takenIDs(rest))
		b.takesNone()

		require.NoError(db, db.finish(a.rows, got[:2], writing(`UPDATE tasks SET result = 'ok' WHERE id IN (4, 1)`, nil)))
		require.False(db, a.rows.Holds(got[0]))
		require.Equal(db, 2, db.count(`SELECT count(*) FROM tasks WHERE status = 'done' AND result = 'ok' AND session IS NULL AND attempts = 1`))
		failure := errors.New("no")
		require.ErrorIs(db, db.finish(a.rows, got[2:], writing(`UPDATE tasks SET result = 'ok' WHERE id = 3`, failure)), failure)
		require.True(db, a.rows.Holds(got[2]))
		require.Equal(db, 2, db.count(`SELECT count(*) FROM tasks WHERE result = 'ok'`))
		require.NoError(db, a.rows.Release(db.Context(), got[2]))
		db.add(6, 6)
		third := b.take(1)
		require.Equal(db, []string{"3"}, takenIDs(third), "a row that another had is not skipped once it is free")
		require.NoError(db, b.rows.Finish(db.Context(), third...))
		db.exec(`DELETE FROM tasks WHERE id = 6`)
		require.NoError(db, b.rows.Release(db.Context(), rest...))
		again := a.take(1)
		require.Equal(db, []string{"5"}, takenIDs(again))
		require.Greater(db, again[0].Token, rest[0].Token)
		require.Equal(db, 1, again[0].Attempt, "no func has worked on it")
		require.NoError(db, a.rows.ReleaseAfter(db.Context(), time.Hour, again...))
		a.takesNone()
		db.exec(`UPDATE tasks SET not_before = NULL`)
		again = a.take(1)
		began := time.Now()
		require.NoError(db, a.rows.ReleaseAfter(db.Context(), time.Second/2, again...))
		require.Equal(db, []string{"5"}, takenIDs(b.take(1)))
		require.GreaterOrEqual(db, time.Since(began), time.Second/2-time.Millisecond)
		require.Equal(db, 1, b.rows.Len())
		b.stop()
		require.Zero(db, db.count(`SELECT count(*) FROM tasks WHERE session IS NOT NULL`))
	})
}

func TestAFinishOfALostClaimWritesNothing(t *testing.T) {
	eachRowsServer(t, tasks, func(db *rowsDB) {
		db.add(1, 3)
		a, b := db.worker(claims.SessionConfig{}, tasks), db.worker(claims.SessionConfig{}, tasks)
		got := a.take(3)
		db.exec(`UPDATE tasks SET session = NULL WHERE id = 2`) // as the process does that removes the session
		other := b.take(1)
		var lost *claims.EndedError
		for name, finish := range map[string]func() error{
			"func":      func() error { return db.finish(a.rows, got, writing(`UPDATE tasks SET result = 'late'`, nil)) },
			"no func":   func() error { return a.rows.Finish(db.Context(), got...) },
			"one":       func() error { return a.rows.Finish(db.Context(), got[1]) },
			"by value":  func() error { return b.rows.Finish(db.Context(), got[1]) },
			"release":   func() error { return b.rows.Queue.Release(db.Context(), got...) },
			"later":     func() error { return a.rows.ReleaseAfter(db.Context(), time.Hour, got...) },
			"statement": func() error { return db.byStatement(a.rows, got[1]) },
		} {
			err := finish()
			require.ErrorIs(db, err, tenure.ErrLost, name)
			if name != "statement" {
				require.ErrorAs(db, err, &lost, name)
				require.Equal(db, []claims.Claim{got[1]}, lost.Claims, name)
			}
			require.Zero(db, db.count(`SELECT count(*) FROM tasks WHERE result IS NOT NULL OR status <> 'queued' OR not_before IS NOT NULL OR session IS NULL`), name)
		}
		require.False(db, a.rows.Holds(got[1]))
		require.True(db, a.rows.Holds(got[0]))
		require.True(db, b.rows.Holds(other[0]))
		db.exec(`DELETE FROM tasks WHERE id = 3`)
		require.ErrorAs(db, a.rows.Finish(db.Context(), got[0], got[2]), &lost)
		require.Equal(db, []claims.Claim{got[2]}, lost.Claims)
		require.NoError(db, a.rows.Finish(db.Context(), got[0]))
	})
}

// A session can release a row without knowing what has happened to the row behind its back.
func TestAReleaseForgetsAnOwnClaimThatHasEnded(t *testing.T) {
	eachRowsServer(t, tasks, func(db *rowsDB) {
		db.add(1, 3)
		a, b := db.worker(claims.SessionConfig{}, tasks), db.worker(claims.SessionConfig{}, tasks)
		got := a.take(3)
		db.exec(`UPDATE tasks SET session = NULL WHERE id = 2`)
		db.exec(`DELETE FROM tasks WHERE id = 3`)
		other := b.take(1)
		require.NoError(db, a.rows.Release(db.Context(), got...))
		require.Zero(db, a.rows.Len())
		require.NoError(db, db.finish(b.rows, other, writing(`UPDATE tasks SET result = 'ok' WHERE id = 2`, nil)))
		require.ErrorIs(db, a.rows.Queue.Release(db.Context(), got...), tenure.ErrLost, "by value")
	})
}

// What a session does under a former claim is late even if it has the row again.
func TestAFinishUnderAFormerClaimOfTheSameSessionIsLate(t *testing.T) {
	eachRowsServer(t, tasks, func(db *rowsDB) {
		db.add(1, 1)
		a := db.worker(claims.SessionConfig{}, tasks)
		former := a.take(1)
		require.NoError(db, a.rows.Release(db.Context(), former...))
		got := a.take(1)
		require.ErrorIs(db, db.byStatement(a.rows, former[0]), tenure.ErrLost)
		require.ErrorIs(db, db.finish(a.rows, former, writing(`UPDATE tasks SET result = 'late'`, nil)), tenure.ErrLost)
		require.ErrorIs(db, a.rows.Release(db.Context(), former...), tenure.ErrLost)
		require.True(db, a.rows.Holds(got[0]))
		require.NoError(db, db.byStatement(a.rows, got[0]))
	})
}
