package tenure

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tenurelib/tenure/internal/pace"
)

// Resign ends the current term, if there is one, and returns when the job has returned and
// the lease is released. The replica then stays away for long enough that another can win.
// An error says that the lease could not be released, or that ctx was done first; the
// resignation stands all the same.
//
// A job that resigns passes its own context, or it would wait for itself to return.
func (c *Coordinator) Resign(ctx context.Context) error { return c.ResignFor(ctx, 0) }

// ResignFor is [Coordinator.Resign] with the least time for which this replica stays away
// after the release. A handover to it by name, see [Lease.RequestHandover], brings it back
// earlier. If it is called several times in one term, the first call's time counts.
func (c *Coordinator) ResignFor(ctx context.Context, away time.Duration) error {
	if away < 0 {
		return fmt.Errorf("tenure: resign %s: %w: away %v is negative", c.lease.cfg.Key, ErrInvalid, away)
	}
	resign := c.askToResign(away)
	if resign == nil {
		return nil
	}
	select {
	case <-resign.done:
		return resign.err
	case <-ctx.Done():
		return fmt.Errorf("tenure: resign %s: %w", c.lease.cfg.Key, ctx.Err())
	}
}

// askToResign returns the resignation from the current term; nil if there is no term.
func (c *Coordinator) askToResign(away time.Duration) *resignation {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.keeper != nil && c.resign == nil {
		c.resign = &resignation{away: away, done: make(chan struct{})}
		c.keeper.end(ErrResigned)
	}
	return c.resign
}

// resignation is how Resign reaches the goroutine that owns the term.
type resignation struct {
	away time.Duration // the least time to stay away
	done chan struct{} // closed when the term is over
	err  error         // of the release; set before done is closed
}

// release releases the lease, unless it is already another's. If a request has named a
// replica, the lease is offered to that one for long enough that it finds out by polling.
func (c *Coordinator) release(term *Term, cause error) error {
	if isLoss(cause) && errors.Is(cause, ErrLost) {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), c.caller.timeout)
	defer cancel()
	offerFor := min(max(c.cfg.AcquireInterval*5/4, time.Second), c.lease.cfg.TTL)
	for {
		err := c.lease.release(ctx, term, offerFor)
		switch {
		case err == nil:
			c.monitor.released(term, cause)
			return nil
		case errors.Is(err, ErrLost):
			c.monitor.notReleased(term, cause, err)
			return nil
		case !pace.Sleep(ctx, pace.Jitter(c.caller.timeout/10)):
			c.monitor.notReleased(term, cause, err)
			return err
		}
	}
}

// longestStayAway is how many TTLs an unhealthy replica stays away at most.
const longestStayAway = 4

// stayAway returns how long this replica does not compete after a term.
func (c *Coordinator) stayAway(term *Term, cause error, resign *resignation) time.Duration {
	every, least := c.cfg.AcquireInterval, time.Duration(0)
	if resign != nil || errors.Is(cause, ErrResigned) {
		least = 2 * pace.Jitter(every)
	}
	if resign != nil {
		least = max(least, resign.away)
	}
	switch {
	case errors.Is(cause, ErrUnhealthy):
		// Even the first time for longer than after a resignation, so that it does not win
		// again when a healthy replica was asked to hand over.
		away := c.unhealthy.Next(time.Since(term.AcquiredAt()), 3*every, longestStayAway*c.lease.cfg.TTL)
		return max(least, pace.Jitter(away))
	case errors.Is(cause, ErrJobEnded):
		return max(least, 2*pace.Jitter(every)) // every standby tries first
	default:
		return max(least, pace.Jitter(every))
	}
}
