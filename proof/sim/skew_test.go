package sim

import (
	"bytes"
	"context"
	"encoding/json"
	"sync"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

// skewed is the store as seen by a replica whose clock runs at its own rate.
//
// A bubble has one clock. A replica at rate r, whose own clock counts r seconds per
// true second, is equivalent to one at rate 1 with all of its durations divided by r:
// newReplica divides those in its configuration, and skewed those that it reads. The
// durations that it writes into its record are the configured ones, on its own clock;
// the reader converts them to true time by the writer's rate.
//
// The age of a record that carries a request is the one exception: the reader adds the
// store's time to it, so it is off by up to 1 % of the time between the last renewal
// and the request. Margin has room for that.
//
// The writer's wall clock is days off, which shows in acquired_at_ms.
type skewed struct {
	tenure.Store
	r *replica
	*translation
}

// translation is a record as it is stored and as a replica reads it.
type translation struct {
	mu       sync.Mutex
	from, to []byte
}

func (s skewed) Get(ctx context.Context, key tenure.Key) (tenure.Object, error) {
	obj, err := s.Store.Get(ctx, key)
	if err == nil && key == leaseKey {
		obj.Age = testkit.Scale(obj.Age, 1/s.r.rate)
		obj.Payload = s.translated(obj.Payload)
	}
	return obj, err
}

// PutIf restores the payload of a record that was read and is written back with a
// request in its labels.
func (s skewed) PutIf(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
	if obj.Key == leaseKey {
		s.mu.Lock()
		if s.from != nil && bytes.Equal(obj.Payload, s.to) {
			obj.Payload = bytes.Clone(s.from)
		}
		s.mu.Unlock()
	}
	return s.Store.PutIf(ctx, obj, cond)
}

// translated returns a record as this replica reads it. It caches the last one, because
// most reads find the same record.
func (s skewed) translated(payload []byte) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !bytes.Equal(payload, s.from) {
		s.from, s.to = payload, s.translate(payload)
	}
	return bytes.Clone(s.to)
}

func (s skewed) translate(payload []byte) []byte {
	var record map[string]any
	if json.Unmarshal(payload, &record) != nil {
		return payload
	}
	holder, _ := record["holder"].(string)
	for _, writer := range s.r.w.replicas {
		// It must read its own record exactly as it wrote it, byte by byte.
		if ttl, ok := record["ttl_ms"].(float64); ok && writer.name == holder && writer != s.r {
			record["ttl_ms"] = int64(ttl*writer.rate/s.r.rate + 0.999)
			acquired, _ := record["acquired_at_ms"].(float64)
			record["acquired_at_ms"] = int64(acquired) + writer.wallOffset.Milliseconds()
			payload, _ = json.Marshal(record)
		}
	}
	return payload
}

// skewedWatcher is skewed with the store's other capabilities.
type skewedWatcher struct {
	skewed
	tenure.Watcher
	tenure.Notifier
	tenure.Fencer
}

// skewedPoller is skewedWatcher without wake-ups.
type skewedPoller struct {
	skewed
	tenure.Fencer
}
