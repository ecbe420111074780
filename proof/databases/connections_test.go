package databases_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
)

// The figures of docs/connections.md.
func TestAProcessHasAsManyConnectionsAsThePageSays(t *testing.T) {
	t.Parallel()
	url := testkit.StartPostgres(t).URL()
	owner := testkit.OpenPostgres(t, url, tenure.PostgresConfig{PollOnly: true})
	testkit.Migrate(t, owner)
	testkit.MigrateClaims(t, owner)
	admin := testkit.PostgresPool(t, url)

	coordinates := func(ctx context.Context, t *testing.T, store *tenure.PostgresStore, holds bool) {
		lease := testkit.Must(tenure.NewLease(store, tenure.LeaseConfig{Key: testkit.LeaseKey, Logger: testkit.Quiet}))
		c := testkit.Must(tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Watch: func(ctx context.Context) error { <-ctx.Done(); return nil }}))
		var running sync.WaitGroup
		t.Cleanup(running.Wait)
		running.Go(func() { _ = c.Run(ctx) })
		require.Eventually(t, func() bool { return c.IsHolder() == holds && (holds || c.Status().Holder != "") }, testkit.Patience, 10*time.Millisecond)
	}
	claims := func(ctx context.Context, t *testing.T, store *tenure.PostgresStore) {
		session := testkit.Must(claims.NewSession(store, claims.SessionConfig{Logger: testkit.Quiet}))
		keys := testkit.Must(claims.NewKeys(session, "tenant"))
		var running sync.WaitGroup
		t.Cleanup(running.Wait)
		running.Go(func() { _ = session.Run(ctx) })
		testkit.Must(keys.Claim(ctx, "acme"))
	}
	for _, test := range []struct {
		name        string
		cfg         tenure.PostgresConfig
		run         func(ctx context.Context, t *testing.T, store *tenure.PostgresStore)
		least, most int
	}{
		{"holder", tenure.PostgresConfig{}, func(ctx context.Context, t *testing.T, s *tenure.PostgresStore) { coordinates(ctx, t, s, true) }, 2, 3},
		{"standby", tenure.PostgresConfig{}, func(ctx context.Context, t *testing.T, s *tenure.PostgresStore) { coordinates(ctx, t, s, false) }, 2, 3},
		{"standby_that_polls", tenure.PostgresConfig{PollOnly: true}, func(ctx context.Context, t *testing.T, s *tenure.PostgresStore) { coordinates(ctx, t, s, false) }, 1, 1},
		{"claims", tenure.PostgresConfig{}, claims, 3, 7},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		t.Cleanup(cancel)
		test.cfg.Logger = testkit.Quiet
		store := testkit.OpenPostgres(t, url+"&application_name="+test.name, test.cfg)
		test.run(ctx, t, store)
		count := func() (n int) {
			require.NoError(t, admin.QueryRow(ctx, `SELECT count(*) FROM pg_stat_activity WHERE application_name = $1`, test.name).Scan(&n))
			return n
		}
		require.Eventually(t, func() bool { return count() >= test.least }, testkit.Patience, 10*time.Millisecond, test.name)
		n := count()
		t.Logf("%s: %d connections", test.name, n)
		if n < test.least || n > test.most {
			t.Errorf("%s: not between %d and %d", test.name, test.least, test.most)
		}
	}
}

