//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package sqliteobjects

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/internal/objects"
)

// claimed opens a table of the file at path, and claims it.
func claimed(t *testing.T, path string, shared bool) error {
	t.Helper()
	table, err := Open(t.Context(), path, "objects", slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	t.Cleanup(func() { table.Close() })
	return table.Claim(t.Context(), shared)
}

// Whoever may write to the folder can put anything there, and a more privileged user may open the database.
func TestWhatIsNoFileOfLocksIsRefusedAndLeftAsItIs(t *testing.T) {
	for name, put := range map[string]func(victim, lock string) error{
		"is a symbolic link":       os.Symlink,
		"has more than one name":   os.Link,
		"is not a regular file":    func(_, lock string) error { return syscall.Mkfifo(lock, 0o666) },
		"is not a regular file: d": func(_, lock string) error { return os.Mkdir(lock, 0o777) },
		"is a symbolic link to nothing": func(victim, lock string) error {
			return os.Symlink(victim+"-missing", lock)
		},
	} {
		for _, shared := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, shared %t", name, shared), func(t *testing.T) {
				dir := t.TempDir()
				path, victim := filepath.Join(dir, "data.db"), filepath.Join(t.TempDir(), "victim")
				require.NoError(t, os.WriteFile(victim, []byte("12345\n"), 0o640))
				before, err := os.Stat(victim)
				require.NoError(t, err)
				require.NoError(t, put(victim, LockFile(path, "objects")))

				err = claimed(t, path, shared)
				require.ErrorIs(t, err, objects.ErrInUse)
				require.ErrorIs(t, err, objects.ErrSetup)
				require.ErrorContains(t, err, filepath.Base(LockFile(path, "objects"))+", which processes lock to claim the database, "+name[:17])
				_, locked := Holder(path, "objects")
				require.False(t, locked)

				after, err := os.Stat(victim)
				require.NoError(t, err)
				require.Equal(t, before.Mode(), after.Mode())
				require.Equal(t, before.Sys().(*syscall.Stat_t).Uid, after.Sys().(*syscall.Stat_t).Uid)
				content, err := os.ReadFile(victim)
				require.NoError(t, err)
				require.Equal(t, "12345\n", string(content))
				require.NoFileExists(t, victim+"-missing")
			})
		}
	}
}

func TestAFileOfLocksThatHoldsMoreThanAPIDIsLockedAndNotWritten(t *testing.T) {
	for before, after := range map[string]string{
		"":                            fmt.Sprintf("%-20d\n", os.Getpid()),
		"123456789\n":                 fmt.Sprintf("%-20d\n", os.Getpid()), // of an earlier version, or process
		"a text\n":                    "a text\n",
		"1234567890123456789012345\n": "1234567890123456789012345\n",
	} {
		path := filepath.Join(t.TempDir(), "data.db")
		lock := LockFile(path, "objects")
		require.NoError(t, os.WriteFile(lock, []byte(before), 0o600))
		require.NoError(t, claimed(t, path, false))
		content, err := os.ReadFile(lock)
		require.NoError(t, err)
		require.Equal(t, after, string(content), "%q", before)
		_, locked := Holder(path, "objects")
		require.True(t, locked, "%q", before)
	}
}

func TestAFileThatIsSharedHasNoHolder(t *testing.T) {
	path := filepath.Join(t.TempDir(), "data.db")
	require.NoError(t, claimed(t, path, true))
	_, locked := Holder(path, "objects")
	require.False(t, locked)
}

func TestAFileOfLocksHasTheOwnerOfItsDatabaseIfItIsNew(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root may give files away")
	}
	const other = 65534
	owner := func(path string) uint32 {
		info, err := os.Stat(path)
		require.NoError(t, err)
		require.EqualValues(t, 0o640, info.Mode().Perm())
		return info.Sys().(*syscall.Stat_t).Uid
	}
	for _, exists := range []bool{false, true} {
		path := filepath.Join(t.TempDir(), "data.db")
		lock := LockFile(path, "objects")
		require.NoError(t, os.WriteFile(path, nil, 0o640))
		require.NoError(t, os.Chown(path, other, other))
		want := uint32(other)
		if exists {
			require.NoError(t, os.WriteFile(lock, nil, 0o640))
			want = 0
		}
		require.NoError(t, claimed(t, path, true))
		require.Equal(t, want, owner(lock))
	}
}
