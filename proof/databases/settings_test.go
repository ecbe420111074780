package databases_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
)

// tasks is the queue of these tests.
var tasks = claims.QueueConfig{Table: "tasks", Attempts: "attempts", NotBefore: "not_before", Ready: "status = 'queued'", Done: "status = 'done'", Logger: testkit.Quiet}

func makeTasks(t *testing.T, owner *pgxpool.Pool, rows int) {
	t.Helper()
	testkit.ExecPostgres(t, owner, `CREATE TABLE notes (n int); CREATE TABLE tasks (id integer PRIMARY KEY, status text NOT NULL DEFAULT 'queued'); `+testkit.Must(tasks.PostgresDDL()))
	testkit.ExecPostgres(t, owner, `INSERT INTO tasks (id) SELECT generate_series(1, $1)`, rows)
}

// startSession runs a session until the test ends.
func startSession(t *testing.T, store tenure.Store) *claims.Session {
	session := testkit.Must(claims.NewSession(store, claims.SessionConfig{TTL: 12 * time.Second, Logger: testkit.Quiet}))
	ctx, cancel := context.WithCancel(context.Background())
	over := make(chan error)
	go func() { over <- session.Run(ctx) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-over) })
	return session
}

// everything uses leases, fences, keys and a queue once in each way.
func everything(t *testing.T, url string, store *tenure.PostgresStore, round int) error {
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	write := fmt.Sprintf(`INSERT INTO notes VALUES (%d)`, round)
	fn := func(tx pgx.Tx) error { _, err := tx.Exec(ctx, write); return err }
	sqlFn := func(tx *sql.Tx) error { _, err := tx.ExecContext(ctx, write); return err }
	db, lease := testkit.OpenSQL(t, "pgx", url), testkit.NewLease(t, store, tenure.LeaseConfig{})
	remote := fmt.Sprint("remote ", round)
	var term *tenure.Term
	var keys *claims.Keys
	var queue *claims.Queue
	var worker *claims.Worker
	var got []claims.Claim
	take := func(n int) func() error {
		return func() error {
			for got = nil; len(got) < n; {
				more, err := worker.Take(ctx, n-len(got))
				if err != nil {
					return err
				}
				got = append(got, more...)
			}
			return nil
		}
	}
	for _, step := range []func() error{
		func() error { return errors.Join(store.Migrate(ctx), claims.Migrate(ctx, store)) },
		func() (err error) { term, err = lease.AcquireOrSteal(ctx); return err },
		func() error { return lease.Renew(ctx, term) },
		func() error { return store.Fenced(ctx, term, fn) },
		func() error { return tenure.FencedTx(ctx, store, term, db, nil, sqlFn) },
		func() error { return lease.Release(ctx, term) },
		func() error {
			session := startSession(t, store)
			keys, queue = testkit.Must(claims.NewKeys(session, "kind")), testkit.Must(claims.NewQueue(store, tasks))
			worker = testkit.Must(claims.NewWorker(session, queue))
			return nil
		},
		func() (err error) { got, err = keys.Claim(ctx, "a", "b", "c"); return err },
		func() error { return store.Fenced(ctx, got[0], fn) },
		func() error { return keys.Release(ctx, got...) },
		take(7),
		func() error { return queue.Finish(ctx, got[0]) },
		func() error { return queue.Finish(ctx, got[1:3]...) },
		func() error { return queue.FinishPostgres(ctx, got[3:4], fn) },
		func() error { return queue.Finish(ctx, got[4]) },
		func() error { return queue.Release(ctx, got[5]) },
		func() error { return queue.ReleaseAfter(ctx, time.Hour, got[6]) },
		func() error {
			_, err := testkit.NewLease(t, store, tenure.LeaseConfig{Key: claims.SessionKey(remote), TTL: time.Second}).TryAcquire(ctx)
			return err
		},
		func() error { _, err := queue.TryTakeFor(ctx, remote, claims.TakeOptions{N: 100}); return err },
		take(5), // what a session had that has expired
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return worker.Release(ctx, got...)
}

func TestNoSettingOfARoleKeepsAnythingFromWorking(t *testing.T) {
	testkit.Slow(t)
	url := testkit.PostgresURL(t)
	owner := testkit.PostgresPool(t, url)
	makeTasks(t, owner, 30)
	for _, set := range []string{
		"lock_timeout = '20ms'", "statement_timeout = '5s'", "idle_in_transaction_session_timeout = '1s'", "synchronous_commit = off", "search_path = nowhere, public",
		"TimeZone = 'Asia/Kathmandu'", "DateStyle = 'German, DMY'", "IntervalStyle = iso_8601", "bytea_output = escape",
		"standard_conforming_strings = off", "plan_cache_mode = force_generic_plan", "row_security = off", "extra_float_digits = -15",
		"quote_all_identifiers = on", "array_nulls = off", "transform_null_equals = on", "default_transaction_deferrable = on", "client_encoding = LATIN1",
	} {
		testkit.ExecPostgres(t, owner, `ALTER DATABASE `+owner.Config().ConnConfig.Database+` SET `+set)
	}
	for round, mode := range []string{"", "&default_query_exec_mode=exec"} {
		require.NoError(t, everything(t, url, testkit.OpenPostgres(t, url+mode, tenure.PostgresConfig{}), round), mode)
	}
}

// Replicas that start at the same time wait for the one that creates the tables.
func TestReplicasMigrateAlthoughTheRoleMayWaitForNoLock(t *testing.T) {
	url := testkit.PostgresURL(t)
	owner := testkit.PostgresPool(t, url)
	var log testkit.SyncBuffer
	testkit.ExecPostgres(t, owner, `ALTER DATABASE `+owner.Config().ConnConfig.Database+` SET lock_timeout = '20ms'`)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	other, err := owner.Begin(t.Context())
	require.NoError(t, err)
	defer other.Rollback(context.Background())
	testkit.ExecPostgres(t, other, `SELECT pg_advisory_xact_lock($1)`, int64(0x74656e757265)) // as Migrate does
	migrated := make(chan error, 1)
	go func() { migrated <- store.Migrate(t.Context()) }()
	testkit.Await(t, "the wait has ended early", func() bool { return strings.Contains(log.String(), "55P03") || len(migrated) > 0 })
	require.NoError(t, other.Rollback(t.Context()))
	require.NoError(t, <-migrated)
}

func TestASettingThatForbidsWritesIsNamedAndForgottenWithoutARestart(t *testing.T) {
	testkit.Slow(t)
	for set, says := range map[string]string{
		"default_transaction_isolation = serializable": "default_transaction_isolation",
		"default_transaction_read_only = on":           "default_transaction_read_only",
	} {
		t.Run(says, func(t *testing.T) {
			url := testkit.PostgresURL(t)
			owner := testkit.PostgresPool(t, url)
			makeTasks(t, owner, 30)
			store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
			testkit.MigrateClaims(t, store)
			alter := func(how string) {
				testkit.ExecPostgres(t, owner, `ALTER DATABASE `+owner.Config().ConnConfig.Database+` `+how)
				testkit.ExecPostgres(t, owner, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = current_database()`)
			}
			var err error
			alter(`SET ` + set)
			testkit.Await(t, "told", func() bool {
				err = everything(t, url, store, 1)
				return err == nil || strings.Contains(err.Error(), says)
			})
			require.ErrorContains(t, err, says)
			alter(`RESET ` + says)
			testkit.Await(t, "it works again", func() bool { return everything(t, url, store, 2) == nil })
		})
	}
}