// The inspection costs a new session of the server much more than all else that it does for a lease.
func TestTablesAreInspectedOncePerStoreAndServer(t *testing.T) {
	t.Parallel()
	server := testkit.StartPostgres(t, "log_statement=all")
	testkit.Migrate(t, testkit.OpenPostgres(t, server.URL(), tenure.PostgresConfig{}))
	admin := testkit.PostgresPool(t, server.URL())
	inspections := func() int { return strings.Count(server.Log(t), "WITH RECURSIVE path AS MATERIALIZED") }
	before := inspections()

	const leases = 12
	config := testkit.Must(pgxpool.ParseConfig(server.URL()))
	config.MaxConns = leases
	config.PrepareConn = func(context.Context, *pgx.Conn) (bool, error) { return true, nil } // so each lease has a connection
	pool := testkit.Must(pgxpool.NewWithConfig(t.Context(), config))
	t.Cleanup(pool.Close)
	store := testkit.Must(tenure.NewPostgresStore(pool, tenure.PostgresConfig{Logger: testkit.Quiet}))
	t.Cleanup(func() { _ = store.Close() })
	var all [leases]*tenure.Lease
	var terms [leases]*tenure.Term
	together := func(do func(i int)) {
		var doing sync.WaitGroup
		for i := range leases {
			doing.Go(func() { do(i) })
		}
		doing.Wait()
	}
	together(func(i int) {
		all[i] = testkit.NewLease(t, store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: fmt.Sprint(i)}, TTL: time.Hour})
		terms[i] = testkit.MustAcquire(t, all[i])
	})
	const slow = 2 // on a busy machine a call that has waited for long looks itself
	require.LessOrEqual(t, inspections()-before, slow, "first calls")
	before = inspections()
	for range 5 {
		testkit.ExecPostgres(t, admin, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'`)
		together(func(i int) {
			testkit.Await(t, "renewed", func() bool { return all[i].Renew(t.Context(), terms[i]) == nil })
		})
	}
	require.Zero(t, inspections()-before, "renewals on a server that was inspected before")
	require.NoError(t, server.Restart("fast"))
	admin.Reset()
	together(func(i int) {
		testkit.Await(t, "renewed", func() bool { return all[i].Renew(t.Context(), terms[i]) == nil })
	})
	require.NotZero(t, inspections()-before, "another start of the server")
	require.LessOrEqual(t, inspections()-before, slow, "another start of the server")
}

// A store that holds a lease loses its connections after something has become unsuitable, by a single change of each catalog.
func TestANewConnectionNoticesWhatHasBecomeUnsuitable(t *testing.T) {
	testkit.Slow(t)
	t.Parallel()
	for name, test := range map[string]struct{ ddl, refusal string }{
		"a second inheriting table": {`CREATE TABLE less () INHERITS (objects); {reconnect};
			CREATE UNLOGGED TABLE more () INHERITS (objects)`, "UNLOGGED"},
		"another table in its place": {`CREATE UNLOGGED TABLE more (LIKE objects INCLUDING ALL); DROP TABLE objects; ALTER TABLE more RENAME TO objects`, "UNLOGGED"},
		"its key":                    {`ALTER TABLE objects DROP CONSTRAINT objects_pkey`, "unique"},
		"a column":                   {`ALTER TABLE objects ALTER resource_version TYPE integer USING 1`, "resource_version"},
		"a policy": {`ALTER TABLE objects ENABLE ROW LEVEL SECURITY; CREATE POLICY all_rows ON objects USING (true); {reconnect};
			DROP POLICY all_rows ON objects`, "row-level security"},
		"the role's isolation level": {`ALTER ROLE {role} SET default_transaction_isolation = 'repeatable read'`, "read committed"},
	} {
		t.Run(name, func(t *testing.T) {
			url, owner := testkit.AsWorker(t)
			store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{Logger: testkit.Quiet})
			ddl := strings.ReplaceAll(test.ddl, "{role}", "worker_"+owner.Config().ConnConfig.Database)
			for i, step := range strings.Split(ddl, "{reconnect};") {
				testkit.MustAcquire(t, testkit.NewLease(t, store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: fmt.Sprint(i)}}))
				if i > 0 {
					reconnect(t, owner, store, fmt.Sprint("again ", i))
				}
				testkit.ExecPostgres(t, owner, step)
			}
			testkit.ExecPostgres(t, owner, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = current_database()`)
			wantRefused(t, test.refusal, func() error {
				_, err := testkit.NewLease(t, store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "next"}}).TryAcquire(t.Context())
				return err
			})
		})
	}
}
