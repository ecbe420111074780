package kills_test

import (
	"context"
	"path/filepath"
	"strings"
	"testing"

	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/proof/kills"
	"github.com/tenurelib/tenure/proof/kit"
)

func open(ctx context.Context, url string) (kit.FencingStore, error) {
	if strings.HasPrefix(url, "postgres") {
		return tenure.OpenPostgres(ctx, url, tenure.PostgresConfig{Logger: kit.Quiet})
	}
	return tenure.OpenSQLite(ctx, url, tenure.SQLiteConfig{Shared: true, Logger: kit.Quiet})
}

func TestMain(m *testing.M) {
	kills.Play(open)
	kit.Main(m)
}

func TestKillsAtRandomInstantsNeitherOverlapNorLeaveALease(t *testing.T) {
	testkit.Slow(t)
	t.Run("postgres", func(t *testing.T) {
		url := kit.PostgresURL(t)
		store := kit.OpenPostgres(t, url, tenure.PostgresConfig{})
		kit.MigrateClaims(t, store)
		kills.Run(t, store, url)
	})
	t.Run("sqlite", func(t *testing.T) {
		url := filepath.Join(t.TempDir(), "tenure.db")
		store := kit.OpenSQLite(t, url)
		kit.MigrateClaims(t, store)
		kills.Run(t, store, url)
	})
}
