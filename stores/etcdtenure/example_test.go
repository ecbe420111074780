//go:build unix

package etcdtenure_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"syscall"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit/rig"
	"github.com/tenurelib/tenure/stores/etcdtenure"
)

// runReplica runs a replica of a program; only one replica at a time does the job.
func runReplica(ctx context.Context, url string, job func(context.Context) error) error {
	store, err := etcdtenure.Open(ctx, url, clientv3.Config{}, etcdtenure.Config{})
	if err != nil {
		return err
	}
	defer store.Close()
	if err := store.Migrate(ctx); err != nil { // creates the key tenure/epoch if it is missing
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
	host, shutdown := serverForExample()
	defer shutdown()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	err := runReplica(ctx, "etcd://"+host, func(ctx context.Context) error {
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
func serverForExample() (host string, shutdown func()) {
	dir, err := os.MkdirTemp("", "etcdtenure")
	if err != nil {
		log.Fatal(err)
	}
	server, err := rig.NewEtcd(context.Background(), dir)
	if err != nil {
		log.Fatal(err)
	}
	if err := server.Start(context.Background()); err != nil {
		log.Fatal(err)
	}
	return server.URL.Host, func() { _ = server.End(syscall.SIGKILL); _ = os.RemoveAll(dir) }
}
