package tenure

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"maps"
	"slices"
	"time"

	"github.com/tenurelib/tenure/internal/logtext"
	"github.com/tenurelib/tenure/internal/seconds"
)

// Status is what a [Coordinator] knows without asking the store. A standby knows the holder from
// its last read, up to a TTL ago, or longer ago if Stale is set.
//
// In JSON the names are those of the tags, times are RFC 3339, durations are in seconds, and the
// lease is the type and the ID of its key with a slash between them. A Status can be decoded from
// its JSON.
type Status struct {
	Lease   Key       `json:"-"`
	Replica string    `json:"replica"` // this replica's name
	Role    Role      `json:"role"`
	Since   time.Time `json:"since"`  // when the role began
	Reason  string    `json:"reason"` // of the last change of role or holder; empty: there was none

	// SettlesAt is when a failover of the database will have settled, by this replica's clock: until then no
	// replica takes the lease, because the database may have lost the holder's record. Zero: no failover is
	// settling.
	SettlesAt time.Time `json:"settles_at,omitzero"`

	StandsDown bool `json:"stands_down,omitempty"` // this replica does not compete: see [Coordinator.StandDown] and [Drain]

	Holder    string            `json:"holder"`              // when the lease was last seen; empty: none
	Stale     bool              `json:"stale"`               // the holder's record has expired since it was read: the lease may now be free, or another replica's
	Labels    map[string]string `json:"labels,omitempty"`    // the holder's
	HeldSince time.Time         `json:"held_since,omitzero"` // by the holder's clock; zero: not known
	RenewedAt time.Time         `json:"renewed_at,omitzero"` // by this replica's clock
	TTL       time.Duration     `json:"-"`                   // the holder's; this replica's if no holder is known; 0 if there is no lease to lose

	// All of these are 0 for a standby. All but Token and RenewalLatency are also 0 if there
	// is no lease to lose: see [Traits].
	Token          int64         `json:"token"`               // of the term
	Witnessed      bool          `json:"witnessed,omitempty"` // see [Term.Witnessed]
	TrustLeft      time.Duration `json:"-"`                   // in the term
	TrustGiven     time.Duration `json:"-"`                   // by each renewal: TTL − Margin
	RenewDeadline  time.Duration `json:"-"`                   // from the last renewal until the job is told to return
	RenewalLatency time.Duration `json:"-"`                   // of the term's last renewal, or of its acquire

	Terms     int        `json:"terms"`      // that this coordinator has held
	Stuck     bool       `json:"stuck"`      // the job did not return in time, and still runs
	LastError string     `json:"last_error"` // of the last call to the store; empty: it succeeded
	Recent    []PastTerm `json:"recent"`     // terms that are over, the latest first, at most ten
	Runs      []RunStats `json:"runs"`       // of this replica's job, by name, in the order in which the names were first used
}

type statusFields Status // without its methods

type statusJSON struct {
	Lease *Key `json:"lease"`
	*statusFields
	TTL            *seconds.Duration `json:"ttl_seconds"`
	TrustLeft      *seconds.Duration `json:"trust_left_seconds"`
	TrustGiven     *seconds.Duration `json:"trust_given_seconds"`
	RenewDeadline  *seconds.Duration `json:"renew_deadline_seconds"`
	RenewalLatency *seconds.Duration `json:"renewal_latency_seconds"`
}

// inJSON returns what JSON is written from, and read into.
func (s *Status) inJSON() *statusJSON {
	return &statusJSON{&s.Lease, (*statusFields)(s), seconds.In(&s.TTL), seconds.In(&s.TrustLeft), seconds.In(&s.TrustGiven),
		seconds.In(&s.RenewDeadline), seconds.In(&s.RenewalLatency)}
}

// MarshalJSON encodes the status as its documentation says.
func (s Status) MarshalJSON() ([]byte, error) { return json.Marshal(s.inJSON()) }

// UnmarshalJSON reads what MarshalJSON writes.
func (s *Status) UnmarshalJSON(data []byte) error { return json.Unmarshal(data, s.inJSON()) }

