package tenure

import (
	"os"

	"github.com/google/uuid"
)

// ReplicaID returns a name for this replica, for people to read: the first of
// the environment variables TENURE_REPLICA_ID, OPENSHELL_REPLICA_ID and HOSTNAME
// that is set, else the host's name, else a new UUID. Two replicas may share
// it: nothing that must be safe depends on it.
func ReplicaID() string {
	for _, name := range []string{"TENURE_REPLICA_ID", "OPENSHELL_REPLICA_ID", "HOSTNAME"} {
		if id := os.Getenv(name); id != "" {
			return id
		}
	}
	if host, err := os.Hostname(); err == nil && host != "" {
		return host
	}
	return uuid.NewString()
}
