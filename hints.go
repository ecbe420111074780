package tenure

import (
	"context"
	"time"
)

// vainHints makes a replica deaf for a while after hints that led to nothing.
// Anybody who may connect to the database can notify, and a flood of hints must
// cost no more than polling does: after a few it is heard once in an interval. A
// hint that comes meanwhile is heard afterwards.
type vainHints struct {
	due time.Time // when all would have been heard, at one in an interval
}

// awaitHint waits for so long, or until a hint comes that it is not deaf to. It
// returns false for ok once ctx is done.
func awaitHint(ctx context.Context, hints Watch, deaf, wait time.Duration) (woken, ok bool) {
	if deaf = max(0, min(deaf, wait)); !sleep(ctx, deaf) {
		return false, false
	}
	if deaf >= wait {
		return false, true
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

// after returns for how long to be deaf now.
func (v *vainHints) after(vain bool, interval time.Duration) time.Duration {
	const few = 5
	now := time.Now()
	if v.due.Before(now) {
		v.due = now
	}
	if vain {
		v.due = v.due.Add(interval)
	}
	return max(0, v.due.Sub(now)-few*interval)
}
