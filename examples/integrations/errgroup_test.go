package integrations

import (
	"context"
	"fmt"

	"golang.org/x/sync/errgroup"
)

// The coordinator is one goroutine of the group. When another returns an error, the group's
// context ends, and Wait returns after the job has returned and the lease is released.
func Example_errgroup() {
	store := newStore()
	defer store.Close()
	working := make(chan struct{})
	coordinator := newCoordinator(store, "errgroup", func(ctx context.Context) error {
		close(working)
		<-ctx.Done() // the work goes on until then
		fmt.Println("the job returns:", context.Cause(ctx))
		return nil
	})

	group, ctx := errgroup.WithContext(context.Background())
	group.Go(func() error { return coordinator.Run(ctx) })
	group.Go(func() error {
		<-working
		return fmt.Errorf("the server failed")
	})
	fmt.Println(group.Wait())
	// Output:
	// the job returns: replica is shutting down
	// the server failed
}
