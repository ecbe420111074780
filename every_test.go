package tenure_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
)

func TestEverySweepsAtOnceAndThenAnIntervalAfterEachEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		var at []time.Duration
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Second)
		defer cancel()
		err := tenure.Every(10*time.Second, func(context.Context) error {
			at = append(at, time.Since(began))
			time.Sleep(20 * time.Second)
			return errors.New("this one failed")
		})(ctx)
		wantErr(t, err, nil)
		want := []time.Duration{0, 30 * time.Second, 60 * time.Second, 90 * time.Second}
		if len(at) != len(want) {
			t.Fatalf("swept at %v, want %v", at, want)
		}
		for i := range want {
			if at[i] != want[i] {
				t.Errorf("swept at %v, want %v", at, want)
			}
		}
	})
}

func TestEveryPanicsAtAProgrammersMistake(t *testing.T) {
	require.Panics(t, func() { tenure.Every(0, func(context.Context) error { return nil }) })
	require.Panics(t, func() { tenure.Every(-time.Second, func(context.Context) error { return nil }) })
	require.Panics(t, func() { tenure.Every(time.Second, nil) })
}
