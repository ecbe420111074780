package databases_test

import (
	"context"
	"net/url"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
)

// Servers that speak the protocol of Postgres but lack what leases rely on are refused by their names, on whatever
// connection they are found.
func TestAServerThatCannotKeepAPromiseIsRefused(t *testing.T) {
	testkit.Slow(t)
	t.Parallel()
	const serverless = "abcdefghijklmnopqrstuvwxyz.dsql.eu-west-1.on.aws"
	real := testkit.PostgresURL(t)
	owner := testkit.OpenPostgres(t, real, tenure.PostgresConfig{})
	testkit.Migrate(t, owner)
	testkit.MigrateClaims(t, owner)

	dsql, err := pgxpool.ParseConfig(real)
	require.NoError(t, err)
	address, err := url.Parse(real)
	require.NoError(t, err)
	dsql.ConnConfig.Host = serverless
	dsql.ConnConfig.Fallbacks = nil
	dsql.ConnConfig.LookupFunc = func(_ context.Context, host string) ([]string, error) {
		require.Equal(t, serverless, host)
		return []string{address.Hostname()}, nil
	}
	cockroach, err := pgxpool.ParseConfig(testkit.Relabelled(t, real, "crdb_version", "CockroachDB CCL v25.2.1"))
	require.NoError(t, err)
	ordinary, err := pgxpool.ParseConfig(testkit.Relabelled(t, real, "in_hot_standby", "off"))
	require.NoError(t, err)

	for name, config := range map[string]*pgxpool.Config{"CockroachDB": cockroach, "Aurora DSQL": dsql, "": ordinary} {
		pool, err := pgxpool.NewWithConfig(t.Context(), config)
		require.NoError(t, err)
		t.Cleanup(pool.Close)
		store, err := tenure.NewPostgresStore(pool, tenure.PostgresConfig{})
		require.NoError(t, err)
		t.Cleanup(func() { store.Close() })
		lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: testkit.LeaseKey})
		require.NoError(t, err)
		_, acquire := lease.TryAcquire(t.Context())
		for call, err := range map[string]error{"Migrate": store.Migrate(t.Context()), "claims.Migrate": claims.Migrate(t.Context(), store), "TryAcquire": acquire} {
			if name == "" {
				require.NoError(t, err, call)
				continue
			}
			require.ErrorIs(t, err, tenure.ErrSetup, call)
			require.ErrorContains(t, err, "this server is "+name, call)
		}
	}
	_, err = tenure.OpenPostgres(t.Context(), testkit.Relabelled(t, real, "crdb_version", "CockroachDB CCL v25.2.1"), tenure.PostgresConfig{})
	require.ErrorIs(t, err, tenure.ErrSetup)
	require.ErrorContains(t, err, "this server is CockroachDB")
}
