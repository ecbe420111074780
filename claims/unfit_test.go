package claims_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/testkit"
)

// take claims a key as sessions do.
func take(ctx context.Context, store *tenure.PostgresStore, key string) ([]objects.Claim, error) {
	return store.Backend().Claims().Take(ctx, "session", "kind", []string{key}, nil, []string{key}, testkit.Patience)
}

// rowsOfClaims returns how many keys are claimed.
func rowsOfClaims(t *testing.T, pool *pgxpool.Pool) (n int) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM objects_claims`).Scan(&n))
	return n
}

// Without a reconnect, the key that is missing is noticed by the statement that relies on it.
func TestTheTableOfClaimsMayBeMadeAgainWithoutItsKeyWhileAProcessRuns(t *testing.T) {
	url := testkit.PostgresURL(t)
	pool := testkit.PostgresPool(t, url)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.MigrateClaims(t, store)
	_, err := take(t.Context(), store, "k")
	require.NoError(t, err)
	testkit.ExecPostgres(t, pool, `CREATE TABLE again (LIKE objects_claims); DROP TABLE objects_claims; ALTER TABLE again RENAME TO objects_claims`)
	for range 2 {
		_, err = take(t.Context(), store, "k")
		require.ErrorIs(t, err, tenure.ErrSetup)
		require.ErrorContains(t, err, "no unique key on (kind, id): two sessions can hold one key")
	}
	require.Zero(t, rowsOfClaims(t, pool))
	testkit.ExecPostgres(t, pool, `ALTER TABLE objects_claims ADD PRIMARY KEY (kind, id)`)
	got, err := take(t.Context(), store, "k")
	require.NoError(t, err)
	require.Len(t, got, 1)
}

func TestNoKeyIsClaimedTwiceThoughACrashEmptiesTheTableOfClaims(t *testing.T) {
	testkit.Slow(t)
	server := testkit.StartPostgres(t)
	pool := testkit.PostgresPool(t, server.URL())
	store := testkit.OpenPostgres(t, server.URL(), tenure.PostgresConfig{})
	testkit.MigrateClaims(t, store)
	got, err := take(t.Context(), store, "k")
	require.NoError(t, err)
	require.Len(t, got, 1)
	testkit.ExecPostgres(t, pool, `ALTER TABLE objects_claims SET UNLOGGED`)
	require.NoError(t, server.Restart("immediate"))
	testkit.Await(t, "refused", func() bool { // the first call may find that its connection has ended
		got, err = take(t.Context(), store, "k")
		return err == nil || errors.Is(err, tenure.ErrSetup)
	})
	require.ErrorContains(t, err, "UNLOGGED")
	pool.Reset()
	require.Zero(t, rowsOfClaims(t, pool), "it was claimed again")
}
