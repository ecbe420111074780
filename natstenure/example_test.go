package natstenure_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/natstenure"
)

// A replica of a program whose job only one of them does at a time.
func Example() {
	url, shutdown := serverForExample()
	defer shutdown()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()

	nc, err := nats.Connect(url, nats.MaxReconnects(-1))
	if err != nil {
		log.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		log.Fatal(err)
	}
	store, err := natstenure.New(js, natstenure.Config{SyncAlways: true, Logger: quiet})
	if err != nil {
		log.Fatal(err)
	}
	defer store.Close()
	if err := store.Migrate(ctx); err != nil {
		log.Fatal(err)
	}
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{TTL: 15 * time.Second, Logger: quiet})
	if err != nil {
		log.Fatal(err)
	}
	coordinator, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
		Logger: quiet,
		Reconcile: func(ctx context.Context) error {
			fenced, err := tenure.Fence(store, tenure.TermFromContext(ctx))
			if err != nil {
				return err
			}
			_, err = fenced.PutIf(ctx, tenure.Object{Key: tenure.Key{Type: "report", ID: "daily"}, Payload: []byte("done")}, tenure.Unconditional())
			fmt.Println("written while this replica holds the lease:", err == nil)
			cancel() // the example ends; a job runs until its context does
			<-ctx.Done()
			return nil
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	if err := coordinator.Run(ctx); err != nil {
		log.Fatal(err)
	}
	// Output: written while this replica holds the lease: true
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
