package etcdtenure

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
)

func TestAWriteJoinsAGroupOnlyOfItsEpochWithOtherKeys(t *testing.T) {
	first, second := epoch{Above: 1, text: "1"}, epoch{Above: 2, text: "2"}
	put := func(e epoch, key, value string, compared ...string) *groupedWrite {
		w := &groupedWrite{request: request{epoch: e, then: []clientv3.Op{clientv3.OpPut(key, value)}}}
		for _, key := range compared {
			w.conditions = append(w.conditions, at(key, 7))
		}
		return w
	}
	for what, c := range map[string]struct {
		w    *groupedWrite
		want bool
	}{
		"another object":                                {put(first, "b", "", "b"), true},
		"a write under another epoch":                   {put(second, "b", "", "b"), false},
		"a write of the same key":                       {put(first, "a", ""), false},
		"a write of a key that is compared":             {put(first, "compared", ""), false},
		"a write that depends on a key that is written": {put(first, "b", "", "a"), false},
		"a large object":                                {put(first, "b", strings.Repeat("x", groupLargest+1)), false},
	} {
		g := &group{epoch: first, keys: make(map[string]bool)}
		require.True(t, g.join(put(first, "a", "", "compared")), what)
		require.Equal(t, c.want, g.join(c.w), what)
	}
}
