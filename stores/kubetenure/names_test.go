//go:build unix

package kubetenure_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/stores/kubetenure"
)

func TestTheNameOfALeaseIsReadableWhereItCanBe(t *testing.T) {
	t.Parallel()
	c := running(t)
	ns := c.namespace(t)
	store := c.store(t, ns)
	for key, name := range map[tenure.Key]string{
		{Type: "lease", ID: "sweeper"}:               "sweeper.lease",
		{Type: "lease", ID: strings.Repeat("x", 63)}: strings.Repeat("x", 63) + ".lease",
		{Type: "reconciler_lease", ID: "web"}:        "tenure-b28c2802e54604304af963e2b334b812",
		{Type: "lease", ID: "a.b"}:                   "tenure-eac2396432b517cf7e363363a6dd0aee",
	} {
		_, err := store.PutIf(t.Context(), tenure.Object{Key: key}, tenure.IfAbsent())
		require.NoError(t, err)
		code, _ := c.call(t, "GET", leases(ns)+"/"+name, nil)
		if code != http.StatusOK {
			t.Errorf("%s is not Lease %s, of %v", key, name, c.names(t, ns))
		}
	}
	types, err := store.Types(t.Context(), 10)
	require.NoError(t, err)
	require.Equal(t, []string{"lease", "reconciler_lease"}, types)
	types, err = store.Types(t.Context(), 1)
	require.NoError(t, err)
	require.Equal(t, []string{"lease"}, types)
}

// The command, for one, has no Config.Leases.
func TestALeaseUnderAnotherNameIsListed(t *testing.T) {
	t.Parallel()
	c := running(t)
	ns := c.namespace(t)
	named := func(name string) *kubetenure.Store {
		return open(t, kubetenure.Config{Namespace: ns, URL: c.kube.URL.String(), Leases: map[tenure.Key]string{sweeper: name}})
	}
	operator, plain, other := named("the-operator"), c.store(t, ns), named("another")
	put := func(store *kubetenure.Store, payload string) {
		t.Helper()
		_, err := store.PutIf(t.Context(), tenure.Object{Key: sweeper, Payload: []byte(payload)}, tenure.Unconditional())
		require.NoError(t, err)
	}
	lists := func(store *kubetenure.Store, payloads ...string) {
		t.Helper()
		found, err := store.List(t.Context(), "lease", "", 10)
		require.NoError(t, err)
		var got []string
		for _, obj := range found {
			require.Equal(t, sweeper, obj.Key)
			got = append(got, string(obj.Payload))
		}
		require.Equal(t, payloads, got)
	}
	put(operator, "operator's")
	lists(operator, "operator's")
	lists(plain, "operator's")
	lists(other) // it knows which Lease it is, and there is none
	put(plain, "the key's own")
	put(other, "another's") // in the order of names, the key's own Lease is now between the others
	lists(operator, "operator's")
	lists(plain, "the key's own")
}

func (c *cluster) names(t testing.TB, ns string) (names []string) {
	t.Helper()
	for _, item := range c.do(t, "GET", leases(ns), nil)["items"].([]any) {
		names = append(names, item.(map[string]any)["metadata"].(map[string]any)["name"].(string))
	}
	return names
}
