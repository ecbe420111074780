package databases_test

import (
	"testing"

	"github.com/tenurelib/tenure/internal/testkit"
)

// What the statements use differs most from version to version: functions of the WAL and of recovery, which a role
// may call, and what an error is called.
func TestEveryVersionOfPostgresKeepsTheContractAndTheLineages(t *testing.T) {
	testkit.OnEachPostgres(t, `^Test(PostgresKeepsTheContract|ManyReplicasMayMigrateAtOnce|ThroughPgBouncerTheContractIsKept|`+
		`.*Failover.*|.*Promotion.*|.*Restart.*|.*Timeline.*|.*AnotherServer.*|ALostClaim.*|`+
		`ATable(On|That).*|ARole.*|.*Migrate.*|OfSeveralHosts.*|AServerThatIsStillReadOnly.*|NoOperationOnRows.*|.*Index.*)$`)
}
