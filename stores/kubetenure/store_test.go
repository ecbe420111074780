//go:build unix

package kubetenure_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/stores/kubetenure"
	"github.com/tenurelib/tenure/storetest"
)

func TestTheStoreKeepsTheContract(t *testing.T) {
	c := running(t)
	storetest.Run(t, func(t *testing.T) tenure.Store { return c.store(t, c.namespace(t)) })
}

func TestOnlyPublicPackagesOfTheRootModuleAreImported(t *testing.T) { testkit.OnlyPublicImports(t) }

func TestALeaseIsAcquiredRenewedAndReleased(t *testing.T) {
	t.Parallel()
	c := running(t)
	ns := c.namespace(t)
	store := c.store(t, ns)
	require.NoError(t, store.Migrate(t.Context()))
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{Key: sweeper, Holder: "a", TTL: 3 * time.Second})
	last := int64(0)
	for round := range 3 {
		term, err := lease.TryAcquire(t.Context())
		require.NoError(t, err)
		require.Greater(t, term.Token(), last)
		last = term.Token()
		require.NoError(t, lease.Renew(t.Context(), term))
		is := c.do(t, "GET", leases(ns)+"/sweeper.lease", nil)
		spec := is["spec"].(map[string]any)
		require.Equal(t, "a_"+term.ID(), spec["holderIdentity"])
		require.EqualValues(t, 4, spec["leaseDurationSeconds"], "a second more than the TTL")
		require.EqualValues(t, round+1, spec["leaseTransitions"])
		require.NoError(t, lease.Release(t.Context(), term))
		spec = c.do(t, "GET", leases(ns)+"/sweeper.lease", nil)["spec"].(map[string]any)
		require.Empty(t, spec["holderIdentity"])
		require.EqualValues(t, round+1, spec["leaseTransitions"])
	}
	items := c.do(t, "GET", leases(ns), nil)["items"].([]any)
	require.Len(t, items, 1, "Migrate writes nothing")
}

// Whoever knows an old state of a Lease must not bring it back.
// client-go compares renewTimes in whole seconds. It would see no renewal until the clock has caught up.
func TestARenewalAfterTheClockWasSetBackIsOneToClientGo(t *testing.T) {
	t.Parallel()
	c := running(t)
	ns := c.namespace(t)
	lease := testkit.NewLease(t, c.store(t, ns), tenure.LeaseConfig{Key: sweeper, Holder: "a"})
	term, err := lease.TryAcquire(t.Context())
	require.NoError(t, err)
	require.NoError(t, lease.Release(t.Context(), term))
	ahead := time.Now().Add(time.Hour).UTC().Format("2006-01-02T15:04:05.000000Z")
	c.do(t, "PATCH", leases(ns)+"/sweeper.lease", `{"spec": {"renewTime": "`+ahead+`"}}`)
	renewed := func() {
		t.Helper()
		text := c.do(t, "GET", leases(ns)+"/sweeper.lease", nil)["spec"].(map[string]any)["renewTime"].(string)
		at, err := time.Parse(time.RFC3339Nano, text)
		require.NoError(t, err)
		require.WithinDuration(t, time.Now(), at, soon)
	}
	term, err = lease.TryAcquire(t.Context())
	require.NoError(t, err)
	renewed()
	require.NoError(t, lease.Renew(t.Context(), term))
	renewed()
}

func TestAWriteAtTheVersionOfALeaseThatWasDeletedIsRefused(t *testing.T) {
	t.Parallel()
	c := running(t)
	ns := c.namespace(t)
	store := c.store(t, ns)
	obj, err := store.PutIf(t.Context(), tenure.Object{Key: widget}, tenure.IfAbsent())
	require.NoError(t, err)
	c.do(t, "DELETE", leases(ns)+"/a.widget", nil)
	_, err = store.PutIf(t.Context(), obj, tenure.IfVersion(obj.Version))
	require.ErrorIs(t, err, tenure.ErrConflict)
	code, _ := c.call(t, "GET", leases(ns)+"/a.widget", nil)
	require.Equal(t, http.StatusNotFound, code)
	again, err := store.PutIf(t.Context(), obj, tenure.IfAbsent())
	require.NoError(t, err)
	require.Greater(t, again.Version, obj.Version)
}

