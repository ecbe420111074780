package claims_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/proof/kit"
)

// A user of leases alone has no tables of claims, and a queue by itself needs none.
func TestAQueueByItselfNeedsNoTablesOfClaims(t *testing.T) {
	eachServer(t, func(t *testing.T, open func() tenure.Database) {
		store := open()
		if err := store.Migrate(t.Context()); err != nil {
			t.Fatal(err)
		}
		session, err := claims.NewSession(store, claims.SessionConfig{})
		if err != nil {
			t.Fatal(err)
		}
		keys, err := claims.NewKeys(session, "tenant")
		if err != nil {
			t.Fatal(err)
		}
		if err := keys.Forget(t.Context()); !errors.Is(err, tenure.ErrSetup) || !strings.Contains(err.Error(), "call claims.Migrate once") {
			t.Errorf("without the table: %v", err)
		}
		const create = `CREATE TABLE tasks (id bigint PRIMARY KEY, status text NOT NULL DEFAULT 'queued', priority integer NOT NULL DEFAULT 0)`
		switch store := store.(type) {
		case *tenure.PostgresStore:
			kit.ExecPostgres(t, store.Pool(), create)
			kit.ExecPostgres(t, store.Pool(), kit.Must(tasks.PostgresDDL()))
			kit.ExecPostgres(t, store.Pool(), `INSERT INTO tasks (id) VALUES (1)`)
		case *tenure.SQLiteStore:
			kit.ExecSQL(t, store.DB(), create)
			kit.ExecSQL(t, store.DB(), kit.Must(tasks.SQLiteDDL()))
			kit.ExecSQL(t, store.DB(), `INSERT INTO tasks (id) VALUES (1)`)
		}
		queue, err := claims.NewQueue(store, tasks)
		if err != nil {
			t.Fatal(err)
		}
		got, err := queue.TryTakeFor(t.Context(), "worker", claims.TakeOptions{N: 1})
		if err != nil || len(got) != 1 {
			t.Fatalf("took %v, error %v", got, err)
		}
		if err := queue.Finish(t.Context(), got...); err != nil {
			t.Error(err)
		}
	})
}
