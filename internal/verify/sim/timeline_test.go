package sim

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"
)

// timeline keeps the last events of a world, to be read after a failure. Lines are
// formatted only then.
type timeline struct {
	began time.Time

	mu    sync.Mutex
	lines []line // a ring once it is full
	said  int
}

type line struct {
	at     time.Duration
	who    string
	format string
	args   []any // must not change afterwards
}

const timelineLength = 400

func (tl *timeline) say(who, format string, args ...any) {
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

func (tl *timeline) String() string {
	tl.mu.Lock()
	defer tl.mu.Unlock()
	var b strings.Builder
	for i := max(0, tl.said-timelineLength); i < tl.said; i++ {
		l := tl.lines[i%timelineLength]
		fmt.Fprintf(&b, "%12v  %-8s %s\n", l.at.Round(time.Millisecond), l.who, fmt.Sprintf(l.format, l.args...))
	}
	return b.String()
}

// logger returns a logger that adds the library's messages for one replica to the
// timeline.
func (tl *timeline) logger(who string) *slog.Logger { return slog.New(&lineHandler{tl, who}) }

type lineHandler struct {
	tl  *timeline
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
	h.tl.say(h.who, "  log: %s", b.String())
	return nil
}
