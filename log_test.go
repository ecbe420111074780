package tenure_test

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/verify/kit"
	"github.com/tenurelib/tenure/storetest"
)

// journal counts the lines of a log from a level on, by what they say.
type journal struct {
	mu      sync.Mutex
	lines   map[string]int
	unnamed []string // lines of level info without a replica or a holder
}

func (j *journal) logger(level slog.Level) *slog.Logger {
	return slog.New(journalHandler{j, level, nil})
}

type journalHandler struct {
	*journal
	level slog.Level
	attrs []slog.Attr
}

func (h journalHandler) Enabled(_ context.Context, level slog.Level) bool { return level >= h.level }
func (h journalHandler) WithGroup(string) slog.Handler                    { panic("no groups are used") }
func (h journalHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	h.attrs = slices.Concat(h.attrs, attrs)
	return h
}

func (h journalHandler) Handle(_ context.Context, r slog.Record) error {
	values := map[string]string{}
	for _, a := range h.attrs {
		values[a.Key] = a.Value.String()
	}
	r.Attrs(func(a slog.Attr) bool { values[a.Key] = a.Value.String(); return true })
	line := r.Level.String() + " " + r.Message + " by " + values["replica"]
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.lines == nil {
		h.lines = map[string]int{}
	}
	h.lines[line]++
	_, held := values["holder"]
	if r.Level == slog.LevelInfo && (values["replica"] == "" || !held) {
		h.unnamed = append(h.unnamed, line)
	}
	return nil
}

// take returns the lines since the last call.
func (j *journal) take() map[string]int {
	j.mu.Lock()
	defer j.mu.Unlock()
	lines := j.lines
	j.lines = nil
	return lines
}

func TestTheLogHasOneLineForEachChangeAndNoneForAPoll(t *testing.T) {
	inBubble(t, func(t *scene) {
		var j journal
		t.store = kit.Bare(t.store) // so that standbys poll
		logged := tenure.CoordinatorConfig{Logger: j.logger(slog.LevelInfo)}
		a, b := t.start("a", logged), t.start("b", logged)
		require.Equal(t, map[string]int{"INFO lease acquired by a": 1, "INFO lease has another holder by b": 1}, j.take())
		time.Sleep(time.Hour)
		require.Empty(t, j.take())

		a.store.SetHook(kit.Refuse)
		time.Sleep(time.Hour)
		require.Equal(t, map[string]int{
			"WARN lease not renewed, trying again by a": 1,
			"INFO lease lost by a":                      1,
			"INFO lease acquired by b":                  1,
		}, j.take())
		a.store.SetHook(nil)
		time.Sleep(time.Hour)
		require.Equal(t, map[string]int{"INFO lease has another holder by a": 1}, j.take())

		require.NoError(t, b.Resign(t.Context()))
		time.Sleep(time.Hour)
		require.Equal(t, map[string]int{
			"INFO lease released by b":           1,
			"INFO lease acquired by a":           1,
			"INFO lease has another holder by b": 1,
		}, j.take())
		require.Empty(t, j.unnamed)
	})
}

func TestAttemptsAreLoggedAtLevelDebug(t *testing.T) {
	inBubble(t, func(t *scene) {
		var j journal
		t.store = kit.Bare(t.store)
		t.start("a", tenure.CoordinatorConfig{Logger: kit.Quiet})
		t.start("b", tenure.CoordinatorConfig{Logger: j.logger(slog.LevelDebug)})
		time.Sleep(time.Minute)
		require.InDelta(t, 16, j.take()["DEBUG lease is held by b"], 4, "one each 5 s, jittered")
	})
}

func TestAnErrorWhosePortDiffersEachTimeIsLoggedOnce(t *testing.T) {
	inBubble(t, func(t *scene) {
		var j journal
		var port atomic.Int32
		t.store = storetest.Faulty(t.store, func(context.Context, storetest.Call, func(context.Context) error) error {
			return fmt.Errorf("read tcp 127.0.0.1:%d: connection reset by peer", 40000+port.Add(1))
		})
		t.start("a", tenure.CoordinatorConfig{Logger: j.logger(slog.LevelWarn)})
		time.Sleep(time.Minute)
		require.GreaterOrEqual(t, port.Load(), int32(10))
		require.Equal(t, map[string]int{"WARN lease cannot be acquired by a": 1}, j.take())
	})
}
