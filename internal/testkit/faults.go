package testkit

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure/storetest"
)

// ErrReset is the error of a call whose request or answer was lost.
var ErrReset = errors.New("connection reset by peer")

var errRefused = errors.New("connection refused")

// Hang makes a call wait until its context ends, as if the server were unreachable.
func Hang(ctx context.Context, _ storetest.Call, _ func(context.Context) error) error {
	<-ctx.Done()
	return ctx.Err()
}

// Refuse fails each call, as if nothing listened on the server's port.
func Refuse(context.Context, storetest.Call, func(context.Context) error) error {
	return errRefused
}

// LoseAnswer lets a call reach the store, but its caller gets [ErrReset].
func LoseAnswer(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
	_ = do(ctx)
	return ErrReset
}

// Slowly delays the request.
func Slowly(d time.Duration) storetest.Hook {
	return func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
		time.Sleep(d)
		return do(ctx)
	}
}

// AnswerAfter delays the answer.
func AnswerAfter(d time.Duration) storetest.Hook {
	return func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
		err := do(ctx)
		time.Sleep(d)
		return err
	}
}

// Only applies a hook to calls of one operation.
func Only(op string, hook storetest.Hook) storetest.Hook {
	return func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
		if call.Op != op {
			return do(ctx)
		}
		return hook(ctx, call, do)
	}
}

// Once applies a hook to the first call.
func Once(hook storetest.Hook) storetest.Hook {
	var done atomic.Bool
	return func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
		if done.Swap(true) {
			return do(ctx)
		}
		return hook(ctx, call, do)
	}
}

// Calls counts calls of a store.
type Calls struct {
	mu     sync.Mutex
	counts map[string]int
}

// Count returns a hook that counts each call under a prefix and the name of its operation, and then
// passes it to next. A nil next lets the call through.
func (c *Calls) Count(prefix string, next storetest.Hook) storetest.Hook {
	return func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
		c.mu.Lock()
		if c.counts == nil {
			c.counts = map[string]int{}
		}
		c.counts[prefix+call.Op]++
		c.mu.Unlock()
		if next == nil {
			return do(ctx)
		}
		return next(ctx, call, do)
	}
}

// Take returns the counts since the last call.
func (c *Calls) Take() map[string]int {
	c.mu.Lock()
	defer c.mu.Unlock()
	counts := c.counts
	c.counts = nil
	return counts
}