// PastTerm is a term that is over, of this replica or of another that it saw as a standby.
type PastTerm struct {
	ID     string    `json:"id"` // the term's; empty in a record of another program
	Holder string    `json:"holder"`
	Token  int64     `json:"token"`          // 0: not known, as for any term of another replica
	Began  time.Time `json:"began,omitzero"` // by the holder's clock; zero: not known
	Ended  time.Time `json:"ended"`          // by this replica's clock: when it was released, or seen to be over
	Reason string    `json:"reason"`         // how it ended, as other replicas see it too; for this replica's own terms, also why
}

// RunStats is what a coordinator knows about the runs with one name in its replica's job: see
// [RecordRun]. If a func of the job returns an error without having been told to return, that
// ends the term, and counts as a failed run with the func's name, watch or reconcile; its start
// is not counted.
type RunStats struct {
	Name         string    `json:"name"`
	Running      int       `json:"running"` // now
	Started      int       `json:"started"`
	Succeeded    int       `json:"succeeded"`
	Failed       int       `json:"failed"`
	RunningSince time.Time `json:"running_since,omitzero"` // when the oldest run that has not ended began; zero: none is running
	Overdue      bool      `json:"overdue,omitempty"`      // a sweep of Every is running, and has lasted for at least three intervals and at least a minute
	LastStart    time.Time `json:"last_start,omitzero"`
	LastSuccess  time.Time `json:"last_success,omitzero"` // when the last run that succeeded ended; zero: none has
	LastFailure  time.Time `json:"last_failure,omitzero"` // when the last run that failed ended; zero: none has
	LastError    string    `json:"last_error"`            // of the last run that failed
}

// JobRun is one run of a replica's job: see [RecordRun].
type JobRun struct {
	Name    string
	Outcome RunOutcome
	Began   time.Time
	Ended   time.Time // zero if it has not ended
	Oldest  time.Time // when the oldest run with this name that has not ended began; zero: none is running
	Err     error     // what it returned
}

// RunOutcome says how a run has ended, if it has ended.
type RunOutcome string

const (
	RunBegan       RunOutcome = "began" // it has not ended
	RunSucceeded   RunOutcome = "succeeded"
	RunFailed      RunOutcome = "failed"      // it returned an error, or panicked
	RunInterrupted RunOutcome = "interrupted" // it returned an error after its term had ended
)

// Status returns what the coordinator knows. It does no I/O.
func (c *Coordinator) Status() Status {
	c.monitor.mu.Lock()
	defer c.monitor.mu.Unlock()
	return c.status()
}

// status is for callers that hold the monitor's mutex.
func (c *Coordinator) status() Status {
	s := &c.monitor.state
	status := Status{
		Lease:     c.monitor.lease,
		Replica:   c.monitor.replica,
		Role:      s.role,
		Since:     s.since,
		Reason:    s.reason,
		Holder:    s.holder,
		Terms:     s.terms,
		Stuck:     s.stuck,
		LastError: s.lastError,
		TTL:       c.lease.cfg.TTL,
		Recent:    append([]PastTerm{}, s.past...), // never null in JSON
		Runs:      append([]RunStats{}, s.runs...),
	}
	slices.Reverse(status.Recent)
	status.StandsDown = s.down
	if s.held == nil && time.Now().Before(s.settles) {
		status.SettlesAt = s.settles
	}
	if s.held != nil {
		status.Token, status.Witnessed, status.RenewalLatency = s.held.Token(), s.held.Witnessed(), s.latency
		if !s.held.local() {
			status.TrustLeft, status.TrustGiven, status.RenewDeadline = s.held.Remaining(), s.held.trusted, c.cfg.RenewDeadline
		}
	}
	switch {
	case s.seen != nil:
		status.Labels, status.TTL = maps.Clone(s.seen.Labels), s.seen.TTL
		status.HeldSince = s.seen.AcquiredAt
		if c.turns == nil {
			status.RenewedAt = s.seenAt.Add(-max(0, s.seen.Age)).Round(0)
			status.Stale = c.isStale(s)
		}
	case s.held != nil && s.holder != "":
		status.Labels = maps.Clone(c.lease.cfg.Labels)
		status.HeldSince = s.held.AcquiredAt()
		if !s.held.local() {
			status.RenewedAt = s.held.lastAttempt().Wall
			// Of a job that does not return: another replica may hold the lease by now.
			status.Stale = time.Since(s.held.lastAttempt().Mono) > c.lease.cfg.TTL+time.Second
		}
	}
	if c.turns != nil {
		status.TTL = 0
	}
	return status
}

