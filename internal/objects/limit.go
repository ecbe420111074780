package objects

import (
	"cmp"
	"context"
	"sync/atomic"
	"time"
)

const defaultCallLimit = 30 * time.Second

var callLimit atomic.Int64 // set by tests; 0: the default

// CallLimit returns how long a call without a deadline may take.
func CallLimit() time.Duration {
	return cmp.Or(time.Duration(callLimit.Load()), defaultCallLimit)
}

// SetCallLimit is for tests. It returns a func that restores the limit.
func SetCallLimit(limit time.Duration) (restore func()) {
	was := callLimit.Swap(int64(limit))
	return func() { callLimit.Store(was) }
}

// Limited gives a context a deadline if it has none. Otherwise the call would wait for as long as
// another client keeps a row locked, or forever for a server that is gone.
func Limited(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, CallLimit())
}
