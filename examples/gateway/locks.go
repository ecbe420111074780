//go:build unix

package main

import (
	"context"
	"sync"
)

// nameLocks has a lock for each sandbox that a request to this process is changing. The
// locks only save requests to the same gateway from conflicts with each other: correctness
// rests on compare-and-swap, which also works between gateways. The zero value is ready to
// use.
type nameLocks struct {
	mu    sync.Mutex
	locks map[string]*nameLock
}

type nameLock struct {
	users int           // goroutines that hold it or wait for it; guarded by nameLocks.mu
	held  chan struct{} // holds a value while locked
}

// lock acquires the lock of a name. It waits until ctx is done.
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
