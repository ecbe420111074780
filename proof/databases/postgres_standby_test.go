package databases_test

import (
	"context"
	"log/slog"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

// standbyOf returns a standby of a server, and a URL that names it first.
func standbyOf(t *testing.T, primary *testkit.PostgresServer) (standby *testkit.PostgresServer, both string) {
	t.Helper()
	standby, err := primary.Standby()
	require.NoError(t, err)
	t.Cleanup(func() { _ = standby.Close() })
	first, err := url.Parse(standby.URL())
	require.NoError(t, err)
	second, err := url.Parse(primary.URL())
	require.NoError(t, err)
	first.Host += "," + second.Host
	return standby, first.String()
}

func TestOfSeveralHostsThePrimaryIsFoundThoughAStandbyComesFirst(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	primary := testkit.StartPostgres(t)
	standby, both := standbyOf(t, primary)

	t.Run("by URL", func(t *testing.T) {
		opened, err := tenure.Open(ctx, both)
		require.NoError(t, err)
		defer opened.Close()
		testkit.Migrate(t, opened)
		lease := testkit.NewLease(t, opened, tenure.LeaseConfig{})
		require.NoError(t, lease.Release(ctx, testkit.MustAcquire(t, lease)))
	})
	t.Run("in the caller's pool", func(t *testing.T) {
		pool := testkit.PostgresPool(t, both) // whose queries go to the standby
		testkit.Await(t, "the standby has the table", func() bool { _, err := pool.Exec(ctx, `TABLE objects`); return err == nil })
		store := testkit.Must(tenure.NewPostgresStore(pool, tenure.PostgresConfig{Logger: testkit.Quiet}))
		defer store.Close()
		lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
		term := testkit.MustAcquire(t, lease)
		err := store.Fenced(ctx, term, func(tx pgx.Tx) error { return nil })
		require.ErrorContains(t, err, "target_session_attrs=read-write", "its record can't be locked there")
		require.NoError(t, lease.Release(ctx, term))
	})
	t.Run("unless the URL says otherwise", func(t *testing.T) {
		store := testkit.OpenPostgres(t, both+"&target_session_attrs=any", tenure.PostgresConfig{})
		_, err := testkit.NewLease(t, store, tenure.LeaseConfig{}).TryAcquire(ctx)
		require.ErrorContains(t, err, "the server is a standby")
		require.ErrorContains(t, err, "target_session_attrs=read-write")
	})
	t.Run("after a failover", func(t *testing.T) {
		store := testkit.OpenPostgres(t, both, tenure.PostgresConfig{})
		lease := testkit.NewLease(t, store, tenure.LeaseConfig{TTL: time.Hour})
		term := testkit.MustAcquire(t, lease)
		testkit.Await(t, "the standby has it", func() bool {
			other := testkit.OpenPostgres(t, standby.URL(), tenure.PostgresConfig{})
			defer other.Close()
			held, err := testkit.NewLease(t, other, tenure.LeaseConfig{}).Read(ctx)
			return err == nil && held.Term == term.ID()
		})
		require.NoError(t, primary.Stop("immediate"))
		require.NoError(t, standby.Promote())
		testkit.Await(t, "it is renewed on the new primary", func() bool {
			ctx, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			return lease.Renew(ctx, term) == nil
		})
	})
}

func TestAServerThatIsStillReadOnlyIsWaitedForAtAStart(t *testing.T) {
	primary := testkit.StartPostgres(t)
	standby, _ := standbyOf(t, primary)
	var log testkit.SyncBuffer
	store := testkit.Must(tenure.OpenPostgres(t.Context(), standby.URL(), tenure.PostgresConfig{Logger: slog.New(slog.NewTextHandler(&log, nil))}))
	defer store.Close()
	migrated := make(chan error, 1)
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	go func() { migrated <- store.Migrate(ctx) }()
	testkit.Await(t, "it waits, and says why", func() bool {
		return strings.Contains(log.String(), "waiting for the database") && strings.Contains(log.String(), "the server is read-only")
	})
	require.NoError(t, primary.Stop("immediate"))
	require.NoError(t, standby.Promote())
	require.NoError(t, <-migrated)
	_, err := testkit.NewLease(t, store, tenure.LeaseConfig{}).TryAcquire(t.Context())
	require.ErrorIs(t, err, tenure.ErrHeld, "a promoted server may have lost a record")
	testkit.Await(t, "acquired", func() bool {
		_, err := testkit.NewLease(t, store, tenure.LeaseConfig{TTL: 2 * time.Second}).TryAcquire(t.Context())
		return err == nil
	})
}
