package databases_test

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
)

// A crash of the server, or a failover, must not forget a lease or a claim that was granted, though the
// application may do without.
func TestLeasesAndClaimsAreDurableWhateverTheRoleHas(t *testing.T) {
	testkit.Slow(t)
	for _, set := range []string{"off", "local", "remote_write"} {
		for name, suffix := range map[string]string{"": "", "no session settings": "&lock_timeout=700", "no prepared statements": "&default_query_exec_mode=exec"} {
			t.Run(set+" "+name, func(t *testing.T) {
				t.Parallel()
				url := testkit.PostgresURL(t)
				owner := testkit.PostgresPool(t, url)
				store := testkit.OpenPostgres(t, url+suffix, tenure.PostgresConfig{})
				testkit.MigrateClaims(t, store)
				testkit.ExecPostgres(t, owner, `ALTER DATABASE `+owner.Config().ConnConfig.Database+` SET synchronous_commit = `+set)
				testkit.ExecPostgres(t, owner, `CREATE TABLE said (what text, how text)`)
				testkit.ExecPostgres(t, owner, `CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
					INSERT INTO said VALUES (TG_ARGV[0], current_setting('synchronous_commit')); RETURN NEW; END $$`)
				testkit.ExecPostgres(t, owner, `CREATE TRIGGER note BEFORE INSERT OR UPDATE ON objects_claims FOR EACH ROW EXECUTE FUNCTION note('claim')`)
				testkit.ExecPostgres(t, owner, `CREATE TRIGGER lease BEFORE INSERT OR UPDATE ON objects FOR EACH ROW WHEN (NEW.object_type <> 'app') EXECUTE FUNCTION note('lease')`)
				testkit.ExecPostgres(t, owner, `CREATE TRIGGER app BEFORE INSERT ON objects FOR EACH ROW WHEN (NEW.object_type = 'app') EXECUTE FUNCTION note('app')`)
				store = testkit.OpenPostgres(t, url+suffix, tenure.PostgresConfig{}) // after the role was changed

				lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
				term := testkit.MustAcquire(t, lease)
				require.NoError(t, lease.Renew(t.Context(), term))
				var others sync.WaitGroup
				for i := range 20 { // some of them in groups
					others.Go(func() {
						testkit.MustAcquire(t, testkit.NewLease(t, store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: fmt.Sprint(i)}}))
					})
				}
				others.Wait()
				session, err := claims.NewSession(store, claims.SessionConfig{})
				require.NoError(t, err)
				keys, err := claims.NewKeys(session, "tenant")
				require.NoError(t, err)
				ctx, stop := context.WithCancel(t.Context())
				ended := make(chan error)
				go func() { ended <- session.Run(ctx) }()
				defer func() { stop(); require.NoError(t, <-ended) }()
				_, err = keys.Claim(t.Context(), "x")
				require.NoError(t, err)
				_, err = store.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "app", ID: "1"}}, tenure.IfAbsent())
				require.NoError(t, err)

				var weak, all int
				require.NoError(t, owner.QueryRow(t.Context(), `SELECT count(*) FILTER (WHERE how IN ('off', 'local')), count(*) FROM said WHERE what <> 'app'`).Scan(&weak, &all))
				require.Zero(t, weak)
				require.Greater(t, all, 20)
				var app string
				require.NoError(t, owner.QueryRow(t.Context(), `SELECT how FROM said WHERE what = 'app'`).Scan(&app))
				require.Equal(t, set, app, "it is the application's")
			})
		}
	}
}
