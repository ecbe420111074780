package tenure

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tenurelib/tenure/internal/pace"
)

// Resign ends the current term, if there is one, and returns when the job has
// returned and the lease has been given back; the replica then stays away for
// long enough that another can win. An error says that the lease could not be
// released, or that ctx was done before; the resignation stands all the same.
//
// A job that resigns must not wait for itself to return: it passes its own
// context.
func (c *Coordinator) Resign(ctx context.Context) error { return c.ResignFor(ctx, 0) }

// ResignFor is [Coordinator.Resign] with a time for which this replica stays away
// at least, counted from when the lease was given back; a handover to it by name,
// see [Lease.RequestHandover], brings it back before. Where several resign from
// one term, the first one's time counts.
func (c *Coordinator) ResignFor(ctx context.Context, away time.Duration) error {
	if away < 0 {
		return fmt.Errorf("tenure: resign %s: %w: away %v is negative", c.lease.cfg.Key, ErrInvalid, away)
	}
	resign := c.askToResign(away)
	if resign == nil {
		return nil
	}
	select {
	case <-resign.over:
		return resign.err
	case <-ctx.Done():
		return fmt.Errorf("tenure: resign %s: %w", c.lease.cfg.Key, ctx.Err())
	}
}

// askToResign returns the resignation of the current term; nil: there is none.
func (c *Coordinator) askToResign(away time.Duration) *resignation {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.keeper != nil && c.resign == nil {
		c.resign = &resignation{away: away, over: make(chan struct{})}
		c.keeper.end(ErrResigned)
	}
	return c.resign
}

// resignation is how Resign reaches the goroutine that owns the term.
type resignation struct {
	away time.Duration // how long to stay away at least
	over chan struct{} // closed when the lease has been given back
	err  error         // of that; set before over is closed
}

// giveBack releases the lease, unless it is another's already. Where a request has
// named a replica, it is left to that one for a time in which also one that polls
// finds it.
func (c *Coordinator) giveBack(term *Term, cause error) error {
	if isLoss(cause) && errors.Is(cause, ErrLost) {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), c.caller.timeout)
	defer cancel()
	leave := min(max(c.cfg.AcquireInterval*5/4, time.Second), c.lease.cfg.TTL)
	for {
		err := c.lease.release(ctx, term, leave)
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

// longestStayAway is the most TTLs for which an unhealthy replica stays away.
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
		// At first for longer than one that has resigned, so that it does not win again
		// where a healthy one was asked to hand over.
		away := c.unhealthy.Next(time.Since(term.AcquiredAt()), 3*every, longestStayAway*c.lease.cfg.TTL)
		return max(least, pace.Jitter(away))
	case errors.Is(cause, ErrJobEnded):
		return max(least, 2*pace.Jitter(every)) // every standby tries before
	default:
		return max(least, pace.Jitter(every))
	}
}