// isStale reports whether the record of another holder has expired since it was read. A standby
// usually reads it again when it expires, which takes a moment.
func (c *Coordinator) isStale(s *state) bool {
	age := max(0, s.seen.Age)
	if s.seen.Term == "" || c.lease.cfg.Expiry == ExpiryObserved { // then the age does not count
		age = 0
	}
	return age+time.Since(s.seenAt) > s.seen.TTL+time.Second
}

// Changes yields the status now, and again each time that the role, the holder, the last error or the
// stuck job changes, or a sweep becomes overdue, until ctx is done or the loop ends. Renewals and
// runs of the job are not changes, nor is the moment when the status becomes stale.
//
// A reader that is slower than the changes gets the latest status and misses those in between;
// the coordinator never waits for a reader. There may be any number of readers, and they do not
// take changes from each other. Changes starts no goroutine.
func (c *Coordinator) Changes(ctx context.Context) iter.Seq[Status] {
	return func(yield func(Status) bool) {
		for ctx.Err() == nil {
			status, changed := c.follow()
			if !yield(status) {
				return
			}
			select {
			case <-changed:
			case <-ctx.Done():
			}
		}
	}
}

// follow returns the status, and a channel that is closed when it has changed.
func (c *Coordinator) follow() (Status, <-chan struct{}) {
	c.monitor.mu.Lock()
	defer c.monitor.mu.Unlock()
	if c.monitor.state.changed == nil {
		c.monitor.state.changed = make(chan struct{})
	}
	return c.status(), c.monitor.state.changed
}

// Healthy is for a liveness probe, and does no I/O. It returns an error only if a restart of
// the process would help: if a job did not return in time after its term and still runs, if
// the trust in a term ended longer ago than the tolerance (0: 10 seconds) and the coordinator has not
// reacted to that, or if the store is closed for good ([ErrClosed]). A standby is healthy, and
// so is a replica whose database doesn't answer.
func (c *Coordinator) Healthy(tolerance time.Duration) error {
	c.monitor.mu.Lock()
	stuck, held, closed := c.monitor.state.stuck, c.monitor.state.held, c.monitor.state.closed
	c.monitor.mu.Unlock()
	if stuck {
		return fmt.Errorf("tenure: %s: the job still runs although its term is over", c.lease.cfg.Key)
	}
	if closed != nil {
		return fmt.Errorf("tenure: %s: %w", c.lease.cfg.Key, closed)
	}
	if held == nil || held.local() {
		return nil
	}
	if past := -held.timeLeft(); past > cmp.Or(tolerance, 10*time.Second) {
		return fmt.Errorf("tenure: %s: the trust in the term ended %v ago", c.lease.cfg.Key, past.Round(time.Millisecond))
	}
	return nil
}

// state is what a coordinator knows. The monitor's mutex guards it.
type state struct {
	role      Role
	since     time.Time
	reason    string
	down      bool     // it does not compete until it is asked to
	held      *Term    // until it is released; nil for a standby
	holder    string   // as last seen; empty: none is known
	seen      *Holding // another holder's record, as last read; nil: there is none
	seenAt    time.Time
	ending    string // what became of the record of the term held, in the words of other replicas
	working   bool   // the job's funcs were started, and not all have returned
	stuck     bool
	settles   time.Time // see [Status]
	terms     int
	token     int64 // of the last term
	latency   time.Duration
	overdue   time.Time // when the first of the latest failed renewals failed; zero: the last renewal succeeded
	lastError string
	class     string          // of lastError
	closed    error           // an [ErrClosed], once a call to the store has failed with it
	retries   logtext.Retries // since the last call to the store that succeeded
	past      []PastTerm      // the latest last; nil until a term is over
	runs      []RunStats      // one for each name
	running   [][]openRun     // for each name, the runs that have not ended, the oldest first
	changed   chan struct{}   // closed at the next change; nil: no reader waits for one
}

