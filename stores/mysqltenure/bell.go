package mysqltenure

import (
	"context"
	"sync"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storekit"
)

const shortestRetry, longestRetry = 20 * time.Millisecond, time.Second

// bell is what the subscriptions to one object share.
type bell struct {
	bells   *bells
	key     tenure.Key
	mayRing bool // it has a connection of its own
	stop    context.CancelFunc
	changed chan struct{} // has room for one: own has changed

	mu   sync.Mutex
	subs []*subscription
	live bool
	own  string // the name of the bell of what this process has written last; empty: it has deleted that
}

// run listens until its context ends.
func (b *bell) run(ctx context.Context) {
	for pause := shortestRetry; ; pause = min(2*pause, longestRetry) {
		err := b.listen(ctx)
		if b.breaks() {
			pause = shortestRetry
		}
		if ctx.Err() != nil {
			return
		}
		b.bells.cfg.Logger.Debug("watch broke; retrying", "key", b.key.String(), "error", err)
		if storekit.Pause(ctx, pause) != nil {
			return
		}
	}
}

// wrote notes which bell this process should have.
func (b *bell) wrote(name string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if name == "" {
		b.wakeAll()
	}
	if name == b.own {
		return
	}
	b.own = name
	select {
	case b.changed <- struct{}{}:
	default:
	}
}

func (b *bell) ownName() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.own
}

func (b *bell) wake() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.wakeAll()
}

func (b *bell) wakeAll() {
	for _, sub := range b.subs {
		select {
		case sub.c <- struct{}{}:
		default:
		}
	}
}

// sees wakes the subscribers once, if the object has changed, or if hints did not arrive before. It reports whether it
// did.
func (b *bell) sees(changed bool) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	changed = changed || !b.live
	b.live = true
	if changed {
		b.wakeAll()
	}
	return changed
}

// breaks says that no hints arrive, and reports whether they did before.
func (b *bell) breaks() (was bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if was = b.live; was {
		b.live = false
		b.wakeAll()
	}
	return was
}

// subscription is one subscription to one object.
type subscription struct {
	bell *bell
	c    chan struct{} // has room for one hint: hints that have not been received become one
}

func (s *subscription) C() <-chan struct{} { return s.c }

func (s *subscription) Live() bool {
	s.bell.mu.Lock()
	defer s.bell.mu.Unlock()
	return s.bell.live
}

// Stop may be called twice.
func (s *subscription) Stop() { s.bell.bells.unwatch(s) }