// A PUT that changes nothing is not executed, and is answered with the old version.
func TestAWriteThatChangesNothingHasAVersionOfItsOwn(t *testing.T) {
	t.Parallel()
	c := running(t)
	store := c.store(t, c.namespace(t))
	last := int64(0)
	for range 100 {
		obj, err := store.PutIf(t.Context(), tenure.Object{Key: widget, Payload: []byte("same")}, tenure.Unconditional())
		require.NoError(t, err)
		require.Greater(t, obj.Version, last)
		last = obj.Version
	}
}

// What stands between may send a request again whose answer was lost.
func TestAWriteThatIsSentTwiceHasSucceeded(t *testing.T) {
	t.Parallel()
	c := running(t)
	ns := c.namespace(t)
	twice := through(func(req *http.Request, send func(*http.Request) (*http.Response, error)) (*http.Response, error) {
		if req.Method == http.MethodPut {
			first := req.Clone(req.Context())
			first.Body, _ = req.GetBody()
			if resp, err := send(first); err == nil {
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
		}
		return send(req)
	})
	store := open(t, kubetenure.Config{Namespace: ns, URL: c.kube.URL.String(), Client: twice.client()})
	other := c.store(t, ns)
	obj, err := store.PutIf(t.Context(), tenure.Object{Key: widget, Payload: []byte("1")}, tenure.IfAbsent())
	require.NoError(t, err)
	obj.Payload = []byte("2")
	obj, err = store.PutIf(t.Context(), obj, tenure.IfVersion(obj.Version))
	require.NoError(t, err)
	require.NoError(t, store.DeleteIf(t.Context(), widget, tenure.IfVersion(obj.Version)))

	// The write of another is not taken for one's own.
	obj, err = other.PutIf(t.Context(), tenure.Object{Key: widget}, tenure.IfAbsent())
	require.NoError(t, err)
	_, err = store.Get(t.Context(), widget)
	require.NoError(t, err)
	_, err = other.PutIf(t.Context(), obj, tenure.IfVersion(obj.Version))
	require.NoError(t, err)
	_, err = store.PutIf(t.Context(), obj, tenure.IfVersion(obj.Version))
	require.ErrorIs(t, err, tenure.ErrConflict)
}

// foreign is a spec as client-go writes it.
func foreign(holder string, transitions int) map[string]any {
	now := time.Now().UTC().Truncate(time.Second).Format("2006-01-02T15:04:05.000000Z")
	return map[string]any{"holderIdentity": holder, "leaseDurationSeconds": 15, "acquireTime": now, "renewTime": now, "leaseTransitions": transitions}
}

func TestALeaseOfAnotherProgramHasThatProgramsHolderAndDuration(t *testing.T) {
	t.Parallel()
	c := running(t)
	ns := c.namespace(t)
	store := open(t, kubetenure.Config{Namespace: ns, URL: c.kube.URL.String(), Leases: map[tenure.Key]string{sweeper: "operator"}})
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{Key: sweeper, Holder: "a", TTL: time.Minute})
	take := func(holder string, transitions int) {
		t.Helper()
		is := c.do(t, "GET", leases(ns)+"/operator", nil)
		is["spec"] = foreign(holder, transitions)
		c.do(t, "PUT", leases(ns)+"/operator", is)
	}
	held := func(holder string) {
		t.Helper()
		is, err := lease.Read(t.Context())
		require.NoError(t, err)
		require.Equal(t, holder, is.Holder)
		require.Empty(t, is.Term)
		require.Equal(t, 15*time.Second, is.TTL)
		require.WithinDuration(t, time.Now(), is.AcquiredAt, soon)
		_, err = lease.AcquireOrSteal(t.Context())
		require.ErrorIs(t, err, tenure.ErrHeld)
		require.ErrorIs(t, lease.RequestRelease(t.Context()), errors.ErrUnsupported)
	}
	c.do(t, "POST", leases(ns), map[string]any{"metadata": map[string]any{"name": "operator"}, "spec": foreign("host_1", 3)})
	held("host_1")
	take("", 3) // it has released the lease
	_, err := lease.Read(t.Context())
	require.ErrorIs(t, err, tenure.ErrNotFound)
	term, err := lease.TryAcquire(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 4, c.do(t, "GET", leases(ns)+"/operator", nil)["spec"].(map[string]any)["leaseTransitions"])

	take("host_2", 5) // it keeps our annotations
	held("host_2")
	require.ErrorIs(t, lease.Renew(t.Context(), term), tenure.ErrLost)
	require.ErrorContains(t, lease.Renew(t.Context(), term), "is held by host_2")

	// The same program again, after a release: only the count of transitions differs.
	take("", 5)
	term, err = lease.TryAcquire(t.Context())
	require.NoError(t, err)
	require.NoError(t, lease.Release(t.Context(), term))
	take("host_2", 7)
	take("", 7)
	_, err = lease.Read(t.Context())
	require.ErrorIs(t, err, tenure.ErrNotFound)
}

