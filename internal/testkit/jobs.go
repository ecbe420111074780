package testkit

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"
)

// JobLog records when jobs begin and end, and fails the test if two overlap.
type JobLog struct {
	t     *testing.T
	began time.Time

	mu      sync.Mutex
	running string
	lines   []string
}

// Say adds a line.
func (l *JobLog) Say(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, fmt.Sprintf("%v ", time.Since(l.began).Round(time.Millisecond))+fmt.Sprintf(format, args...))
}

// Run is a job of the named replica that runs until its context ends.
func (l *JobLog) Run(ctx context.Context, name string) {
	l.Begin(name)
	<-ctx.Done()
	l.End(name, context.Cause(ctx))
}

// Begin notes that the job of a replica begins.
func (l *JobLog) Begin(name string) {
	l.Say("%s begins", name)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.running != "" {
		l.t.Errorf("%s's job began while %s's was running", name, l.running)
	}
	l.running = name
}

// End notes that the job of a replica ends.
func (l *JobLog) End(name string, why error) {
	l.mu.Lock()
	l.running = ""
	l.mu.Unlock()
	l.Say("%s ends: %v", name, why)
}

// Holder returns the name of the replica whose job runs, or "".
func (l *JobLog) Holder() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.running
}

func (l *JobLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.lines, "\n")
}

// NewJobLog returns an empty log, whose time begins now.
func NewJobLog(t *testing.T) *JobLog { return &JobLog{t: t, began: time.Now()} }

// UntilDone is a job that works until it is stopped.
func UntilDone(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }

// Succeeds is a job, or a check, with nothing to do.
func Succeeds(context.Context) error { return nil }
