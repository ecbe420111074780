package claims

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
)

// Status is what a [Session] knows without asking the store. In JSON the names are as the tags
// say, times are RFC 3339, and durations are seconds. JSON can be read back.
type Status struct {
	ID        string            `json:"id"`     // of the session that began last; empty: none has begun
	Holder    string            `json:"holder"` // this process's name
	Labels    map[string]string `json:"labels,omitempty"`
	Valid     bool              `json:"valid"`               // see [Session.Valid]
	Closing   bool              `json:"closing"`             // nothing more is claimed; the session lasts until all funcs have returned
	Since     time.Time         `json:"since,omitzero"`      // when the session began
	RenewedAt time.Time         `json:"renewed_at,omitzero"` // when its last renewal was sent; zero: it is over
	TTL       time.Duration     `json:"-"`
	TrustLeft time.Duration     `json:"-"`          // until its claims may not be relied upon any more
	Stuck     bool              `json:"stuck"`      // funcs of a session that was lost did not return in time, and still run
	LastError string            `json:"last_error"` // of the last attempt to begin or renew a session; empty: it succeeded
	Kinds     []KindStatus      `json:"kinds"`      // by name

	// Since the process started.
	Begun       int   `json:"begun"`        // sessions
	Lost        int   `json:"lost"`         // sessions
	Removed     int64 `json:"removed"`      // expired sessions of other processes that this process has removed
	Freed       int64 `json:"freed"`        // rows of such sessions that it has freed; two that free the same rows at once both count them
	SweepErrors int64 `json:"sweep_errors"` // failed looks for such sessions and their rows; all are retried
}

// KindStatus is what a session knows about the keys of one kind, or the rows of one table.
type KindStatus struct {
	Kind    string `json:"kind"`
	Claims  int    `json:"claims"`  // that it holds
	Running int    `json:"running"` // funcs of [Keys.Do], also those of sessions that were lost
}

// Running returns how many funcs run, for keys of all kinds.
func (s Status) Running() (n int) {
	for _, k := range s.Kinds {
		n += k.Running
	}
	return n
}

type statusFields Status // without its methods

type statusJSON struct {
	*statusFields
	TTL       float64 `json:"ttl_seconds"`
	TrustLeft float64 `json:"trust_left_seconds"`
}

// MarshalJSON encodes the status as its documentation says.
func (s Status) MarshalJSON() ([]byte, error) {
	fields := statusFields(s)
	return json.Marshal(statusJSON{&fields, s.TTL.Seconds(), s.TrustLeft.Seconds()})
}

// UnmarshalJSON reads what MarshalJSON has written.
func (s *Status) UnmarshalJSON(data []byte) error {
	fields := statusJSON{statusFields: (*statusFields)(s)}
	if err := json.Unmarshal(data, &fields); err != nil {
		return err
	}
	seconds := func(s float64) time.Duration { return time.Duration(math.Round(s * float64(time.Second))) }
	s.TTL, s.TrustLeft = seconds(fields.TTL), seconds(fields.TrustLeft)
	return nil
}

// history is what [Session.Status] tells beside the present. The session's mu guards it.
type history struct {
	begun, lost int
	last        *term          // that has begun; nil: none has
	terms       map[*term]bool // that have begun, and whose funcs have not all returned
	failed      error          // why no session begins; nil: the last attempt succeeded
}

// began notes that a term has begun. The caller holds the mutex.
func (h *history) began(t *term) {
	if h.terms == nil {
		h.terms = make(map[*term]bool)
	}
	h.last, h.failed = t, nil
	h.terms[t] = true
	h.begun++
}

// Status returns what the session knows. It does no I/O, and takes no longer for a million claims
// than for one.
func (s *Session) Status() Status {
	status := Status{
		Holder: s.cfg.Holder, Labels: maps.Clone(s.cfg.Labels), TTL: s.cfg.TTL,
		Kinds:   []KindStatus{}, // never null in JSON
		Removed: s.sweeper.removed.Load(), Freed: s.sweeper.freed.Load(), SweepErrors: s.sweeper.errors.Load(),
	}
	s.mu.Lock()
	for kind, k := range s.kinds {
		status.Kinds = append(status.Kinds, KindStatus{Kind: kind, Claims: k.ledger.size(), Running: len(k.running)})
	}
	status.Valid, status.Closing = s.term != nil && s.term.Valid(), s.closed
	status.Begun, status.Lost = s.history.begun, s.history.lost
	last, failed := s.history.last, s.history.failed
	terms := slices.Collect(maps.Keys(s.history.terms))
	s.mu.Unlock()

	slices.SortFunc(status.Kinds, func(a, b KindStatus) int { return cmp.Compare(a.Kind, b.Kind) })
	for _, t := range terms {
		status.Stuck = status.Stuck || t.coordinator.Status().Stuck
	}
	if last != nil {
		record := last.coordinator.Status()
		status.ID, status.Since = last.id, last.AcquiredAt()
		status.RenewedAt, status.TrustLeft, status.LastError = record.RenewedAt, record.TrustLeft, record.LastError
	}
	if failed != nil {
		status.LastError = failed.Error()
	}
	return status
}

// Listing is what sessions owned at one moment.
type Listing struct {
	Claims []Claim   // in no order
	At     time.Time // the moment, by the database's clock; zero if there were no claims
}

// Age returns how old a claim of the listing was, by the database's clock: negative if the clock
// was set back since.
func (l Listing) Age(c Claim) time.Duration { return l.At.Sub(time.UnixMicro(c.Token)) }

// List returns the claims of all sessions on keys of some kinds, as of one moment: one
// statement. Those of sessions that are gone are not listed. A process that has crashed is
// listed until its session has expired and was removed. It is meant for kinds of some thousand
// keys. It works whether Run runs or not.
func (s *Session) List(ctx context.Context, kinds ...string) (Listing, error) {
	listing, err := s.list(ctx, kinds)
	return listing, opError("list claims of "+strings.Join(kinds, ", "), err)
}

func (s *Session) list(ctx context.Context, kinds []string) (Listing, error) {
	if len(kinds) == 0 || slices.Contains(kinds, "") {
		return Listing{}, fmt.Errorf("%w: a kind is missing", tenure.ErrInvalid)
	}
	for _, kind := range kinds {
		if err := objects.ValidText("kind", kind); err != nil {
			return Listing{}, err
		}
	}
	rows, at, err := s.claims.OfKinds(ctx, kinds, s.limit)
	if err != nil {
		return Listing{}, err
	}
	listing := Listing{Claims: make([]Claim, 0, len(rows)), At: at}
	for _, r := range rows {
		listing.Claims = append(listing.Claims, claimOf(r.Kind, r.Session, r))
	}
	return listing, nil
}
