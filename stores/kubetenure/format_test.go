//go:build unix

package kubetenure_test

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/testkit/golden"
)

func TestWhatIsStoredInALeaseStaysAsItIs(t *testing.T) {
	t.Parallel()
	c := running(t)
	ns := c.namespace(t)
	store := c.store(t, ns)
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{Key: sweeper, Holder: "replica-a", TTL: 15 * time.Second, Labels: map[string]string{"address": "10.0.0.1:8080"}})
	term, err := lease.TryAcquire(t.Context())
	require.NoError(t, err)
	require.NoError(t, lease.Renew(t.Context(), term))
	_, err = store.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "a/b", ID: "c/7"}, Payload: []byte("\xff\x00")}, tenure.IfAbsent())
	require.NoError(t, err)

	var got strings.Builder
	show := func() {
		for _, item := range c.do(t, "GET", leases(ns), nil)["items"].([]any) {
			meta, spec := item.(map[string]any)["metadata"].(map[string]any), item.(map[string]any)["spec"].(map[string]any)
			fmt.Fprintf(&got, "%s\n", meta["name"])
			for _, part := range []map[string]any{meta["labels"].(map[string]any), meta["annotations"].(map[string]any), spec} {
				for _, name := range slices.Sorted(maps.Keys(part)) {
					fmt.Fprintf(&got, "  %s: %v\n", name, part[name])
				}
			}
		}
	}
	show()
	require.NoError(t, lease.Release(t.Context(), term))
	got.WriteString("after the release:\n")
	show()
	masked := got.String()
	for pattern, by := range map[string]string{
		`[0-9a-f]{8}-[0-9a-f-]{27}`:              "TERM",
		`"write":"[A-Z2-7]{26}"`:                 `"write":"RANDOM"`,
		`\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z`: "TIME",
		`\b\d{13,}\b`:                            "NUMBER",
	} {
		masked = regexp.MustCompile(pattern).ReplaceAllString(masked, by)
	}
	golden.Compare(t, "lease", masked)
}
