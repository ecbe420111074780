//go:build unix

package testkit

import (
	"os"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// PauseProcess pauses a child of this process. It waits until the child has stopped, because after
// the signal alone the child could still answer a request.
func PauseProcess(t testing.TB, child *os.Process) {
	t.Helper()
	require.NoError(t, child.Signal(syscall.SIGSTOP))
	AwaitPaused(t, child)
}

// AwaitPaused waits until a child that gets SIGSTOP, maybe from itself, has stopped.
func AwaitPaused(t testing.TB, child *os.Process) {
	t.Helper()
	var status syscall.WaitStatus
	err := error(syscall.EINTR)
	for err == syscall.EINTR {
		_, err = syscall.Wait4(child.Pid, &status, syscall.WUNTRACED, nil)
	}
	require.NoError(t, err)
	require.True(t, status.Stopped(), "it has ended")
}

// ResumeProcess resumes a paused child.
func ResumeProcess(t testing.TB, child *os.Process) {
	t.Helper()
	require.NoError(t, child.Signal(syscall.SIGCONT))
}
