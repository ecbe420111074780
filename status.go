package tenure

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"
)

// Role is what a replica is with regard to a lease.
type Role uint8

const (
	Standby    Role = iota // waits for the lease
	Confirming             // has taken the lease over, and makes sure that its predecessor is gone before the job begins
	Holder                 // holds the lease; its job runs
	Stopping               // its job has been told to return; the lease is released once it has
)

func (r Role) String() string {
	switch r {
	case Standby:
		return "standby"
	case Holder:
		return "holder"
	case Stopping:
		return "stopping"
	case Confirming:
		return "confirming"
	}
	return fmt.Sprintf("role %d", uint8(r))
}

// MarshalText makes a role a word in JSON and in logs.
func (r Role) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// Status is what a [Coordinator] knows without asking the store. A standby knows
// of the holder what it read last, which may be as long ago as the TTL.
//
// In JSON the names are as the tags say, times are RFC 3339, durations are
// seconds, and the lease is its key's type and ID with a slash between.
type Status struct {
	Lease   Key       `json:"-"`
	Replica string    `json:"replica"` // this replica's name
	Role    Role      `json:"role"`
	Since   time.Time `json:"since"`  // of the role
	Reason  string    `json:"reason"` // of the last change of role or holder; empty: there was none

	Holder    string            `json:"holder"`                // who held the lease when it was last seen; empty: nobody
	Labels    map[string]string `json:"labels,omitempty"`      // the holder's
	HeldSince time.Time         `json:"held_since,omitzero"`   // by the holder's clock; zero: not known
	RenewedAt time.Time         `json:"last_renewal,omitzero"` // by this replica's clock where it holds, else by the store's

	Token          int64         `json:"token"` // of the term held; 0 for a standby
	TrustLeft      time.Duration `json:"-"`     // in the term held; 0 for a standby, and where there is no lease to lose
	RenewalLatency time.Duration `json:"-"`     // of the last renewal, or the acquire, of the term held; 0 for a standby

	Terms     int        `json:"terms"`      // held so far by this coordinator
	Stuck     bool       `json:"stuck"`      // the job did not return in time, and still runs
	LastError string     `json:"last_error"` // of the last call to the store; empty: it went well
	Recent    []PastTerm `json:"recent"`     // terms that are over, the latest first, ten at most
}

// MarshalJSON encodes the status as its documentation says.
func (s Status) MarshalJSON() ([]byte, error) {
	type fields Status // without this method
	return json.Marshal(struct {
		Lease string `json:"lease"`
		fields
		TrustLeft      float64 `json:"trust_left_seconds"`
		RenewalLatency float64 `json:"renewal_latency_seconds"`
	}{s.Lease.String(), fields(s), s.TrustLeft.Seconds(), s.RenewalLatency.Seconds()})
}

// PastTerm is a term that is over: one of this replica, or one that it saw as a
// standby.
type PastTerm struct {
	ID     string    `json:"id"` // the term's; empty in a record of another program
	Holder string    `json:"holder"`
	Token  int64     `json:"token"`          // 0: not known; only of its own terms does a replica know it
	Began  time.Time `json:"began,omitzero"` // by the holder's clock; zero: not known
	Ended  time.Time `json:"ended"`          // by this replica's clock: when it was given back, or was seen to be over
	Reason string    `json:"reason"`
}

// Status returns what the coordinator knows. It does no I/O.
func (c *Coordinator) Status() Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.currentStatus()
}

// currentStatus needs the mutex.
func (c *Coordinator) currentStatus() Status {
	s := &c.state
	status := Status{
		Lease:     c.lease.cfg.Key,
		Replica:   c.lease.cfg.Holder,
		Role:      s.role,
		Since:     s.since,
		Reason:    s.reason,
		Holder:    s.holder,
		Terms:     s.terms,
		Stuck:     s.stuck,
		LastError: s.lastError,
		Recent:    make([]PastTerm, 0, len(s.past)),
	}
	for _, past := range slices.Backward(s.past) {
		status.Recent = append(status.Recent, past)
	}
	if c.held != nil {
		status.Token, status.RenewalLatency = c.held.Token(), s.latency
		if !c.held.local() {
			status.TrustLeft = c.held.Remaining()
		}
	}
	switch {
	case s.seen != nil:
		status.Labels = maps.Clone(s.seen.Labels)
		status.HeldSince, status.RenewedAt = s.seen.AcquiredAt, s.seen.RenewedAt
	case c.held != nil && s.holder != "":
		status.Labels = maps.Clone(c.lease.cfg.Labels)
		status.HeldSince = c.held.AcquiredAt()
		if !c.held.local() {
			status.RenewedAt = c.held.lastAttempt().Wall
		}
	}
	return status
}

// Healthy is for a liveness probe, and does no I/O. It returns an error only where
// something is wrong that a restart of the process would mend: a job still runs
// that did not return in time when its term was over, or the trust in a term ended
// longer than the tolerance ago, and the coordinator has still not dealt with it. To be
// a standby is healthy, and so is to have a database that does not answer.
func (c *Coordinator) Healthy(tolerance time.Duration) error {
	c.mu.Lock()
	stuck, held := c.state.stuck, c.held
	c.mu.Unlock()
	if stuck {
		return fmt.Errorf("tenure: %s: the job still runs although its term is over", c.lease.cfg.Key)
	}
	if held == nil || held.local() {
		return nil
	}
	if past := -held.timeLeft(); past > tolerance {
		return fmt.Errorf("tenure: %s: the trust in the term ended %v ago", c.lease.cfg.Key, past.Round(time.Millisecond))
	}
	return nil
}
