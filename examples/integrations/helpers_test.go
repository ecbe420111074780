// Package integrations shows tenure in programs that use other libraries. Each file is about one
// library, and its example or test runs.
package integrations

import (
	"context"
	"log"
	"testing"
	"time"

	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

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
