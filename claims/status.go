package claims

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/seconds"
)

// Status is what a [Session] knows without asking the store. In JSON, names are as the tags say, times
// are RFC 3339, and durations are seconds. A Status can be read back from its JSON.
type Status struct {
	ID        string            `json:"id"`     // of the latest session; empty: none has begun
	Holder    string            `json:"holder"` // this process's name
	Labels    map[string]string `json:"labels,omitempty"`
	Valid     bool              `json:"valid"`               // see [Session.Valid]
	Closing   bool              `json:"closing"`             // it claims nothing more, and lasts until all funcs have returned
	Since     time.Time         `json:"since,omitzero"`      // when the session began
	RenewedAt time.Time         `json:"renewed_at,omitzero"` // when its last renewal was sent; zero: it is over
	TTL       time.Duration     `json:"-"`
	TrustLeft time.Duration     `json:"-"`          // how long its claims may still be relied upon
	Stuck     bool              `json:"stuck"`      // funcs of a lost session did not return in time, and still run
	LastError string            `json:"last_error"` // of the last attempt to begin or renew a session; empty: it succeeded
	Kinds     []KindStatus      `json:"kinds"`      // by name

	// Since the process started.
	Begun       int   `json:"begun"`        // sessions
	Lost        int   `json:"lost"`         // sessions
	Removed     int64 `json:"removed"`      // expired sessions of other processes that this process has removed
	Freed       int64 `json:"freed"`        // rows of such sessions that it has freed; two processes that free a row at once both count it
	SweepErrors int64 `json:"sweep_errors"` // failures to find such sessions or free their rows; all are retried
}

// KindStatus is what a session knows about the keys of one kind, or the rows of one table.
type KindStatus struct {
	Kind    string `json:"kind"`
	Claims  int    `json:"claims"`  // that it holds
	Running int    `json:"running"` // funcs of [Keys.Do], also those of lost sessions
}

type statusFields Status // without its methods

type statusJSON struct {
	*statusFields
	TTL       *seconds.Duration `json:"ttl_seconds"`
	TrustLeft *seconds.Duration `json:"trust_left_seconds"`
}

func (s *Status) inJSON() *statusJSON {
	return &statusJSON{(*statusFields)(s), seconds.In(&s.TTL), seconds.In(&s.TrustLeft)}
}

// MarshalJSON encodes the status as its documentation says.
func (s Status) MarshalJSON() ([]byte, error) { return json.Marshal(s.inJSON()) }

// UnmarshalJSON reads what MarshalJSON has written.
func (s *Status) UnmarshalJSON(data []byte) error { return json.Unmarshal(data, s.inJSON()) }

// history is what [Session.Status] tells about the past. The session's mu guards it.
type history struct {
	begun, lost int
	last        *term          // that has begun; nil: none has
	terms       map[*term]bool // that have begun, and are not over yet
	failed      error          // of the last attempt to begin a session; nil: it succeeded
}

// began notes that a term has begun. The caller holds the session's mu.
func (h *history) began(t *term) {
	if h.terms == nil {
		h.terms = make(map[*term]bool)
	}
	h.last, h.failed = t, nil
	h.terms[t] = true
	h.begun++
}

// Status returns what the session knows. It does no I/O, and is as fast with a million claims as with
// one.
func (s *Session) Status() Status {
	status := Status{
		Holder: s.cfg.Holder, Labels: maps.Clone(s.cfg.Labels), TTL: s.cfg.TTL,
		Kinds:   []KindStatus{}, // never null in JSON
		Removed: s.sweeper.removed.Load(), Freed: s.sweeper.freed.Load(), SweepErrors: s.sweeper.errors.Load(),
	}
	s.mu.Lock()
	for kind, k := range s.kinds {
		if k.ofRows() || !isOwnKind(kind) {
			status.Kinds = append(status.Kinds, KindStatus{Kind: kind, Claims: k.ledger.size(), Running: len(k.running)})
		}
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
	Claims []Claim   // in no particular order
	At     time.Time // the moment, by the database's clock; zero if there were no claims
}

// Age returns how old a claim of the listing was, by the database's clock. It is negative if the clock
// was set back after the claim began.
func (l Listing) Age(c Claim) time.Duration { return l.At.Sub(time.UnixMicro(c.Token)) }

// List returns the claims of all sessions on keys of some kinds, as of one moment. It sends one statement, and
// is meant for kinds with a few thousand keys. Claims of sessions that are gone are not listed. The claims of a
// crashed process are listed until its session has expired and been removed. List works even while
// [Session.Run] does not run.
func (s *Session) List(ctx context.Context, kinds ...string) (Listing, error) {
	listing, err := s.list(ctx, kinds)
	return listing, opError("list claims of "+strings.Join(kinds, ", "), err)
}

func (s *Session) list(ctx context.Context, kinds []string) (Listing, error) {
	if len(kinds) == 0 || slices.Contains(kinds, "") {
		return Listing{}, fmt.Errorf("%w: a kind is missing", tenure.ErrInvalid)
	}
	for _, kind := range kinds {
		if err := objects.ValidName("kind", kind); err != nil {
			return Listing{}, err
		}
	}
	rows, at, err := s.claims.OfKinds(ctx, kinds, s.limit)
	if err != nil {
		return Listing{}, err
	}
	listing := Listing{Claims: make([]Claim, 0, len(rows)), At: at}
	for _, r := range rows {
		listing.Claims = append(listing.Claims, claimOf(r.Kind, r.Session, r, false))
	}
	return listing, nil
}
