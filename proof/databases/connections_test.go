package databases_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/proof/kit"
)

// The figures of docs/connections.md.
func TestAProcessHasAsManyConnectionsAsThePageSays(t *testing.T) {
	t.Parallel()
	url := kit.StartPostgres(t).URL()
	owner := kit.OpenPostgres(t, url, tenure.PostgresConfig{PollOnly: true})
	kit.Migrate(t, owner)
	kit.MigrateClaims(t, owner)
	admin := kit.PostgresPool(t, url)

	coordinates := func(ctx context.Context, t *testing.T, store *tenure.PostgresStore, holds bool) {
		lease := kit.Must(tenure.NewLease(store, tenure.LeaseConfig{Key: kit.LeaseKey, Logger: kit.Quiet}))
		c := kit.Must(tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Watch: func(ctx context.Context) error { <-ctx.Done(); return nil }}))
		var running sync.WaitGroup
		t.Cleanup(running.Wait)
		running.Go(func() { _ = c.Run(ctx) })
		require.Eventually(t, func() bool { return c.IsHolder() == holds && (holds || c.Status().Holder != "") }, kit.Patience, 10*time.Millisecond)
	}
	claims := func(ctx context.Context, t *testing.T, store *tenure.PostgresStore) {
		session := kit.Must(claims.NewSession(store, claims.SessionConfig{Logger: kit.Quiet}))
		keys := kit.Must(claims.NewKeys(session, "tenant"))
		var running sync.WaitGroup
		t.Cleanup(running.Wait)
		running.Go(func() { _ = session.Run(ctx) })
		kit.Must(keys.Claim(ctx, "acme"))
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
		test.cfg.Logger = kit.Quiet
		store := kit.OpenPostgres(t, url+"&application_name="+test.name, test.cfg)
		test.run(ctx, t, store)
		count := func() (n int) {
			require.NoError(t, admin.QueryRow(ctx, `SELECT count(*) FROM pg_stat_activity WHERE application_name = $1`, test.name).Scan(&n))
			return n
		}
		require.Eventually(t, func() bool { return count() >= test.least }, kit.Patience, 10*time.Millisecond, test.name)
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
	server := kit.StartPostgres(t, "log_statement=all")
	kit.Migrate(t, kit.OpenPostgres(t, server.URL(), tenure.PostgresConfig{}))
	admin := kit.PostgresPool(t, server.URL())
	inspections := func() int { return strings.Count(server.Log(t), "WITH RECURSIVE path AS MATERIALIZED") }
	before := inspections()

	const leases = 12
	store := kit.Must(tenure.NewPostgresStore(kit.PostgresPool(t, server.URL()), tenure.PostgresConfig{Logger: kit.Quiet}))
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
		all[i] = kit.NewLease(t, store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: fmt.Sprint(i)}, TTL: time.Hour})
		terms[i] = kit.MustAcquire(t, all[i])
	})
	const slow = 2 // on a busy machine a call that has waited for long looks itself
	require.LessOrEqual(t, inspections()-before, slow, "first calls")
	before = inspections()
	for range 5 {
		kit.ExecPostgres(t, admin, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'`)
		together(func(i int) {
			kit.Await(t, "renewed", func() bool { return all[i].Renew(t.Context(), terms[i]) == nil })
		})
	}
	require.Zero(t, inspections()-before, "renewals on a server that was inspected before")
	require.NoError(t, server.Restart("fast"))
	admin.Reset()
	together(func(i int) {
		kit.Await(t, "renewed", func() bool { return all[i].Renew(t.Context(), terms[i]) == nil })
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
			url, owner := kit.AsWorker(t)
			store := kit.OpenPostgres(t, url, tenure.PostgresConfig{Logger: kit.Quiet})
			ddl := strings.ReplaceAll(test.ddl, "{role}", "worker_"+owner.Config().ConnConfig.Database)
			for i, step := range strings.Split(ddl, "{reconnect};") {
				kit.MustAcquire(t, kit.NewLease(t, store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: fmt.Sprint(i)}}))
				if i > 0 {
					reconnect(t, owner, store, fmt.Sprint("again ", i))
				}
				kit.ExecPostgres(t, owner, step)
			}
			kit.ExecPostgres(t, owner, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = current_database()`)
			wantRefused(t, test.refusal, func() error {
				_, err := kit.NewLease(t, store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "next"}}).TryAcquire(t.Context())
				return err
			})
		})
	}
}
