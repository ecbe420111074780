package tenure_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/verify/kit"
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

func TestEveryPanicsAtAProgrammersMistake(t *testing.T) {
	require.Panics(t, func() { tenure.Every(0, kit.Succeeds) })
	require.Panics(t, func() { tenure.Every(-time.Second, kit.Succeeds) })
	require.Panics(t, func() { tenure.Every(time.Second, nil) })
}
