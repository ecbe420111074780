package tenure

import (
	"encoding/json"
	"fmt"
	"maps"
	"time"
)

// unknownHolder stands for the holder that a record does not tell.
const unknownHolder = "unknown"

// Holding is what a lease's record tells: who holds it, and until when at most.
type Holding struct {
	Key        Key
	Holder     string // for people; "unknown" where the record does not tell
	Term       string // the term's ID; empty in a record of another program
	Version    int64
	TTL        time.Duration // the holder's, else the reader's own
	AcquiredAt time.Time     // by the holder's clock
	RenewedAt  time.Time     // by the store's clock
	Age        time.Duration // since the last renewal, by the store's clock, when it was read
	Labels     map[string]string

	// Offered says that nobody holds the lease: its last holder has given it up and
	// offers it to this one, for the TTL.
	Offered bool
}

// record is the payload of a lease's object. Its bytes stay the same from the
// acquire to the release of a term: they are the term's identity, and fenced
// writes compare them.
type record struct {
	Holder       string `json:"holder"`
	AcquiredAtMS int64  `json:"acquired_at_ms"`
	Term         string `json:"term"`
	TTLMS        int64  `json:"ttl_ms"`
	Offered      bool   `json:"offered,omitempty"`
}

// is reports whether a holding is what the record tells.
func (r record) is(h *Holding) bool {
	return h != nil && h.Term == r.Term && h.Holder == r.Holder && h.Offered == r.Offered
}

func (r record) encode() []byte {
	b, err := json.Marshal(r)
	if err != nil {
		panic(fmt.Sprintf("bug: a record of strings and numbers does not encode: %v", err))
	}
	return b
}

// decodeHolding reads a lease's object. It always returns a Holding that a
// standby can act upon: one that nobody can decode would be held for ever. The
// error says what was wrong with it.
func decodeHolding(obj Object, ownTTL time.Duration) (Holding, error) {
	h := Holding{
		Key:       obj.Key,
		Holder:    unknownHolder,
		Version:   obj.Version,
		TTL:       ownTTL,
		RenewedAt: obj.UpdatedAt,
		Age:       obj.Age,
		Labels:    obj.Labels,
	}
	if request := requestIn(obj); request != nil {
		h.Age += time.Duration(request.AgeMS) * time.Millisecond
		h.Labels = maps.Clone(obj.Labels)
		delete(h.Labels, requestLabel)
	}
	var r record
	if err := json.Unmarshal(obj.Payload, &r); err != nil {
		return h, fmt.Errorf("tenure: record of %s at version %d: %w", obj.Key, obj.Version, err)
	}
	h.Term, h.Offered = r.Term, r.Offered
	if r.Holder != "" {
		h.Holder = r.Holder
	}
	if r.AcquiredAtMS != 0 {
		h.AcquiredAt = time.UnixMilli(r.AcquiredAtMS)
	}
	if r.TTLMS > 0 && r.TTLMS <= maximumTTL.Milliseconds() {
		h.TTL = time.Duration(r.TTLMS) * time.Millisecond
	}
	return h, nil
}
