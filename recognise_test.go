package tenure_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/proof/kit"
	"github.com/tenurelib/tenure/storetest"
)

// lossyNetwork delays, loses and reorders requests and answers, until it is repaired.
type lossyNetwork struct {
	mu     sync.Mutex
	rng    *rand.Rand
	mended atomic.Bool
	late   sync.WaitGroup // what is still under way
}

// draw returns a number below n.
func (l *lossyNetwork) draw(n int) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.rng.IntN(n)
}

func (l *lossyNetwork) ms(most int) time.Duration {
	return time.Duration(l.draw(most)) * time.Millisecond
}

func (l *lossyNetwork) hook(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
	if l.mended.Load() {
		return do(ctx)
	}
	request, back := l.ms(40), l.ms(40)
	if l.draw(4) == 0 {
		request = 0
	}
	if l.draw(6) == 0 {
		request += 200 * time.Millisecond // lands after its caller has given up
	}
	loseRequest, loseAnswer := l.draw(6) == 0, l.draw(4) == 0
	answer := make(chan error, 1)
	l.late.Go(func() {
		time.Sleep(request)
		if loseRequest {
			return
		}
		err := do(context.WithoutCancel(ctx))
		time.Sleep(back)
		if !loseAnswer {
			answer <- err
		}
	})
	select {
	case err := <-answer:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Over a lossy network, many renewals of one term at once, and requests for its release, are
// not taken for a copy's. Once the network is repaired and a renewal has been answered, a
// copy's renewal is never taken for the term's own.
func TestATermKnowsItsOwnRenewalsFromThoseOfACopy(t *testing.T) {
	testkit.Slow(t)
	for seed := range uint64(300) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			inBubble(t, func(t *scene) {
				network := &lossyNetwork{rng: rand.New(rand.NewPCG(seed, 1))}
				store := storetest.Faulty(t.store, nil)
				lease := kit.NewLease(t, store, tenure.LeaseConfig{Holder: "a", TTL: time.Hour})
				term := kit.MustAcquire(t, lease)
				store.SetHook(network.hook)
				defer network.late.Wait()
				var all sync.WaitGroup
				for range 1 + network.draw(4) {
					all.Go(func() {
						for range 12 {
							ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond+network.ms(90))
							err := lease.Renew(ctx, term)
							cancel()
							if errors.Is(err, tenure.ErrLost) {
								t.Errorf("lost: %v", err)
								return
							}
							time.Sleep(network.ms(30))
						}
					})
				}
				other := kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "b"})
				all.Go(func() {
					for i := range 8 {
						time.Sleep(network.ms(120))
						_ = other.RequestHandover(t.Context(), []string{"", "x", "y"}[i%3])
					}
				})
				all.Wait()
				if network.draw(2) == 0 {
					network.late.Wait()
				}
				network.mended.Store(true)
				require.NoError(t, lease.Renew(t.Context(), term))
				if network.draw(2) == 0 {
					network.late.Wait()
				}
				renewAsCopy(t, t.store)
				require.ErrorIs(t, lease.Renew(t.Context(), term), tenure.ErrLost, "a copy's renewal was taken for its own")
			})
		})
	}
}
