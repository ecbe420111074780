package tenure_test

import (
	"context"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

// wrongClock is what a replica sees of a database through a clock that is wrong,
// differently each time it looks.
type wrongClock struct{ tenure.Store }

func wrong() time.Duration { return rand.N(48*time.Hour) - 24*time.Hour }

func (s wrongClock) Get(ctx context.Context, key tenure.Key) (tenure.Object, error) {
	obj, err := s.Store.Get(ctx, key)
	obj.Age += wrong()
	return obj, err
}

func TestWhereOnlyWhatIsObservedCountsNoClockDecides(t *testing.T) {
	const interval, missed, takeovers = 2 * time.Second, 5, 100
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		var mu sync.Mutex
		var offset time.Duration // of the database's clock
		jump := func() {
			mu.Lock()
			defer mu.Unlock()
			offset = wrong()
		}
		store.Now = func() time.Time {
			mu.Lock()
			defer mu.Unlock()
			return time.Now().Add(offset)
		}
		l := newLedger(t)
		var writer *replica        // who wrote the record last
		var wrote, since time.Time // the last write, and the writer's first
		var replicas []*replica
		for _, name := range []string{"a", "b", "c"} {
			leaseConfig, cfg, err := tenure.ObservedConfig(interval, missed, 0)
			wantErr(t, err, nil)
			leaseConfig.Holder = name
			cfg.Reconcile = func(ctx context.Context) error { l.run(ctx, name); return nil }
			replicas = append(replicas, startWith(t, wrongClock{store}, leaseConfig, cfg))
		}
		watch := func(r *replica) storetest.Hook {
			return func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
				err := do(ctx)
				if call.Op == "put" && err == nil {
					mu.Lock()
					defer mu.Unlock()
					if writer != r { // a takeover
						writer, since = r, time.Now()
					}
					wrote = time.Now()
				}
				return err
			}
		}
		for _, r := range replicas {
			r.store.SetHook(watch(r))
		}
		const ttl, acquireInterval = missed * interval, missed * interval / 6
		for range takeovers {
			time.Sleep(ttl + acquireInterval + rand.N(10*time.Second))
			jump()
			var holder *replica
			for _, r := range replicas {
				if r.IsHolder() {
					holder = r
				}
			}
			if holder == nil {
				t.Fatalf("nobody holds:\n%v", l)
			}
			holder.store.SetHook(hang)
			mu.Lock()
			last := wrote
			mu.Unlock()
			var taken time.Time
			for end := time.Now().Add(ttl + acquireInterval); taken.IsZero() && time.Now().Before(end); {
				time.Sleep(100 * time.Millisecond)
				jump()
				synctest.Wait()
				mu.Lock()
				if writer != holder {
					taken = since
				}
				mu.Unlock()
			}
			if after := taken.Sub(last); after < ttl || after > ttl+acquireInterval {
				t.Fatalf("taken over %v after the last renewal, want within %v and %v", after, ttl, ttl+acquireInterval)
			}
			holder.store.SetHook(watch(holder))
		}
	})
}
