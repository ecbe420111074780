package tenure_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/proof/kit"
)

// A handle that was closed is no database that is down: it never answers again.
func TestAStoreThatIsClosedForGoodEndsRunAndIsUnhealthy(t *testing.T) {
	for _, holds := range []bool{true, false} {
		t.Run(fmt.Sprintf("holds: %v", holds), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := kit.OpenSQLite(t, ":memory:")
				kit.Migrate(t, store)
				if !holds {
					kit.MustAcquire(t, kit.NewLease(t, store, tenure.LeaseConfig{Holder: "other"}))
				}
				var cause error
				c, err := tenure.NewCoordinator(kit.NewLease(t, store, tenure.LeaseConfig{Holder: "a"}), tenure.CoordinatorConfig{
					Reconcile: func(ctx context.Context) error {
						<-ctx.Done()
						cause = context.Cause(ctx)
						return nil
					},
				})
				require.NoError(t, err)
				done := make(chan error, 1)
				go func() { done <- c.Run(t.Context()) }()
				time.Sleep(time.Second)
				require.Equal(t, holds, c.IsHolder())
				require.NoError(t, c.Healthy(time.Second))
				require.NoError(t, store.DB().Close())
				time.Sleep(15 * time.Second)
				require.ErrorIs(t, c.Healthy(time.Second), tenure.ErrClosed)
				time.Sleep(time.Minute)
				require.ErrorIs(t, <-done, tenure.ErrClosed)
				if holds {
					require.ErrorIs(t, cause, tenure.ErrDeadline, "the job has returned first")
				}
			})
		})
	}
}

func TestASessionWhoseStoreIsClosedForGoodEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := kit.OpenSQLite(t, ":memory:")
		kit.Migrate(t, store)
		require.NoError(t, claims.Migrate(t.Context(), store))
		session, err := claims.NewSession(store, claims.SessionConfig{Logger: kit.Quiet})
		require.NoError(t, err)
		keys, err := claims.NewKeys(session, "k")
		require.NoError(t, err)
		done := make(chan error, 1)
		go func() { done <- session.Run(t.Context()) }()
		_, err = keys.Claim(t.Context(), "1")
		require.NoError(t, err)
		require.NoError(t, store.DB().Close())
		time.Sleep(2 * time.Minute)
		require.ErrorIs(t, <-done, tenure.ErrClosed)
		_, err = keys.Claim(t.Context(), "2")
		require.ErrorIs(t, err, claims.ErrClosed)
	})
}

// Neither package exports the error of a handle that was closed.
func TestTheErrorsOfClosedHandlesAreKnown(t *testing.T) {
	pool, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/none")
	require.NoError(t, err)
	down := pool.Ping(t.Context())
	pool.Close()
	_, closed := pool.Exec(t.Context(), "SELECT 1")
	db := sql.OpenDB(untouched{t})
	require.NoError(t, db.Close())
	for err, want := range map[error]bool{
		closed: true, db.Ping(): true, fmt.Errorf("get: %w", tenure.ErrClosed): true,
		down: false, context.DeadlineExceeded: false, sql.ErrConnDone: false, errors.New("connection is closed"): false,
	} {
		require.Error(t, err)
		require.Equal(t, want, objects.IsClosed(err), "%v", err)
	}
	require.False(t, objects.IsClosed(nil))
}
