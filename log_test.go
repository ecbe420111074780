package tenure_test

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

// journal counts the lines of a log, by what they say.
type journal struct {
	mu      sync.Mutex
	lines   map[string]int
	unnamed []string // lines of info and above without a replica or a holder
}

// logTo returns a logger for the lines of a level and above.
func logTo(j *journal, level slog.Level) *slog.Logger {
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
	j.lines = map[string]int{}
	return lines
}

func TestTheLogHasOneLineForEachChangeAndNoneForAPoll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := &journal{lines: map[string]int{}}
		store := storetest.NewMem()
		replica := func(name string) *replica {
			return start(t, nil, struct{ tenure.Store }{store}, name, tenure.CoordinatorConfig{ // polls
				Reconcile: returnsAfter(0), Logger: logTo(j, slog.LevelInfo),
			})
		}
		want := func(when string, want map[string]int) {
			t.Helper()
			if got := j.take(); !maps.Equal(got, want) {
				t.Errorf("%s: logged %v, want %v", when, got, want)
			}
		}
		a := replica("a")
		synctest.Wait()
		b := replica("b")
		synctest.Wait()
		want("a acquires", map[string]int{"INFO lease acquired by a": 1, "INFO lease has another holder by b": 1})
		time.Sleep(time.Hour)
		want("an hour", nil)

		a.store.SetHook(refuse)
		time.Sleep(time.Hour)
		want("a is cut off", map[string]int{
			"WARN lease not renewed, trying again by a": 1,
			"INFO lease lost by a":                      1,
			"INFO lease acquired by b":                  1,
		})
		a.store.SetHook(nil)
		time.Sleep(time.Hour)
		want("a is back", map[string]int{"INFO lease has another holder by a": 1})

		wantErr(t, b.Resign(t.Context()), nil)
		time.Sleep(time.Hour)
		want("b resigns", map[string]int{
			"INFO lease released by b":           1,
			"INFO lease acquired by a":           1,
			"INFO lease has another holder by b": 1,
		})
		if len(j.unnamed) != 0 {
			t.Errorf("lines without replica and holder: %q", j.unnamed)
		}
	})
}

func TestAttemptsAreLoggedForThoseWhoDebug(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := &journal{lines: map[string]int{}}
		store := struct{ tenure.Store }{storetest.NewMem()}
		start(t, nil, store, "a", tenure.CoordinatorConfig{Reconcile: returnsAfter(0), Logger: quiet})
		synctest.Wait()
		start(t, nil, store, "b", tenure.CoordinatorConfig{Reconcile: returnsAfter(0), Logger: logTo(j, slog.LevelDebug)})
		time.Sleep(time.Minute)
		if n := j.take()["DEBUG lease is held by b"]; n < 12 || n > 20 { // every 5 s, jittered
			t.Errorf("%d attempts were logged in a minute, want 12 to 20", n)
		}
	})
}
