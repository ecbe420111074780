package kills_test

import (
	"context"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/testkit/rig"
	"github.com/tenurelib/tenure/proof/kills"
	"github.com/tenurelib/tenure/stores/natstenure"
)

func open(ctx context.Context, url string) (testkit.FencingStore, error) {
	if strings.HasPrefix(url, "postgres") {
		return tenure.OpenPostgres(ctx, url, tenure.PostgresConfig{Logger: testkit.Quiet})
	}
	if strings.HasPrefix(url, "nats:") {
		return natstenure.Open(ctx, url, natstenure.Config{SyncAlways: true, Logger: testkit.Quiet})
	}
	return tenure.OpenSQLite(ctx, url, tenure.SQLiteConfig{Shared: true, Logger: testkit.Quiet})
}

func TestMain(m *testing.M) {
	kills.Play(open)
	testkit.Main(m)
}

func TestKillsAtRandomInstantsNeitherOverlapNorLeaveALease(t *testing.T) {
	testkit.Slow(t)
	t.Run("postgres", func(t *testing.T) {
		url := testkit.PostgresURL(t)
		store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
		testkit.MigrateClaims(t, store)
		kills.Run(t, store, url)
	})
	t.Run("sqlite", func(t *testing.T) {
		url := filepath.Join(t.TempDir(), "tenure.db")
		store := testkit.OpenSQLite(t, url)
		testkit.MigrateClaims(t, store)
		kills.Run(t, store, url)
	})
	t.Run("nats", func(t *testing.T) {
		dir := t.TempDir()
		server, err := rig.NewNATS(t.Context(), dir, filepath.Join(dir, "nats.log"))
		require.NoError(t, err)
		require.NoError(t, server.Start(t.Context()))
		t.Cleanup(func() { _ = server.End(syscall.SIGKILL) })
		store, err := natstenure.Open(t.Context(), server.URL.String(), natstenure.Config{SyncAlways: true, Logger: testkit.Quiet})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, store.Close()) })
		require.NoError(t, store.Migrate(t.Context()))
		kills.Run(t, store, "nats://"+lag(t, server.URL.Host))
	})
}
