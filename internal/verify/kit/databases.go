package kit

import (
	"context"
	"database/sql"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/verify/pgtest"
)

// EachStore runs a test on every kind of database. open returns another handle
// on the same one at each call, as other replicas would have.
func EachStore(t *testing.T, test func(t *testing.T, open func() tenure.Store)) {
	t.Run("postgres", func(t *testing.T) {
		url := pgtest.URL(t)
		Migrate(t, OpenPostgres(t, url, tenure.PostgresConfig{}))
		test(t, func() tenure.Store { return OpenPostgres(t, url, tenure.PostgresConfig{}) })
	})
	t.Run("sqlite", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "tenure.db")
		Migrate(t, OpenSQLite(t, path))
		test(t, func() tenure.Store { return OpenSQLite(t, path) })
	})
}

// OpenPostgres opens a store until the test ends, which is quiet unless cfg has a logger.
func OpenPostgres(t testing.TB, url string, cfg tenure.PostgresConfig) *tenure.PostgresStore {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = Quiet
	}
	store, err := tenure.OpenPostgres(t.Context(), url, cfg)
	require.NoError(t, err)
	t.Cleanup(func() { store.Close() })
	return store
}

// OpenSQLite opens a store on a file that is shared, until the test ends.
func OpenSQLite(t testing.TB, path string) *tenure.SQLiteStore {
	t.Helper()
	store, err := tenure.OpenSQLite(t.Context(), path, tenure.SQLiteConfig{Shared: true, Logger: Quiet})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, store.Close()) })
	return store
}

// Migrate makes the tables of a store.
func Migrate(t testing.TB, store interface{ Migrate(context.Context) error }) {
	t.Helper()
	require.NoError(t, store.Migrate(t.Context()))
}

// PostgresPool is for what a test does besides the store.
func PostgresPool(t testing.TB, url string) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), url)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

// ExecPostgres runs a statement.
func ExecPostgres(t testing.TB, db interface {
	Exec(context.Context, string, ...any) (pgconn.CommandTag, error)
}, sql string, args ...any) {
	t.Helper()
	_, err := db.Exec(context.Background(), sql, args...)
	require.NoError(t, err, sql)
}

// AwaitLockWait returns when a statement in this database waits for a lock.
func AwaitLockWait(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	AwaitThat(t, "something waits for a lock", func() bool { return LockWaits(t, pool) > 0 })
}

// LockWaits counts the statements in this database that wait for a lock.
func LockWaits(t *testing.T, pool *pgxpool.Pool) (n int) {
	t.Helper()
	err := pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity
		WHERE datname = current_database() AND wait_event_type = 'Lock'`).Scan(&n)
	require.NoError(t, err)
	return n
}

// OpenSQL opens a database until the test ends.
func OpenSQL(t *testing.T, driver, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open(driver, dsn)
	require.NoError(t, err)
	t.Cleanup(func() { db.Close() })
	return db
}

// ExecSQL runs a statement and returns how many rows it has changed.
func ExecSQL(t *testing.T, db *sql.DB, query string, args ...any) (changed int64) {
	t.Helper()
	result, err := db.ExecContext(context.Background(), query, args...)
	require.NoError(t, err, query)
	changed, _ = result.RowsAffected()
	return changed
}

// CountRows counts the rows of the table ledger.
func CountRows(t *testing.T, db interface {
	QueryRowContext(context.Context, string, ...any) *sql.Row
}) (n int) {
	t.Helper()
	require.NoError(t, db.QueryRowContext(context.Background(), `SELECT count(*) FROM ledger`).Scan(&n))
	return n
}

// LeaseConns is how many connections the leases of a PostgresStore have at least.
const LeaseConns = 4

// TakeoverSQL is another replica's way to a term, in a transaction of its own, so that a
// test can stop it anywhere.
const TakeoverSQL = `UPDATE objects SET payload = '{"holder":"thief","term":"another","ttl_ms":30000}',
	resource_version = resource_version + 1 WHERE object_type = 'reconciler_lease' AND id = 'singleton'`

// StoreWatcher is what all stores of this module are.
type StoreWatcher interface {
	tenure.Store
	tenure.Watcher
	tenure.Notifier
}

// BeginWatch watches until the test ends.
func BeginWatch(t *testing.T, store tenure.Watcher, key tenure.Key) tenure.Subscription {
	t.Helper()
	watch := store.Watch(key)
	t.Cleanup(watch.Stop)
	return watch
}

// LiveWatch begins to watch, and returns when hints can be expected.
func LiveWatch(t *testing.T, store tenure.Watcher, key tenure.Key) tenure.Subscription {
	t.Helper()
	watch := BeginWatch(t, store, key)
	AwaitThat(t, "a watch is live", watch.Live)
	return watch
}

// AwaitHung waits until so many connections are in the midst of a trigger that never
// ends.
func AwaitHung(t *testing.T, pool *pgxpool.Pool, want int) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		var n int
		err := pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event = 'PgSleep'`).Scan(&n)
		WantErr(t, err, nil)
		if n == want {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%d connections hang, want %d", n, want)
		}
	}
}

