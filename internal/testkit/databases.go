package testkit

import (
	"context"
	"database/sql"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
)

// EachStore runs a test on Postgres and on SQLite. Each call of open opens another store on the
// same database, as another replica would.
func EachStore(t *testing.T, test func(t *testing.T, open func() tenure.Store)) {
	t.Run("postgres", func(t *testing.T) {
		url := PostgresURL(t)
		Migrate(t, OpenPostgres(t, url, tenure.PostgresConfig{}))
		test(t, func() tenure.Store { return OpenPostgres(t, url, tenure.PostgresConfig{}) })
	})
	t.Run("sqlite", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "tenure.db")
		Migrate(t, OpenSQLite(t, path))
		test(t, func() tenure.Store { return OpenSQLite(t, path) })
	})
}

// OpenPostgres opens a store, which is closed when the test ends. It logs nothing unless cfg has
// a logger.
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

// AwaitLockWait returns when a statement in this database waits for a lock.
func AwaitLockWait(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	Await(t, "a statement waits for a lock", func() bool { return LockWaits(t, pool) > 0 })
}

// LockWaits counts the statements in this database that wait for a lock.
func LockWaits(t *testing.T, pool *pgxpool.Pool) int {
	t.Helper()
	return countActivity(t, pool, `wait_event_type = 'Lock'`)
}

// AwaitHung returns when that many connections are in a trigger that never ends.
func AwaitHung(t *testing.T, pool *pgxpool.Pool, want int) {
	t.Helper()
	Await(t, fmt.Sprintf("%d connections hang", want), func() bool { return countActivity(t, pool, `wait_event = 'PgSleep'`) == want })
}

func countActivity(t *testing.T, pool *pgxpool.Pool, where string) (n int) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND `+where).Scan(&n))
	return n
}

// OpenSQLite opens a store on a shared file, which is closed when the test ends.
func OpenSQLite(t testing.TB, path string) *tenure.SQLiteStore {
	t.Helper()
	store, err := tenure.OpenSQLite(t.Context(), path, tenure.SQLiteConfig{Shared: true, Logger: Quiet})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, store.Close()) })
	return store
}

// Migrate creates the tables of a store.
func Migrate(t testing.TB, store interface{ Migrate(context.Context) error }) {
	t.Helper()
	require.NoError(t, store.Migrate(t.Context()))
}

// MigrateClaims creates the tables of a store, and those of claims.
func MigrateClaims(t testing.TB, store tenure.Database) {
	t.Helper()
	Migrate(t, store)
	require.NoError(t, claims.Migrate(t.Context(), store))
}

// PostgresPool opens a pool for what a test does outside the store.
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

// OpenSQL opens a database, which is closed when the test ends.
func OpenSQL(t *testing.T, driver, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open(driver, dsn)
	require.NoError(t, err)
	t.Cleanup(func() { db.Close() })
	return db
}

// ExecSQL runs a statement and returns how many rows it changed.
func ExecSQL(t *testing.T, db *sql.DB, query string, args ...any) (changed int64) {
	t.Helper()
	result, err := db.ExecContext(context.Background(), query, args...)
	require.NoError(t, err, query)
	changed, _ = result.RowsAffected()
	return changed
}

// LeaseConns is the least number of connections that a PostgresStore may open for its leases.
const LeaseConns = 4

// StoreWatcher is implemented by all stores of this module.
type StoreWatcher interface {
	tenure.Store
	tenure.Watcher
	tenure.Notifier
}

// BeginWatch watches a key until the test ends.
func BeginWatch(t *testing.T, store tenure.Watcher, key tenure.Key) tenure.Subscription {
	t.Helper()
	watch := store.Watch(key)
	t.Cleanup(watch.Stop)
	return watch
}

// LiveWatch watches a key until the test ends, and returns when hints can be expected.
func LiveWatch(t *testing.T, store tenure.Watcher, key tenure.Key) tenure.Subscription {
	t.Helper()
	watch := BeginWatch(t, store, key)
	Await(t, "a watch is live", watch.Live)
	return watch
}

// AsWorker returns the URL of a database for a role that may use the store's tables but owns
// nothing, and the owner's pool.
func AsWorker(t *testing.T) (url string, owner *pgxpool.Pool) {
	t.Helper()
	url = PostgresURL(t)
	MigrateClaims(t, OpenPostgres(t, url, tenure.PostgresConfig{}))
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

// ForeignTable creates a table named objects as another program might have: the id alone is the
// key, and there are columns that the library does not know.
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

// TakeHint takes a waiting hint, and reports whether there was one.
func TakeHint(watch tenure.Subscription) bool {
	select {
	case <-watch.C():
		return true
	default:
		return false
	}
}

// AwaitHint waits for a hint.
func AwaitHint(t *testing.T, what string, watch tenure.Subscription) {
	t.Helper()
	select {
	case <-watch.C():
	case <-time.After(Patience):
		t.Fatalf("%s: not woken", what)
	}
}

// DeleteAndWake deletes an object and wakes the watchers of its key.
func DeleteAndWake(t *testing.T, store tenure.Notifier, obj tenure.Object) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	WantErr(t, store.DeleteAndWake(ctx, obj.Key, tenure.IfVersion(obj.Version)), nil)
}

// OneConn returns a pool whose one connection begins with this statement.
func OneConn(t testing.TB, url, begins string) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(url)
	WantErr(t, err, nil)
	config.MaxConns = 1
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, begins)
		return err
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	WantErr(t, err, nil)
	t.Cleanup(pool.Close)
	return pool
}

// Held returns how many claims a session holds.
func Held(s *claims.Session) (n int) {
	for _, k := range s.Status().Kinds {
		n += k.Claims
	}
	return n
}
