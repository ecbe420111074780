package natstenure

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tenurelib/tenure"
)

const (
	heartbeat = time.Second
	silence   = 5 * heartbeat / 2 // after which a consumer is taken for dead

	shortestRetry, longestRetry = 20 * time.Millisecond, time.Second

	inactive = 30 * time.Second // then the server removes a consumer that nobody listens to
)

// watch is a consumer of one object's messages, for all subscriptions to the object.
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

// Watch watches an object by a consumer, which this process shares among all subscriptions to
// that object. It does no I/O.
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

// run consumes until the last subscription has ended. If the consumer breaks it makes another.
func (w *watch) run(ctx context.Context) {
	defer w.set(false, tenure.Change{})
	for wait := shortestRetry; ctx.Err() == nil; wait = min(2*wait, longestRetry) {
		was := w.s.nc.Status()
		lived, err := w.consume(ctx)
		w.set(false, tenure.Change{})
		if lived {
			wait = shortestRetry
		}
		if ctx.Err() == nil {
			w.s.cfg.Logger.Debug("watch broke, trying again", "key", w.key.String(), "error", err, "connection", was.String())
		}
		_ = pause(ctx, wait)
	}
}

// consume makes a consumer and follows it until it breaks. It reports whether it was live.
func (w *watch) consume(ctx context.Context) (lived bool, err error) {
	nc := w.s.nc
	status := nc.StatusChanged(nats.CONNECTED, nats.RECONNECTING, nats.DISCONNECTED, nats.CLOSED)
	defer nc.RemoveStatusListener(status)
	if !nc.IsConnected() {
		select {
		case <-status:
		case <-ctx.Done():
		}
		return false, nats.ErrDisconnected
	}
	limited, cancel := context.WithTimeout(ctx, 2*silence)
	defer cancel()
	stream, err := w.s.ready(limited)
	if err != nil {
		return false, err
	}
	inbox := nc.NewInbox()
	messages := make(chan *nats.Msg, 256)
	sub, err := nc.ChanSubscribe(inbox, messages)
	if err != nil {
		return false, err
	}
	defer sub.Unsubscribe()
	consumer, err := stream.CreatePushConsumer(limited, jetstream.ConsumerConfig{
		DeliverSubject:    inbox,
		DeliverPolicy:     jetstream.DeliverLastPerSubjectPolicy,
		AckPolicy:         jetstream.AckNonePolicy,
		FilterSubject:     w.s.subject(w.key) + either,
		IdleHeartbeat:     heartbeat,
		InactiveThreshold: inactive,
		MemoryStorage:     true,
		Replicas:          1,
	})
	if err != nil {
		return false, err
	}
	info := consumer.CachedInfo()
	defer w.remove(info.Name)
	if info.NumPending == 0 {
		lived = true
		w.set(true, tenure.Change{Object: tenure.Object{Key: w.key}, Deleted: true, Arrived: time.Now()})
	}
	received := uint64(0)
	for {
		dead := time.NewTimer(silence)
		select {
		case <-ctx.Done():
			dead.Stop()
			return lived, ctx.Err()
		case is := <-status:
			dead.Stop()
			return lived, fmt.Errorf("the connection is %s", is)
		case <-dead.C:
			return lived, errors.New("the consumer is silent")
		case msg := <-messages:
			dead.Stop()
			arrived := time.Now()
			if code := msg.Header.Get("Status"); code != "" {
				if code != "100" {
					return lived, fmt.Errorf("the server says %s %s", code, msg.Header.Get("Description"))
				}
				if last := msg.Header.Get("Nats-Last-Consumer"); last != "" && last != strconv.FormatUint(received, 10) {
					return lived, errors.New("a message is missing")
				}
				continue
			}
			about, err := msg.Metadata()
			if err != nil {
				return lived, err
			}
			if received++; about.Sequence.Consumer != received {
				return lived, errors.New("a message is missing")
			}
			st, obj := decode(w.key, about.Sequence.Stream, msg.Data, about.Timestamp)
			w.s.saw(w.key, st, false)
			if lived || about.NumPending == 0 { // else a newer one follows
				lived = true
				w.set(true, tenure.Change{Object: obj, Deleted: st.Deleted, Arrived: arrived})
			}
		}
	}
}

// remove removes a consumer without waiting for that: the server does so later in any case.
func (w *watch) remove(name string) {
	w.s.ends.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = w.s.js.DeleteConsumer(ctx, w.s.cfg.Stream, name)
	})
}
