package tenure_test

import (
	"os"
	"testing"

	"github.com/tenurelib/tenure"
)

func TestAReplicaIsNamedByTheFirstVariableThatIsSetElseByItsHost(t *testing.T) {
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	names := []string{"TENURE_REPLICA_ID", "OPENSHELL_REPLICA_ID", "HOSTNAME"}
	for _, name := range names {
		t.Setenv(name, "by "+name)
	}
	for _, name := range names {
		if got, want := tenure.ReplicaID(), "by "+name; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
		t.Setenv(name, "")
	}
	if got := tenure.ReplicaID(); got != host {
		t.Errorf("got %q, want the host's name %q", got, host)
	}
}
