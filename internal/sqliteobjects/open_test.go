package sqliteobjects

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

// Errors of mattn's driver have a code, and no method Code; that driver needs cgo, so it is
// tested in a module of its own.
func TestAnErrorWithoutACodeIsRecognisedByItsText(t *testing.T) {
	require.True(t, isBusy(errors.New("database is locked")))
	require.False(t, isBusy(errors.New("database table is locked")))
	require.False(t, isBusy(errors.New("no such table: objects")))
}
