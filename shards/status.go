package shards

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/tenurelib/tenure/internal/health"
	"github.com/tenurelib/tenure/internal/logtext"
	"github.com/tenurelib/tenure/internal/pace"
)

// Status is what a [Member] knows about itself, as of its last look at the others.
type Status struct {
	Kind    string `json:"kind"`
	Session string `json:"session,omitempty"` // empty: this process does not take part
	Members int    `json:"members"`           // processes that are present
	Counted int    `json:"counted"`           // how many of them have settled
	Settled bool   `json:"settled"`           // whether this process has settled

	// Share is how many of the Count shards this process should have: 0 until it has settled.
	Share int `json:"share"`
	Count int `json:"count"`

	Shards    []ShardStatus `json:"shards"`              // the shards that it has, by ID
	Stuck     int           `json:"stuck"`               // how many of them do not stop
	Failing   int           `json:"failing"`             // how many of them fail
	Unhealthy string        `json:"unhealthy,omitempty"` // why Check fails

	// Since the process started.
	Claimed int `json:"claimed"`  // shards that this process has claimed
	GivenUp int `json:"given_up"` // how many of them it has freed for other processes while it kept running
}

// ShardStatus is the status of one shard that this process has.
type ShardStatus struct {
	ID       string    `json:"id"`
	Token    int64     `json:"token"`
	Since    time.Time `json:"since"`              // when it was claimed
	Stopping time.Time `json:"stopping,omitzero"`  // when it was told to stop; zero: it was not
	Stuck    bool      `json:"stuck,omitempty"`    // it was told more than 10 seconds ago
	Failing  bool      `json:"failing,omitempty"`  // its func has returned too early within the last minute
	Failures int       `json:"failures,omitempty"` // how often its func has returned too early
	Error    string    `json:"error,omitempty"`    // of the last time
}

// failingFor is how long a shard counts as failing after its func has returned too early. It is longer than
// the pause before the next call.
const failingFor = 2 * longestPause

// Status returns the member's status. It does no I/O.
func (m *Member) Status() Status {
	m.mu.Lock()
	defer m.mu.Unlock()
	v := m.current()
	status := Status{
		Kind: m.cfg.Kind, Session: m.me.Session, Members: v.members, Counted: v.counted,
		Settled: v.counts(), Share: v.share, Count: v.shards,
		Shards: make([]ShardStatus, 0, len(m.shards)), Claimed: m.claimed, GivenUp: m.givenUp,
	}
	if m.checkErr != nil {
		status.Unhealthy = m.checkErr.Error()
	}
	for _, s := range m.shards {
		one := ShardStatus{ID: s.id, Token: s.claim.Token, Since: s.begun, Failures: s.failures}
		if s.cause != nil {
			one.Stopping, one.Stuck = s.stopped, time.Since(s.stopped) >= tooLong
		}
		if s.err != nil {
			one.Error, one.Failing = s.err.Error(), time.Since(s.failed) < failingFor
		}
		if one.Stuck {
			status.Stuck++
		}
		if one.Failing {
			status.Failing++
		}
		status.Shards = append(status.Shards, one)
	}
	slices.SortFunc(status.Shards, func(a, b ShardStatus) int { return cmp.Compare(a.ID, b.ID) })
	return status
}

// unhealthy returns why this process must not work, or nil.
func (m *Member) unhealthy() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.checkErr
}

// check calls Check until ctx is done.
func (m *Member) check(ctx context.Context) {
	check := health.Check{Timeout: m.paces.RenewInterval / 2}
	for ctx.Err() == nil {
		answered, err := check.Ask(ctx, func(ctx context.Context) error { return logtext.Sound(m.cfg.Check(ctx)) })
		if !answered {
			err = errors.New("Check has not returned in time")
		}
		if ctx.Err() == nil {
			m.checked(err)
		}
		pace.Sleep(ctx, m.paces.RenewInterval)
	}
}

// checked notes the answer of Check, and logs a change.
func (m *Member) checked(err error) {
	m.mu.Lock()
	was := m.checkErr
	m.checkErr = err
	m.mu.Unlock()
	switch {
	case err != nil && (was == nil || was.Error() != err.Error()):
		m.cfg.Logger.Warn("shards: Check fails", "kind", m.cfg.Kind, "error", err)
	case err == nil && was != nil:
		m.cfg.Logger.Info("shards: Check succeeds", "kind", m.cfg.Kind)
	}
	if (err == nil) != (was == nil) {
		m.wake()
	}
}
