// Package integrations shows tenure in programs that use other libraries. Each file is about one
// library, and its example or test runs.
package integrations

import (
	"context"
	"log"
	"os"
	"path/filepath"
	"testing"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"
	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/testkit/rig"
	"github.com/tenurelib/tenure/stores/mysqltenure"
)

func TestMain(m *testing.M) { testkit.Main(all{m}) }

type all struct{ *testing.M }

func (m all) Run() int {
	defer rig.RemoveMariaDB()
	return m.M.Run()
}

// newStore returns an in-memory store that lasts as long as an example.
func newStore() *tenure.SQLiteStore {
	store, err := tenure.OpenSQLite(context.Background(), ":memory:", tenure.SQLiteConfig{Shared: true})
	if err != nil {
		log.Fatal(err)
	}
	if err := store.Migrate(context.Background()); err != nil {
		log.Fatal(err)
	}
	return store
}

// newCoordinator returns a coordinator that runs the job while it holds the lease with that name.
func newCoordinator(store tenure.Store, name string, job func(context.Context) error) *tenure.Coordinator {
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: name}})
	if err != nil {
		log.Fatal(err)
	}
	coordinator, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Reconcile: job})
	if err != nil {
		log.Fatal(err)
	}
	return coordinator
}

// awaitHolding returns when a coordinator that runs holds the lease.
func awaitHolding(coordinator *tenure.Coordinator) {
	for status := range coordinator.Changes(context.Background()) {
		if status.Role == tenure.RoleHolder {
			return
		}
	}
}

// limited returns a context that ends with the test, or after a minute.
func limited(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// sqlStores open a store, and say how a program opens a pool of its own in the same database, by the name of its driver.
var sqlStores = map[string]func(t *testing.T) (store tenure.Database, dsn string){
	"pgx": func(t *testing.T) (tenure.Database, string) {
		url := testkit.PostgresURL(t)
		return opened(t, url), url
	},
	"sqlite": func(t *testing.T) (tenure.Database, string) {
		path := filepath.Join(t.TempDir(), "integrations.db")
		return opened(t, path+"?shared=true"), "file:" + path + "?_txlock=immediate&_pragma=busy_timeout(10000)"
	},
	"mysql": func(t *testing.T) (tenure.Database, string) {
		if _, err := os.Stat(rig.MariaDBProgram); err != nil && os.Getenv("TENURE_REQUIRE_MARIADB") == "" {
			t.Skip("there is no mariadbd: install mariadb-server")
		}
		server, err := rig.NewMariaDB("")
		must(t, err)
		t.Cleanup(func() { server.Close() })
		must(t, server.Start(t.Context()))
		store, err := mysqltenure.Open(t.Context(), server.URL.String(), mysqltenure.Config{})
		must(t, err)
		return ready(t, store), server.DSN("app", "")
	},
}

func opened(t *testing.T, url string) tenure.Database {
	store, err := tenure.Open(t.Context(), url)
	must(t, err)
	return ready(t, store)
}

func ready(t *testing.T, store tenure.Database) tenure.Database {
	t.Cleanup(func() { store.Close() })
	must(t, store.Migrate(t.Context()))
	return store
}

// takenOver returns a term that does not know that its record is gone, as if it had expired, and the next holder had come and gone.
func takenOver(t *testing.T, store tenure.Database, name string) *tenure.Term {
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: name}})
	must(t, err)
	term, err := lease.AcquireOrSteal(t.Context())
	must(t, err)
	held, err := lease.Read(t.Context())
	must(t, err)
	must(t, store.DeleteIf(t.Context(), held.Key, tenure.IfVersion(held.Version)))
	return term
}
