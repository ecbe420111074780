package shards

import (
	"cmp"
	"slices"
	"time"
)

// Status is what a [Member] knows of itself, as of its last look at the others.
type Status struct {
	Kind    string `json:"kind"`
	Session string `json:"session,omitempty"` // empty: this process does not take part
	Members int    `json:"members"`           // processes that are there
	Counted int    `json:"counted"`           // those of them that have settled
	Settled bool   `json:"settled"`           // this process is one of those

	// Share is how many of the Count shards this process should have: 0 until it has settled.
	Share int `json:"share"`
	Count int `json:"count"`

	Shards    []ShardStatus `json:"shards"`              // those that it has, by ID
	Stuck     int           `json:"stuck"`               // how many of them do not stop
	Failing   int           `json:"failing"`             // and how many fail
	Unhealthy string        `json:"unhealthy,omitempty"` // why Check fails

	// Since the process started.
	Claimed int `json:"claimed"`  // shards that this process has claimed
	GivenUp int `json:"given_up"` // those of them that it has freed for others, but not because it stops
}

// ShardStatus is what is known of one shard that this process has.
type ShardStatus struct {
	ID       string    `json:"id"`
	Token    int64     `json:"token"`
	Since    time.Time `json:"since"`              // when it was claimed
	Stopping time.Time `json:"stopping,omitzero"`  // when it was told to stop; zero: it was not
	Stuck    bool      `json:"stuck,omitempty"`    // that was more than 10 seconds ago
	Failing  bool      `json:"failing,omitempty"`  // its func has returned by itself within the last minute
	Failures int       `json:"failures,omitempty"` // how often it has
	Error    string    `json:"error,omitempty"`    // of the last of these
}

// failingFor is how long a shard counts as failing after its func has returned by itself: longer
// than the pause before the next call.
const failingFor = 2 * longestPause

// Status returns what this process has, without I/O.
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
