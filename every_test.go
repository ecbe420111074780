package tenure_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/proof/kit"
)

func TestEverySweepsAtOnceAndThenAnIntervalAfterEachEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		var at []time.Duration
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Second)
		defer cancel()
		require.NoError(t, tenure.Every(10*time.Second, func(context.Context) error {
			at = append(at, time.Since(began))
			time.Sleep(20 * time.Second)
			return errors.New("this one failed")
		})(ctx))
		require.Equal(t, []time.Duration{0, 30 * time.Second, 60 * time.Second, 90 * time.Second}, at)
	})
}

func TestASweepThatFailsAsBeforeIsLoggedEveryTenMinutes(t *testing.T) {
	inBubble(t, func(t *scene) {
		log, lines := textLog()
		var failure atomic.Pointer[error]
		fails := func(err error) { failure.Store(&err) }
		fails(errors.New("no table: port 4711"))
		t.start("a", tenure.CoordinatorConfig{Logger: log, Reconcile: tenure.Every(time.Minute, func(context.Context) error {
			return *failure.Load()
		})})
		during := func(d time.Duration) (swept []string) {
			time.Sleep(d)
			for line := range strings.Lines(lines()) {
				if strings.Contains(line, `msg="sweep `) {
					swept = append(swept, line)
				}
			}
			return swept
		}
		require.Len(t, during(time.Second), 1)
		fails(errors.New("no table: port 4712"))
		require.Empty(t, during(9*time.Minute), "the same error but for a number")
		again := during(time.Minute)
		require.Len(t, again, 1, "ten minutes later")
		require.Contains(t, again[0], `msg="sweep failed"`)
		require.Contains(t, again[0], "port 4712")
		require.Contains(t, again[0], "failures=11")
		fails(errors.New("no index"))
		other := during(time.Minute)
		require.Len(t, other, 1, "another error")
		require.Contains(t, other[0], `error="no index"`)
		fails(nil)
		better := during(3 * time.Minute)
		require.Len(t, better, 1, "one line for the end of it")
		require.Contains(t, better[0], `level=INFO msg="sweep succeeds again"`)
		require.Contains(t, better[0], "failures=12 after=12m0s")
		fails(errors.New("no index"))
		require.Len(t, during(time.Minute), 1, "the same error after a success")
	})
}

func TestEveryPanicsAtAProgrammersMistake(t *testing.T) {
	require.Panics(t, func() { tenure.Every(0, kit.Succeeds) })
	require.Panics(t, func() { tenure.Every(-time.Second, kit.Succeeds) })
	require.Panics(t, func() { tenure.Every(time.Second, nil) })
}
