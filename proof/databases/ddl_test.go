package databases_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
)

// An id that was int4 when the queue was first used is the usual one to outgrow its type.
func TestAQueueWhoseIDChangesItsTypeGoesOn(t *testing.T) {
	url := testkit.PostgresURL(t)
	owner := testkit.PostgresPool(t, url)
	makeTasks(t, owner, 2)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.MigrateClaims(t, store)
	testkit.MustAcquire(t, testkit.NewLease(t, store, tenure.LeaseConfig{Key: claims.SessionKey("s"), TTL: time.Hour}))
	queue := testkit.Must(claims.NewQueue(store, tasks)) // without a worker, whose new connections would look at the table
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	got, err := queue.TryTakeFor(ctx, "s", claims.TakeOptions{N: 1})
	require.NoError(t, err)
	require.NoError(t, queue.Finish(ctx, got...))

	testkit.ExecPostgres(t, owner, `ALTER TABLE tasks ALTER COLUMN id TYPE bigint; INSERT INTO tasks SELECT 3000000000 + n FROM generate_series(1, 5) n`)
	got, err = queue.TryTakeFor(ctx, "s", claims.TakeOptions{N: 10})
	require.NoError(t, err)
	require.Len(t, got, 6)
	finish := func(c ...claims.Claim) error {
		return queue.FinishPostgres(ctx, c, func(pgx.Tx) error { return nil })
	}
	require.NoError(t, finish(got[1]))
	require.NoError(t, queue.Finish(ctx, got[2]))
	testkit.ExecPostgres(t, owner, `ALTER TABLE tasks RENAME id TO narrow; ALTER TABLE tasks ADD id text; UPDATE tasks SET id = narrow; ALTER TABLE tasks DROP narrow, ADD PRIMARY KEY (id); `+testkit.Must(tasks.PostgresDDL()))
	require.NoError(t, queue.Finish(ctx, got[3]))
	require.NoError(t, queue.ReleaseAfter(ctx, time.Hour, got[4]))
	require.NoError(t, queue.Release(ctx, got[0], got[5]))
	var left int
	require.NoError(t, owner.QueryRow(ctx, `SELECT count(*) FROM tasks WHERE session IS NOT NULL OR status = 'queued'`).Scan(&left))
	require.Equal(t, 3, left)
}
