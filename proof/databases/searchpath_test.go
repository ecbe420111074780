package databases_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/testkit"
)

// reconnect ends all other connections to the database, waits until the store has a new one, and
// acquires a lease of that ID.
func reconnect(t *testing.T, owner *pgxpool.Pool, store *tenure.PostgresStore, id string) {
	t.Helper()
	testkit.ExecPostgres(t, owner, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = current_database()`)
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: id}})
	testkit.Await(t, "connected again", func() bool {
		_, err := lease.Read(t.Context())
		return errors.Is(err, tenure.ErrNotFound)
	})
	testkit.MustAcquire(t, lease)
}

func countIn(t *testing.T, owner *pgxpool.Pool, schema string) (n int) {
	t.Helper()
	require.NoError(t, owner.QueryRow(t.Context(), `SELECT count(*) FROM `+schema+`.objects WHERE object_type <> 'tenure.lineage'`).Scan(&n))
	return n
}

func TestATableThatWasFoundStaysTheOneWhateverSearchPathLaterSessionsHave(t *testing.T) {
	url := testkit.PostgresURL(t)
	owner := testkit.PostgresPool(t, url)
	var log testkit.SyncBuffer
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	testkit.MigrateClaims(t, store)
	require.Empty(t, log.String())
	testkit.MigrateClaims(t, testkit.OpenPostgres(t, url, tenure.PostgresConfig{Schema: "newer"}))
	testkit.ExecPostgres(t, owner, `
		CREATE TABLE public.todo (id text PRIMARY KEY, session text, token bigint NOT NULL DEFAULT 0);
		CREATE INDEX ON public.todo (session, id) WHERE session IS NOT NULL;
		INSERT INTO public.todo VALUES ('1'), ('2')`)
	rows := store.Backend().Rows(objects.RowsConfig{Table: "todo", ID: "id", Session: "session", Token: "token"}, testkit.Quiet)
	require.NoError(t, rows.Check(t.Context(), testkit.Patience))
	testkit.ExecPostgres(t, owner, fmt.Sprintf(`ALTER DATABASE %s SET search_path = newer, public`, owner.Config().ConnConfig.Database))
	testkit.ExecPostgres(t, owner, `CREATE TABLE newer.todo (LIKE public.todo INCLUDING ALL)`)
	reconnect(t, owner, store, "first")
	require.Equal(t, []int{1, 0}, []int{countIn(t, owner, "public"), countIn(t, owner, "newer")}, "leases in public, newer")
	testkit.Await(t, "a warning", func() bool {
		return strings.Contains(log.String(), "search_path now finds another table") && strings.Contains(log.String(), "other=newer")
	})
	for range 2 { // the first may still find the connection that has ended
		taken, err := rows.TakeReady(t.Context(), objects.Taking{Session: "session", N: 1}, testkit.Patience)
		require.NoError(t, err)
		require.Len(t, taken, 1, "rows of the table that was found")
	}

	testkit.ExecPostgres(t, owner, `DROP TABLE newer.objects, newer.objects_tombstones, newer.objects_claims, newer.objects_requests`)
	for _, table := range testkit.OwnTables {
		testkit.ExecPostgres(t, owner, `ALTER TABLE public.`+table+` SET SCHEMA newer`)
	}
	reconnect(t, owner, store, "second")
	require.Equal(t, 2, countIn(t, owner, "newer"), "leases in the table that was moved")
}

// A hook of the caller's pool may choose the role and the search_path for each call. What the login role
// would find is of no concern.
func TestAHookThatPreparesEachCallChoosesTheTablesOfEveryConnection(t *testing.T) {
	prepare := func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, `SET ROLE tenant; SET search_path = tenant`)
		return err
	}
	for name, hook := range map[string]func(config *pgxpool.Config){
		"PrepareConn": func(config *pgxpool.Config) {
			config.PrepareConn = func(ctx context.Context, conn *pgx.Conn) (bool, error) {
				err := prepare(ctx, conn)
				return err == nil, err
			}
		},
		"BeforeAcquire": func(config *pgxpool.Config) {
			//lint:ignore SA1019 callers may still use it
			config.BeforeAcquire = func(ctx context.Context, conn *pgx.Conn) bool { return prepare(ctx, conn) == nil }
		},
	} {
		t.Run(name, func(t *testing.T) {
			server := testkit.StartPostgres(t)
			owner := testkit.PostgresPool(t, server.URL())
			testkit.MigrateClaims(t, testkit.OpenPostgres(t, server.URL(), tenure.PostgresConfig{})) // an older copy, which the login role may not use
			testkit.ExecPostgres(t, owner, `CREATE ROLE tenant; CREATE ROLE login LOGIN NOINHERIT IN ROLE tenant; CREATE SCHEMA tenant AUTHORIZATION tenant`)
			config := owner.Config()
			config.ConnConfig.User = "login"
			hook(config)
			pool, err := pgxpool.NewWithConfig(t.Context(), config)
			require.NoError(t, err)
			t.Cleanup(pool.Close)
			store := testkit.Must(tenure.NewPostgresStore(pool, tenure.PostgresConfig{Logger: testkit.Quiet}))
			t.Cleanup(func() { store.Close() })
			testkit.MigrateClaims(t, store)
			reconnect(t, owner, store, "first")

			testkit.ExecPostgres(t, owner, `ALTER TABLE tenant.objects SET UNLOGGED`)
			testkit.ExecPostgres(t, owner, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'login'`)
			wantRefused(t, "SET LOGGED", func() error {
				_, err := testkit.NewLease(t, store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "second"}}).TryAcquire(t.Context())
				return err
			})
			require.Equal(t, []int{1, 0}, []int{countIn(t, owner, "tenant"), countIn(t, owner, "public")}, "leases in tenant, public")
		})
	}
}
