package databases_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/proof/kit"
)

// A role without the rights to see the timeline, or one of them, has another lineage after each restart.
func TestAPromotionMarksTheTableAgainAndARestartDoesNot(t *testing.T) {
	t.Parallel()
	primary := kit.StartPostgres(t)
	kit.Migrate(t, kit.OpenPostgres(t, primary.URL(), tenure.PostgresConfig{}))
	look := func(server *kit.PostgresServer) (on tenure.Lineage) {
		store := kit.OpenPostgres(t, server.URL(), tenure.PostgresConfig{})
		defer store.Close()
		on, err := store.Lineage(t.Context())
		require.NoError(t, err)
		return on
	}
	first := look(primary)
	require.Greater(t, first.Age, 1000*time.Hour, "nothing can have been lost")
	require.Equal(t, first.Server, look(primary).Server)
	require.NoError(t, primary.Restart("immediate"))
	again := look(primary)
	require.NotEqual(t, first.Server, again.Server)
	require.Equal(t, first.Mark, again.Mark)

	standby, err := primary.Standby()
	require.NoError(t, err)
	t.Cleanup(func() { _ = standby.Close() })
	store := kit.OpenPostgres(t, standby.URL()+"&target_session_attrs=any", tenure.PostgresConfig{})
	_, err = store.Lineage(t.Context())
	require.ErrorContains(t, err, "the server is a standby")
	require.NoError(t, primary.Stop("immediate"))
	require.NoError(t, standby.Promote())
	promoted := look(standby)
	require.NotEqual(t, first.Mark, promoted.Mark)
	require.Less(t, promoted.Age, kit.Patience)
	kept, err := store.Lineage(t.Context()) // on a connection that was opened before
	require.NoError(t, err)
	require.Equal(t, promoted.Mark, kept.Mark)
	require.Equal(t, promoted.Server, kept.Server)

	kit.ExecPostgres(t, kit.PostgresPool(t, standby.URL()), `REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC; CREATE ROLE worker LOGIN;
		GRANT ALL ON ALL TABLES IN SCHEMA public TO worker`)
	denied := kit.OpenPostgres(t, strings.Replace(standby.URL(), "postgres@", "worker@", 1), tenure.PostgresConfig{})
	was, err := denied.Lineage(t.Context())
	require.NoError(t, err)
	require.NotEqual(t, promoted.Mark, was.Mark)
	require.NoError(t, standby.Restart("fast"))
	kit.Await(t, "it has looked again", func() bool {
		_, _ = denied.Get(objects.WithLeaseCall(t.Context()), kit.LeaseKey)
		is, err := denied.Lineage(t.Context())
		return err == nil && is.Mark != was.Mark
	})
}
