package testkit

import (
	"sync"
	"time"

	"github.com/tenurelib/tenure/internal/clock"
)

// ExpiryStoreClock is a database's clock. It runs at its own rate and can be set. Like
// [MachineClocks], it is safe for concurrent use.
type ExpiryStoreClock struct {
	began time.Time
	rate  float64

	mu    sync.Mutex
	shift time.Duration
}

// NewStoreClock returns a clock that counts rate seconds per true second.
func NewStoreClock(rate float64) *ExpiryStoreClock {
	return &ExpiryStoreClock{began: time.Now(), rate: rate}
}

// Now returns what the clock says.
func (c *ExpiryStoreClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.began.Add(Scale(time.Since(c.began), c.rate) + c.shift)
}

// Jump sets the clock ahead by d, or back if d is negative.
func (c *ExpiryStoreClock) Jump(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.shift += d
}

// Shifted returns how far the clock has been set ahead in total.
func (c *ExpiryStoreClock) Shifted() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.shift
}

// MachineClocks has the clocks of one machine. The monotonic clock stands still while the machine
// is suspended.
type MachineClocks struct {
	mu     sync.Mutex
	asleep time.Time     // when it was suspended; zero if it is awake
	slept  time.Duration // total of earlier suspends
	set    time.Duration // how far the wall clock has been set ahead in total
}

// Now reads both clocks, as a process on the machine does.
func (m *MachineClocks) Now() clock.Reading {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := clock.Process()
	now.Mono, now.Wall = now.Mono.Add(-m.slept), now.Wall.Add(m.set)
	if !m.asleep.IsZero() {
		now.Mono = now.Mono.Add(-time.Since(m.asleep))
	}
	return now
}

// Suspend suspends the machine.
func (m *MachineClocks) Suspend() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.asleep = time.Now()
}

// Resume wakes the machine.
func (m *MachineClocks) Resume() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.slept += time.Since(m.asleep)
	m.asleep = time.Time{}
}

// SetWall sets the wall clock ahead, or back if by is negative.
func (m *MachineClocks) SetWall(by time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.set += by
}
