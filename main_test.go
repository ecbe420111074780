package tenure_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/verify/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// patience is how long to wait for what takes milliseconds on an idle machine.
const patience = time.Minute

// untilEnough runs a stress test in rounds until enough has happened for it to
// tell anything. A machine that has something else to do may be too slow for the
// pace of a round, and then the next one takes its time: TTLs and the like are to be
// multiplied by slower. A round must end with its context.
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
			t.Fatal("too little happened to tell anything")
		}
		t.Logf("too little has happened so far, at a pace of 1/%d", slower)
	}
}

// acquireBriefly begins a term with a TTL of cfg, or with a longer one where the
// machine is too slow for that, as soon as the lease is free or has expired.
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

// must returns what a constructor has made.
func must[T any](made T, err error) T {
	if err != nil {
		panic(err)
	}
	return made
}

// quiet keeps logs out of the tests that don't read them.
var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

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
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	return store
}

func openSQLite(t testing.TB, path string) *tenure.SQLiteStore {
	t.Helper()
	store, err := tenure.OpenSQLite(t.Context(), path, tenure.SQLiteConfig{Shared: true, Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := store.Close(); err != nil {
			t.Error(err)
		}
	})
	return store
}

func migrate(t testing.TB, store interface{ Migrate(context.Context) error }) {
	t.Helper()
	if err := store.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// postgresPool is for what a test does beside the store.
func postgresPool(t testing.TB, url string) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

func execPostgres(t testing.TB, db interface {
	Exec(context.Context, string, ...any) (pgconn.CommandTag, error)
}, sql string, args ...any) {
	t.Helper()
	if _, err := db.Exec(context.Background(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}