func TestAnOfferToAnyReplicaIsOneToAnyProgram(t *testing.T) {
	t.Parallel()
	c := running(t)
	ns := c.namespace(t)
	store := c.store(t, ns)
	for to, want := range map[string]string{"": "", "b": "b_TERM"} {
		payload := fmt.Sprintf(`{"holder":"%s","acquired_at_ms":1,"term":"TERM","ttl_ms":1500,"offered":true}`, to)
		_, err := store.PutIf(t.Context(), tenure.Object{Key: sweeper, Payload: []byte(payload)}, tenure.Unconditional())
		require.NoError(t, err)
		spec := c.do(t, "GET", leases(ns)+"/sweeper.lease", nil)["spec"].(map[string]any)
		require.Equal(t, want, spec["holderIdentity"])
		require.EqualValues(t, 3, spec["leaseDurationSeconds"])
	}
}

func TestWhatOthersHavePutIntoALeaseStays(t *testing.T) {
	t.Parallel()
	c := running(t)
	ns := c.namespace(t)
	store := c.store(t, ns)
	obj, err := store.PutIf(t.Context(), tenure.Object{Key: widget}, tenure.IfAbsent())
	require.NoError(t, err)
	c.do(t, "PATCH", leases(ns)+"/a.widget?fieldManager=somebody", `{"metadata": {
		"labels": {"app": "web"}, "annotations": {"note": "grüße"}, "finalizers": ["example.com/f"],
		"ownerReferences": [{"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "1-2-3"}]}}`)
	obj, err = store.PutIf(t.Context(), obj, tenure.Unconditional())
	require.NoError(t, err)
	require.NoError(t, store.DeleteIf(t.Context(), widget, tenure.IfVersion(obj.Version)))
	meta := c.do(t, "GET", leases(ns)+"/a.widget", nil)["metadata"].(map[string]any)
	require.Equal(t, "web", meta["labels"].(map[string]any)["app"])
	require.Equal(t, "grüße", meta["annotations"].(map[string]any)["note"])
	require.Equal(t, []any{"example.com/f"}, meta["finalizers"])
	require.Contains(t, text(t, meta["ownerReferences"]), "1-2-3")
	require.Contains(t, text(t, meta["managedFields"]), "somebody")
}

