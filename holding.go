package tenure

import (
	"encoding/json"
	"fmt"
	"maps"
	"strings"
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
	// leaves it to this one, for the TTL; to any, where that is empty.
	Offered bool

	unconfirmed []Holding // whom the term was taken over from, until that is confirmed
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

// how says in whose hands the lease is.
func (h *Holding) how() string {
	switch {
	case !h.Offered:
		return "held by " + h.Holder
	case h.Holder == "":
		return "left to anybody"
	default:
		return "left to " + h.Holder
	}
}

// isTermOf reports whether an object is the record of a term.
func isTermOf(term string, obj Object) bool {
	var r record
	return term != "" && json.Unmarshal(obj.Payload, &r) == nil && r.Term == term
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
		RenewedAt: plausible(obj.UpdatedAt),
		Age:       obj.Age,
		Labels:    obj.Labels,
	}
	if hasReserved(obj) {
		h.unconfirmed = unconfirmedIn(obj)
		renewed := asRenewed(obj)
		h.RenewedAt, h.Age = plausible(renewed.UpdatedAt), renewed.Age
		h.Labels = maps.Clone(obj.Labels)
		maps.DeleteFunc(h.Labels, func(name, _ string) bool { return strings.HasPrefix(name, reservedLabels) })
	}
	if tooLong(h.Labels) {
		h.Labels = nil
	}
	var r record
	if err := json.Unmarshal(obj.Payload, &r); err != nil {
		return h, fmt.Errorf("tenure: record of %s at version %d: %w", obj.Key, obj.Version, err)
	}
	h.Offered = r.Offered
	if len(r.Term) <= longestHolder {
		h.Term = r.Term
	}
	if r.Holder != "" || r.Offered {
		h.Holder = strings.ToValidUTF8(r.Holder[:min(len(r.Holder), longestHolder)], "")
	}
	if r.AcquiredAtMS != 0 {
		h.AcquiredAt = plausible(time.UnixMilli(r.AcquiredAtMS))
	}
	if r.TTLMS > 0 && r.TTLMS <= maximumTTL.Milliseconds() {
		h.TTL = time.Duration(r.TTLMS) * time.Millisecond
	}
	return h, nil
}

// tooLong reports whether another program has written more into its labels than the
// record of a term that follows has room for, where they may have to be told.
func tooLong(labels map[string]string) bool {
	bytes := 0
	for name, value := range labels {
		bytes += len(name) + len(value)
	}
	return bytes > longestHolder
}

// plausible returns a time that is fit for JSON, which has no years above 9999: the
// zero time for one that somebody has written in another unit.
func plausible(t time.Time) time.Time {
	if year := t.UTC().Year(); year < 1 || year > 9998 {
		return time.Time{}
	}
	return t
}
