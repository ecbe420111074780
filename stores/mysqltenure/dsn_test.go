//go:build linux

package mysqltenure_test

import (
	"crypto/rand"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/stores/mysqltenure"
	"github.com/tenurelib/tenure/storetest"
)

// TestOnAServerOfYourOwn runs against any server of one writer: make test-mysql DSN='user:password@tcp(host:3306)/scratch'. It
// creates tables in that database, and leaves them.
func TestOnAServerOfYourOwn(t *testing.T) {
	dsn := os.Getenv("TENURE_TEST_MYSQL")
	if dsn == "" {
		t.Skip("TENURE_TEST_MYSQL has no DSN")
	}
	open := func(t *testing.T, table string) *mysqltenure.Store {
		store, err := mysqltenure.Open(t.Context(), dsn, mysqltenure.Config{Table: table, Logger: testkit.Quiet})
		require.NoError(t, err)
		return ready(t, store)
	}
	db := pool(t, dsn) // prepares statements, unless the DSN says otherwise
	var version string
	require.NoError(t, db.QueryRow("SELECT VERSION()").Scan(&version))
	t.Log(version)
	unique := func() string { return "tenure_test_" + rand.Text() }
	storetest.Run(t, func(t *testing.T) tenure.Store { return open(t, unique()) })
	t.Run("prepared", func(t *testing.T) {
		storetest.Run(t, func(t *testing.T) tenure.Store { return openOn(t, db, unique()) })
	})
	t.Run("fences", func(t *testing.T) {
		table := unique()
		runStaleWrites(t, open(t, table), open(t, table), db, table, races)
		exec1(t, db, "DROP TABLE IF EXISTS ledger")
		exec1(t, db, testkit.CreateLedger)
		for _, level := range levels {
			testkit.RunFenceRaces(t, open(t, unique()), db, level, "INSERT INTO ledger VALUES (?)", races)
		}
	})
	t.Run("handover", func(t *testing.T) {
		table := unique()
		took := handovers(t, 1, 5, func() *mysqltenure.Store { return open(t, table) })
		t.Log(took)
	})
}