// The API server elects the holder, which is a feature that is off by default.
func TestALeaseWithAStrategyIsRefused(t *testing.T) {
	t.Parallel()
	c := start(t, "--feature-gates=CoordinatedLeaderElection=true", "--runtime-config=coordination.k8s.io/v1beta1=true")
	store := c.store(t, "default")
	c.do(t, "POST", leases("default"), `{"metadata": {"name": "a.widget"}, "spec": {"strategy": "OldestEmulationVersion"}}`)
	_, err := store.PutIf(t.Context(), tenure.Object{Key: widget}, tenure.IfAbsent())
	require.ErrorIs(t, err, tenure.ErrSetup)
	require.ErrorContains(t, err, "OldestEmulationVersion")
}

func TestALeaseThatCannotBeUsedIsRefused(t *testing.T) {
	t.Parallel()
	c := running(t)
	for what, test := range map[string]struct {
		patch string
		want  error
		says  string
	}{
		"of another key":       {`{"metadata": {"annotations": {"tenurelib.dev/object": "{\"type\":\"lease\",\"id\":\"other\"}"}}}`, tenure.ErrTaken, "lease/other"},
		"above is no number":   {`{"metadata": {"annotations": {"tenurelib.dev/above": "many"}}}`, tenure.ErrSetup, `"many"`},
		"above is negative":    {`{"metadata": {"annotations": {"tenurelib.dev/above": "-1"}}}`, tenure.ErrSetup, `"-1"`},
		"above leaves no room": {`{"metadata": {"annotations": {"tenurelib.dev/above": "9223372036854775807"}}}`, tenure.ErrSetup, "room"},
	} {
		t.Run(what, func(t *testing.T) {
			ns := c.namespace(t)
			store := c.store(t, ns)
			obj, err := store.PutIf(t.Context(), tenure.Object{Key: widget}, tenure.IfAbsent())
			require.NoError(t, err)
			c.do(t, "PATCH", leases(ns)+"/a.widget", test.patch)
			for range 2 {
				_, err = store.Get(t.Context(), widget)
				require.ErrorIs(t, err, test.want)
				require.ErrorContains(t, err, test.says)
			}
			for _, cond := range []tenure.WriteCondition{tenure.IfAbsent(), tenure.IfVersion(obj.Version), tenure.Unconditional()} {
				_, err = store.PutIf(t.Context(), obj, cond)
				require.ErrorIs(t, err, test.want)
			}
			found, err := store.List(t.Context(), "widget", "", 10)
			require.NoError(t, err)
			require.Empty(t, found)
		})
	}
}

// A version is counted from the annotation, which is written by hand after a restore.
func TestVersionsAreAboveTheAnnotation(t *testing.T) {
	t.Parallel()
	c := running(t)
	ns := c.namespace(t)
	store := c.store(t, ns)
	obj, err := store.PutIf(t.Context(), tenure.Object{Key: widget}, tenure.IfAbsent())
	require.NoError(t, err)
	watch := live(t, store, widget)
	const above = 1 << 60
	c.do(t, "PATCH", leases(ns)+"/a.widget", fmt.Sprintf(`{"metadata": {"annotations": {"tenurelib.dev/above": "%d"}}}`, above))
	_, err = store.PutIf(t.Context(), obj, tenure.IfVersion(obj.Version))
	require.ErrorIs(t, err, tenure.ErrConflict)
	is, err := store.Get(t.Context(), widget)
	require.NoError(t, err)
	require.Greater(t, is.Version, int64(above))
	is, err = store.PutIf(t.Context(), is, tenure.IfVersion(is.Version))
	require.NoError(t, err)
	require.Greater(t, is.Version, int64(above))
	awaitChange(t, watch, is.Version)
	require.NoError(t, store.DeleteIf(t.Context(), widget, tenure.IfVersion(is.Version)))
	is, err = store.PutIf(t.Context(), is, tenure.IfAbsent())
	require.NoError(t, err)
	require.Greater(t, is.Version, int64(above))
}

