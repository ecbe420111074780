package main

import (
	"encoding/json"
	"io"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Kinds of events.
const (
	ready       = "ready" // for SIGTERM
	jobStarted  = "job started"
	jobStopped  = "job stopped"
	jobStuck    = "job stuck" // it was told to return at From
	operation   = "operation" // an operation begins
	answer      = "answer"    // of an operation
	acknowledge = "acknowledged"
	stalled     = "stalled" // the process did not run since From
	renewed     = "renewed" // by a call that lasted from From to At
	notRenewed  = "not renewed"
	setUpError  = "set-up error"
	leaked      = "leaked"
	ended       = "ended" // properly, with nothing left behind
	killed      = "killed"

	// Kinds of events of the other leases.
	held        = "held" // from From to At
	released    = "released"
	notReleased = "not released" // because it was lost

	// Kinds of events of claims. The note is the key.
	claimBegun = "claim begun" // its func runs
	claimEnded = "claim ended" // it was seen valid from From to At, and its func returned at Until
	claimTwice = "claim runs twice"
	begunOut   = "begun while drained"

	// Kinds of events of replicas that answer requests.
	serves     = "serves" // at the address in the note
	leaves     = "leaves" // it will serve no longer
	requestRan = "ran"    // a handler has begun with the request in the note

	// Kinds of events of rows. The note is the row and how often it was said to be taken.
	rowBegun = "row begun"
)

// event is something that happened in one replica, a line of its history.
type event struct {
	At      time.Duration `json:"at"` // by the clock of [monotonic]
	Replica string        `json:"replica"`
	Kind    string        `json:"kind"`
	From    time.Duration `json:"from,omitempty"`
	Term    string        `json:"term,omitempty"`
	Token   int64         `json:"token,omitempty"`
	Note    string        `json:"note,omitempty"`
	Op      *op           `json:"op,omitempty"`
	Until   time.Duration `json:"until,omitempty"`
}

// monotonic returns the time of a clock that all processes of the host share and that
// can't be set.
func monotonic() time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		panic(err)
	}
	return time.Duration(now.Nano())
}

// eventWriter writes each event immediately, so that nothing is lost if the process is
// killed.
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
	w.to.Write(append(line, '\n')) // if the reader is gone, this process ends anyway
}