// openRun is a run that has not ended.
type openRun struct {
	began   time.Time
	overdue bool // see [RunStats]
}

// become notes a change of role.
func (s *state) become(role Role, reason string) {
	s.role, s.since, s.reason = role, time.Now(), reason
}

// saw notes another holder's record; nil: there is none.
func (s *state) saw(h *Holding) {
	if h == nil || h.isOffer() {
		if s.seen != nil {
			how := "released"
			if h != nil {
				how = h.how()
			}
			s.endTerm(s.seen.pastTerm(how))
		}
		s.seen, s.holder = nil, ""
		return
	}
	if s.seen != nil && !s.seen.sameTerm(h) {
		s.endTerm(s.seen.pastTerm(followedBy(h)))
	}
	s.reads(h)
}

// reads notes the record of another holder as it was just read.
func (s *state) reads(h *Holding) { s.seen, s.holder, s.seenAt = h, h.Holder, time.Now() }

func (h *Holding) pastTerm(reason string) PastTerm {
	return PastTerm{ID: h.Term, Holder: h.Holder, Began: h.AcquiredAt, Ended: time.Now(), Reason: reason}
}

func followedBy(h *Holding) string { return "followed by " + h.Holder }

// endTerm notes a term that is over.
func (s *state) endTerm(term PastTerm) {
	const most = 10
	s.past = append(s.past, term)
	s.past = slices.Delete(s.past, 0, max(0, len(s.past)-most))
}

// ran notes that a run has begun or ended, with the text of its error.
func (s *state) ran(r *JobRun, text string) {
	i := slices.IndexFunc(s.runs, func(known RunStats) bool { return known.Name == r.Name })
	if i < 0 {
		i = len(s.runs)
		s.runs, s.running = append(s.runs, RunStats{Name: r.Name}), append(s.running, nil)
	}
	runs, running := &s.runs[i], &s.running[i]
	if r.Outcome == RunBegan {
		*running = append(*running, openRun{began: r.Began})
	} else if ended := slices.IndexFunc(*running, func(o openRun) bool { return o.began == r.Began }); ended >= 0 {
		*running = slices.Delete(*running, ended, ended+1)
	}
	runs.Running, runs.RunningSince = len(*running), time.Time{}
	runs.Overdue = slices.ContainsFunc(*running, func(o openRun) bool { return o.overdue })
	if len(*running) > 0 {
		runs.RunningSince = (*running)[0].began
	}
	r.Oldest = runs.RunningSince
	switch r.Outcome {
	case RunBegan:
		runs.Started++
		runs.LastStart = r.Began
	case RunSucceeded:
		runs.Succeeded++
		runs.LastSuccess = r.Ended
	case RunFailed:
		runs.Failed++
		runs.LastFailure, runs.LastError = r.Ended, text
	}
}

// runIsOverdue notes that the run with this name that began at that time, or next after it, should have ended.
func (s *state) runIsOverdue(name string, began time.Time) {
	for i := range s.runs {
		next := slices.IndexFunc(s.running[i], func(o openRun) bool { return !o.began.Before(began) })
		if s.runs[i].Name == name && next >= 0 {
			s.running[i][next].overdue, s.runs[i].Overdue = true, true
			s.publish()
		}
	}
}

// answered notes that the last call to the store succeeded.
func (s *state) answered() {
	s.retries.Reset()
	s.noteError("", "")
}

// noteError notes the text and the class of the error of the last call to the store, or "".
func (s *state) noteError(text, class string) {
	if class != s.class {
		s.publish()
	}
	s.lastError, s.class = text, class
}

// publish wakes all readers of [Coordinator.Changes].
func (s *state) publish() {
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
}
