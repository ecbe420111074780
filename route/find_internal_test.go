package route

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestKeysThatAreNotInUseAreForgotten(t *testing.T) {
	rt := &Route{entries: make(map[string]*entry)}
	rt.entry("served").call = &call{}
	for i := range 3 * mostEntries {
		rt.entry(fmt.Sprint(i))
	}
	require.Len(t, rt.entries, mostEntries)
	require.NotNil(t, rt.entry("served").call)
	for i := range mostEntries { // more than that are in use
		rt.entry(fmt.Sprint("used", i)).waiting = 1
	}
	require.Greater(t, len(rt.entries), mostEntries-1)
	require.NotNil(t, rt.entries["used0"])
}
