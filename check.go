package tenure

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// ErrUnhealthy says that a term is over because [CoordinatorConfig.Check] failed.
var ErrUnhealthy = errors.New("replica is unhealthy")

// checks runs the caller's Check, one at a time. One that ignores the end of its
// context counts as failed, and until it has returned no other begins.
type checks struct {
	running chan struct{} // closed when the last has returned; nil before the first
}

// check asks whether this replica is fit for a role. Its error is [ErrUnhealthy].
func (c *Coordinator) check(ctx context.Context, role Role) error {
	if c.cfg.Check == nil {
		return nil
	}
	if !c.checks.idle() {
		return fmt.Errorf("%w: the check before has not returned", ErrUnhealthy)
	}
	ctx, cancel := context.WithTimeout(ctx, c.cfg.CheckTimeout)
	defer cancel()
	returned, result := make(chan struct{}), make(chan error, 1)
	c.checks.running = returned
	go func() {
		defer close(returned)
		result <- c.cfg.Check(ctx, role)
	}()
	select {
	case err := <-result:
		if err != nil {
			return fmt.Errorf("%w: %w", ErrUnhealthy, err)
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%w: the check has not answered: %w", ErrUnhealthy, ctx.Err())
	}
}

func (c *checks) idle() bool {
	if c.running == nil {
		return true
	}
	select {
	case <-c.running:
		return true
	default:
		return false
	}
}

// wait returns when no check runs.
func (c *checks) wait() {
	if c.running != nil {
		<-c.running
	}
}

// checkHolder checks before a renewal, unless the job has been told to return.
func (c *Coordinator) checkHolder(ctx context.Context, k *keeper) error {
	if k.winding.Load() {
		return nil
	}
	role := Holder
	if c.term.Load() == nil {
		role = Confirming
	}
	err := c.check(ctx, role)
	if err != nil {
		k.unfit.Store(&err)
	} else {
		k.unfit.Store(nil)
	}
	return err
}

// longestCooldown is the most TTLs for which an unhealthy replica stays away.
const longestCooldown = 4

// cooldown is how long a replica stays away whose check has failed: at first for
// longer than one that has resigned, lest it win again where a healthy one was asked
// to hand over, then twice as long each time.
type cooldown struct {
	next time.Duration
}

// after returns the pause after an unhealthy term that lasted so long.
func (d *cooldown) after(lasted, first, most time.Duration) time.Duration {
	if lasted > most { // fit for longer than it ever stays away
		d.next = 0
	}
	d.next = min(max(first, 2*d.next), most)
	return d.next
}
