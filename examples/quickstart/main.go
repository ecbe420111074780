// Command quickstart sweeps once a second, on one replica at a time. It is the program in
// the README. Start it twice, with TENURE_REPLICA_ID set to a and to b.
package main

import (
	"context"
	"log"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/tenurelib/tenure"
	_ "modernc.org/sqlite"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	store, err := tenure.OpenSQLite(ctx, "tenure.db", tenure.SQLiteConfig{Shared: true})
	if err != nil {
		log.Fatal(err)
	}
	defer store.Close()
	if err := store.Migrate(ctx); err != nil {
		log.Fatal(err)
	}
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{
		Key: tenure.Key{ID: "sweeper"},
		TTL: 5 * time.Second, // short, to see a failover soon; the default is 30 s
	})
	if err != nil {
		log.Fatal(err)
	}
	coordinator, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
		Reconcile: tenure.Every(time.Second, sweep),
	})
	if err != nil {
		log.Fatal(err)
	}
	if err := coordinator.Run(ctx); err != nil { // in a server: in a goroutine that main waits for
		log.Fatal(err)
	}
}

// sweep runs only while this replica holds the lease. Its ctx ends when it no longer does.
func sweep(ctx context.Context) error {
	log.Print("sweeping")
	return nil
}
