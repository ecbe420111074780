package shards

import (
	"cmp"
	"slices"
	"time"
)

// Status is what a [Shards] knows of itself, as of its last look at the others.
type Status struct {
	Kind    string `json:"kind"`
	Session string `json:"session,omitempty"` // empty: this process does not take part
	Members int    `json:"members"`           // processes that are there
	Counted int    `json:"counted"`           // those of them that have settled

	// Share is how many of the Count shards this process should have: 0 until it has settled.
	Share int `json:"share"`
	Count int `json:"count"`

	Shards    []ShardStatus `json:"shards"`              // those that it has, by ID
	Unhealthy string        `json:"unhealthy,omitempty"` // why Check fails
}

// ShardStatus is what is known of one shard that this process has.
type ShardStatus struct {
	ID       string    `json:"id"`
	Token    int64     `json:"token"`
	Since    time.Time `json:"since"`              // when it was claimed
	Stopping time.Time `json:"stopping,omitzero"`  // when it was told to stop; zero: it was not
	Failures int       `json:"failures,omitempty"` // how often its func has returned by itself
	Error    string    `json:"error,omitempty"`    // of the last of these
}

// Status returns what this process has, without I/O.
func (sh *Shards) Status() Status {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	v := sh.current()
	status := Status{
		Kind: sh.cfg.Kind, Session: sh.me.Session, Members: v.members, Counted: v.counted,
		Share: v.share, Count: v.shards, Shards: make([]ShardStatus, 0, len(sh.shards)),
	}
	if sh.sick != nil {
		status.Unhealthy = sh.sick.Error()
	}
	for _, s := range sh.shards {
		one := ShardStatus{ID: s.id, Token: s.claim.Token, Since: s.begun, Failures: s.failures}
		if s.cause != nil {
			one.Stopping = s.stopped
		}
		if s.err != nil {
			one.Error = s.err.Error()
		}
		status.Shards = append(status.Shards, one)
	}
	slices.SortFunc(status.Shards, func(a, b ShardStatus) int { return cmp.Compare(a.ID, b.ID) })
	return status
}
