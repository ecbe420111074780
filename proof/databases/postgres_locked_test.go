package databases_test

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/testkit"
)

func TestACallWithoutADeadlineDoesNotWaitForALockedRecordForEver(t *testing.T) {
	testkit.Slow(t)
	defer objects.SetCallLimit(5 * time.Second)() // with time for the server's answer, on a busy machine, too
	ctx := context.Background()
	url := testkit.PostgresURL(t)
	store, pool := testkit.OpenPostgres(t, url, tenure.PostgresConfig{}), testkit.PostgresPool(t, url)
	testkit.Migrate(t, store)
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{TTL: time.Hour})
	term := testkit.MustAcquire(t, lease)
	obj := testkit.Get(t, store, term.Key())

	blocker, err := pool.Begin(ctx)
	require.NoError(t, err)
	defer blocker.Rollback(ctx)
	query, args, err := store.FenceStatement(term)
	require.NoError(t, err)
	testkit.ExecPostgres(t, blocker, query, args...)

	for name, call := range map[string]func() error{
		"renew":  func() error { return lease.Renew(ctx, term) },
		"put":    func() error { _, err := store.PutIf(ctx, obj, tenure.IfVersion(obj.Version)); return err },
		"delete": func() error { return store.DeleteIf(ctx, obj.Key, tenure.IfVersion(obj.Version)) },
	} {
		testkit.Await(t, "the error of "+name+" says who has the lock", func() bool { // a busy server may not say so in time
			err := call()
			require.ErrorContains(t, err, "55P03", name)
			return strings.Contains(err.Error(), "the record is locked by process") && strings.Contains(err.Error(), "pg_terminate_backend")
		})
	}
	require.NoError(t, blocker.Rollback(ctx))
	require.NoError(t, lease.Renew(ctx, term))

	// Only a lock that does not suit the fence keeps a fenced transaction waiting.
	blocker, err = pool.Begin(ctx)
	require.NoError(t, err)
	defer blocker.Rollback(ctx)
	testkit.ExecPostgres(t, blocker, `SELECT FROM objects FOR UPDATE`)
	err = store.Fenced(ctx, term, func(pgx.Tx) error { return nil })
	require.ErrorContains(t, err, "the record is locked by process")
	err = tenure.FencedTx(ctx, store, term, testkit.OpenSQL(t, "pgx", url), nil, func(*sql.Tx) error { return nil })
	require.Error(t, err)
}

// Such a transaction keeps its locks when its session ends, and when the server restarts.
func TestTheErrorOfALeaseNamesThePreparedTransactionThatKeepsItsRecordLocked(t *testing.T) {
	ctx := t.Context()
	server := testkit.StartPostgres(t, "max_prepared_transactions=10")
	store, pool := testkit.OpenPostgres(t, server.URL(), tenure.PostgresConfig{}), testkit.PostgresPool(t, server.URL())
	testkit.Migrate(t, store)
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{TTL: time.Hour})
	term := testkit.MustAcquire(t, lease)
	query, args, err := store.FenceStatement(term)
	require.NoError(t, err)
	// The server ends its wait 0.2 s before the call ends, so on a busy machine its answer, or that to
	// the question who has the lock, may come too late. The store asks again after ten seconds.
	refusal := func(call func(ctx context.Context) error) (err error) {
		for range 20 {
			limited, cancel := context.WithTimeout(ctx, 3*time.Second)
			err = call(limited)
			cancel()
			if !errors.Is(err, context.DeadlineExceeded) && (err == nil || !strings.Contains(err.Error(), "see pg_prepared_xacts")) {
				break
			}
		}
		return err
	}
	renew := func(ctx context.Context) error { return lease.Renew(ctx, term) }
	prepare := func(name string) {
		conn, err := pool.Acquire(ctx)
		require.NoError(t, err)
		defer conn.Release()
		tx, err := conn.Begin(ctx)
		require.NoError(t, err)
		testkit.ExecPostgres(t, tx, query, args...)
		testkit.ExecPostgres(t, tx, `PREPARE TRANSACTION '`+name+`'`)
	}
	want := func(names ...string) {
		t.Helper()
		err := refusal(renew)
		require.ErrorContains(t, err, "55P03")
		for _, name := range names {
			require.ErrorContains(t, err, "the prepared transaction '"+name+"' of ")
		}
		require.ErrorContains(t, err, "ROLLBACK PREPARED")
	}
	prepare("one of mine")
	want("one of mine")
	require.True(t, term.Valid())
	testkit.ExecPostgres(t, pool, `ROLLBACK PREPARED 'one of mine'`)
	require.NoError(t, renew(ctx))

	// Another process asks anew, and two lock the row together.
	prepare("first")
	prepare("second")
	store = testkit.OpenPostgres(t, server.URL(), tenure.PostgresConfig{})
	lease = testkit.NewLease(t, store, tenure.LeaseConfig{TTL: time.Hour})
	held, err := lease.Read(ctx)
	require.NoError(t, err)
	err = refusal(func(ctx context.Context) error { return store.DeleteIf(ctx, held.Key, tenure.IfVersion(held.Version)) })
	require.ErrorContains(t, err, "'first'")
	require.ErrorContains(t, err, "'second'")
	testkit.ExecPostgres(t, pool, `ROLLBACK PREPARED 'first'`)
	testkit.ExecPostgres(t, pool, `ROLLBACK PREPARED 'second'`)
}

func TestAFencedFuncThatPreparesItsTransactionIsToldSo(t *testing.T) {
	ctx := t.Context()
	server := testkit.StartPostgres(t, "max_prepared_transactions=10")
	store := testkit.OpenPostgres(t, server.URL(), tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
	term := testkit.MustAcquire(t, lease)
	err := store.Fenced(ctx, term, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `PREPARE TRANSACTION 'a'`)
		return err
	})
	require.ErrorIs(t, err, tenure.ErrInvalid)
	require.ErrorContains(t, err, "PREPARE TRANSACTION")
	require.Error(t, tenure.FencedTx(ctx, store, term, testkit.OpenSQL(t, "pgx", server.URL()), nil, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `PREPARE TRANSACTION 'b'`)
		return err
	}))
	require.NoError(t, lease.Renew(ctx, term))
}

func TestACallWithoutADeadlineDoesNotWaitForAFencedFuncOnSQLiteForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		store, err := tenure.OpenSQLite(ctx, ":memory:", tenure.SQLiteConfig{Shared: true, Logger: testkit.Quiet})
		require.NoError(t, err)
		defer store.Close()
		testkit.Migrate(t, store)
		lease := testkit.NewLease(t, store, tenure.LeaseConfig{TTL: time.Hour})
		term := testkit.MustAcquire(t, lease)
		obj := testkit.Get(t, store, term.Key())
		hung, result := make(chan struct{}), make(chan error)
		go func() { result <- store.Fenced(ctx, term, func(*sql.Tx) error { <-hung; return nil }) }()
		synctest.Wait()
		require.ErrorIs(t, lease.Renew(ctx, term), context.DeadlineExceeded)
		_, err = store.Get(ctx, obj.Key)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorIs(t, store.DeleteIf(ctx, obj.Key, tenure.IfVersion(obj.Version)), context.DeadlineExceeded)
		_, err = store.List(ctx, obj.Key.Type, "", 1)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorIs(t, store.Fenced(ctx, term, func(*sql.Tx) error { return nil }), context.DeadlineExceeded)
		close(hung)
		require.NoError(t, <-result) // the func itself has no limit
		require.NoError(t, lease.Renew(ctx, term))
	})
}
