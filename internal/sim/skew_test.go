package sim

import (
	"context"
	"encoding/json"

	"github.com/tenurelib/tenure"
)

// skewed is the store as a replica reads it whose clock runs at a rate of its own.
//
// A bubble has one clock. A replica at rate r, whose own clock counts r seconds in
// each true one, is the same as one at rate 1 all of whose durations are divided
// by r: those that it is configured with, which newReplica does, and those that it
// reads, which this does. What it writes into its record is what it was configured
// with, on its own clock; the reader makes that true again by the writer's rate.
//
// The writer's wall clock is days off, which shows in acquired_at_ms.
type skewed struct {
	tenure.Store
	r *replica
}

func (s skewed) Get(ctx context.Context, key tenure.Key) (tenure.Object, error) {
	obj, err := s.Store.Get(ctx, key)
	if err != nil || key != leaseKey {
		return obj, err
	}
	obj.Age = scale(obj.Age, 1/s.r.rate)
	var record map[string]any
	if json.Unmarshal(obj.Payload, &record) != nil {
		return obj, nil
	}
	holder, _ := record["holder"].(string)
	for _, writer := range s.r.w.replicas {
		// Its own record it must get as it wrote it, byte by byte.
		if ttl, ok := record["ttl_ms"].(float64); ok && writer.name == holder && writer != s.r {
			record["ttl_ms"] = int64(ttl*writer.rate/s.r.rate + 0.999)
			acquired, _ := record["acquired_at_ms"].(float64)
			record["acquired_at_ms"] = int64(acquired) + writer.wallOffset.Milliseconds()
			obj.Payload, _ = json.Marshal(record)
		}
	}
	return obj, nil
}

// skewedWatcher is skewed for a store whose other capabilities are to be seen.
type skewedWatcher struct {
	skewed
	tenure.Watcher
	tenure.Fencer
}

// skewedPoller is the same without wake-ups.
type skewedPoller struct {
	skewed
	tenure.Fencer
}
