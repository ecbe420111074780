package sqliteobjects

import (
	"context"
	"database/sql"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/internal/objects"
)

// Errors of mattn's driver have a code but no method Code; that driver needs cgo, so it is tested
// in a separate module.
func TestAnErrorWithoutACodeIsRecognisedByItsText(t *testing.T) {
	require.True(t, isBusy(errors.New("database is locked")))
	require.False(t, isBusy(errors.New("database table is locked")))
	require.False(t, isBusy(errors.New("no such table: objects")))
}

func TestACallThatIsInterruptedSaysThatTheFileIsLocked(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	calls := 0
	err := whenFree(ctx, func() error {
		if calls++; calls == 1 {
			return errors.New("database is locked")
		}
		cancel()
		return ctx.Err()
	})
	require.ErrorIs(t, err, context.Canceled)
	require.True(t, isBusy(err), "%v", err)
}

func TestAllConnectionsOpenTheFileThatTheFirstHasOpened(t *testing.T) {
	one, two := t.TempDir(), t.TempDir()
	count := func(db *sql.DB) (rows int) {
		t.Helper()
		require.NoError(t, db.QueryRow("SELECT count(*) FROM t").Scan(&rows))
		return rows
	}
	for name, path := range map[string]string{"a relative path": "a.db", "a link": filepath.Join(one, "link.db"), "a link to a folder": filepath.Join(one, "current", "b.db")} {
		t.Run(name, func(t *testing.T) {
			t.Chdir(one)
			relink := func(folder string) {
				for link, file := range map[string]string{"link.db": "c.db", "current": ""} {
					os.Remove(filepath.Join(one, link))
					require.NoError(t, os.Symlink(filepath.Join(folder, file), filepath.Join(one, link)))
				}
			}
			for _, folder := range []string{one, two} {
				require.NoError(t, os.WriteFile(filepath.Join(folder, "c.db"), nil, 0o600))
			}
			relink(one)
			db, err := openDB(t.Context(), path)
			require.NoError(t, err)
			t.Cleanup(func() { db.Close() })
			_, err = db.Exec("CREATE TABLE t (v); INSERT INTO t VALUES (1)")
			require.NoError(t, err)
			reading, _, err := OpenToRead(t.Context(), path)
			require.NoError(t, err)
			t.Cleanup(func() { reading.Close() })

			t.Chdir(two)
			relink(two)
			for _, db := range []*sql.DB{db, reading} {
				db.SetMaxIdleConns(-1) // so that each call opens the file
				require.Equal(t, 1, count(db))
				require.Equal(t, 1, count(db))
			}
			files, err := filepath.Glob(filepath.Join(two, "*"))
			require.NoError(t, err)
			require.Equal(t, []string{filepath.Join(two, "c.db")}, files)
		})
	}
}

func TestNoFileIsCreatedThroughALinkToNothing(t *testing.T) {
	dir := t.TempDir()
	missing, link := filepath.Join(dir, "missing"), filepath.Join(dir, "link.db")
	require.NoError(t, os.Symlink(missing, link))
	_, err := openDB(t.Context(), link)
	require.ErrorIs(t, err, objects.ErrSetup)
	require.ErrorContains(t, err, "symbolic link")
	require.NoFileExists(t, missing)
}
