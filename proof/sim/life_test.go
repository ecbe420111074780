package sim

import (
	"context"
	"errors"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/report"
)

// life is one process on a replica.
type life struct {
	r           *replica
	coordinator *tenure.Coordinator
	lease       *tenure.Lease
	store       tenure.Store
	shutdown    context.CancelFunc
	gone        chan struct{} // closed at its crash
	ended       chan struct{} // closed when Run has returned
	started     time.Time
	witness     string // its name; empty: there is none

	// Guarded by the world's lock.
	draining
	wishing
	stopping  bool      // a shutdown was asked for
	panicked  bool      // its job has, which ends it
	newest    *term     // the last term whose record it wrote
	token     int64     // of the last term for which its job began
	unchecked bool      // its last check failed, or there was none yet
	refused   time.Time // when it last may have had to refuse the store's tokens
	looked    time.Time // when it last got an answer to a read as a standby
	mustLook  time.Time // when it must look at the latest, because the record was changed and it was not told
}

// run runs the coordinator. A panic of the job ends the process, as it would in reality.
func (l *life) run(ctx context.Context) {
	defer func() {
		defer close(l.ended)
		var panicked *report.Panic
		switch v := recover().(type) {
		case nil:
			return
		case *report.Panic:
			panicked = v
		default:
			panic(v)
		}
		if !errors.Is(panicked, errPanic) {
			panic(panicked)
		}
		l.r.w.line.Say(l.r.name, "process ends: its job panicked")
		l.r.ended(l, l.r.dice.UpTo(l.r.w.ttl))
	}()
	defer l.follow(ctx)()
	_ = l.coordinator.Run(context.WithValue(ctx, runKey{}, true))
}

// runKey is the key that the contexts of a process have when it competes: a holder's and a
// request's calls have others.
type runKey struct{}

// halt returns true once the process is not paused, or false if it is gone.
func (l *life) halt() bool {
	for {
		l.r.w.mu.Lock()
		paused := l.r.paused
		l.r.w.mu.Unlock()
		if paused == nil {
			return !l.dead()
		}
		select {
		case <-paused:
		case <-l.gone:
			return false
		}
	}
}

func (l *life) dead() bool {
	select {
	case <-l.gone:
		return true
	default:
		return false
	}
}

func (l *life) ttl() time.Duration { return l.r.ttl }

// allowed is the time that a job has to return with the library's defaults.
func (l *life) allowed() time.Duration {
	return l.r.ttl - l.r.ttl/30 - l.r.ttl*2/3
}

// goodSince returns since when nothing has been wrong with the process. It must be
// called under the world's lock.
func (l *life) goodSince() time.Time {
	switch {
	case !l.r.good || l.dead():
		return time.Now()
	case l.started.After(l.r.goodSince):
		return l.started
	}
	return l.r.goodSince
}
