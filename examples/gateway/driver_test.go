//go:build unix

package main

import (
	"context"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/internal/testkit"
)

// newTestDriver returns a driver on a directory. Its processes end with the test.
func newTestDriver(t *testing.T, dir string) *processDriver {
	t.Helper()
	d, err := newProcessDriver(dir)
	require.NoError(t, err)
	d.killAfter = 50 * time.Millisecond
	t.Cleanup(func() {
		instances, err := d.List(context.Background())
		require.NoError(t, err)
		for _, inst := range instances {
			require.NoError(t, d.Delete(context.Background(), inst.ID))
		}
	})
	return d
}

// run creates an instance of the sandbox "box".
func (d *processDriver) run(t *testing.T, command ...string) (id string, pid int) {
	t.Helper()
	id = "box." + uuid.NewString()
	pid, err := d.Create(t.Context(), id, command)
	require.NoError(t, err)
	return id, pid
}

func (d *processDriver) isAlive(t *testing.T, id string) bool {
	t.Helper()
	inst, err := d.load(id)
	require.NoError(t, err)
	return inst.Alive
}

// awaitOutput waits until a process has written a line, and returns it.
func (d *processDriver) awaitOutput(t *testing.T, id string) (line string) {
	t.Helper()
	testkit.Await(t, "the process has written a line", func() (ok bool) {
		out, err := os.ReadFile(d.path(id, ".out"))
		require.NoError(t, err)
		line, _, ok = strings.Cut(string(out), "\n")
		return ok
	})
	return line
}

func TestAnInstanceRunsUntilItIsDeletedByAnyDriverOfItsDirectory(t *testing.T) {
	dir := t.TempDir()
	d, other := newTestDriver(t, dir), newTestDriver(t, dir)
	id, pid := d.run(t, "sleep", "1000")
	testkit.Await(t, "the process has written its PID", func() bool {
		inst, err := other.load(id)
		require.True(t, err == nil && inst.Alive && inst.Sandbox == "box", "%+v, %v", inst, err)
		return inst.PID == pid
	})
	require.NoError(t, other.Delete(t.Context(), id))
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, entries)
	testkit.Await(t, "the process is reaped", func() bool { return syscall.Kill(pid, 0) != nil })
	require.NoError(t, d.Delete(t.Context(), id), "the second deletion")
}

func TestTheCommandGetsItsArgumentsButNotTheGatewaysEnvironment(t *testing.T) {
	t.Setenv("PGPASSWORD", "s3cret")
	d := newTestDriver(t, t.TempDir())
	id, _ := d.run(t, "sh", "-c", `printf '%s|' "$@"; env; cat`, "--", "a b", "-x", "")
	testkit.Await(t, "the process exits at the end of its empty input", func() bool { return !d.isAlive(t, id) })
	out, err := os.ReadFile(d.path(id, ".out"))
	require.NoError(t, err)
	require.True(t, strings.HasPrefix(string(out), "a b|-x||"), "%s", out)
	require.NotContains(t, string(out), "s3cret")
}

func TestACommandThatDoesNotExistLeavesNoInstance(t *testing.T) {
	d := newTestDriver(t, t.TempDir())
	file := filepath.Join(t.TempDir(), "no-program")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	for _, command := range []string{"no-such-command", file} {
		_, err := d.Create(t.Context(), "box.1", []string{command})
		require.Error(t, err)
	}
	instances, err := d.List(t.Context())
	require.NoError(t, err)
	require.Empty(t, instances)
}

func TestEachExitIsSeenOnceByEachWatcher(t *testing.T) {
	dir := t.TempDir()
	d, other := newTestDriver(t, dir), newTestDriver(t, dir)
	early, _ := d.run(t, "true")
	testkit.Await(t, "a process exits before the watch begins", func() bool { return !d.isAlive(t, early) })
	late, pid := d.run(t, "sleep", "1000")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var exits []string
	for inst, err := range other.Watch(ctx) {
		require.NoError(t, err)
		exits = append(exits, inst.ID)
		switch inst.ID {
		case early:
			require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
		case late:
			time.AfterFunc(3*watchInterval, cancel)
		}
	}
	require.Equal(t, []string{early, late}, exits)
}

func TestADeletionEndsAProcessAndItsChildrenEvenIfTheyIgnoreSIGTERM(t *testing.T) {
	const grow = `grow() { echo ready; while :; do echo >>"$1"; sleep 0.01; done; }; `
	for _, script := range []string{
		`trap "" TERM; grow "$1" & wait`,                         // all do
		`(trap "" TERM; grow "$1") & wait`,                       // the child does
		`(trap "" TERM; grow "$1") & sleep 0.1; kill -KILL "$$"`, // the child does, and its parent is dead
	} {
		d := newTestDriver(t, t.TempDir())
		file := filepath.Join(t.TempDir(), "grows")
		id, _ := d.run(t, "sh", "-c", grow+script, "sh", file)
		d.awaitOutput(t, id)
		require.NoError(t, d.Delete(t.Context(), id))
		before, _ := os.ReadFile(file)
		time.Sleep(100 * time.Millisecond)
		after, _ := os.ReadFile(file)
		require.Equal(t, len(before), len(after), "a process still writes: %s", script)
	}
}

func TestAnInterruptedDeletionIsFinishedByTheNext(t *testing.T) {
	d := newTestDriver(t, t.TempDir())
	d.killAfter = time.Hour
	id, _ := d.run(t, "sh", "-c", `trap "" TERM; echo ready; while :; do sleep 0.01; done`)
	d.awaitOutput(t, id)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, d.Delete(ctx, id), context.DeadlineExceeded)
	require.True(t, d.isAlive(t, id))
	d.killAfter = time.Millisecond
	require.NoError(t, d.Delete(t.Context(), id))
	_, err := d.load(id)
	require.ErrorIs(t, err, fs.ErrNotExist)
}

// A gateway may die after it has made the files and before it has started the process.
func TestAnInstanceWhoseProcessWasNeverStartedIsDeadAndCanBeDeleted(t *testing.T) {
	d := newTestDriver(t, t.TempDir())
	require.NoError(t, os.WriteFile(d.path("box.1", ".pid"), nil, 0o600))
	instances, err := d.List(t.Context())
	require.NoError(t, err)
	require.Len(t, instances, 1)
	require.False(t, instances[0].Alive)
	require.NoError(t, d.Delete(t.Context(), "box.1"))
}

func TestAProcessThatReusesThePIDIsNotTheInstances(t *testing.T) {
	d := newTestDriver(t, t.TempDir())
	stranger := exec.Command("sleep", "1000")
	stranger.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	require.NoError(t, stranger.Start())
	defer stranger.Process.Kill()
	require.NoError(t, os.WriteFile(d.path("box.1", ".pid"), []byte(strconv.Itoa(stranger.Process.Pid)+"\n"), 0o600))
	require.False(t, d.isAlive(t, "box.1"))
	require.NoError(t, d.Delete(t.Context(), "box.1"))
	require.NoError(t, stranger.Process.Signal(syscall.Signal(0)))
}

func TestAnInstanceIsInTheStateDirectoryWhateverItsID(t *testing.T) {
	parent := t.TempDir()
	d := newTestDriver(t, filepath.Join(parent, "state"))
	outside := filepath.Join(parent, "precious.pid")
	require.NoError(t, os.WriteFile(outside, nil, 0o600))
	require.NoError(t, d.Delete(t.Context(), "../precious"))
	require.FileExists(t, outside)
}
