package etcdtenure

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/metadata"

	"github.com/tenurelib/tenure"
)

const (
	heartbeat = time.Second       // after which a watch that has heard nothing asks
	silence   = 5 * heartbeat / 2 // after which it is taken for dead

	shortestRetry, longestRetry = 20 * time.Millisecond, time.Second
)

// watch is a watch of one object, for all subscriptions to it.
type watch struct {
	s    *Store
	key  tenure.Key
	stop context.CancelFunc

	mu   sync.Mutex
	subs []*subscription
	live bool
	last tenure.Change // while live
}

// subscription is a [tenure.ChangeSubscription].
type subscription struct {
	watch *watch // nil: the store was closed
	c     chan struct{}
}

// Watch watches an object by a watch of etcd, which this process shares among all
// subscriptions to that object. It does no I/O.
func (s *Store) Watch(key tenure.Key) tenure.Subscription {
	sub := &subscription{c: make(chan struct{}, 1)}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed.Err() != nil {
		return sub
	}
	w := s.watches[key]
	if w == nil {
		w = &watch{s: &Store{shared: s.shared}, key: key}
		var ctx context.Context
		ctx, w.stop = context.WithCancel(s.closed)
		s.watches[key] = w
		s.ends.Go(func() { w.run(ctx) })
	}
	sub.watch = w
	w.mu.Lock()
	defer w.mu.Unlock()
	w.subs = append(w.subs, sub)
	return sub
}

// C receives when the object may have changed.
func (sub *subscription) C() <-chan struct{} { return sub.c }

// Live reports whether changes arrive.
func (sub *subscription) Live() bool {
	_, ok := sub.Last()
	return ok
}

// Last returns the newest change that has arrived.
func (sub *subscription) Last() (tenure.Change, bool) {
	w := sub.watch
	if w == nil {
		return tenure.Change{}, false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.last, w.live
}

// Stop ends the subscription. It may be called twice.
func (sub *subscription) Stop() {
	w := sub.watch
	if w == nil {
		return
	}
	w.s.mu.Lock()
	defer w.s.mu.Unlock()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.subs = slices.DeleteFunc(w.subs, func(other *subscription) bool { return other == sub })
	if len(w.subs) == 0 && w.s.watches[w.key] == w {
		delete(w.s.watches, w.key)
		w.stop()
	}
}

// set notes a change, or that none will arrive, and wakes the subscribers.
func (w *watch) set(live bool, last tenure.Change) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !live && !w.live {
		return
	}
	w.live, w.last = live, last
	for _, sub := range w.subs {
		select {
		case sub.c <- struct{}{}:
		default:
		}
	}
}

// run watches until the last subscription has ended. If the watch breaks it begins another.
func (w *watch) run(ctx context.Context) {
	defer w.set(false, tenure.Change{})
	for wait := shortestRetry; ctx.Err() == nil; wait = min(2*wait, longestRetry) {
		lived, err := w.follow(ctx)
		w.set(false, tenure.Change{})
		if lived {
			wait = shortestRetry
		}
		if ctx.Err() == nil {
			w.s.cfg.Logger.Debug("watch broke, trying again", "key", w.key.String(), "error", err)
		}
		_ = pause(ctx, wait)
	}
}

var errSilent = errors.New("the server is silent")

// follow watches the object until the watch breaks. It reports whether it was live.
func (w *watch) follow(ctx context.Context) (lived bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	limited, cancelReady := context.WithTimeout(ctx, silence)
	defer cancelReady()
	e, err := w.s.ready(limited)
	if err != nil {
		return false, err
	}

	// The watches of a store share a stream of their own, which metadata tell from others. A
	// server without a leader ends the stream.
	//
	// The watch begins with what comes next, and the object is read once that is certain. One
	// that begins with a revision would not be told that there is nothing new: not before the
	// server has that revision, and an old one is looked at only every 100 ms.
	stream := w.s.streamNumber()
	ctx = metadata.AppendToOutgoingContext(clientv3.WithRequireLeader(ctx), "tenure-stream", fmt.Sprintf("%p-%d", w.s.shared, stream))
	tooLate := time.AfterFunc(silence, cancel)
	events := w.s.client.Watch(ctx, w.s.keyOf(ofObjects, w.key), clientv3.WithCreatedNotify()) // waits for the server's answer
	if !tooLate.Stop() {
		w.s.leaveStream(stream)
		return false, errSilent
	}
	at := int64(0) // the revision up to which the object is known
	dead := time.NewTimer(silence)
	defer dead.Stop()
	for {
		ask := time.NewTimer(heartbeat + rand.N(heartbeat/2)) // one watch that asks is answered to all
		select {
		case <-ctx.Done():
			ask.Stop()
			return lived, ctx.Err()
		case <-dead.C:
			ask.Stop()
			w.s.leaveStream(stream)
			return lived, errSilent
		case <-ask.C:
			asking, cancel := context.WithTimeout(ctx, silence-heartbeat)
			err := w.s.client.RequestProgress(asking)
			cancel()
			if err != nil && ctx.Err() == nil && asking.Err() == nil {
				return lived, err
			}
		case resp, ok := <-events:
			ask.Stop()
			arrived := time.Now()
			switch {
			case !ok:
				return lived, errors.New("the client has ended the watch")
			case resp.Err() != nil:
				return lived, resp.Err()
			}
			if err := w.s.follows(e, 0, resp.Header); err != nil { // the server may be behind, but not of another cluster
				return lived, err
			}
			if resp.Created {
				if at, err = w.found(ctx); err != nil {
					return lived, err
				}
				lived = true
			}
			if w.s.isOver(e) {
				return lived, errors.New("another epoch has begun")
			}
			for _, event := range resp.Events {
				if event.Kv.ModRevision <= at {
					continue
				}
				at = event.Kv.ModRevision
				change := tenure.Change{Object: tenure.Object{Key: w.key, Version: e.version(at)}, Deleted: true, Arrived: arrived}
				var st state
				if event.Type == clientv3.EventTypePut {
					change.Deleted = false
					st, change.Object = decode(e, w.key, event.Kv)
				}
				w.s.saw(e, w.key, st, at)
				w.set(true, change)
			}
			dead.Reset(silence)
		}
	}
}

// found makes the watch live with the object as it is, and returns the cluster's revision.
func (w *watch) found(ctx context.Context) (at int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, silence)
	defer cancel()
	st, obj, at, err := w.s.read(ctx, w.key)
	if err == nil {
		obj.Key = w.key
		w.set(true, tenure.Change{Object: obj, Deleted: st.revision == 0, Arrived: time.Now()})
	}
	return at, err
}

func (s *shared) streamNumber() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stream
}

// leaveStream makes the watches that begin from now on use another stream, perhaps to another
// server.
func (s *shared) leaveStream(number int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stream == number {
		s.stream++
	}
}

// isOver reports whether an epoch is known to be over.
func (s *shared) isOver(e epoch) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.epoch != e || s.wentBack
}
