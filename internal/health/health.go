// Package health calls a user's Check, and never waits for one that hangs.
package health

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// Check calls the user's funcs, one at a time. The zero value with a Timeout is ready to use. All
// methods are safe for concurrent use.
type Check struct {
	Timeout time.Duration // of each call
	running atomic.Bool
	calls   sync.WaitGroup
}

// Ask calls check and returns its error. Answered is false if the call ignored the end of its
// context. It is also false if an earlier call has not returned yet; then Ask does not call check.
func (c *Check) Ask(ctx context.Context, check func(context.Context) error) (answered bool, err error) {
	if !c.running.CompareAndSwap(false, true) {
		return false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	result := make(chan error, 1)
	c.calls.Go(func() {
		ended := sync.OnceFunc(func() { c.running.Store(false) }) // once: after the answer, another call may run
		defer ended()                                             // also if check ends by runtime.Goexit
		err := check(ctx)
		ended() // before the answer, after which the caller may ask again
		result <- err
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
