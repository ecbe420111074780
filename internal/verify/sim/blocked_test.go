package sim

import (
	"context"
	"log/slog"
	"time"

	"github.com/tenurelib/tenure"
)

// block keeps the caller of the log or the trace waiting now and then, in a world where they
// block: for up to two TTLs, or for as long as the process lives. No rule of the judge excuses
// anything by it.
func (l *life) block() {
	if !l.r.w.blocks {
		return
	}
	var d time.Duration
	switch n := l.r.blocking.N(100); {
	case n < 1:
		d = 1000 * l.r.ttl
	case n < 10:
		d = l.r.blocking.UpTo(2 * l.r.ttl)
	default:
		return
	}
	l.r.w.line.Say(l.r.name, "its log blocks for %v", d)
	select {
	case <-l.gone:
	case <-l.ended:
	case <-time.After(d):
	}
}

// logger returns a logger that writes to the world's timeline.
func (l *life) logger() *slog.Logger {
	return slog.New(blockingHandler{l.r.w.line.Logger(l.r.name).Handler(), l})
}

type blockingHandler struct {
	slog.Handler
	l *life
}

func (h blockingHandler) WithAttrs([]slog.Attr) slog.Handler { return h }
func (h blockingHandler) WithGroup(string) slog.Handler      { return h }
func (h blockingHandler) Handle(ctx context.Context, r slog.Record) error {
	err := h.Handler.Handle(ctx, r)
	h.l.block()
	return err
}

func (l *life) trace() *tenure.Trace {
	return &tenure.Trace{
		Attempt:       func(time.Duration, error) { l.block() },
		Acquired:      func(*tenure.Term, *tenure.Holding) { l.block() },
		Renewed:       func(*tenure.Term, time.Duration, time.Duration) { l.block() },
		RenewalFailed: func(*tenure.Term, error, time.Duration) { l.block() },
		Lost:          func(*tenure.Term, error) { l.block() },
		Released:      func(*tenure.Term, error) { l.block() },
		JobStarted:    func(*tenure.Term) { l.block() },
		JobEnded:      func(*tenure.Term, error, time.Duration) { l.block() },
		JobStuck:      func(*tenure.Term, time.Duration) { l.block() },
		HolderChanged: func(string) { l.block() },
	}
}
