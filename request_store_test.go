package tenure_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/tenurelib/tenure"
)

// On real stores, each replica with one of its own, as in processes of their own.
func TestALeaseGoesRoundByRequestInMilliseconds(t *testing.T) {
	eachStore(t, func(t *testing.T, open func() tenure.Store) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		key := tenure.Key{Type: "lease", ID: "round"}
		began := make(chan string, 16)
		for i := range 3 {
			store := open().(storeWatcher)
			c, err := tenure.NewCoordinator(newLease(t, store, tenure.LeaseConfig{Key: key, Holder: fmt.Sprint(i), TTL: 10 * time.Minute}), tenure.CoordinatorConfig{
				AcquireInterval: 50 * time.Millisecond, // twice that is how long who was holder stays away
				Watch: func(ctx context.Context) error {
					began <- tenure.TermFromContext(ctx).Holder()
					<-ctx.Done()
					return nil
				},
			})
			wantErr(t, err, nil)
			liveWatch(t, store, key)
			var running sync.WaitGroup
			running.Go(func() { c.Run(ctx) })
			t.Cleanup(running.Wait) // before the store is closed
			if i == 0 {
				<-began
			}
		}
		asker := newLease(t, open(), tenure.LeaseConfig{Key: key})
		for round := range 9 {
			next := fmt.Sprint((round + 1) % 3)
			sent := time.Now()
			wantErr(t, asker.RequestHandover(t.Context(), next), nil)
			select {
			case got := <-began:
				t.Logf("%s after %v", got, time.Since(sent).Round(100*time.Microsecond))
				if got != next {
					t.Fatalf("round %d: %s holds, want %s", round, got, next)
				}
			case <-time.After(patience): // a renewal comes after three
				t.Fatalf("round %d: nobody holds: %v", round, time.Since(sent))
			}
		}
	})
}
