package storetest_test

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

var totalKey = tenure.Key{Type: "total", ID: "orders"}

// total is what the job maintains. The number of orders is stored in the same write
// as their sum, so a sweep can tell whether the previous one's write happened.
type total struct{ Orders, Cents int }

// addUp is the job: it adds each placed order to the total exactly once.
func addUp(store tenure.Store, placed func() []int) func(context.Context) error {
	return func(ctx context.Context) error {
		for {
			obj, err := store.Get(ctx, totalKey)
			cond := tenure.IfVersion(obj.Version)
			if errors.Is(err, tenure.ErrNotFound) {
				obj.Payload, cond = []byte("{}"), tenure.IfAbsent()
			} else if err != nil {
				return err
			}
			var sum total
			if err := json.Unmarshal(obj.Payload, &sum); err != nil {
				return err
			}
			orders := placed()
			if sum.Orders == len(orders) {
				return nil
			}
			sum.Cents += orders[sum.Orders]
			sum.Orders++
			payload, err := json.Marshal(sum)
			if err != nil {
				return err
			}
			if _, err := store.PutIf(ctx, tenure.Object{Key: totalKey, Payload: payload}, cond); err != nil {
				return err // whatever happened, the next sweep reads the total again
			}
		}
	}
}

// testAddUp tests it with two replicas and ten hours of database faults: each order
// must be in the total exactly once. The test takes a few milliseconds.
func testAddUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		placed := func() []int { // one a minute, of 0 to 599 cents
			orders := make([]int, min(time.Since(began)/time.Minute, 600))
			for i := range orders {
				orders[i] = i
			}
			return orders
		}
		mem := storetest.NewMem()
		var faults atomic.Int64
		hooks := []storetest.Hook{
			nil, // no fault
			func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error { // answers are lost
				err := do(ctx)
				if rand.N(2) == 0 {
					faults.Add(1)
					return errors.New("connection reset")
				}
				return err
			},
			func(ctx context.Context, call storetest.Call, do func(context.Context) error) error { // writes hang, and land after their callers gave up
				if call.Op == "get" {
					return do(ctx)
				}
				faults.Add(1)
				go func() {
					time.Sleep(2 * time.Minute)
					do(context.WithoutCancel(ctx))
				}()
				<-ctx.Done()
				return ctx.Err()
			},
			func(ctx context.Context, call storetest.Call, do func(context.Context) error) error { // another client writes first
				if obj, err := mem.Get(ctx, call.Key); err == nil && call.Op == "put" && rand.N(2) == 0 {
					faults.Add(1)
					mem.PutIf(ctx, obj, tenure.Unconditional())
				}
				return do(ctx)
			},
		}

		ctx, stop := context.WithCancel(t.Context())
		var replicas sync.WaitGroup
		var stores []*storetest.FaultyStore
		for _, name := range []string{"a", "b"} {
			store := storetest.Faulty(mem, nil)
			stores = append(stores, store)
			lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "sweeper"}, Holder: name, Logger: slog.New(slog.DiscardHandler)})
			if err != nil {
				t.Fatal(err)
			}
			coordinator, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
				Reconcile: tenure.Every(time.Minute, addUp(store, placed)),
			})
			if err != nil {
				t.Fatal(err)
			}
			replicas.Go(func() { coordinator.Run(ctx) })
		}
		for range 60 {
			stores[rand.N(len(stores))].SetHook(hooks[rand.N(len(hooks))])
			time.Sleep(10 * time.Minute)
		}
		for _, store := range stores {
			store.SetHook(nil)
		}
		time.Sleep(5 * time.Minute) // time to add the last orders
		stop()
		replicas.Wait()

		obj, err := mem.Get(t.Context(), totalKey)
		if err != nil {
			t.Fatal(err)
		}
		if got, want := string(obj.Payload), `{"Orders":600,"Cents":179700}`; got != want || faults.Load() == 0 {
			t.Errorf("after %d faults: got %s, want %s", faults.Load(), got, want)
		}
	})
}

// This tests a job in virtual time against lost answers, a store that hangs, and
// conflicts.
func ExampleFaulty_job() {
	var t *testing.T // in your package: func TestAddUp(t *testing.T)
	testAddUp(t)
}
