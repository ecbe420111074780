package proctree_test

import (
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/internal/proctree"
)

// A PID namespace without a /proc of its own shows the processes of another one, under numbers that are others' in it.
func TestNoProcessIsSeenInTheProcOfAnotherNamespace(t *testing.T) {
	if os.Getenv("PROCTREE_TEST_INNER") != "" {
		require.Empty(t, proctree.All())
		require.False(t, proctree.Descends(os.Getppid(), os.Getpid()))
		return
	}
	require.NotEmpty(t, proctree.All())
	if err := exec.Command("unshare", "--pid", "--fork", "true").Run(); err != nil {
		t.Skipf("no namespace of its own can be had: %v", err)
	}
	inner := exec.Command("unshare", "--pid", "--fork", os.Args[0], "-test.run=^"+t.Name()+"$")
	inner.Env = append(os.Environ(), "PROCTREE_TEST_INNER=1")
	out, err := inner.CombinedOutput()
	require.NoError(t, err, "%s", out)
}
