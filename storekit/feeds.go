package storekit

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/pace"
)

const shortestRetry, longestRetry = 20 * time.Millisecond, time.Second

// Feeds keeps the subscriptions to objects of a store on which every change is an event. All
// subscriptions to one object share a feed, which follows the object until the last subscription
// stops. All methods are safe for concurrent use.
type Feeds struct {
	follow func(ctx context.Context, key tenure.Key, tell func(tenure.Change)) error
	logger *slog.Logger

	mu     sync.Mutex
	feeds  map[tenure.Key]*feed // of the objects with subscriptions
	closed context.Context      // done when the feeds are closed
	close  context.CancelFunc
	ends   sync.WaitGroup // of the feeds' goroutines
}

// NewFeeds returns feeds that call follow for each object with a subscription. follow must call
// tell with the object's state once it is certain that every later change will arrive, and again at
// each change. It must return when its context is done, or when it has lost track; then it is
// called again after a pause.
func NewFeeds(follow func(ctx context.Context, key tenure.Key, tell func(tenure.Change)) error, logger *slog.Logger) *Feeds {
	f := &Feeds{follow: follow, logger: logger, feeds: make(map[tenure.Key]*feed)}
	f.closed, f.close = context.WithCancel(context.Background())
	return f
}

// Watch begins a subscription. After Close it never becomes live.
func (f *Feeds) Watch(key tenure.Key) tenure.ChangeSubscription {
	f.mu.Lock()
	defer f.mu.Unlock()
	of := f.feeds[key]
	if of == nil {
		of = &feed{feeds: f, key: key}
		if f.closed.Err() == nil {
			var ctx context.Context
			ctx, of.stop = context.WithCancel(f.closed)
			f.feeds[key] = of
			f.ends.Go(func() { of.run(ctx) })
		}
	}
	sub := &subscription{feed: of, c: make(chan struct{}, 1)}
	of.mu.Lock()
	defer of.mu.Unlock()
	of.subs = append(of.subs, sub)
	return sub
}

// Close ends all subscriptions and waits until no object is followed.
func (f *Feeds) Close() {
	f.mu.Lock() // no goroutine is started from now on
	f.close()
	f.mu.Unlock()
	f.ends.Wait()
}

// feed is what the subscriptions to one object share.
type feed struct {
	feeds *Feeds
	key   tenure.Key
	stop  context.CancelFunc

	mu   sync.Mutex
	subs []*subscription
	live bool
	last tenure.Change // while live
}

func (f *feed) run(ctx context.Context) {
	for wait := shortestRetry; ; wait = min(2*wait, longestRetry) {
		err := f.feeds.follow(ctx, f.key, func(change tenure.Change) { f.set(true, change) })
		if f.set(false, tenure.Change{}) {
			wait = shortestRetry
		}
		if ctx.Err() != nil {
			return
		}
		f.feeds.logger.Debug("watch broke; retrying", "key", f.key.String(), "error", err)
		if !pace.Sleep(ctx, rand.N(wait)) {
			return
		}
	}
}

// set records a change, or that no changes arrive, and wakes the subscribers. It reports whether
// the feed was live.
func (f *feed) set(live bool, last tenure.Change) (was bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	was = f.live
	if !live && !was {
		return was
	}
	f.live, f.last = live, last
	for _, sub := range f.subs {
		select {
		case sub.c <- struct{}{}:
		default:
		}
	}
	return was
}

// subscription is one subscription to one object.
type subscription struct {
	feed *feed
	c    chan struct{} // has room for one hint: hints that have not been received become one
}

func (s *subscription) C() <-chan struct{} { return s.c }

func (s *subscription) Live() bool {
	_, live := s.Last()
	return live
}

func (s *subscription) Last() (change tenure.Change, ok bool) {
	s.feed.mu.Lock()
	defer s.feed.mu.Unlock()
	return s.feed.last, s.feed.live
}

// Stop may be called twice.
func (s *subscription) Stop() {
	of := s.feed
	of.feeds.mu.Lock()
	defer of.feeds.mu.Unlock()
	of.mu.Lock()
	defer of.mu.Unlock()
	of.subs = slices.DeleteFunc(of.subs, func(other *subscription) bool { return other == s })
	if len(of.subs) == 0 && of.feeds.feeds[of.key] == of {
		delete(of.feeds.feeds, of.key)
		of.stop()
	}
}
