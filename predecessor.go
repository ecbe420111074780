package tenure

import (
	"maps"
	"slices"
	"time"
)

// unconfirmedLabel is the label by which the record of a term says whom it was
// taken over from, for as long as that is not confirmed. So nobody is forgotten
// where the confirming replica crashes too, or gives the lease back.
const unconfirmedLabel = reservedLabels + "unconfirmed"

// unconfirmed is what stands in that label.
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

// unconfirmedIn returns the holders who may still be at work although a term
// stands that began after theirs, the first of them first.
func unconfirmedIn(obj Object) []Holding {
	var u unconfirmed
	if !reserved(obj, unconfirmedLabel, &u) || !isTermOf(u.Term, obj) {
		return nil
	}
	holdings := make([]Holding, 0, len(u.Before))
	for _, p := range u.Before {
		holdings = append(holdings, Holding{
			Key:        obj.Key,
			Holder:     p.Holder,
			Term:       p.Term,
			Version:    p.Version,
			TTL:        time.Duration(p.TTLMS) * time.Millisecond,
			AcquiredAt: fromMilli(p.AcquiredAtMS),
			RenewedAt:  fromMilli(p.RenewedAtMS),
			Age:        obj.UpdatedAt.Sub(time.UnixMilli(p.RenewedAtMS)) + obj.Age,
			Labels:     p.Labels,
		})
	}
	return holdings
}

// unconfirmedBy makes the label's value for a record.
func unconfirmedBy(term string, before []Holding) unconfirmed {
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
	return u
}

// predecessors returns who may still be at work when this lease takes over a
// record: its holder, unless that gave it up, and those of whom that holder was not
// sure; but not this replica itself. Of one holder the last term counts.
func (l *Lease) predecessors(h Holding) []Holding {
	others := slices.Clone(h.unconfirmed)
	if !h.Offered {
		others = slices.DeleteFunc(others, func(p Holding) bool { return p.Holder == h.Holder && maps.Equal(p.Labels, h.Labels) })
		others = append(others, h)
	}
	return slices.DeleteFunc(others, l.own)
}

// own reports whether a record is of a term of this replica, whose job has returned.
func (l *Lease) own(h Holding) bool {
	l.mu.Lock()
	begun := h.Term != "" && h.Term == l.begun
	l.mu.Unlock()
	return begun || l.isLeftover(h) || l.reclaims(h)
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
