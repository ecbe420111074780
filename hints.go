package tenure

import (
	"context"
	"time"
)

// vainHints makes a replica deaf for a while after a hint that led to nothing,
// for longer each time. Anybody who may connect to the database can notify, and a
// flood of hints must cost no more than polling does. A hint that comes meanwhile
// is heard afterwards.
type vainHints struct {
	deaf time.Duration
	last time.Time // when it began
}

// awaitHint waits for so long, or until a hint comes that it is not deaf to. It
// returns false for ok once ctx is done.
func awaitHint(ctx context.Context, hints Watch, deaf, wait time.Duration) (woken, ok bool) {
	deaf = min(deaf, wait)
	if deaf > 0 && !sleep(ctx, deaf) {
		return false, false
	}
	timer := time.NewTimer(wait - deaf)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false, false
	case <-timer.C:
		return false, true
	case <-hints.C():
		return true, true
	}
}

// after returns for how long to be deaf after a try that was in vain.
func (v *vainHints) after(woken bool, most time.Duration) time.Duration {
	const first = 5 * time.Millisecond
	now := time.Now()
	switch {
	case !woken:
		v.deaf = 0
	case now.Sub(v.last) > 2*v.deaf: // the one before was long ago
		v.deaf = min(first, most)
	default:
		v.deaf = min(2*v.deaf, most)
	}
	v.last = now
	return v.deaf
}
