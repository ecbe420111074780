package sqliteobjects

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

// Errors of mattn's driver have a code but no method Code; that driver needs cgo, so it is tested
// in a separate module.
func TestAnErrorWithoutACodeIsRecognisedByItsText(t *testing.T) {
	require.True(t, isBusy(errors.New("database is locked")))
	require.False(t, isBusy(errors.New("database table is locked")))
	require.False(t, isBusy(errors.New("no such table: objects")))
}

func TestACallThatIsInterruptedSaysThatTheFileIsLocked(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	calls := 0
	err := whenFree(ctx, func() error {
		if calls++; calls == 1 {
			return errors.New("database is locked")
		}
		cancel()
		return ctx.Err()
	})
	require.ErrorIs(t, err, context.Canceled)
	require.True(t, isBusy(err), "%v", err)
}
