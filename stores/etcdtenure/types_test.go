//go:build unix

package etcdtenure_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/stores/etcdtenure"
)

func TestTheTypesOfAllObjectsAreListed(t *testing.T) {
	client := connect(t, start(t).client)
	store := openOn(t, client, etcdtenure.Config{Prefix: "mine/"})
	got, err := store.Types(t.Context(), 10)
	require.NoError(t, err)
	require.Empty(t, got)
	want := []string{"a", "a b", "a/b", "b", "ä"}
	for _, kind := range want {
		for _, id := range []string{"1", "2/3"} {
			_, err := store.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: kind, ID: id}}, tenure.IfAbsent())
			require.NoError(t, err)
		}
	}
	for _, others := range []string{"mine/o/b!", "mine/p/c/1", "theirs/o/d/1"} { // written by other programs
		_, err := client.Put(t.Context(), others, "")
		require.NoError(t, err)
	}
	got, err = store.Types(t.Context(), 10)
	require.NoError(t, err)
	require.ElementsMatch(t, want, got)
	got, err = store.Types(t.Context(), 2)
	require.NoError(t, err)
	require.Len(t, got, 2)
}
