package databases_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
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
