package sqliteobjects

import (
	"bytes"
	"database/sql"
	"log/slog"
	"path/filepath"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/internal/objects"
)

// A goroutine may begin to poll before the previous one has ended, whose last watch has stopped. It must not wait in a
// way that stops virtual time, in which users test their jobs.
func TestAWatchThatEndsAtOnceLeavesNobodyWaitingForTheNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db, err := sql.Open("sqlite", ":memory:")
		require.NoError(t, err)
		db.SetMaxOpenConns(1)
		defer db.Close()
		w := newWatches(db, "", nil)
		defer w.close()
		for range 100 {
			w.watch(objects.ID{Type: "lease", ID: "1"}).Stop()
			last := w.watch(objects.ID{Type: "lease", ID: "1"})
			time.Sleep(time.Hour)
			require.Equal(t, 1, polling(), "polling goroutines")
			last.Stop()
		}
	})
}

func TestVirtualTimeGoesOnWhileAFileIsWatched(t *testing.T) {
	path := filepath.Join(t.TempDir(), "data.db")
	synctest.Test(t, func(t *testing.T) {
		table, err := Open(t.Context(), path, "objects", slog.New(slog.DiscardHandler))
		require.NoError(t, err)
		defer table.Close()
		require.NoError(t, table.Migrate(t.Context()))
		watch := table.Watch(objects.ID{Type: "lease", ID: "1"})
		defer watch.Stop()
		time.Sleep(time.Minute)
		require.True(t, watch.Live())
	})
}

func polling() int {
	stacks := make([]byte, 1<<20)
	return bytes.Count(stacks[:runtime.Stack(stacks, true)], []byte(".(*watches).poll("))
}
