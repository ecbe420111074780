package tenure_test

import (
	"context"
	"database/sql"
	"errors"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/verify/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// patience is how long to wait for what takes milliseconds on an idle machine.
const patience = time.Minute

// untilEnough runs a stress test in rounds until enough has happened to prove anything. A
// busy machine may be too slow for the pace of a round. Then the next round is slower: it
// multiplies its TTLs and the like by slower. A round must end with its context.
func untilEnough(t *testing.T, length time.Duration, round func(ctx context.Context, slower time.Duration), enough func() bool) {
	t.Helper()
	const longest = 5 * time.Minute
	began := time.Now()
	for slower := time.Duration(1); ; slower = min(2*slower, 32) {
		ctx, cancel := context.WithTimeout(t.Context(), length)
		round(ctx, slower)
		cancel()
		if t.Failed() || enough() {
			return
		}
		if time.Since(began) > longest {
			t.Fatal("too little happened to prove anything")
		}
		t.Logf("too little has happened so far, at a pace of 1/%d", slower)
	}
}

// must returns what a constructor has made, or panics.
func must[T any](made T, err error) T {
	if err != nil {
		panic(err)
	}
	return made
}

// eachStore runs a test on every kind of database. open returns another handle
// on the same one at each call, as other replicas would have.
func eachStore(t *testing.T, test func(t *testing.T, open func() tenure.Store)) {
	t.Run("postgres", func(t *testing.T) {
		url := pgtest.URL(t)
		migrate(t, openPostgres(t, url, tenure.PostgresConfig{}))
		test(t, func() tenure.Store { return openPostgres(t, url, tenure.PostgresConfig{}) })
	})
	t.Run("sqlite", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "tenure.db")
		migrate(t, openSQLite(t, path))
		test(t, func() tenure.Store { return openSQLite(t, path) })
	})
}

func openPostgres(t testing.TB, url string, cfg tenure.PostgresConfig) *tenure.PostgresStore {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = quiet
	}
	store, err := tenure.OpenPostgres(t.Context(), url, cfg)
	require.NoError(t, err)
	t.Cleanup(func() { store.Close() })
	return store
}

func openSQLite(t testing.TB, path string) *tenure.SQLiteStore {
	t.Helper()
	store, err := tenure.OpenSQLite(t.Context(), path, tenure.SQLiteConfig{Shared: true, Logger: quiet})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, store.Close()) })
	return store
}

func migrate(t testing.TB, store interface{ Migrate(context.Context) error }) {
	t.Helper()
	require.NoError(t, store.Migrate(t.Context()))
}

// postgresPool is for what a test does besides the store.
func postgresPool(t testing.TB, url string) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), url)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

func execPostgres(t testing.TB, db interface {
	Exec(context.Context, string, ...any) (pgconn.CommandTag, error)
}, sql string, args ...any) {
	t.Helper()
	_, err := db.Exec(context.Background(), sql, args...)
	require.NoError(t, err, sql)
}

// acquireBriefly begins a term with the TTL of cfg, or a longer one where the machine is too
// slow for that, as soon as the lease is free or has expired.
func acquireBriefly(t testing.TB, store tenure.Store, cfg tenure.LeaseConfig) (lease *tenure.Lease, term *tenure.Term, ttl time.Duration) {
	t.Helper()
	lease = newLease(t, store, cfg)
	for end := time.Now().Add(patience); ; {
		term, err := lease.AcquireOrSteal(t.Context())
		switch {
		case err == nil:
			return lease, term, cfg.TTL
		case errors.Is(err, tenure.ErrDeadline):
			cfg.TTL *= 2
			lease = newLease(t, store, cfg)
		case !errors.Is(err, tenure.ErrHeld) || time.Now().After(end):
			t.Fatal(err)
		}
	}
}

func postgresURL(t testing.TB) string { return pgtest.URL(t) }

// awaitThat waits until ok, which it calls on the test's own goroutine.
func awaitThat(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		require.True(t, time.Now().Before(end), "waited until %s", what)
	}
}

// awaitLockWait returns when a statement in this database waits for a lock.
func awaitLockWait(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	awaitThat(t, "something waits for a lock", func() bool { return lockWaits(t, pool) > 0 })
}

// lockWaits counts the statements in this database that wait for a lock.
func lockWaits(t *testing.T, pool *pgxpool.Pool) (n int) {
	t.Helper()
	err := pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity
		WHERE datname = current_database() AND wait_event_type = 'Lock'`).Scan(&n)
	require.NoError(t, err)
	return n
}

func openSQL(t *testing.T, driver, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open(driver, dsn)
	require.NoError(t, err)
	t.Cleanup(func() { db.Close() })
	return db
}

// countRows counts the rows of the table ledger.
func countRows(t *testing.T, db interface {
	QueryRowContext(context.Context, string, ...any) *sql.Row
}) (n int) {
	t.Helper()
	require.NoError(t, db.QueryRowContext(context.Background(), `SELECT count(*) FROM ledger`).Scan(&n))
	return n
}

func execSQL(t *testing.T, db *sql.DB, query string, args ...any) (changed int64) {
	t.Helper()
	result, err := db.ExecContext(context.Background(), query, args...)
	require.NoError(t, err, query)
	changed, _ = result.RowsAffected()
	return changed
}

// storeWatcher is what all stores of this module are.
type storeWatcher interface {
	tenure.Store
	tenure.Watcher
	tenure.Notifier
}

func beginWatch(t *testing.T, store tenure.Watcher, key tenure.Key) tenure.Subscription {
	t.Helper()
	watch := store.Watch(key)
	t.Cleanup(watch.Stop)
	return watch
}

// liveWatch begins to watch, and returns when hints can be expected.
func liveWatch(t *testing.T, store tenure.Watcher, key tenure.Key) tenure.Subscription {
	t.Helper()
	watch := beginWatch(t, store, key)
	awaitThat(t, "a watch is live", watch.Live)
	return watch
}

func sleepFor(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

func percentile(d []time.Duration, p int) time.Duration {
	slices.Sort(d)
	return d[len(d)*p/100]
}

// stacksOf counts the goroutines that run code of these.
func stacksOf(code ...string) (n int) {
	stacks := make([]byte, 1<<22)
	for g := range strings.SplitSeq(string(stacks[:runtime.Stack(stacks, true)]), "\n\n") {
		if slices.ContainsFunc(code, func(code string) bool { return strings.Contains(g, code) }) {
			n++
		}
	}
	return n
}

// takeoverSQL is another replica's way to a term, in a transaction of its own, so that a
// test can stop it anywhere.
const takeoverSQL = `UPDATE objects SET payload = '{"holder":"thief","term":"another","ttl_ms":30000}',
	resource_version = resource_version + 1 WHERE object_type = 'reconciler_lease' AND id = 'singleton'`