// asVersion gives the Lease another resourceVersion in each answer.
func TestAResourceVersionThatIsNoNumberIsRefused(t *testing.T) {
	t.Parallel()
	c := running(t)
	ns := c.namespace(t)
	_, err := c.store(t, ns).PutIf(t.Context(), tenure.Object{Key: widget}, tenure.IfAbsent())
	require.NoError(t, err)
	for _, version := range []string{"v7", "0", "-1", "340282366920938463463374607431768211455"} {
		other := through(func(req *http.Request, send func(*http.Request) (*http.Response, error)) (*http.Response, error) {
			resp, err := send(req)
			if err != nil {
				return nil, err
			}
			body, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			before, after, _ := strings.Cut(string(body), `"resourceVersion":"`)
			_, after, _ = strings.Cut(after, `"`)
			resp.Body = io.NopCloser(strings.NewReader(before + `"resourceVersion":"` + version + `"` + after))
			return resp, err
		})
		store := open(t, kubetenure.Config{Namespace: ns, URL: c.kube.URL.String(), Client: other.client()})
		_, err := store.Get(t.Context(), widget)
		require.ErrorIs(t, err, tenure.ErrSetup)
		require.ErrorContains(t, err, version)
	}
}

func TestAPayloadMayHave128KiBWhateverItIs(t *testing.T) {
	t.Parallel()
	c := running(t)
	store := c.store(t, c.namespace(t))
	noise := make([]byte, 128<<10)
	for i := range noise {
		noise[i] = byte(rand.Uint32())
	}
	for i, payload := range [][]byte{noise, bytes.Repeat([]byte("x"), 250<<10)} {
		obj := tenure.Object{Key: tenure.Key{Type: "widget", ID: fmt.Sprint(i)}, Payload: payload}
		_, err := store.PutIf(t.Context(), obj, tenure.IfAbsent())
		require.NoError(t, err)
		is, err := store.Get(t.Context(), obj.Key)
		require.NoError(t, err)
		require.Equal(t, payload, is.Payload)
	}
	_, err := store.PutIf(t.Context(), tenure.Object{Key: widget, Payload: bytes.Repeat([]byte("x"), 256<<10)}, tenure.IfAbsent())
	require.ErrorIs(t, err, tenure.ErrInvalid)
	require.ErrorContains(t, err, "262144")
	_, err = store.Get(t.Context(), widget)
	require.ErrorIs(t, err, tenure.ErrNotFound)
}

func TestARenewalIsOneRequest(t *testing.T) {
	t.Parallel()
	c := running(t)
	var requests atomic.Int64
	count := through(func(req *http.Request, send func(*http.Request) (*http.Response, error)) (*http.Response, error) {
		requests.Add(1)
		return send(req)
	})
	store := open(t, kubetenure.Config{Namespace: c.namespace(t), URL: c.kube.URL.String(), Client: count.client()})
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{Key: sweeper, Holder: "a"})
	term, err := lease.TryAcquire(t.Context())
	require.NoError(t, err)
	before := requests.Load()
	for range 10 {
		require.NoError(t, lease.Renew(t.Context(), term))
	}
	require.EqualValues(t, 10, requests.Load()-before)
	require.NoError(t, lease.Release(t.Context(), term))
	require.EqualValues(t, 11, requests.Load()-before)
}

// The watch begins with what comes after the state that was read.
func TestADeletionBetweenTheReadAndTheWatchIsTold(t *testing.T) {
	t.Parallel()
	c := running(t)
	ns := c.namespace(t)
	_, err := c.store(t, ns).PutIf(t.Context(), tenure.Object{Key: widget}, tenure.IfAbsent())
	require.NoError(t, err)
	between := through(func(req *http.Request, send func(*http.Request) (*http.Response, error)) (*http.Response, error) {
		if isWatch(req) {
			c.do(t, "DELETE", leases(ns)+"/a.widget", nil)
		}
		return send(req)
	})
	store := open(t, kubetenure.Config{Namespace: ns, URL: c.kube.URL.String(), Client: between.client()})
	watch := store.Watch(widget).(tenure.ChangeSubscription)
	defer watch.Stop()
	testkit.Await(t, "the deletion has arrived", func() bool { change, ok := watch.Last(); return ok && change.Deleted })
}
