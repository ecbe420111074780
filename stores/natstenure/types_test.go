package natstenure_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
)

func TestTheTypesOfAllObjectsAreListed(t *testing.T) {
	t.Parallel()
	store := open(t, start(t).ClientURL())
	got, err := store.Types(t.Context(), 10)
	require.NoError(t, err)
	require.Empty(t, got)
	want := []string{"a", "a/b", "a.b *>", "ä", strings.Repeat("long", 500)} // the last one is stored as a hash
	for _, kind := range want {
		for _, id := range []string{"1", "2"} {
			_, err := store.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: kind, ID: id}}, tenure.IfAbsent())
			require.NoError(t, err)
		}
	}
	got, err = store.Types(t.Context(), 10)
	require.NoError(t, err)
	require.ElementsMatch(t, want, got)
	require.IsIncreasing(t, got)
	got, err = store.Types(t.Context(), 2)
	require.NoError(t, err)
	require.Equal(t, []string{"a", "a.b *>"}, got)
}
