package sqliteobjects

import (
	"database/sql"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"
)

// Without a lock, what is read while another process writes may be torn.
func TestWhatWasReadOfAFileThatWasAloneStandsUntilSomebodyWrites(t *testing.T) {
	path := filepath.Join(t.TempDir(), "it's 100%.db")
	write := func(statement string) *sql.DB {
		t.Helper()
		db, err := openDB(t.Context(), path)
		require.NoError(t, err)
		_, err = db.Exec(statement)
		require.NoError(t, err)
		return db
	}
	link := filepath.Join(t.TempDir(), "link.db")
	require.NoError(t, os.Symlink(path, link))
	count := func() (rows int, stands func() bool) {
		t.Helper()
		db, stands, err := OpenToRead(t.Context(), link)
		require.NoError(t, err)
		t.Cleanup(func() { db.Close() })
		require.NoError(t, db.QueryRow("SELECT count(*) FROM t").Scan(&rows))
		_, err = db.Exec("INSERT INTO t VALUES (0)")
		require.Error(t, err)
		return rows, stands
	}
	require.NoError(t, write("CREATE TABLE t (v); INSERT INTO t VALUES (1)").Close())
	rows, stands := count()
	require.Equal(t, 1, rows)
	require.True(t, stands())

	writer := write("INSERT INTO t VALUES (2)") // which is in the log
	require.False(t, stands())
	rows, live := count()
	require.Equal(t, 2, rows)
	require.True(t, live())
	require.NoError(t, writer.Close())
	require.False(t, stands(), "the log is gone, and the file has what was in it")
	rows, stands = count()
	require.Equal(t, 2, rows)
	require.True(t, stands())
}
