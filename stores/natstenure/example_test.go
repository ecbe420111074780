package natstenure_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/stores/natstenure"
)

// runReplica runs a replica of a program; only one replica at a time does the job.
func runReplica(ctx context.Context, url string, job func(context.Context) error) error {
	store, err := natstenure.Open(ctx, url, natstenure.Config{SyncAlways: true}) // and Replicas: 3 in a cluster
	if err != nil {
		return err
	}
	defer store.Close()
	if err := store.Migrate(ctx); err != nil { // creates the stream TENURE if it is missing
		return err
	}
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "sweeper"}, TTL: 15 * time.Second})
	if err != nil {
		return err
	}
	coordinator, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Reconcile: job})
	if err != nil {
		return err
	}
	return coordinator.Run(ctx)
}

func Example() {
	url, shutdown := serverForExample()
	defer shutdown()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	err := runReplica(ctx, url, func(ctx context.Context) error {
		fmt.Println("this replica holds the lease:", tenure.TermFromContext(ctx).Valid())
		cancel() // the example ends; a job runs until its context does
		<-ctx.Done()
		return nil
	})
	fmt.Println(err)
	// Output:
	// this replica holds the lease: true
	// <nil>
}

// serverForExample stands in for the servers of a deployment.
func serverForExample() (url string, shutdown func()) {
	dir, err := os.MkdirTemp("", "natstenure")
	if err != nil {
		log.Fatal(err)
	}
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: -1, JetStream: true, StoreDir: dir, SyncAlways: true, NoSigs: true, NoLog: true})
	if err != nil {
		log.Fatal(err)
	}
	s.Start()
	if !s.ReadyForConnections(10 * time.Second) {
		log.Fatal("the server is not ready")
	}
	return s.ClientURL(), func() { s.Shutdown(); s.WaitForShutdown(); _ = os.RemoveAll(dir) }
}
