package integrations

import (
	"context"
	"fmt"

	"github.com/thejerf/suture/v4"

	"github.com/tenurelib/tenure"
)

// service makes a coordinator a service of a supervisor.
type service struct{ *tenure.Coordinator }

func (s service) Serve(ctx context.Context) error { return s.Run(ctx) }
func (s service) String() string                  { return s.Status().Lease.String() }

// A job that panics ends its term: Run releases the lease and passes the panic on. The
// supervisor calls Run again, and this replica or another one gets the next term.
func Example_suture() {
	store := newStore()
	defer store.Close()
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	terms := 0
	coordinator := newCoordinator(store, "suture", func(ctx context.Context) error {
		terms++
		fmt.Println("term", terms)
		if terms == 1 {
			panic("a bug")
		}
		stop() // for the example's sake
		<-ctx.Done()
		return nil
	})

	supervisor := suture.NewSimple("program")
	supervisor.Add(service{coordinator})
	fmt.Println(supervisor.Serve(ctx))
	// Output:
	// term 1
	// term 2
	// context canceled
}
