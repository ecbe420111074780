package tenure_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

// Renewals of one term, many at once, over a network that delays, loses and reorders
// requests and answers, while others ask for its release: none of that is a copy. Once
// all is quiet and a renewal was answered, one by a copy is never taken for its own.
func TestATermKnowsItsOwnRenewalsFromThoseOfACopy(t *testing.T) {
	for seed := range uint64(300) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				rng := rand.New(rand.NewPCG(seed, 1))
				var mu sync.Mutex
				n := func(most int) int { mu.Lock(); defer mu.Unlock(); return rng.IntN(most) }
				ms := func(most int) time.Duration { return time.Duration(n(most)) * time.Millisecond }
				mem := storetest.NewMem()
				var late sync.WaitGroup
				defer late.Wait()
				var good atomic.Bool
				hook := func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
					if good.Load() {
						return do(ctx)
					}
					type answer struct{ err error }
					done := make(chan answer, 1)
					request, back := ms(40), ms(40)
					if n(4) == 0 {
						request = 0
					}
					if n(6) == 0 {
						request += 200 * time.Millisecond // lands after its caller has given up
					}
					loseRequest, loseAnswer := n(6) == 0, n(4) == 0
					late.Go(func() {
						time.Sleep(request)
						if loseRequest {
							return
						}
						err := do(context.WithoutCancel(ctx))
						time.Sleep(back)
						if !loseAnswer {
							done <- answer{err}
						}
					})
					select {
					case a := <-done:
						return a.err
					case <-ctx.Done():
						return ctx.Err()
					}
				}
				store := storetest.Faulty(mem, nil)
				lease := newLease(t, store, tenure.LeaseConfig{Holder: "a", TTL: time.Hour})
				term := mustAcquire(t, lease)
				store.SetHook(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
					// the answer of a call that has been given up is not written anywhere
					var once sync.Once
					var landed error
					return hook(ctx, call, func(ctx context.Context) error { once.Do(func() { landed = do(ctx) }); return landed })
				})
				var all sync.WaitGroup
				for range 1 + n(4) {
					all.Go(func() {
						for range 12 {
							ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond+ms(90))
							err := lease.Renew(ctx, term)
							cancel()
							if errors.Is(err, tenure.ErrLost) {
								t.Errorf("lost: %v", err)
								return
							}
							time.Sleep(ms(30))
						}
					})
				}
				other := newLease(t, mem, tenure.LeaseConfig{Holder: "b"})
				all.Go(func() {
					for i := range 8 {
						time.Sleep(ms(120))
						_ = other.RequestHandover(t.Context(), []string{"", "x", "y"}[i%3])
					}
				})
				all.Wait()
				if n(2) == 0 {
					late.Wait()
				}
				good.Store(true)
				if err := lease.Renew(t.Context(), term); err != nil {
					t.Fatalf("over a good network: %v", err)
				}
				if n(2) == 0 {
					late.Wait()
				}
				obj, err := mem.Get(t.Context(), leaseKey)
				wantErr(t, err, nil)
				_, err = mem.PutIf(t.Context(), obj, tenure.MatchVersion(obj.Version))
				wantErr(t, err, nil)
				if err := lease.Renew(t.Context(), term); !errors.Is(err, tenure.ErrLost) {
					t.Errorf("a copy's renewal was taken for its own: %v", err)
				}
				late.Wait()
			})
		})
	}
}
