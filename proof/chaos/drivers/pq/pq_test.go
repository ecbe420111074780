package pq

import (
	"database/sql"
	"testing"

	_ "github.com/lib/pq"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestNoTransactionOfPqWithAFenceStatementCommitsAfterTheNextTermBegan(t *testing.T) {
	url := testkit.PostgresURL(t)
	store, err := tenure.OpenPostgres(t.Context(), url, tenure.PostgresConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	if err := store.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	db, err := sql.Open("postgres", url)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if _, err := db.Exec(testkit.CreateLedger); err != nil {
		t.Fatal(err)
	}
	for _, level := range []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable} {
		testkit.RunFenceRaces(t, store, db, level, `INSERT INTO ledger VALUES ($1)`, 334)
	}
	testkit.RunFenceEndings(t, store, db, `INSERT INTO ledger VALUES ($1)`)
}
