package databases_test

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

// refusals returns the errors of the calls with which a program begins, by how each must begin.
func refusals(t *testing.T, url string, within time.Duration) map[string]error {
	t.Helper()
	limited := func() context.Context {
		ctx, cancel := context.WithTimeout(t.Context(), within)
		t.Cleanup(cancel)
		return ctx
	}
	_, opening := tenure.OpenPostgres(limited(), url, tenure.PostgresConfig{Logger: testkit.Quiet})
	store := testkit.Must(tenure.NewPostgresStore(testkit.PostgresPool(t, url), tenure.PostgresConfig{Logger: testkit.Quiet}))
	t.Cleanup(func() { store.Close() })
	_, acquiring := testkit.NewLease(t, store, tenure.LeaseConfig{}).TryAcquire(t.Context())
	return map[string]error{
		"tenure: open Postgres: ":                      opening,
		`tenure: migrate "objects": `:                  store.Migrate(limited()),
		"tenure: look at the lineage of \"objects\": ": acquiring,
	}
}

func TestAnErrorOfTheConnectionBeginsWithItsCause(t *testing.T) {
	server := testkit.StartPostgres(t)
	pool := testkit.PostgresPool(t, server.URL())
	var rules string
	require.NoError(t, pool.QueryRow(t.Context(), `SHOW hba_file`).Scan(&rules))
	require.NoError(t, os.WriteFile(rules, []byte("host all app all scram-sha-256\nhost all all all trust\n"), 0o600))
	testkit.ExecPostgres(t, pool, `CREATE ROLE app LOGIN PASSWORD 'right'`)
	testkit.ExecPostgres(t, pool, `CREATE ROLE outsider LOGIN`)
	testkit.ExecPostgres(t, pool, `REVOKE CONNECT ON DATABASE postgres FROM PUBLIC`)
	testkit.ExecPostgres(t, pool, `SELECT pg_reload_conf()`)
	at := pool.Config().ConnConfig
	url := func(user, database string) string {
		return fmt.Sprintf("postgres://%s@%s:%d/%s", user, at.Host, at.Port, database)
	}
	require.Eventually(t, func() bool {
		conn, err := pgx.Connect(t.Context(), url("app:s3cret", "postgres"))
		if err == nil {
			conn.Close(t.Context())
		}
		return err != nil
	}, testkit.Patience, 10*time.Millisecond, "the server reads its new rules")

	for bad, want := range map[string]string{
		url("app:s3cret", "postgres"): `password authentication failed for user "app" (SQLSTATE 28P01; database postgres on %s:%d): ` +
			"correct the user and the password in the URL",
		url("nobody:s3cret", "postgres"): `role "nobody" does not exist (SQLSTATE 28000; database postgres on %s:%d): ` +
			"correct the user in the URL, or create the role and let it in (pg_hba.conf)",
		url("postgres:s3cret", "missing"): `database "missing" does not exist (SQLSTATE 3D000; database missing on %s:%d): ` +
			"create the database, or correct its name in the URL",
		url("outsider:s3cret", "postgres"): `permission denied for database "postgres" (SQLSTATE 42501; database postgres on %s:%d): ` +
			"GRANT CONNECT on the database to the role",
	} {
		for op, err := range refusals(t, bad, testkit.Patience) {
			require.EqualError(t, err, op+fmt.Sprintf(want, at.Host, at.Port))
			require.ErrorIs(t, err, tenure.ErrSetup)
			require.ErrorAs(t, err, new(*pgconn.PgError), "the driver's error stays reachable")
			require.ErrorAs(t, err, new(*pgconn.ConnectError))
			require.NotContains(t, fmt.Sprintf("%+v %#v", err, err), "s3cret")
		}
	}
}

func TestAnErrorOfADatabaseThatIsDownBeginsWithItsCause(t *testing.T) {
	testkit.Slow(t)
	const refused = "cannot connect to database db on 127.0.0.1:1: dial tcp 127.0.0.1:1: connect: connection refused"
	for op, err := range refusals(t, "postgres://app:s3cret@127.0.0.1:1/db", time.Second) {
		require.ErrorContains(t, err, op+refused)
		require.NotContains(t, strings.TrimPrefix(err.Error(), op+refused), "refused", "each cause is told once")
		require.NotErrorIs(t, err, tenure.ErrSetup)
		require.ErrorAs(t, err, new(*pgconn.ConnectError), "the driver's error stays reachable")
		require.NotContains(t, fmt.Sprintf("%+v %#v", err, err), "s3cret")
	}
	for op, err := range refusals(t, "postgres://app:s3cret@127.0.0.1:1,127.0.0.1:2/db", time.Second) {
		require.ErrorContains(t, err, op+"cannot connect to database db on 127.0.0.1:1, 127.0.0.1:2: "+
			"dial tcp 127.0.0.1:1: connect: connection refused; dial tcp 127.0.0.1:2: connect: connection refused")
	}
}
