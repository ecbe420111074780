package main

import (
	"sync"
	"time"

	"github.com/tenurelib/tenure/internal/testkit/rig"
)

// calls records when a client's last call began, and the last one that was answered.
// Pieces that follow each other closely, in either direction, are one call.
type calls struct {
	mu      sync.Mutex // guards the fields below
	began   time.Time  // start of the current or last call
	active  time.Time  // when a piece last passed
	success time.Time  // start of the last call that was answered
}

// quiet is the pause that separates calls. Peers renew every half second or less often.
const quiet = 50 * time.Millisecond

// tap watches the calls that pass through one connection.
func (c *calls) tap() rig.Tap {
	return rig.Tap{Sent: func([]byte) { c.sent(time.Now()) }, Answered: func([]byte) { c.answered() }}
}

func (c *calls) sent(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if now.Sub(c.active) > quiet {
		c.began = now
	}
	c.active = now
}

func (c *calls) answered() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.active = time.Now()
	c.success = c.began
}

// unanswered reports whether the last call got no answer. In that case it is unknown
// whether the server did what it was asked for.
func (c *calls) unanswered() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.began.Equal(c.success)
}

func (c *calls) lastSuccess() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.success
}
