// Package pace decides how long to wait: pauses that a context or a hint ends, jitter,
// back-off, and a limit on spurious wake-ups.
package pace

import (
	"context"
	"math/rand/v2"
	"time"
)

// Sleep waits for d, or returns false once ctx is done.
func Sleep(ctx context.Context, d time.Duration) bool {
	if ctx.Err() != nil {
		return false
	}
	if d <= 0 {
		return true // in a synctest bubble, several timers of 0 firing at once crash Go's race detector
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

// Await waits for at most longest, or until a hint comes. At first it ignores hints for ignoreFor;
// a hint that comes in that time ends the wait as soon as it has passed. Ok is false once ctx is
// done.
func Await(ctx context.Context, hints <-chan struct{}, ignoreFor, longest time.Duration) (hinted, ok bool) {
	ignoreFor = max(0, min(ignoreFor, longest))
	if !Sleep(ctx, ignoreFor) {
		return false, false
	}
	if ignoreFor >= longest {
		return false, true
	}
	timer := time.NewTimer(longest - ignoreFor)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false, false
	case <-timer.C:
		return false, true
	case <-hints:
		return true, true
	}
}

// UntilTick returns the time until the next multiple of d, which is at most d. Goroutines that check something
// every d are woken at the same moment by it: a processor that is woken once for a thousand of them takes far
// less time than one that is woken a thousand times.
func UntilTick(d time.Duration) time.Duration { return d - time.Duration(time.Now().UnixNano())%d }

// Jitter returns a random duration between three quarters of d and d.
func Jitter(d time.Duration) time.Duration { return d - rand.N(d/4+1) }

// Retry returns the pause before the next attempt, after a failure that followed this number of
// others in a row: a sixteenth of the interval at first, half of it later, and never more than
// longest, with jitter.
func Retry(interval, longest time.Duration, failures int) time.Duration {
	return Jitter(min(interval/16<<min(failures, 3), longest))
}

// Limiter limits spurious wake-ups: hints that led to nothing. Anyone who may connect to the
// database can send hints, and a flood of them must not cost more than polling does. After the
// first few, the caller follows one hint per interval. The zero value is ready to use. A Limiter
// is not safe for concurrent use.
type Limiter struct {
	due time.Time // when all of them would have been followed, at one per interval
}

// IgnoreFor returns how long to ignore hints after a wake-up that may have been spurious.
func (l *Limiter) IgnoreFor(spurious bool, interval time.Duration) time.Duration {
	const few = 5
	now := time.Now()
	if l.due.Before(now) {
		l.due = now
	}
	if spurious {
		l.due = l.due.Add(interval)
	}
	return max(0, l.due.Sub(now)-few*interval)
}

// Doubling is a pause that doubles each time, up to a limit, and starts again after a time
// without trouble that is longer than the limit. The zero value is ready to use. It is not safe
// for concurrent use.
type Doubling struct{ last time.Duration }

// Next returns the next pause, given the time without trouble before it.
func (d *Doubling) Next(untroubled, first, most time.Duration) time.Duration {
	if untroubled > most {
		d.last = 0
	}
	d.last = min(max(first, 2*d.last), most)
	return d.last
}

// longestHeadStart is the longest that a standby waits before it looks.
const longestHeadStart = 4 * time.Millisecond

// HeadStart is the time that a standby gives the others when all are woken at once, so that only
// a few of them write, and not always the same one wins. The zero value gives no head start. It
// is not safe for concurrent use.
type HeadStart struct{ Gives bool }

// Give waits for the head start, if there is one to give. Ok is false once ctx is done.
func (h *HeadStart) Give(ctx context.Context) (given, ok bool) {
	if !h.Gives {
		return false, true
	}
	return true, Sleep(ctx, rand.N(longestHeadStart))
}

// CameSecond notes that another standby was faster, and how long this one's attempt took. If an
// attempt takes longer than a head start, a look after the head start comes too early to spare a
// write.
func (h *HeadStart) CameSecond(took time.Duration) { h.Gives = took <= longestHeadStart }