// AsWorker returns the URL by which a role that owns nothing reaches the database,
// and the owner's pool.
func AsWorker(t *testing.T) (url string, owner *pgxpool.Pool) {
	t.Helper()
	url = pgtest.URL(t)
	Migrate(t, OpenPostgres(t, url, tenure.PostgresConfig{}))
	owner = PostgresPool(t, url)
	role := "worker_" + owner.Config().ConnConfig.Database
	ExecPostgres(t, owner, `CREATE ROLE `+role+` LOGIN`)
	t.Cleanup(func() {
		ExecPostgres(t, owner, `DROP OWNED BY `+role)
		ExecPostgres(t, owner, `DROP ROLE `+role)
	})
	ExecPostgres(t, owner, `GRANT ALL ON objects, objects_tombstones TO `+role)
	return strings.Replace(url, "postgres@", role+"@", 1), owner
}

// ForeignTable is how another program made its objects: the id alone is the
// key, and there are columns that we know nothing of.
const ForeignTable = `
	CREATE TABLE objects (
		id               TEXT PRIMARY KEY,
		object_type      TEXT NOT NULL,
		scope            TEXT NOT NULL DEFAULT 'global',
		version          BIGINT NOT NULL DEFAULT 1,
		status           TEXT,
		dedup_key        TEXT,
		hit_count        BIGINT NOT NULL DEFAULT 0,
		workspace        TEXT NOT NULL DEFAULT '',
		name             TEXT,
		payload          %s NOT NULL,
		labels           %s,
		resource_version BIGINT NOT NULL DEFAULT 1,
		created_at_ms    BIGINT NOT NULL,
		updated_at_ms    BIGINT NOT NULL
	);
	CREATE UNIQUE INDEX objects_names ON objects (object_type, workspace, name) WHERE name IS NOT NULL;
	CREATE INDEX objects_scopes ON objects (object_type, scope, version) WHERE scope <> '';
	CREATE UNIQUE INDEX objects_dedup ON objects (object_type, dedup_key) WHERE dedup_key IS NOT NULL`

// TakeHint takes the hint that is there.
func TakeHint(watch tenure.Subscription) bool {
	select {
	case <-watch.C():
		return true
	default:
		return false
	}
}

// AwaitHint returns when the watch has been woken.
func AwaitHint(t *testing.T, what string, watch tenure.Subscription) {
	t.Helper()
	select {
	case <-watch.C():
	case <-time.After(Patience):
		t.Fatalf("%s: not woken", what)
	}
}

// DeleteAndWake deletes an object with a hint.
func DeleteAndWake(t *testing.T, store tenure.Notifier, obj tenure.Object) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	WantErr(t, store.DeleteAndWake(ctx, obj.Key, obj.Version), nil)
}
