package integrations

import (
	"context"
	"fmt"

	"github.com/oklog/run"
)

// The coordinator is one actor of the group. When another ends, it is interrupted, and the
// group's Run returns after the job has returned and the lease is released.
func Example_oklogRun() {
	store := newStore()
	defer store.Close()
	working := make(chan struct{})
	coordinator := newCoordinator(store, "run", func(ctx context.Context) error {
		close(working)
		<-ctx.Done() // the work goes on until then
		fmt.Println("the job returns:", context.Cause(ctx))
		return nil
	})

	var group run.Group
	ctx, cancel := context.WithCancel(context.Background())
	group.Add(func() error { return coordinator.Run(ctx) }, func(error) { cancel() })
	group.Add(func() error {
		<-working
		return fmt.Errorf("the server failed")
	}, func(error) {})
	fmt.Println(group.Run())
	// Output:
	// the job returns: replica is shutting down
	// the server failed
}
