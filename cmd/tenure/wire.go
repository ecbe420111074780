//go:build unix

package main

import (
	"syscall"
	"time"
)

// Tenure and its guard exchange lines of JSON on two pipes. The guard asks how much trust
// is left, and counts from before it asked. It therefore never trusts for too long, even if
// either process pauses or a message is delayed, and the two never compare their clocks.

// order is a message from tenure to its guard. The end of the pipe means that tenure has
// ended.
type order struct {
	Trust  *trust         `json:",omitempty"` // the answer to a question
	Signal syscall.Signal `json:",omitempty"` // for the program
	Stop   syscall.Signal `json:",omitempty"` // ends the program with this signal
	Kill   bool           `json:",omitempty"` // kills the program at once
}

// trust is how much time is left in a term.
type trust struct {
	Hard time.Duration // until nothing of the program may be left
	Soft time.Duration // until the guard must tell the program to end, if tenure has not
}

// report is a message from a guard to tenure.
type report struct {
	Ask      bool    `json:",omitempty"` // asks how much trust is left
	Group    int     `json:",omitempty"` // the process group of the program, or of a run of --start, once it has started
	Returned bool    `json:",omitempty"` // the run of --start has ended, and what is left of its group is the service's
	End      *ending `json:",omitempty"` // the last report: nothing of the program is left
}

// ending is how a program ended.
type ending struct {
	Told   bool   // whether the program was told to end
	Status int    // the exit status as a shell reports it: 128 plus the number of a signal
	Text   string // for people
}
