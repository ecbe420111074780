// Package record reads and writes what a lease keeps in its object: the payload, which is the
// identity of a term, and the labels by which replicas tell each other about requests and
// unconfirmed takeovers. It does no I/O.
package record

import (
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/google/uuid"
)

const (
	// Unknown stands for the holder if the record does not name one.
	Unknown = "unknown"

	// LongestHolder is the greatest length of a holder's name that is read, in bytes: other programs, and
	// earlier versions, may have written longer ones than a config may have. Escaped in JSON, the name
	// may become six times as long, and the record must have room for it.
	LongestHolder = 1 << 17

	// LongestTTL is the longest TTL that a record can have.
	LongestTTL = 365 * 24 * time.Hour
)

// Payload is the payload of a lease's object. Its bytes stay the same from a term's acquire to its
// release: they are the term's identity, and fenced writes compare them.
type Payload struct {
	Holder       string `json:"holder"`
	AcquiredAtMS int64  `json:"acquired_at_ms"`
	Term         string `json:"term"`
	TTLMS        int64  `json:"ttl_ms"`
	Offered      bool   `json:"offered,omitempty"`
	Witness      string `json:"witness,omitempty"` // that can prove that the holder is dead: see [tenure.Lease.ReleaseDead]
}

// Encode returns the payload's bytes.
func (p Payload) Encode() []byte {
	b, err := json.Marshal(p)
	if err != nil {
		panic(fmt.Sprintf("bug: cannot encode a record of strings and numbers: %v", err))
	}
	return b
}

// Offer returns the payload with which a holder offers the lease to a replica: no other replica may
// take the lease until the offer has expired. If to is empty, any replica may take it at once.
func Offer(to string, lasts time.Duration) *Payload {
	return &Payload{
		Holder:       to,
		AcquiredAtMS: time.Now().UnixMilli(),
		Term:         uuid.NewString(),
		TTLMS:        max(1, lasts.Milliseconds()),
		Offered:      true,
	}
}

// Object is a lease's object as it was read from a store.
type Object struct {
	Labels    map[string]string
	Payload   []byte
	Version   int64
	UpdatedAt time.Time
	Age       time.Duration
}

// IsOf reports whether the object is the record of the term with this ID.
func (o Object) IsOf(term string) bool {
	var p Payload
	return term != "" && json.Unmarshal(o.Payload, &p) == nil && p.Term == term
}

// TermPart returns the part of a payload that names a term. No payload of another term contains
// it, because inside a JSON string its quotes would be escaped.
func TermPart(term string) []byte {
	text, _ := json.Marshal(term) // a string always encodes
	return append([]byte(`"term":`), text...)
}

// Holding is what a record says.
type Holding struct {
	Holder       string
	Term         string // empty in a record of another program
	Version      int64
	TTL          time.Duration
	AcquiredAt   time.Time // zero if the record does not say
	RunningSince time.Time // when a long run of the holder's job began; zero: none is known
	RenewedAt    time.Time
	Age          time.Duration // since the last renewal
	Labels       map[string]string
	Offered      bool
	Witness      string

	Unconfirmed []Holding // earlier holders that may still be working; none once the takeover is confirmed
}

// Read reads a lease's object. It always returns a Holding that a standby can act on; otherwise a
// lease whose record cannot be decoded would be held forever. The TTL is the reader's own if the
// record has none. The error says what is wrong with the record.
func Read(o Object, ownTTL time.Duration) (Holding, error) {
	h := Holding{
		Holder:    Unknown,
		Version:   o.Version,
		TTL:       ownTTL,
		RenewedAt: plausible(o.UpdatedAt),
		Age:       o.Age,
		Labels:    o.Labels,
	}
	if hasReserved(o) {
		h.Unconfirmed, h.RunningSince = unconfirmedIn(o), o.runningSince()
		renewed := o.AsRenewed()
		h.RenewedAt, h.Age = plausible(renewed.UpdatedAt), renewed.Age
		h.Labels = maps.Clone(o.Labels)
		maps.DeleteFunc(h.Labels, func(name, _ string) bool { return strings.HasPrefix(name, Reserved) })
	}
	if tooLong(h.Labels) {
		h.Labels = nil
	}
	var p Payload
	if err := json.Unmarshal(o.Payload, &p); err != nil {
		return h, err
	}
	h.Offered, h.Witness = p.Offered, p.Witness
	if len(p.Term) <= LongestHolder {
		h.Term = p.Term
	}
	if p.Holder != "" || p.Offered {
		h.Holder = strings.ToValidUTF8(p.Holder[:min(len(p.Holder), LongestHolder)], "")
	}
	if p.AcquiredAtMS != 0 {
		h.AcquiredAt = plausible(time.UnixMilli(p.AcquiredAtMS))
	}
	if p.TTLMS > 0 && p.TTLMS <= LongestTTL.Milliseconds() {
		h.TTL = time.Duration(p.TTLMS) * time.Millisecond
	}
	return h, nil
}

// tooLong reports whether another program has written so many labels that the record of the next
// term, which names its predecessors, has no room for them.
func tooLong(labels map[string]string) bool {
	bytes := 0
	for name, value := range labels {
		bytes += len(name) + len(value)
	}
	return bytes > LongestHolder
}

// plausible returns a time if it fits into JSON, which has no years above 9999. Otherwise it
// returns the zero time, because such a time was written in another unit.
func plausible(t time.Time) time.Time {
	if year := t.UTC().Year(); year < 1 || year > 9998 {
		return time.Time{}
	}
	return t
}
