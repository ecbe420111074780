package sim

import (
	"sync"
	"time"

	"github.com/tenurelib/tenure/internal/clock"
)

// storeClock is the database's clock: it runs at its own rate and can be set.
type storeClock struct {
	began time.Time
	rate  float64

	mu    sync.Mutex
	shift time.Duration
}

func (c *storeClock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.began.Add(scale(time.Since(c.began), c.rate) + c.shift)
}

func (c *storeClock) jump(d time.Duration) {
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

// shifted returns how far the clock has been set ahead in total.
func (c *storeClock) shifted() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.shift
}

// machineClocks are the clocks of one machine. The monotonic one stands still while the
// machine is suspended.
type machineClocks struct {
	mu     sync.Mutex
	asleep time.Time     // when it was suspended; zero if it is awake
	slept  time.Duration // total of earlier suspends
	set    time.Duration // how far the wall clock has been set ahead in total
}

func (m *machineClocks) now() clock.Reading {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := clock.Process()
	now.Mono, now.Wall = now.Mono.Add(-m.slept), now.Wall.Add(m.set)
	if !m.asleep.IsZero() {
		now.Mono = now.Mono.Add(-time.Since(m.asleep))
	}
	return now
}

func (m *machineClocks) suspend() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.asleep = time.Now()
}

func (m *machineClocks) resume() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.slept += time.Since(m.asleep)
	m.asleep = time.Time{}
}

func (m *machineClocks) setWall(by time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.set += by
}
