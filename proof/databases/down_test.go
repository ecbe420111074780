package databases_test

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

// A coordinator that starts before its database does, and goes on through all
// that becomes of that, with short times, for a real server is in play.
func TestACoordinatorKeepsTryingWhateverBecomesOfItsDatabase(t *testing.T) {
	before := goroutines()
	server := testkit.StartPostgres(t)
	first := testkit.OpenPostgres(t, server.URL(), tenure.PostgresConfig{})
	testkit.Migrate(t, first)
	first.Close()
	admin := testkit.PostgresPool(t, server.URL())
	testkit.ExecPostgres(t, admin, `CREATE ROLE worker LOGIN`)
	testkit.ExecPostgres(t, admin, `GRANT ALL ON objects, objects_tombstones TO worker`)
	testkit.WantErr(t, server.Stop("fast"), nil)

	var log bytes.Buffer
	pool := testkit.PostgresPool(t, strings.Replace(server.URL(), "postgres@", "worker@", 1))
	store := testkit.Must(tenure.NewPostgresStore(pool, tenure.PostgresConfig{Logger: testkit.Quiet}))
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{TTL: 1500 * time.Millisecond})
	c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
		Reconcile: func(ctx context.Context) error { <-ctx.Done(); return nil },
		Logger:    slog.New(slog.NewTextHandler(&log, nil)),
	})
	testkit.WantErr(t, err, nil)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- c.Run(ctx) }()
	await := func(what string, ok func() bool) {
		t.Helper()
		for end := time.Now().Add(testkit.Patience); !ok(); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("waited for %s; status %+v", what, c.Status())
			}
		}
	}
	await("the status tells that the database is down", func() bool { return c.Status().LastError != "" })
	testkit.WantErr(t, server.Start(), nil)
	admin.Reset() // its connections went with the server
	await("it holds once the database is up", c.IsHolder)

	testkit.ExecPostgres(t, admin, `ALTER ROLE worker NOLOGIN`)
	await("its term is over, its role being refused", func() bool {
		// One that was being opened has its login behind it, and is not listed yet.
		testkit.ExecPostgres(t, admin, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'worker'`)
		return !c.IsHolder()
	})
	await("the status tells that the role is refused", func() bool { return strings.Contains(c.Status().LastError, "28000") })
	testkit.ExecPostgres(t, admin, `ALTER ROLE worker LOGIN`)
	await("it holds again once the role is admitted", c.IsHolder)

	testkit.ExecPostgres(t, admin, `ALTER TABLE objects RENAME TO elsewhere`)
	await("its term is over, its table being gone", func() bool { return !c.IsHolder() })
	await("the status says Migrate", func() bool { return strings.Contains(c.Status().LastError, "Migrate") })
	testkit.ExecPostgres(t, admin, `ALTER TABLE elsewhere RENAME TO objects`)
	await("it holds again once the table is back", c.IsHolder)

	cancel()
	testkit.WantErr(t, <-done, nil)
	store.Close()
	pool.Close()
	admin.Close()
	await("no goroutine is left", func() bool { return goroutines() <= before })
	if _, err := store.Get(t.Context(), testkit.LeaseKey); err == nil {
		t.Error("a closed pool answers")
	}
	if _, err := lease.AcquireOrSteal(t.Context()); err == nil {
		t.Error("a closed store gives a lease")
	}
	for _, want := range []string{"lease acquired", "lease lost", "28000", "Migrate"} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("the log does not tell %q:\n%s", want, &log)
		}
	}
}

// goroutines counts those that run code of the library or of its driver.
func goroutines() (n int) {
	return stacksOf("tenurelib/tenure.", "internal/listen.", "internal/sqliteobjects.", "pgx/v5/pgxpool.", "database/sql.")
}
