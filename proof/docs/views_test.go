package docs_test

import (
	"context"
	"database/sql"
	"os"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
)

// The pages on Postgres and SQLite have views for a person with a SQL client.
func TestTheViewsShowWhoHoldsWhat(t *testing.T) {
	testkit.Docs(t)
	viewsOf := func(page string) string {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		return string(regexp.MustCompile("(?s)```sql\n(CREATE VIEW leader_lease .*?)```").FindSubmatch(text)[1])
	}
	for name, views := range map[string]struct {
		store tenure.Database
		sql   string
	}{
		"Postgres": {testkit.OpenPostgres(t, testkit.QuickPostgresURL(t), tenure.PostgresConfig{}), viewsOf("docs/postgres.md")},
		"SQLite":   {testkit.OpenSQLite(t, ":memory:"), viewsOf("docs/sqlite.md")},
	} {
		t.Run(name, func(t *testing.T) {
			store := views.store
			testkit.Migrate(t, store)
			require.NoError(t, claims.Migrate(t.Context(), store))
			_, err := store.DB().Exec(views.sql)
			require.NoError(t, err)
			count := func() (n int) {
				require.NoError(t, store.DB().QueryRow(`SELECT count(*) FROM leader_lease`).Scan(&n))
				return n
			}

			lease := testkit.NewLease(t, store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "nightly"}, Holder: "a", TTL: time.Hour})
			term := testkit.MustAcquire(t, lease)
			var id, holder string
			var acquired, expires any // a time, or text on SQLite
			require.NoError(t, store.DB().QueryRow(`SELECT id, holder, acquired_at, expires_at FROM leader_lease`).Scan(&id, &holder, &acquired, &expires))
			require.Equal(t, []string{term.Key().ID, "a"}, []string{id, holder})
			require.WithinDuration(t, time.Now(), timeOf(t, acquired), testkit.Patience)
			require.InDelta(t, time.Hour, timeOf(t, expires).Sub(timeOf(t, acquired)), float64(time.Second))
			require.NoError(t, lease.RequestHandover(t.Context(), "b"))
			require.Equal(t, 1, count(), "a record with a request")
			require.NoError(t, lease.Renew(t.Context(), term))
			require.NoError(t, lease.Release(t.Context(), term))
			require.Zero(t, count(), "an offer to b is held by nobody")

			session, err := claims.NewSession(store, claims.SessionConfig{Holder: "c", Logger: testkit.Quiet})
			require.NoError(t, err)
			ctx, stop := context.WithCancel(t.Context())
			running := make(chan error, 1)
			go func() { running <- session.Run(ctx) }()
			keys, err := claims.NewKeys(session, "cart")
			require.NoError(t, err)
			got, err := keys.Claim(t.Context(), "1")
			require.NoError(t, err)
			var kind, owner sql.NullString
			var since any
			require.NoError(t, store.DB().QueryRow(`SELECT kind, id, holder, since, expires_at FROM claims_held`).Scan(&kind, &id, &owner, &since, &expires))
			require.Equal(t, []string{"cart", "1", "c"}, []string{kind.String, id, owner.String})
			require.WithinDuration(t, time.Now(), timeOf(t, since), testkit.Patience)
			require.Greater(t, time.Until(timeOf(t, expires)), time.Second)
			require.NoError(t, keys.Release(t.Context(), got...))
			require.ErrorIs(t, store.DB().QueryRow(`SELECT kind FROM claims_held`).Scan(&kind), sql.ErrNoRows)
			stop()
			require.NoError(t, <-running)
		})
	}
}

func timeOf(t *testing.T, value any) time.Time {
	t.Helper()
	if at, ok := value.(time.Time); ok {
		return at
	}
	at, err := time.ParseInLocation(time.DateTime, value.(string), time.UTC)
	require.NoError(t, err)
	return at
}
