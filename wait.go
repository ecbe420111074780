package tenure

import (
	"context"
	"math/rand/v2"
	"time"
)

// sleep waits for d, or returns false once ctx is done.
func sleep(ctx context.Context, d time.Duration) bool {
	if ctx.Err() != nil {
		return false
	}
	if d <= 0 {
		return true // timers of 0 that fire at once in one synctest bubble crash Go's race detector
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// jitter returns a random duration of at most d and at least three quarters of
// it.
func jitter(d time.Duration) time.Duration {
	return d - rand.N(d/4+1)
}
