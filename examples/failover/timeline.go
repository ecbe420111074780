package main

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// timeline prints what happens, and keeps it for the picture that the test draws.
type timeline struct {
	began time.Time

	mu      sync.Mutex // guards the fields below
	out     io.Writer
	moments []moment
}

// moment is when a replica begins to do something.
type moment struct {
	at      time.Duration
	replica string
	does    string
	note    string // for the picture
}

// What a replica does.
const (
	standsBy = "stands by"
	works    = "works"
	isCutOff = "is cut off"
	ends     = "ends"
)

func newTimeline(out io.Writer) *timeline { return &timeline{began: time.Now(), out: out} }

// add prints a line, unless it is empty, and keeps the moment, unless it is no replica's.
func (t *timeline) add(m moment, line string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	m.at = time.Since(t.began)
	if m.replica != "" {
		t.moments = append(t.moments, m)
	}
	if line != "" {
		fmt.Fprintf(t.out, "%7.3fs  %s\n", m.at.Seconds(), fmt.Sprintf(line, args...))
	}
}
