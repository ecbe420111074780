package tenure_test

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/proof/kit"
	"github.com/tenurelib/tenure/storetest"
)

// wrongClock is a database whose clock is wrong, by a different amount at each read.
type wrongClock struct{ tenure.Store }

func wrong() time.Duration { return rand.N(48*time.Hour) - 24*time.Hour }

func (s wrongClock) Get(ctx context.Context, key tenure.Key) (tenure.Object, error) {
	obj, err := s.Store.Get(ctx, key)
	obj.Age += wrong()
	return obj, err
}

func TestWithObservedExpiryNoClockDecides(t *testing.T) {
	const interval, missed, takeovers = 2 * time.Second, 5, 100
	const ttl, acquireInterval = missed * interval, missed * interval / 6
	inBubble(t, func(t *scene) {
		var mu sync.Mutex         // guards the variables below
		var offset time.Duration  // of the database's clock
		var writer *replica       // of the record
		var first, last time.Time // write of the writer
		mem := storetest.NewMem()
		mem.Now = func() time.Time {
			mu.Lock()
			defer mu.Unlock()
			return time.Now().Add(offset)
		}
		t.store = wrongClock{mem}
		watch := func(r *replica) {
			r.store.SetHook(kit.Only("put", func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
				err := do(ctx)
				mu.Lock()
				defer mu.Unlock()
				if err == nil && writer != r { // a takeover
					writer, first = r, time.Now()
				}
				if err == nil {
					last = time.Now()
				}
				return err
			}))
		}
		for _, name := range []string{"a", "b", "c"} {
			watch(t.startWith(tenure.LeaseConfig{TTL: ttl, Expiry: tenure.Observed, Holder: name}, tenure.CoordinatorConfig{RenewInterval: interval}))
		}
		for range takeovers {
			time.Sleep(ttl + acquireInterval + rand.N(10*time.Second))
			i := slices.IndexFunc(t.replicas, func(r *replica) bool { return r.IsHolder() })
			require.NotEqual(t, -1, i, "no replica holds:\n%v", t.jobs)
			holder := t.replicas[i]
			holder.store.SetHook(kit.Hang)
			mu.Lock()
			renewed := last
			mu.Unlock()
			for end := time.Now().Add(ttl + acquireInterval); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
				mu.Lock()
				offset = wrong()
				mu.Unlock()
			}
			synctest.Wait()
			mu.Lock()
			next, after := writer, first.Sub(renewed)
			mu.Unlock()
			require.NotSame(t, holder, next, "not taken over")
			require.GreaterOrEqual(t, after, ttl, "from the last renewal to the takeover")
			require.LessOrEqual(t, after, ttl+acquireInterval, "from the last renewal to the takeover")
			watch(holder)
		}
	})
}
