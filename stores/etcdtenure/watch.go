package etcdtenure

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/metadata"

	"github.com/tenurelib/tenure"
)

const (
	heartbeat = time.Second       // after which a watch that has heard nothing asks
	silence   = 5 * heartbeat / 2 // after which it is presumed dead
)

// Watch watches an object through a watch of etcd that all subscriptions of this process to the
// object share. It does no I/O.
func (s *Store) Watch(key tenure.Key) tenure.Subscription { return s.watches.Watch(key) }

var errSilent = errors.New("the server is silent")

// follow watches an object and reports its changes until the watch breaks.
func (s *Store) follow(ctx context.Context, key tenure.Key, tell func(tenure.Change)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	limited, cancelReady := context.WithTimeout(ctx, silence)
	defer cancelReady()
	e, err := s.ready(limited)
	if err != nil {
		return err
	}

	// The watches of a store share a stream of their own, which metadata distinguish from other
	// streams. A server without a leader ends the stream.
	//
	// The watch begins with the next change, and the object is read once that is certain. A watch
	// that begins at a revision would not be told that there is nothing new before the server has
	// that revision, and the server checks old revisions only every 100 ms.
	stream := s.streamNumber()
	ctx = metadata.AppendToOutgoingContext(clientv3.WithRequireLeader(ctx), "tenure-stream", fmt.Sprintf("%p-%d", s.shared, stream))
	tooLate := time.AfterFunc(silence, cancel)
	events := s.client.Watch(ctx, s.keyOf(ofObjects, key), clientv3.WithCreatedNotify()) // waits for the server's answer
	if !tooLate.Stop() {
		s.leaveStream(stream)
		return errSilent
	}
	at := int64(0) // the revision up to which the object is known
	dead := time.NewTimer(silence)
	defer dead.Stop()
	for {
		ask := time.NewTimer(heartbeat + rand.N(heartbeat/2)) // one watch asks, and all are answered
		select {
		case <-ctx.Done():
			ask.Stop()
			return ctx.Err()
		case <-dead.C:
			ask.Stop()
			s.leaveStream(stream)
			return errSilent
		case <-ask.C:
			asking, cancel := context.WithTimeout(ctx, silence-heartbeat)
			err := s.client.RequestProgress(asking)
			cancel()
			if err != nil && ctx.Err() == nil && asking.Err() == nil {
				return err
			}
		case resp, ok := <-events:
			ask.Stop()
			arrived := time.Now()
			switch {
			case !ok:
				return errors.New("the client has ended the watch")
			case resp.Err() != nil:
				s.leaveStream(stream) // which keeps the token with which it was opened, also once that has expired
				return resp.Err()
			}
			if err := s.follows(e, 0, resp.Header); err != nil { // the server may be behind, but not of another cluster
				return err
			}
			if resp.Created {
				if at, err = s.found(ctx, key, tell); err != nil {
					return err
				}
			}
			if s.isOver(e) {
				return errors.New("another epoch has begun")
			}
			for _, event := range resp.Events {
				if event.Kv.ModRevision <= at {
					continue
				}
				at = event.Kv.ModRevision
				change := tenure.Change{Object: tenure.Object{Key: key, Version: e.version(at)}, Deleted: true, Arrived: arrived}
				var st state
				if event.Type == clientv3.EventTypePut {
					change.Deleted = false
					st, change.Object = decode(e, key, event.Kv)
				}
				s.saw(e, key, st, at)
				tell(change)
			}
			dead.Reset(silence)
		}
	}
}

// found reports the present object, and returns the cluster's revision.
func (s *Store) found(ctx context.Context, key tenure.Key, tell func(tenure.Change)) (at int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, silence)
	defer cancel()
	st, obj, at, err := s.read(ctx, key)
	if err == nil {
		obj.Key = key
		tell(tenure.Change{Object: obj, Deleted: st.revision == 0, Arrived: time.Now()})
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
