package filewatch_test

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/internal/filewatch"
)

// patience is far longer than any notification takes, and quiet is long enough for one to arrive.
const (
	patience = 30 * time.Second
	quiet    = 50 * time.Millisecond
)

// create returns a new file in a directory with others, and a watch of it.
func create(t *testing.T) (*os.File, *filewatch.Watcher) {
	t.Helper()
	file, err := os.Create(filepath.Join(t.TempDir(), "data.db-wal"))
	require.NoError(t, err)
	t.Cleanup(func() { file.Close() })
	w, err := filewatch.New(file.Name())
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip(err)
	}
	require.NoError(t, err)
	return file, w
}

func write(t *testing.T, file *os.File) {
	t.Helper()
	_, err := file.WriteAt([]byte("in place, as in a log that SQLite begins anew"), 0)
	require.NoError(t, err)
	require.NoError(t, file.Sync())
}

func wantNotified(t *testing.T, w *filewatch.Watcher) {
	t.Helper()
	select {
	case <-w.C:
	case <-time.After(patience):
		t.Fatal("no notification that the file was written")
	}
}

// drain takes the notifications that are under way.
func drain(w *filewatch.Watcher) {
	for {
		select {
		case <-w.C:
		case <-time.After(quiet):
			return
		}
	}
}

func TestEachWriteOfTheFileIsTold(t *testing.T) {
	file, w := create(t)
	defer w.Close()
	for range 5 {
		write(t, file)
		wantNotified(t, w)
		drain(w)
	}
}

func TestWritesOfOtherFilesAreNotTold(t *testing.T) {
	file, w := create(t)
	defer w.Close()
	other, err := os.Create(strings.TrimSuffix(file.Name(), "-wal"))
	require.NoError(t, err)
	defer other.Close()
	drain(w)
	write(t, other)
	select {
	case <-w.C:
		t.Error("notified of a write to another file")
	case <-time.After(quiet):
	}
	write(t, file)
	wantNotified(t, w)
}

func TestAFileThatIsMissingIsAnError(t *testing.T) {
	_, err := filewatch.New(filepath.Join(t.TempDir(), "missing"))
	require.Error(t, err)
}

// Time would stand still while the watch waits for the file.
func TestFilesAreNotWatchedInVirtualTime(t *testing.T) {
	path := filepath.Join(t.TempDir(), "data.db-wal")
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	synctest.Test(t, func(t *testing.T) {
		w, err := filewatch.New(path)
		if err == nil {
			w.Close()
		}
		require.Error(t, err)
	})
}

// Close waits for the goroutine, which may be waiting for the file or for a receiver.
func TestNothingIsLeftOfAWatchThatIsClosed(t *testing.T) {
	before, began := runtime.NumGoroutine(), descriptors()
	for i := range 20 {
		file, w := create(t)
		for range i % 3 {
			write(t, file)
		}
		w.Close()
		file.Close()
		require.LessOrEqual(t, runtime.NumGoroutine(), before+1) // a finalizer's, or a timer's of the tests
		require.LessOrEqual(t, descriptors(), began+1)           // the poller's
	}
}

// descriptors counts the open files of this process, where it can.
func descriptors() int {
	entries, _ := os.ReadDir("/proc/self/fd")
	return len(entries)
}
