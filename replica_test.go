package tenure_test

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
)

func TestAReplicaIsNamedByTheFirstVariableThatIsSetElseByItsHost(t *testing.T) {
	host, err := os.Hostname()
	require.NoError(t, err)
	names := []string{"TENURE_REPLICA_ID", "HOSTNAME"}
	for _, name := range names {
		t.Setenv(name, "by "+name)
	}
	for _, name := range names {
		require.Equal(t, "by "+name, tenure.ReplicaID())
		t.Setenv(name, "")
	}
	require.Equal(t, host, tenure.ReplicaID())
}
