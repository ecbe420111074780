package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
)

// record is everything that is known about one phase: the events that the replicas
// reported, and the faults.
type record struct {
	mu      sync.Mutex // guards the fields below
	events  []event
	running map[string]string // the term of each running job, by replica
	owned   map[string]event  // the beginning of each key's running func, by key
	faults  []*fault
	copied  []int64 // the versions of the lease's record that were written by a copy of the holder
	pauses  []span
	runs    map[string][]int64 // the tokens under which each request ran
	tell    func(event)        // is called for each event
	wake    chan struct{}      // closed at the next event
}

func newRecord() *record {
	return &record{running: map[string]string{}, owned: map[string]event{}, runs: map[string][]int64{}, tell: func(event) {}, wake: make(chan struct{})}
}

// span is a period of time of one replica, or of all if replica is empty.
type span struct {
	replica  string
	from, to time.Duration
}

func (s span) covers(from, to time.Duration) bool { return s.from <= from && to <= s.to }

// read reads a replica's events until it ends, and writes them to its history.
func (r *record) read(from io.Reader, history io.Writer) error {
	lines := bufio.NewScanner(from)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var e event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			return fmt.Errorf("%w: %s", err, lines.Bytes())
		}
		if _, err := fmt.Fprintf(history, "%s\n", lines.Bytes()); err != nil {
			return err
		}
		r.add(e)
	}
	return lines.Err()
}

func (r *record) add(e event) {
	r.tell(e)
	r.mu.Lock()
	defer r.mu.Unlock()
	if e.Kind == requestRan { // there are too many for the other checks
		r.runs[e.Note] = append(r.runs[e.Note], e.Token)
		return
	}
	r.events = append(r.events, e)
	switch e.Kind {
	case jobStarted:
		r.running[e.Replica] = e.Term
	case jobStopped:
		delete(r.running, e.Replica)
	case killed:
		delete(r.running, e.Replica)
		maps.DeleteFunc(r.owned, func(_ string, begun event) bool { return begun.Replica == e.Replica })
	case claimBegun:
		if strings.HasPrefix(e.Note, actor) { // a slot may have nobody who wants it
			r.owned[e.Note] = e
		}
	case claimEnded:
		if r.owned[e.Note].Term == e.Term {
			delete(r.owned, e.Note)
		}
	case stalled:
		r.pauses = append(r.pauses, span{e.Replica, e.From, e.At})
	}
	close(r.wake)
	r.wake = make(chan struct{})
}

func (r *record) paused(replica string, from, to time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pauses = append(r.pauses, span{replica, from, to})
}

// holders returns the replicas whose job is running.
func (r *record) holders() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Sorted(maps.Keys(r.running))
}

// terms returns the terms of the running jobs, and a channel that is closed when they may
// have changed.
func (r *record) terms() ([]string, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Collect(maps.Values(r.running)), r.wake
}

// funcs returns how many keys have a func that runs, and a channel that is closed when that may
// have changed.
func (r *record) funcs() (int, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.owned), r.wake
}

// spread returns how many keys' funcs run in each replica, in order, and a channel that is closed
// when that may have changed.
func (r *record) spread() ([]int, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	of := map[string]int{}
	for _, begun := range r.owned {
		of[begun.Replica]++
	}
	return slices.Sorted(maps.Values(of)), r.wake
}

// job is one run of a replica's job.
type job struct {
	span
	term  string
	token int64
	death bool          // it ended with its process
	until time.Duration // when it returned, if that is not to: only a key's func has that
	cause string        // why it was told to return
}

// end returns when the job returned.
func (j job) end() time.Duration { return cmp.Or(j.until, j.to) }

// jobs returns all jobs, in the order in which they began.
func (r *record) jobs() []job {
	var jobs []job
	open := map[string]int{}
	for _, e := range r.sorted() {
		switch e.Kind {
		case jobStarted:
			open[e.Replica] = len(jobs)
			jobs = append(jobs, job{span: span{e.Replica, e.At, forever}, term: e.Term, token: e.Token})
		case jobStopped, killed:
			if i, ok := open[e.Replica]; ok {
				jobs[i].to, jobs[i].death, jobs[i].cause = e.At, e.Kind == killed, e.Note
				delete(open, e.Replica)
			}
		}
	}
	return jobs
}

func (r *record) sorted() []event {
	r.mu.Lock()
	defer r.mu.Unlock()
	events := slices.Clone(r.events)
	slices.SortStableFunc(events, func(a, b event) int { return int(a.At - b.At) })
	return events
}

// ended returns the time of the last event.
func (r *record) ended() (at time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.events {
		at = max(at, e.At)
	}
	return at
}

// sortedPauses returns all pauses, in the order in which they began.
func (r *record) sortedPauses() []span {
	r.mu.Lock()
	defer r.mu.Unlock()
	pauses := slices.Clone(r.pauses)
	slices.SortFunc(pauses, func(a, b span) int { return int(a.from - b.from) })
	return pauses
}
