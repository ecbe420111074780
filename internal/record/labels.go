package record

import (
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"time"
)

// Reserved is the prefix of labels that only leases write.
const Reserved = "tenure."

const (
	// requestLabel asks the holder to release the lease. It lasts until the next renewal.
	requestLabel = Reserved + "release"

	// unconfirmedLabel names the earlier holders until the takeover from them is confirmed, so
	// that they are not forgotten if the confirming replica also crashes, or releases the lease.
	unconfirmedLabel = Reserved + "unconfirmed"

	// resumedLabel says that a process other than the one that began the term continues it.
	resumedLabel = Reserved + "resumed"

	// sealedLabel says that the process that began the term is about to give up what it owns,
	// so that no other process may continue the term.
	sealedLabel = Reserved + "sealed"

	// runningLabel says when a long run of the holder's job began.
	runningLabel = Reserved + "running"

	// lineageLabel has the mark of the lineage in which a valid term wrote the record.
	lineageLabel = Reserved + "lineage"
)

// A process that continues a term can renew the record as it is, if the record has the first of
// these labels and neither of the others: a request would have to be removed, and a sealed term
// must not be resumed.
const (
	Resumable = resumedLabel
	Requested = requestLabel
	Final     = sealedLabel
	Marked    = lineageLabel
)

// Request asks a holder to release its lease. Writing it gives the object a new version and
// time, but it is no renewal, and must not prolong the lease of a holder that has vanished. It
// therefore contains the previous version and time, and readers go by those.
type Request struct {
	Term        string `json:"term"`          // to which it applies: another program may keep the label in a record of its own
	To          string `json:"to,omitempty"`  // the replica that gets the lease next; empty: any
	Version     int64  `json:"version"`       // of the last renewal
	RenewedAtMS int64  `json:"renewed_at_ms"` // by the store's clock
}

// Request returns the request in the object, or nil.
func (o Object) Request() *Request {
	var r Request
	if !reserved(o, requestLabel, &r) || !o.IsOf(r.Term) || r.Version <= 0 || r.Version >= o.Version {
		return nil
	}
	return &r
}

// WithRequest returns the object's labels with a request to its holder, in favour of the replica
// to, or of any replica if to is empty.
func (o Object) WithRequest(term, to string) map[string]string {
	before := o.AsRenewed()
	return withReserved(o.Labels, requestLabel,
		Request{Term: term, To: to, Version: before.Version, RenewedAtMS: WholeMilli(before.UpdatedAt)})
}

// AsRenewed returns the object as its last renewal left it.
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

// WholeMilli returns a time as requests contain it: in milliseconds, rounded up.
func WholeMilli(t time.Time) int64 { return t.Add(time.Millisecond - 1).UnixMilli() }

// unconfirmed is the content of the label with that name.
type unconfirmed struct {
	Term   string        `json:"term"` // the one that has to confirm: another program may keep the label in a record of its own
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

// unconfirmedIn returns the holders that may still be working although a later term has begun, in
// the order of their terms.
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

// WithUnconfirmed returns labels that name the holders from which a term was taken over.
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

// mark is the content of a label that applies to one term.
type mark struct {
	Term string `json:"term"`
}

func (o Object) marked(label string) bool {
	var m mark
	return reserved(o, label, &m) && o.IsOf(m.Term)
}

// Resumed reports whether a process other than the one that began the term continues it.
func (o Object) Resumed() bool { return o.marked(resumedLabel) }

// Sealed reports whether no process but the one that began the term may continue it.
func (o Object) Sealed() bool { return o.marked(sealedLabel) }

// AsResumed returns the labels of a record whose term another process continues. They have no
// request to the holder.
func (o Object) AsResumed(term string) map[string]string {
	labels := withReserved(o.Labels, resumedLabel, mark{Term: term})
	maps.DeleteFunc(labels, func(name, _ string) bool {
		return strings.HasPrefix(name, Reserved) && name != resumedLabel && name != lineageLabel
	})
	return labels
}

// WithSeal returns the labels of a record whose term no other process may continue.
func WithSeal(labels map[string]string, term string) map[string]string {
	return withReserved(labels, sealedLabel, mark{Term: term})
}

// running is the content of the label with that name.
type running struct {
	Term    string `json:"term"` // another program may keep the label in a record of its own
	SinceMS int64  `json:"since_ms"`
}

// WithRunning returns labels that say when a long run of the holder's job began.
func WithRunning(labels map[string]string, term string, since time.Time) map[string]string {
	return withReserved(labels, runningLabel, running{Term: term, SinceMS: since.UnixMilli()})
}

// runningSince returns the time that WithRunning has written, or the zero time.
func (o Object) runningSince() time.Time {
	var r running
	if !reserved(o, runningLabel, &r) || !o.IsOf(r.Term) {
		return time.Time{}
	}
	return plausible(fromMilli(r.SinceMS))
}

// lineage is the content of the label with that name.
type lineage struct {
	Term   string `json:"term"` // another program may keep the label in a record of its own
	Mark   string `json:"mark"`
	Server string `json:"server,omitempty"` // its start; only in the record of a session, but not of an earlier version
}

// WithLineage returns labels with the mark of the lineage in which a valid term writes its record and, if it is not empty,
// the server on which that write must happen.
func WithLineage(labels map[string]string, term, mark, server string) map[string]string {
	if mark == "" {
		return labels
	}
	return withReserved(labels, lineageLabel, lineage{Term: term, Mark: mark, Server: server})
}

// LineagePart returns a part of the label that WithLineage writes for that mark and server; empty if there is no
// mark.
func LineagePart(mark, server string) string {
	label := WithLineage(nil, "", mark, server)[lineageLabel]
	_, part, _ := strings.Cut(label, `"mark":`)
	return part
}

// Mark returns the mark that WithLineage has written, or "".
func (o Object) Mark() string {
	var l lineage
	if !reserved(o, lineageLabel, &l) || !o.IsOf(l.Term) {
		return ""
	}
	return l.Mark
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

// reserved reads a reserved label. It returns false if there is none, or if it can't be decoded.
func reserved(o Object, label string, value any) bool {
	text, ok := o.Labels[label]
	return ok && json.Unmarshal([]byte(text), value) == nil
}

// withReserved returns a copy of labels with a reserved one added.
func withReserved(labels map[string]string, label string, value any) map[string]string {
	text, err := json.Marshal(value)
	if err != nil {
		panic(fmt.Sprintf("bug: cannot encode a label of strings and numbers: %v", err))
	}
	labels = maps.Clone(labels)
	if labels == nil {
		labels = make(map[string]string, 1)
	}
	labels[label] = string(text)
	return labels
}
