package record

import (
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"time"
)

// Reserved begins the names of labels that only leases write.
const Reserved = "tenure."

const (
	// requestLabel is the label by which a holder is asked to release the lease. It
	// lasts until the next renewal.
	requestLabel = Reserved + "release"

	// unconfirmedLabel is the label by which the record of a term says from whom it was
	// taken over, for as long as that is not confirmed. So nobody is forgotten where
	// the confirming replica crashes too, or gives the lease back.
	unconfirmedLabel = Reserved + "unconfirmed"
)

// Request asks a holder to release its lease. Writing it makes a new version of the
// object, at a new time; but a request is no renewal, and must not make the lease of a
// holder that has vanished last longer. So it says what was there before, and readers
// go by that.
type Request struct {
	Term        string `json:"term"`          // that is asked; another program leaves the label in its own record
	To          string `json:"to,omitempty"`  // the replica that is to be next; empty: any
	Version     int64  `json:"version"`       // of the last renewal
	RenewedAtMS int64  `json:"renewed_at_ms"` // by the store's clock
}

// Request returns the request that stands in the object, or nil.
func (o Object) Request() *Request {
	var r Request
	if !reserved(o, requestLabel, &r) || !o.IsOf(r.Term) || r.Version <= 0 || r.Version >= o.Version {
		return nil
	}
	return &r
}

// WithRequest returns the object's labels with a request to its holder, in favour of a
// replica, or of any where that is empty.
func (o Object) WithRequest(term, to string) map[string]string {
	before := o.AsRenewed()
	return withReserved(o.Labels, requestLabel,
		Request{Term: term, To: to, Version: before.Version, RenewedAtMS: WholeMilli(before.UpdatedAt)})
}

// AsRenewed returns the object as its last renewal has left it.
func (o Object) AsRenewed() Object {
	request := o.Request()
	if request == nil {
		return o
	}
	renewed := time.UnixMilli(request.RenewedAtMS)
	o.Age += o.UpdatedAt.Truncate(time.Millisecond).Sub(renewed)
	o.Version, o.UpdatedAt = request.Version, renewed
	return o
}

// WholeMilli is a time as requests tell it, and never before it.
func WholeMilli(t time.Time) int64 { return t.Add(time.Millisecond - 1).UnixMilli() }

// unconfirmed is what stands in the label of that name.
type unconfirmed struct {
	Term   string        `json:"term"` // that is to confirm; another program leaves the label in its own record
	Before []predecessor `json:"before"`
}

type predecessor struct {
	Holder       string            `json:"holder"`
	Term         string            `json:"term"`
	Version      int64             `json:"version"`
	TTLMS        int64             `json:"ttl_ms"`
	AcquiredAtMS int64             `json:"acquired_at_ms"`
	RenewedAtMS  int64             `json:"renewed_at_ms"`
	Labels       map[string]string `json:"labels,omitempty"`
}

// unconfirmedIn returns the holders that may still be at work although a term stands
// that began after theirs, the first of them first.
func unconfirmedIn(o Object) []Holding {
	var u unconfirmed
	if !reserved(o, unconfirmedLabel, &u) || !o.IsOf(u.Term) {
		return nil
	}
	holdings := make([]Holding, 0, len(u.Before))
	for _, p := range u.Before {
		holdings = append(holdings, Holding{
			Holder:     p.Holder,
			Term:       p.Term,
			Version:    p.Version,
			TTL:        time.Duration(p.TTLMS) * time.Millisecond,
			AcquiredAt: fromMilli(p.AcquiredAtMS),
			RenewedAt:  fromMilli(p.RenewedAtMS),
			Age:        o.UpdatedAt.Sub(time.UnixMilli(p.RenewedAtMS)) + o.Age,
			Labels:     p.Labels,
		})
	}
	return holdings
}

// WithUnconfirmed returns labels that say from whom a term was taken over.
func WithUnconfirmed(labels map[string]string, term string, before []Holding) map[string]string {
	u := unconfirmed{Term: term}
	for _, h := range before {
		u.Before = append(u.Before, predecessor{
			Holder:       h.Holder,
			Term:         h.Term,
			Version:      h.Version,
			TTLMS:        h.TTL.Milliseconds(),
			AcquiredAtMS: toMilli(h.AcquiredAt),
			RenewedAtMS:  toMilli(h.RenewedAt),
			Labels:       h.Labels,
		})
	}
	return withReserved(labels, unconfirmedLabel, u)
}

// fromMilli and toMilli keep the zero time zero.
func fromMilli(ms int64) time.Time {
	if ms == 0 {
		return time.Time{}
	}
	return time.UnixMilli(ms)
}

func toMilli(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMilli()
}

func hasReserved(o Object) bool {
	for name := range o.Labels {
		if strings.HasPrefix(name, Reserved) {
			return true
		}
	}
	return false
}

// reserved reads a reserved label. It returns false where there is none that can be
// read.
func reserved(o Object, label string, value any) bool {
	text, ok := o.Labels[label]
	return ok && json.Unmarshal([]byte(text), value) == nil
}

// withReserved returns labels with a reserved one.
func withReserved(labels map[string]string, label string, value any) map[string]string {
	text, err := json.Marshal(value)
	if err != nil {
		panic(fmt.Sprintf("bug: a label of strings and numbers does not encode: %v", err))
	}
	labels = maps.Clone(labels)
	if labels == nil {
		labels = make(map[string]string, 1)
	}
	labels[label] = string(text)
	return labels
}
