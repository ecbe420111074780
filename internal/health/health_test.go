package health

import (
	"context"
	"runtime"
	"sync"
	"testing"
	"time"
)

// each runs a test again and again in several goroutines, and keeps stopping the world, so that they are
// paused at any moment.
func each(t *testing.T, test func(c *Check)) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(4))
	length := 2 * time.Second
	if testing.Short() {
		length /= 10
	}
	end := time.Now().Add(length)
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			c := &Check{Timeout: time.Minute}
			for time.Now().Before(end) && !t.Failed() {
				for range 100 {
					test(c)
				}
			}
		})
	}
	for stats := new(runtime.MemStats); time.Now().Before(end) && !t.Failed(); {
		runtime.ReadMemStats(stats)
	}
	all.Wait()
}

func TestACallerThatHasAnAnswerMayAskAgain(t *testing.T) {
	each(t, func(c *Check) {
		if answered, _ := c.Ask(t.Context(), func(context.Context) error { return nil }); !answered {
			t.Error("the call before has been answered, and this one is not")
		}
	})
}

func TestOneCallIsUnderWayAtATime(t *testing.T) {
	each(t, func(c *Check) {
		c.Ask(t.Context(), func(context.Context) error { return nil })
		c.Ask(t.Context(), func(ctx context.Context) error {
			for range 10 {
				runtime.Gosched()
				if answered, _ := c.Ask(ctx, func(context.Context) error { return nil }); answered {
					t.Error("two calls were under way")
				}
			}
			return nil
		})
	})
}
