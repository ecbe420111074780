//go:build unix

package storelife

import (
	"os"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// Pause stops a child of this process, and returns when it has stopped. The signal alone takes
// effect a little later, so the child could still answer a request.
func Pause(t testing.TB, child *os.Process) {
	t.Helper()
	require.NoError(t, child.Signal(syscall.SIGSTOP))
	var status syscall.WaitStatus
	err := error(syscall.EINTR)
	for err == syscall.EINTR {
		_, err = syscall.Wait4(child.Pid, &status, syscall.WUNTRACED, nil)
	}
	require.NoError(t, err)
	require.True(t, status.Stopped(), "it has ended")
}

// Resume lets a child go on that was paused.
func Resume(t testing.TB, child *os.Process) {
	t.Helper()
	require.NoError(t, child.Signal(syscall.SIGCONT))
}
