package tenure

import (
	"context"
	"iter"
)

// Changes returns the status as it is, and then each time that the role, the
// holder, the last error or the stuck job has changed, until ctx is done or the
// loop is left. Renewals are no changes.
//
// A reader that is slower than the changes gets the latest and misses those
// between; the coordinator never waits for one. Any number may read, each gets
// all. No goroutine is started.
func (c *Coordinator) Changes(ctx context.Context) iter.Seq[Status] {
	return func(yield func(Status) bool) {
		for ctx.Err() == nil {
			status, changed := c.follow()
			if !yield(status) {
				return
			}
			select {
			case <-changed:
			case <-ctx.Done():
			}
		}
	}
}

// follow returns the status, and a channel that is closed when it has changed.
func (c *Coordinator) follow() (Status, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state.changed == nil {
		c.state.changed = make(chan struct{})
	}
	return c.currentStatus(), c.state.changed
}

// publish wakes all who follow. It needs the coordinator's mutex.
func (s *state) publish() {
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
}
