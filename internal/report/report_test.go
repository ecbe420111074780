package report_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/internal/report"
)

// blocking is a handler that blocks in every method until it is released.
type blocking struct {
	slog.Handler
	release chan struct{}
}

func (b blocking) Enabled(ctx context.Context, l slog.Level) bool {
	<-b.release
	return b.Handler.Enabled(ctx, l)
}

func (b blocking) Handle(ctx context.Context, r slog.Record) error {
	<-b.release
	return b.Handler.Handle(ctx, r)
}

func (b blocking) WithAttrs(attrs []slog.Attr) slog.Handler {
	<-b.release
	return blocking{b.Handler.WithAttrs(attrs), b.release}
}

func (b blocking) WithGroup(name string) slog.Handler {
	<-b.release
	return blocking{b.Handler.WithGroup(name), b.release}
}

func newLog(out *bytes.Buffer) blocking {
	return blocking{slog.NewTextHandler(out, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}), make(chan struct{})}
}

func TestNothingWaitsForALoggerThatBlocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		handler := newLog(&out)
		logger, reports := report.Logger(slog.New(handler))
		began := time.Now()
		logger.With("a", 1).WithGroup("g").Info("first", "b", 2)
		logger.Debug("not enabled")
		reports.Add(func() { out.WriteString("second\n") })
		logger.Warn("third")
		require.Zero(t, time.Since(began))
		reports.Flush()
		require.Equal(t, time.Second, time.Since(began), "it waits no longer than that")
		require.Empty(t, out.String())
		close(handler.release)
		synctest.Wait()
		require.Equal(t, "level=INFO msg=first a=1 g.b=2\nsecond\nlevel=WARN msg=third\n", out.String())
	})
}

func TestALoggerThatHasAQueueIsNotGivenAnother(t *testing.T) {
	logger, reports := report.Logger(slog.New(slog.DiscardHandler))
	again, same := report.Logger(logger.With("a", 1))
	require.Same(t, reports, same)
	require.NotNil(t, again)
}

func TestOfReportsThatNobodyTakesSomeAreDroppedAndCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		handler := newLog(&out)
		logger, _ := report.Logger(slog.New(handler))
		for i := range 1000 {
			logger.Info("line", "i", i)
		}
		close(handler.release)
		synctest.Wait()
		logger.Info("after")
		synctest.Wait()
		lines := strings.Split(strings.TrimSpace(out.String()), "\n")
		kept := len(lines) - 2
		for i, line := range lines[:kept] {
			require.Equal(t, fmt.Sprint("level=INFO msg=line i=", i), line, "the earliest ones are kept, in order")
		}
		require.Equal(t, fmt.Sprintf(`level=WARN msg="the logger or the trace is too slow; reports were dropped" dropped=%d`, 1000-kept), lines[kept])
		require.Equal(t, "level=INFO msg=after", lines[kept+1])
	})
}

func TestAPanicIsPassedOnAndTheOtherReportsAreNotLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, reports := report.Logger(slog.New(slog.DiscardHandler))
		var got *report.Panic
		defer reports.PassOn(func(p *report.Panic) { got = p })()
		called := false
		reports.Add(func() { panic("broken") })
		reports.Add(func() { runtime.Goexit() })
		reports.Add(func() { called = true })
		reports.Flush()
		require.Equal(t, "broken", got.Value)
		require.Contains(t, string(got.Stack), "report_test.go")
		require.True(t, called)
	})
}

func TestALoggerForErrorsIsNotWarnedOfWhatWasDropped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		logger, reports := report.Logger(slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelError})))
		for range 1000 {
			logger.Warn("a")
		}
		reports.Flush()
		require.Empty(t, out.String())
	})
}

func TestAPanicIsPassedToAllWhoTakeIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, reports := report.Logger(slog.New(slog.DiscardHandler))
		var a, b int
		stopA := reports.PassOn(func(*report.Panic) { a++ })
		stopB := reports.PassOn(func(*report.Panic) { b++ })
		reports.Add(func() { panic("first") })
		reports.Flush()
		stopB()
		reports.Add(func() { panic("second") })
		reports.Flush()
		stopA()
		require.Equal(t, []int{2, 1}, []int{a, b})
	})
}
