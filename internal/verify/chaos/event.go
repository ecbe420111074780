package main

import (
	"encoding/json"
	"io"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// What an event tells.
const (
	jobStarted  = "job started"
	jobStopped  = "job stopped"
	jobStuck    = "job stuck" // was told to return at From
	operation   = "operation" // begins
	answer      = "answer"    // to an operation
	acknowledge = "acknowledged"
	stalled     = "stalled" // the process did not run, since From
	renewed     = "renewed" // by a call from From to At
	notRenewed  = "not renewed"
	setUpError  = "set-up error"
	leaked      = "leaked"
	ended       = "ended" // in order, and nothing was left behind
	killed      = "killed"

	// Of the other leases.
	held        = "held" // from From to At
	released    = "released"
	notReleased = "not released" // for it was lost
)

// event is what happened in one replica, a line of its history.
type event struct {
	At      time.Duration `json:"at"` // on the clock of [monotonic]
	Replica string        `json:"replica"`
	Kind    string        `json:"kind"`
	From    time.Duration `json:"from,omitempty"`
	Term    string        `json:"term,omitempty"`
	Token   int64         `json:"token,omitempty"`
	Note    string        `json:"note,omitempty"`
	Op      *op           `json:"op,omitempty"`
}

// monotonic returns the time of a clock that all processes of the host share and
// that nobody can set.
func monotonic() time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		panic(err)
	}
	return time.Duration(now.Nano())
}

// eventWriter writes each event at once: what happened before a process is killed
// is known.
type eventWriter struct {
	replica string

	mu sync.Mutex // guards to
	to io.Writer
}

func (w *eventWriter) write(e event) {
	if e.At == 0 {
		e.At = monotonic()
	}
	e.Replica = w.replica
	line, err := json.Marshal(e)
	if err != nil {
		panic(err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.to.Write(append(line, '\n')) // who reads it may be gone, and ends this process
}
