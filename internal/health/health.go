// Package health calls a user's Check without ever waiting for one that hangs.
package health

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// Check calls funcs of the caller, one call at a time. The zero value with a Timeout is ready to
// use. All methods are safe for concurrent use.
type Check struct {
	Timeout time.Duration // of each call
	running atomic.Bool
	calls   sync.WaitGroup
}

// Ask calls check and returns its error. Answered is false if the call ignored the end of its
// context, or if an earlier call has not returned yet: then check is not called.
func (c *Check) Ask(ctx context.Context, check func(context.Context) error) (answered bool, err error) {
	if !c.running.CompareAndSwap(false, true) {
		return false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	result := make(chan error, 1)
	c.calls.Go(func() {
		defer c.running.Store(false)
		result <- check(ctx)
	})
	select {
	case err := <-result:
		return true, err
	case <-ctx.Done():
		return false, nil
	}
}

// Wait returns when no call is under way.
func (c *Check) Wait() { c.calls.Wait() }
