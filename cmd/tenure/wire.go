//go:build unix

package main

import (
	"syscall"
	"time"
)

// What tenure and its guard tell each other, as lines of JSON on two pipes. The
// guard asks how much trust is left, and counts from before it asked: so neither
// a pause of either nor a delay between them makes it trust for too long, and no
// clock is compared with another.

// order is what tenure tells its guard. The end of the pipe is an order too:
// tenure is gone.
type order struct {
	Trust  *trust         `json:",omitempty"` // the answer to a question
	Signal syscall.Signal `json:",omitempty"` // for the program
	Stop   syscall.Signal `json:",omitempty"` // ends the program by this
	Kill   bool           `json:",omitempty"` // ends it at once
}

// trust is what is left of a term.
type trust struct {
	Hard time.Duration // until nothing of the program may be left
	Soft time.Duration // until it must be told to end, if tenure has not done so
}

// report is what a guard tells tenure.
type report struct {
	Ask   bool    `json:",omitempty"` // how much trust is left?
	Group int     `json:",omitempty"` // the process group of the program, which has been started
	End   *ending `json:",omitempty"` // nothing is left of it; the last report
}

// ending is how a program ended.
type ending struct {
	Told   bool   // it was told to
	Status int    // as a shell tells it: 128 and more is a signal
	Text   string // for people
}
