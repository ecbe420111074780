package testkit

import (
	"context"
	"log/slog"
	"time"
)

// Blocker sometimes blocks a call of a process's log or trace, for a while or for as long as the
// process lives. Judges do not accept this as an excuse. A nil Blocker never blocks.
type Blocker struct {
	Dice *Dice
	TTL  time.Duration
	Gone <-chan struct{} // closed when the process has crashed
	End  <-chan struct{} // closed when it has ended
	Say  func(format string, args ...any)
}

// Block may block its caller.
func (b *Blocker) Block() {
	if b == nil {
		return
	}
	var d time.Duration
	switch n := b.Dice.N(100); {
	case n < 1:
		d = 1000 * b.TTL
	case n < 10:
		d = b.Dice.UpTo(2 * b.TTL)
	default:
		return
	}
	b.Say("its log blocks for %v", d)
	select {
	case <-b.Gone:
	case <-b.End:
	case <-time.After(d):
	}
}

// Logger returns a logger that passes each line on and then may block.
func (b *Blocker) Logger(to *slog.Logger) *slog.Logger {
	return slog.New(blockingHandler{to.Handler(), b})
}

type blockingHandler struct {
	slog.Handler
	b *Blocker
}

func (h blockingHandler) WithAttrs([]slog.Attr) slog.Handler { return h }
func (h blockingHandler) WithGroup(string) slog.Handler      { return h }
func (h blockingHandler) Handle(ctx context.Context, r slog.Record) error {
	err := h.Handler.Handle(ctx, r)
	h.b.Block()
	return err
}
