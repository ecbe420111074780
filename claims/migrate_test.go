package claims_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
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
			testkit.ExecPostgres(t, store.Pool(), create)
			testkit.ExecPostgres(t, store.Pool(), testkit.Must(tasks.PostgresDDL()))
			testkit.ExecPostgres(t, store.Pool(), `INSERT INTO tasks (id) VALUES (1)`)
		case *tenure.SQLiteStore:
			testkit.ExecSQL(t, store.DB(), create)
			testkit.ExecSQL(t, store.DB(), testkit.Must(tasks.SQLiteDDL()))
			testkit.ExecSQL(t, store.DB(), `INSERT INTO tasks (id) VALUES (1)`)
		}
		queue, err := claims.NewQueue(store, tasks)
		if err != nil {
			t.Fatal(err)
		}
		if err := queue.Check(t.Context()); err != nil {
			t.Error(err)
		}
		testkit.MustAcquire(t, testkit.NewLease(t, store, tenure.LeaseConfig{Key: claims.SessionKey("worker"), TTL: time.Hour}))
		got, err := queue.TryTakeFor(t.Context(), "worker", claims.TakeOptions{N: 1})
		if err != nil || len(got) != 1 {
			t.Fatalf("took %v, error %v", got, err)
		}
		if err := queue.Finish(t.Context(), got...); err != nil {
			t.Error(err)
		}

		if _, err := claims.NewWorker(session, queue); err != nil { // whose session does
			t.Fatal(err)
		}
		if err := queue.Check(t.Context()); !errors.Is(err, tenure.ErrSetup) || !strings.Contains(err.Error(), "call claims.Migrate once") {
			t.Errorf("with a worker, without the table: %v", err)
		}
		if err := claims.Migrate(t.Context(), store); err != nil {
			t.Fatal(err)
		}
		if err := queue.Check(t.Context()); err != nil {
			t.Error(err)
		}
	})
}
