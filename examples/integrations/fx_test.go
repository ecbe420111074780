package integrations

import (
	"context"
	"fmt"

	"go.uber.org/fx"

	"github.com/tenurelib/tenure"
)

// runInLifecycle runs the coordinator between the start and the stop of an application. The
// stop waits until the job has returned and the lease is released, for as long as fx's
// StopTimeout allows.
func runInLifecycle(lifecycle fx.Lifecycle, coordinator *tenure.Coordinator) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	lifecycle.Append(fx.Hook{
		OnStart: func(context.Context) error { // its context ends when the application has started
			go func() { done <- coordinator.Run(ctx) }()
			return nil
		},
		OnStop: func(stopping context.Context) error {
			cancel()
			select {
			case err := <-done:
				return err
			case <-stopping.Done():
				return context.Cause(stopping)
			}
		},
	})
}

func Example_fx() {
	working := make(chan struct{})
	job := func(ctx context.Context) error {
		close(working)
		<-ctx.Done() // the work goes on until then
		fmt.Println("the job returns:", context.Cause(ctx))
		return nil
	}
	app := fx.New(
		fx.NopLogger,
		fx.Provide(func(lifecycle fx.Lifecycle) *tenure.SQLiteStore {
			store := newStore()
			lifecycle.Append(fx.StopHook(store.Close)) // runs after the coordinator's, because it was appended before
			return store
		}),
		fx.Provide(func(store *tenure.SQLiteStore) *tenure.Coordinator { return newCoordinator(store, "fx", job) }),
		fx.Invoke(runInLifecycle),
	)
	fmt.Println(app.Start(context.Background()))
	<-working
	fmt.Println(app.Stop(context.Background()))
	// Output:
	// <nil>
	// the job returns: replica is shutting down
	// <nil>
}
