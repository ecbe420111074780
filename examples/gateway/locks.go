//go:build unix

package main

import (
	"context"
	"sync"
)

// nameLocks holds a lock for each sandbox that a request of this process is
// changing. It is defence in depth and spares requests conflicts with each
// other; between gateways compare-and-swap decides, and it alone would do. The
// zero value is ready.
type nameLocks struct {
	mu    sync.Mutex
	locks map[string]*nameLock
}

type nameLock struct {
	users int           // those who hold it or wait for it; guarded by nameLocks.mu
	held  chan struct{} // holds a value while locked
}

// lock waits for the lock of a name until ctx ends.
func (l *nameLocks) lock(ctx context.Context, name string) (unlock func(), err error) {
	l.mu.Lock()
	if l.locks == nil {
		l.locks = make(map[string]*nameLock)
	}
	lock := l.locks[name]
	if lock == nil {
		lock = &nameLock{held: make(chan struct{}, 1)}
		l.locks[name] = lock
	}
	lock.users++
	l.mu.Unlock()

	leave := func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if lock.users--; lock.users == 0 {
			delete(l.locks, name)
		}
	}
	select {
	case lock.held <- struct{}{}:
		return func() { <-lock.held; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, context.Cause(ctx)
	}
}
