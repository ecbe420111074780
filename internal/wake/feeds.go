package wake

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/tenurelib/tenure/internal/pace"
)

const shortestRetry, longestRetry = 20 * time.Millisecond, time.Second

// Feeds has the subscriptions to the keys of a store that tells of every change. All
// subscriptions to one key share a feed, which follows that key until the last of them has
// stopped. All methods are safe for concurrent use.
type Feeds[K Key, C any] struct {
	follow func(ctx context.Context, key K, tell func(C)) error
	logger *slog.Logger

	mu     sync.Mutex
	feeds  map[K]*feed[K, C] // that have subscriptions
	closed context.Context   // done when the feeds are closed
	close  context.CancelFunc
	ends   sync.WaitGroup // of the feeds' goroutines
}

// Key is what can be followed.
type Key interface {
	comparable
	fmt.Stringer
}

// NewFeeds returns feeds that follow a key by a func. It calls tell with the key's state once
// it is certain that each later change will arrive, and again at each change. It returns when
// it has lost track, and is called again after a pause, or when its context is done.
func NewFeeds[K Key, C any](follow func(ctx context.Context, key K, tell func(C)) error, logger *slog.Logger) *Feeds[K, C] {
	f := &Feeds[K, C]{follow: follow, logger: logger, feeds: make(map[K]*feed[K, C])}
	f.closed, f.close = context.WithCancel(context.Background())
	return f
}

// Subscribe begins a subscription. Once the feeds are closed it never becomes live.
func (f *Feeds[K, C]) Subscribe(key K) *Subscription[K, C] {
	f.mu.Lock()
	defer f.mu.Unlock()
	of := f.feeds[key]
	if of == nil {
		of = &feed[K, C]{feeds: f, key: key}
		if f.closed.Err() == nil {
			var ctx context.Context
			ctx, of.stop = context.WithCancel(f.closed)
			f.feeds[key] = of
			f.ends.Go(func() { of.run(ctx) })
		}
	}
	sub := &Subscription[K, C]{feed: of, c: make(chan struct{}, 1)}
	of.mu.Lock()
	defer of.mu.Unlock()
	of.subs = append(of.subs, sub)
	return sub
}

// Close ends all subscriptions and waits until no key is followed.
func (f *Feeds[K, C]) Close() {
	f.mu.Lock() // so that no goroutine is started from now on
	f.close()
	f.mu.Unlock()
	f.ends.Wait()
}

// feed is what the subscriptions to one key share.
type feed[K Key, C any] struct {
	feeds *Feeds[K, C]
	key   K
	stop  context.CancelFunc

	mu   sync.Mutex
	subs []*Subscription[K, C]
	live bool
	last C // while live
}

func (f *feed[K, C]) run(ctx context.Context) {
	for wait := shortestRetry; ; wait = min(2*wait, longestRetry) {
		err := f.feeds.follow(ctx, f.key, func(change C) { f.set(true, change) })
		var none C
		if f.set(false, none) {
			wait = shortestRetry
		}
		if ctx.Err() != nil {
			return
		}
		f.feeds.logger.Debug("watch broke, trying again", "key", f.key.String(), "error", err)
		if !pace.Sleep(ctx, rand.N(wait)) {
			return
		}
	}
}

// set notes a change, or that none will arrive, and wakes the subscribers. It reports whether
// the feed was live.
func (f *feed[K, C]) set(live bool, last C) (was bool) {
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

// Subscription is one subscription to one key. All methods are safe for concurrent use.
type Subscription[K Key, C any] struct {
	feed *feed[K, C]
	c    chan struct{} // has room for one hint: two that nobody has received become one
}

// C receives when the key may have changed.
func (s *Subscription[K, C]) C() <-chan struct{} { return s.c }

// Live reports whether changes arrive.
func (s *Subscription[K, C]) Live() bool {
	_, live := s.Last()
	return live
}

// Last returns the newest change that has arrived; ok is false while none arrive.
func (s *Subscription[K, C]) Last() (change C, ok bool) {
	s.feed.mu.Lock()
	defer s.feed.mu.Unlock()
	return s.feed.last, s.feed.live
}

// Stop ends the subscription. It may be called twice.
func (s *Subscription[K, C]) Stop() {
	of := s.feed
	of.feeds.mu.Lock()
	defer of.feeds.mu.Unlock()
	of.mu.Lock()
	defer of.mu.Unlock()
	of.subs = slices.DeleteFunc(of.subs, func(other *Subscription[K, C]) bool { return other == s })
	if len(of.subs) == 0 && of.feeds.feeds[of.key] == of {
		delete(of.feeds.feeds, of.key)
		of.stop()
	}
}
