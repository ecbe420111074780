package tenure

import (
	"context"
	"fmt"
	"time"
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
	if c.held != nil && c.resign == nil {
		c.resign = &resignation{away: away, over: make(chan struct{})}
		c.lost <- ErrResigned
	}
	return c.resign
}

// resignation is how Resign reaches the goroutine that owns the term.
type resignation struct {
	away time.Duration // how long to stay away at least
	over chan struct{} // closed when the lease has been given back
	err  error         // of that; set before over is closed
}
