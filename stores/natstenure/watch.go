package natstenure

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tenurelib/tenure"
)

const (
	heartbeat = time.Second
	silence   = 5 * heartbeat / 2 // after which a consumer is presumed dead

	inactive = 30 * time.Second // after which the server removes a consumer without a listener
)

// Watch watches an object through a consumer that all subscriptions of this process to the object
// share. It does no I/O.
func (s *Store) Watch(key tenure.Key) tenure.Subscription { return s.watches.Watch(key) }

// consume creates a consumer of an object's messages and reports them until the consumer breaks.
func (s *Store) consume(ctx context.Context, key tenure.Key, tell func(tenure.Change)) error {
	nc := s.nc
	status := nc.StatusChanged(nats.CONNECTED, nats.RECONNECTING, nats.DISCONNECTED, nats.CLOSED)
	defer nc.RemoveStatusListener(status)
	if !nc.IsConnected() {
		select {
		case <-status:
		case <-ctx.Done():
		}
		return nats.ErrDisconnected
	}
	limited, cancel := context.WithTimeout(ctx, 2*silence)
	defer cancel()
	stream, err := s.ready(limited)
	if err != nil {
		return err
	}
	inbox := nc.NewInbox()
	messages := make(chan *nats.Msg, 256)
	sub, err := nc.ChanSubscribe(inbox, messages)
	if err != nil {
		return err
	}
	defer sub.Unsubscribe()
	consumer, err := stream.CreatePushConsumer(limited, jetstream.ConsumerConfig{
		DeliverSubject:    inbox,
		DeliverPolicy:     jetstream.DeliverLastPerSubjectPolicy,
		AckPolicy:         jetstream.AckNonePolicy,
		FilterSubject:     s.subject(key) + s.either,
		IdleHeartbeat:     heartbeat,
		InactiveThreshold: inactive,
		MemoryStorage:     true,
		Replicas:          1,
	})
	if err != nil {
		return err
	}
	info := consumer.CachedInfo()
	defer s.remove(info.Name)
	if info.NumPending == 0 {
		tell(tenure.Change{Object: tenure.Object{Key: key}, Deleted: true, Arrived: time.Now()})
	}
	received, complete := uint64(0), info.NumPending == 0
	for {
		dead := time.NewTimer(silence)
		select {
		case <-ctx.Done():
			dead.Stop()
			return ctx.Err()
		case is := <-status:
			dead.Stop()
			return fmt.Errorf("the connection is %s", is)
		case <-dead.C:
			return errors.New("the consumer is silent")
		case msg := <-messages:
			dead.Stop()
			arrived := time.Now()
			if code := msg.Header.Get("Status"); code != "" {
				if code != "100" {
					return fmt.Errorf("the server says %s %s", code, msg.Header.Get("Description"))
				}
				if last := msg.Header.Get("Nats-Last-Consumer"); last != "" && last != strconv.FormatUint(received, 10) {
					return errors.New("a message is missing")
				}
				continue
			}
			about, err := msg.Metadata()
			if err != nil {
				return err
			}
			if received++; about.Sequence.Consumer != received {
				return errors.New("a message is missing")
			}
			st, obj := decode(key, about.Sequence.Stream, msg.Data, about.Timestamp)
			s.saw(key, st, false)
			if complete = complete || about.NumPending == 0; complete { // otherwise a newer one follows
				tell(tenure.Change{Object: obj, Deleted: st.Deleted, Arrived: arrived})
			}
		}
	}
}

// remove removes a consumer in the background. Otherwise the server would remove it later.
func (s *shared) remove(name string) {
	s.ends.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = s.js.DeleteConsumer(ctx, s.cfg.Stream, name)
	})
}
