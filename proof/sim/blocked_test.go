package sim

import (
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

// blocker makes the log and the trace of a process block now and then, in a world where they do.
func (l *life) blocker() *testkit.Blocker {
	if !l.r.w.blocks {
		return nil
	}
	return &testkit.Blocker{Dice: l.r.blocking, TTL: l.r.ttl, Gone: l.gone, End: l.ended, Say: func(format string, args ...any) {
		l.r.w.line.Say(l.r.name, format, args...)
	}}
}

func (l *life) trace() *tenure.Trace {
	b := l.blocker()
	return &tenure.Trace{
		Attempt:       func(time.Duration, error) { b.Block() },
		Acquired:      func(*tenure.Term, *tenure.Holding) { b.Block() },
		Renewed:       func(*tenure.Term, time.Duration, time.Duration) { b.Block() },
		RenewalFailed: func(*tenure.Term, error, time.Duration) { b.Block() },
		Lost:          func(*tenure.Term, error) { b.Block() },
		Released:      func(*tenure.Term, error) { b.Block() },
		JobStarted:    func(*tenure.Term) { b.Block() },
		JobEnded:      func(*tenure.Term, error, time.Duration) { b.Block() },
		JobStuck:      func(*tenure.Term, time.Duration) { b.Block() },
	}
}
