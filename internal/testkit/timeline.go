package testkit

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"
)

// Timeline keeps the last events of a simulation, to be read after a failure. It formats them only
// then.
type Timeline struct {
	began time.Time

	mu    sync.Mutex
	lines []line // a ring once it is full
	said  int
}

type line struct {
	at     time.Duration
	who    string
	format string
	args   []any
}

const timelineLength = 400

// NewTimeline returns an empty timeline, whose time begins now.
func NewTimeline() *Timeline { return &Timeline{began: time.Now()} }

// Say adds a line about one replica or server. The arguments must not change afterwards.
func (tl *Timeline) Say(who, format string, args ...any) {
	tl.mu.Lock()
	defer tl.mu.Unlock()
	l := line{time.Since(tl.began), who, format, args}
	if len(tl.lines) < timelineLength {
		tl.lines = append(tl.lines, l)
	} else {
		tl.lines[tl.said%timelineLength] = l
	}
	tl.said++
}

func (tl *Timeline) String() string {
	tl.mu.Lock()
	defer tl.mu.Unlock()
	var b strings.Builder
	for i := max(0, tl.said-timelineLength); i < tl.said; i++ {
		l := tl.lines[i%timelineLength]
		fmt.Fprintf(&b, "%12v  %-8s %s\n", l.at.Round(time.Millisecond), l.who, fmt.Sprintf(l.format, l.args...))
	}
	return b.String()
}

// Logger returns a logger that adds the library's messages for one replica to the timeline.
func (tl *Timeline) Logger(who string) *slog.Logger { return slog.New(&lineHandler{tl, who}) }

type lineHandler struct {
	tl  *Timeline
	who string
}

func (h *lineHandler) Enabled(_ context.Context, level slog.Level) bool {
	return level >= slog.LevelInfo
}
func (h *lineHandler) WithAttrs([]slog.Attr) slog.Handler { return h }
func (h *lineHandler) WithGroup(string) slog.Handler      { return h }

func (h *lineHandler) Handle(_ context.Context, r slog.Record) error {
	var b strings.Builder
	b.WriteString(r.Message)
	r.Attrs(func(a slog.Attr) bool {
		fmt.Fprintf(&b, " %s=%v", a.Key, a.Value)
		return true
	})
	h.tl.Say(h.who, "  log: %s", b.String())
	return nil
}
