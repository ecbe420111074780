// Package record reads and writes what a lease keeps in its object: the payload, which
// is the identity of a term, and the labels by which replicas tell each other of
// requests and of takeovers that are not confirmed. It does no I/O.
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
	// Unknown stands for the holder that a record does not tell.
	Unknown = "unknown"

	// LongestHolder is the longest name of a holder in bytes. Escaped in JSON it may
	// become six times as long, and the record has to have room for it.
	LongestHolder = 1 << 17

	// LongestTTL is the longest TTL that a record can tell.
	LongestTTL = 365 * 24 * time.Hour
)

// Payload is the payload of a lease's object. Its bytes stay the same from the
// acquire to the release of a term: they are the term's identity, and fenced
// writes compare them.
type Payload struct {
	Holder       string `json:"holder"`
	AcquiredAtMS int64  `json:"acquired_at_ms"`
	Term         string `json:"term"`
	TTLMS        int64  `json:"ttl_ms"`
	Offered      bool   `json:"offered,omitempty"`
}

// Encode returns the payload's bytes.
func (p Payload) Encode() []byte {
	b, err := json.Marshal(p)
	if err != nil {
		panic(fmt.Sprintf("bug: a record of strings and numbers does not encode: %v", err))
	}
	return b
}

// Offer returns the payload that a holder leaves behind that offers the lease to a
// replica: for so long no other takes it. Where no replica is named, any may take it at
// once.
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

// IsOf reports whether the object is the record of a term.
func (o Object) IsOf(term string) bool {
	var p Payload
	return term != "" && json.Unmarshal(o.Payload, &p) == nil && p.Term == term
}

// Holding is what a record tells.
type Holding struct {
	Holder     string
	Term       string // empty in a record of another program
	Version    int64
	TTL        time.Duration
	AcquiredAt time.Time // zero where it is not told
	RenewedAt  time.Time
	Age        time.Duration // since the last renewal
	Labels     map[string]string
	Offered    bool

	Unconfirmed []Holding // the holders that may still be at work, until the takeover is confirmed
}

// Read reads a lease's object. It always returns a Holding that a standby can act
// upon: one that nobody can decode would be held for ever. Its TTL is the reader's own
// where the record tells none. The error says what was wrong with it.
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
		h.Unconfirmed = unconfirmedIn(o)
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
	h.Offered = p.Offered
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

// tooLong reports whether another program has written more into its labels than the
// record of the next term has room for.
func tooLong(labels map[string]string) bool {
	bytes := 0
	for name, value := range labels {
		bytes += len(name) + len(value)
	}
	return bytes > LongestHolder
}

// plausible returns a time that is fit for JSON, which has no years above 9999: the
// zero time for one that somebody has written in another unit.
func plausible(t time.Time) time.Time {
	if year := t.UTC().Year(); year < 1 || year > 9998 {
		return time.Time{}
	}
	return t
}
