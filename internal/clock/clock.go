// Package clock reads the two clocks of a process: the monotonic clock, which stands still
// while the machine is suspended, and the wall clock, which may be set.
package clock

import (
	"context"
	"time"
)

// Reading is one instant, read from both clocks.
type Reading struct {
	Mono time.Time // only to be compared with other monotonic readings
	Wall time.Time // without a monotonic reading
}

// Clock reads both clocks at once.
type Clock func() Reading

// Process reads the clocks of this process.
func Process() Reading {
	now := time.Now()
	return Reading{Mono: now, Wall: now.Round(0)}
}

// Add returns the instant d later.
func (r Reading) Add(d time.Duration) Reading {
	return Reading{Mono: r.Mono.Add(d), Wall: r.Wall.Add(d)}
}

// Until returns the time from now until r, by whichever clock says that less is left.
func (r Reading) Until(now Reading) time.Duration {
	return min(r.Mono.Sub(now.Mono), r.Wall.Sub(now.Wall))
}

type key struct{}

// With returns a context in which [From] finds a clock other than the process's, for tests that
// suspend the machine.
func With(ctx context.Context, c Clock) context.Context {
	return context.WithValue(ctx, key{}, c)
}

// From returns the clock that [With] has put into a context, or else the process's.
func From(ctx context.Context) Clock {
	if c, ok := ctx.Value(key{}).(Clock); ok {
		return c
	}
	return Process
}
