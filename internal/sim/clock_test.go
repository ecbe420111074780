package sim

import (
	"sync"
	"time"
)

// clock is the database's: it runs at a rate of its own, and can be set.
type clock struct {
	began time.Time
	rate  float64

	mu    sync.Mutex
	shift time.Duration
}

func (c *clock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.began.Add(scale(time.Since(c.began), c.rate) + c.shift)
}

func (c *clock) jump(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.shift += d
}

func scale(d time.Duration, by float64) time.Duration {
	if by == 1 {
		return d
	}
	return time.Duration(float64(d) * by)
}

// shifted returns how far the clock was set ahead, in sum.
func (c *clock) shifted() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.shift
}
