package databases_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/pgconns"
	"github.com/tenurelib/tenure/internal/testkit"
)

// makeCounted makes tasks whose updates wait for a row that counts them.
func makeCounted(t *testing.T, owner *pgxpool.Pool) {
	t.Helper()
	makeTasks(t, owner, 40)
	testkit.ExecPostgres(t, owner, `CREATE TABLE results (id bigint PRIMARY KEY, n int NOT NULL DEFAULT 0); INSERT INTO results VALUES (0);
		CREATE FUNCTION counted() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN UPDATE results SET n = n + 1 WHERE id = 0; RETURN NULL; END $$;
		CREATE TRIGGER counted AFTER UPDATE ON tasks FOR EACH STATEMENT EXECUTE FUNCTION counted()`)
}

const lockCounter = `SELECT FROM results WHERE id = 0 FOR UPDATE`

// A transaction of the user locks what a call locks, in the other order. Whichever of the two the server ends, the
// call succeeds, at the latest when it is made again.
func TestADeadlockEndsOneOfTheTwoAndLeavesNothingBehind(t *testing.T) {
	testkit.Slow(t)
	url := testkit.PostgresURL(t)
	owner := testkit.PostgresPool(t, url)
	makeCounted(t, owner)
	testkit.ExecPostgres(t, owner, `ALTER DATABASE `+owner.Config().ConnConfig.Database+` SET deadlock_timeout = '200ms'`)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.MigrateClaims(t, store)
	session := startSession(t, store)
	queue := testkit.Must(claims.NewQueue(store, tasks))
	worker := testkit.Must(claims.NewWorker(session, queue))
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
	term := testkit.MustAcquire(t, lease)
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	take := func(n int) []claims.Claim {
		got, err := worker.Take(ctx, n)
		require.NoError(t, err)
		require.Len(t, got, n)
		return got
	}
	const anyTask, record = `SELECT FROM tasks WHERE session IS NOT NULL OR status = 'queued' FOR UPDATE`, `SELECT FROM objects FOR UPDATE`
	for name, c := range map[string]struct {
		first, second string // what the user's transaction locks
		call          func() func() error
	}{
		"finish in a transaction": {lockCounter, anyTask, func() func() error {
			got := take(2)
			return func() error { return queue.FinishPostgres(ctx, got, func(pgx.Tx) error { return nil }) }
		}},
		"finish several": {lockCounter, anyTask, func() func() error {
			got := take(3)
			return func() error { return queue.Finish(ctx, got...) }
		}},
		"release and take": {lockCounter, anyTask, func() func() error {
			got := take(2)
			return func() error {
				err := worker.Release(ctx, got...)
				if err == nil {
					got, err = worker.Take(ctx, 2)
				}
				if err == nil {
					err = queue.Finish(ctx, got...)
				}
				return err
			}
		}},
		"fenced": {record, lockCounter, func() func() error {
			return func() error {
				return store.Fenced(ctx, term, func(tx pgx.Tx) error { _, err := tx.Exec(ctx, `UPDATE results SET n = n + 1 WHERE id = 0`); return err })
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			call := c.call()
			tx, err := owner.Begin(ctx)
			require.NoError(t, err)
			defer tx.Rollback(context.Background())
			testkit.ExecPostgres(t, tx, `SET LOCAL deadlock_timeout = '1h'`) // unless the machine is very busy, the call is ended
			testkit.ExecPostgres(t, tx, c.first)
			called := make(chan error, 1)
			go func() { called <- call() }()
			testkit.AwaitLockWait(t, owner)
			_, _ = tx.Exec(ctx, `SET LOCAL lock_timeout = '5s'; `+c.second)
			require.NoError(t, tx.Rollback(ctx))
			if err := <-called; err != nil {
				require.Equal(t, "40P01", pgconns.SQLState(err), err)
				require.NoError(t, call())
			}
			require.NoError(t, lease.Renew(ctx, term))
			var left int
			require.NoError(t, owner.QueryRow(ctx, `SELECT count(*) FROM tasks WHERE session IS NOT NULL`).Scan(&left))
			require.Zero(t, left+testkit.Held(session))
		})
	}
}

// A trigger or a foreign key may have to wait for a lock on another row, for longer than the store's sessions do.
func TestSeveralRowsAreFinishedAsSoonAsATriggerNeedNotWait(t *testing.T) {
	url := testkit.PostgresURL(t)
	owner := testkit.PostgresPool(t, url)
	makeCounted(t, owner)
	store := testkit.OpenPostgres(t, url+"&lock_timeout=30ms", tenure.PostgresConfig{})
	testkit.MigrateClaims(t, store)
	testkit.MustAcquire(t, testkit.NewLease(t, store, tenure.LeaseConfig{Key: claims.SessionKey("s"), TTL: time.Hour}))
	queue := testkit.Must(claims.NewQueue(store, tasks))
	got, err := queue.TryTakeFor(t.Context(), "s", claims.TakeOptions{N: 3})
	require.NoError(t, err)
	tx, err := owner.Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(context.Background())
	testkit.ExecPostgres(t, tx, lockCounter)
	finished := make(chan error, 1)
	go func() { finished <- queue.Finish(t.Context(), got...) }()
	database := owner.Config().ConnConfig.Database
	testkit.Await(t, "a wait has ended", func() bool {
		return strings.Contains(testkit.PostgresLog(t), database+" ERROR:  canceling statement due to lock timeout")
	})
	require.NoError(t, tx.Rollback(t.Context()))
	require.NoError(t, <-finished)
}
