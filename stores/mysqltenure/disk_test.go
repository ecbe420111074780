//go:build linux

package mysqltenure_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/testkit/rig"
	"github.com/tenurelib/tenure/storekit"
)

// startOnSmallDisk starts a server on a file system of its own, which fill fills, and returns what gives the room back. What
// the server's files have already is theirs, as on a disk where they were written once.
func startOnSmallDisk(t *testing.T, args ...string) (s *server, fill func() (free func())) {
	t.Helper()
	needsServer(t)
	dir, err := os.MkdirTemp(testkit.MemoryDir(), "tenure-disk-")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.Remove(dir) })
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=128m"); err != nil {
		t.Skipf("a small file system can't be mounted: %v", err)
	}
	t.Cleanup(func() { require.NoError(t, syscall.Unmount(dir, syscall.MNT_DETACH)) })
	mariadb, err := rig.NewMariaDB(dir, args...)
	require.NoError(t, err)
	s = &server{mariadb}
	s.Log = filepath.Join(t.TempDir(), "log")
	t.Cleanup(func() { _ = s.End(syscall.SIGKILL) })
	require.NoError(t, s.Start(t.Context()))
	return s, func() func() {
		require.NoError(t, filepath.WalkDir(filepath.Join(dir, "data"), func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			file, err := os.OpenFile(path, os.O_RDWR, 0)
			if err != nil {
				return err
			}
			defer file.Close()
			is, err := file.Stat()
			if err != nil || is.Size() == 0 {
				return err
			}
			const keepSize = 1
			return syscall.Fallocate(int(file.Fd()), keepSize, 0, is.Size())
		}))
		ballast, err := os.Create(filepath.Join(dir, "ballast"))
		require.NoError(t, err)
		for size := 1 << 20; size > 0; {
			if _, err := ballast.Write(make([]byte, size)); errors.Is(err, syscall.ENOSPC) {
				size /= 2
			} else {
				require.NoError(t, err)
			}
		}
		require.NoError(t, ballast.Close())
		return func() { require.NoError(t, os.Remove(ballast.Name())) }
	}
}

// A server with a binary log waits when its disk is full, and for up to a minute when there is room again. If it has to extend the file
// of a table, it may also end.
func TestAFullDiskEndsTheTermInOrder(t *testing.T) {
	t.Parallel()
	testkit.Slow(t)
	s, fill := startOnSmallDisk(t, "--log-bin=binlog", "--sync-binlog=1", "--binlog-format=ROW")
	var jobs testkit.Jobs
	const ttl = 3 * time.Second
	store := open(t, s, "")
	a, b := testkit.StartReplica(t, &jobs, store, "a", ttl), testkit.StartReplica(t, &jobs, open(t, s, ""), "b", ttl)
	testkit.Await(t, "one holds", func() bool { return testkit.Holder(a, b) != nil })
	first := testkit.Holder(a, b).Status().Token
	free := fill()
	testkit.Await(t, "nobody holds", func() bool { return testkit.Holder(a, b) == nil && jobs.Running.Load() == 0 })
	written, err := store.PutIf(t.Context(), tenure.Object{Key: widget}, tenure.IfAbsent())
	require.Error(t, err, "%v", written)
	require.False(t, storekit.Refusal(err), "%v", err)
	free()
	require.NoError(t, s.End(syscall.SIGKILL)) // as an operator does who has no minute
	require.NoError(t, s.Start(t.Context()))
	testkit.Await(t, "one holds", func() bool { return testkit.Holder(a, b) != nil })
	require.Greater(t, testkit.Holder(a, b).Status().Token, first)
	require.EqualValues(t, 1, jobs.Most.Load())
}

// Without a binary log, a renewal writes only what was written before.
func TestAHolderGoesOnWhileTheDiskIsFull(t *testing.T) {
	t.Parallel()
	testkit.Slow(t)
	s, fill := startOnSmallDisk(t)
	var jobs testkit.Jobs
	const ttl = 2 * time.Second
	store := open(t, s, "")
	a, b := testkit.StartReplica(t, &jobs, store, "a", ttl), testkit.StartReplica(t, &jobs, open(t, s, ""), "b", ttl)
	testkit.Await(t, "one holds", func() bool { return testkit.Holder(a, b) != nil })
	holder := testkit.Holder(a, b)
	first := holder.Status().Token
	free := fill()
	for began := testkit.Get(t, store, holder.Lease.Key()).UpdatedAt; ; {
		is := testkit.Get(t, store, holder.Lease.Key())
		if is.UpdatedAt.Sub(began) > 2*ttl {
			break
		}
		require.Less(t, is.Age, ttl)
		time.Sleep(ttl / 10)
	}
	free()
	require.True(t, holder.IsHolder())
	require.Equal(t, first, holder.Status().Token)
	require.EqualValues(t, 1, jobs.Most.Load())
}
