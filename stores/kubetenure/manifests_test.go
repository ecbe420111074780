//go:build unix

package kubetenure_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/testkit/rig"
	"github.com/tenurelib/tenure/stores/kubetenure"
)

// apply creates what a manifest of the examples has, after edits of its text: old, new.
func (c *cluster) apply(t testing.TB, name, ns string, edits ...string) {
	t.Helper()
	text, err := os.ReadFile("../../examples/kubernetes/" + name)
	require.NoError(t, err)
	for _, manifest := range strings.Split(strings.NewReplacer(edits...).Replace(string(text)), "\n---\n") {
		group := regexp.MustCompile(`apiVersion: (.*)`).FindStringSubmatch(manifest)[1]
		kind := regexp.MustCompile(`(?m)^kind: (.*)`).FindStringSubmatch(manifest)[1]
		plural := strings.ToLower(kind) + "s"
		if strings.HasSuffix(kind, "Policy") {
			plural = strings.ToLower(strings.TrimSuffix(kind, "y")) + "ies"
		}
		path := "/apis/" + group + "/"
		if ns != "" {
			path += "namespaces/" + ns + "/"
		}
		req, err := http.NewRequestWithContext(t.Context(), "POST", c.kube.URL.String()+path+plural, strings.NewReader(manifest))
		require.NoError(t, err)
		req.Header.Set("Content-Type", "application/yaml")
		resp, err := c.kube.Client.Do(req)
		require.NoError(t, err)
		answer, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		resp.Body.Close()
		require.Equal(t, http.StatusCreated, resp.StatusCode, "%s", answer)
	}
}

func TestThePageShowsTheManifests(t *testing.T) {
	page, err := os.ReadFile("../../docs/kubernetes-leases.md")
	require.NoError(t, err)
	manifest, err := os.ReadFile("../../examples/kubernetes/lease.yaml")
	require.NoError(t, err)
	require.Contains(t, string(page), "```yaml\n"+string(manifest)+"```\n")
	for _, name := range []string{"flowschema.yaml", "fence.yaml"} {
		require.Contains(t, string(page), "](../examples/kubernetes/"+name+")")
	}
}

// The API server knows each field of the sidecar's manifest, and would create the pods. No kubelet has run them.
func TestTheManifestOfAWitnessIsAccepted(t *testing.T) {
	t.Parallel()
	manifest, err := os.ReadFile("../../examples/kubernetes/witness.yaml")
	require.NoError(t, err)
	page, err := os.ReadFile("../../docs/witness.md")
	require.NoError(t, err)
	require.Contains(t, string(page), "](../examples/kubernetes/witness.yaml)")
	c := running(t)
	path := "/apis/apps/v1/namespaces/" + c.namespace(t) + "/deployments?dryRun=All&fieldValidation=Strict"
	for text, want := range map[string]int{
		string(manifest): http.StatusCreated,
		strings.Replace(string(manifest), "restartPolicy: Always", "restartPolicy: Sometimes", 1): http.StatusUnprocessableEntity,
		strings.Replace(string(manifest), "mountPath: /run", "mountsPath: /run", 1):               http.StatusBadRequest,
	} {
		resp, err := c.kube.Client.Post(c.kube.URL.String()+path, "application/yaml", strings.NewReader(text))
		require.NoError(t, err)
		answer, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		resp.Body.Close()
		require.Equal(t, want, resp.StatusCode, "%s", answer)
	}
}

// accountClient returns a client of a service account.
func (c *cluster) accountClient(t testing.TB, ns, name string) *http.Client {
	t.Helper()
	accounts := "/api/v1/namespaces/" + ns + "/serviceaccounts"
	c.do(t, "POST", accounts, `{"metadata": {"name": "`+name+`"}}`)
	answer := c.do(t, "POST", accounts+"/"+name+"/token", `{"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}`)
	return rig.KubeClient(answer["status"].(map[string]any)["token"].(string))
}

func TestTheManifestsGiveAReplicaWhatItNeeds(t *testing.T) {
	t.Parallel()
	c := running(t)
	ns := c.namespace(t)
	c.apply(t, "lease.yaml", ns, "namespace: default", "namespace: "+ns)
	c.apply(t, "flowschema.yaml", "", "namespace: default", "namespace: "+ns, "[default]", "["+ns+"]")
	client := c.accountClient(t, ns, "sweeper")
	schema := c.do(t, "GET", "/apis/flowcontrol.apiserver.k8s.io/v1/flowschemas/sweeper-lease", nil)["metadata"].(map[string]any)["uid"]
	var by atomic.Value
	client.Transport = roundTripper{func(req *http.Request, send func(*http.Request) (*http.Response, error)) (*http.Response, error) {
		resp, err := send(req)
		if err == nil {
			by.Store(resp.Header.Get("X-Kubernetes-PF-FlowSchema-UID"))
		}
		return resp, err
	}, client.Transport}
	store := open(t, kubetenure.Config{Namespace: ns, URL: c.kube.URL.String(), Client: client})
	testkit.Await(t, "the rights are known", func() bool { return store.Migrate(t.Context()) == nil })
	live(t, store, sweeper)
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{Key: sweeper, Holder: "a"})
	term, err := lease.TryAcquire(t.Context())
	require.NoError(t, err)
	testkit.Await(t, "the FlowSchema matches", func() bool {
		require.NoError(t, lease.Renew(t.Context(), term))
		return by.Load() == schema
	})
	require.NoError(t, lease.Release(t.Context(), term))
	_, err = store.PutIf(t.Context(), tenure.Object{Key: widget}, tenure.IfAbsent())
	require.ErrorIs(t, err, tenure.ErrSetup)
}

// The API server has one seat for this user, and refuses what does not get it.
func TestWritersWaitForAnAPIServerThatHasTooManyRequests(t *testing.T) {
	t.Parallel()
	c := running(t)
	ns := c.namespace(t)
	flow := "/apis/flowcontrol.apiserver.k8s.io/v1"
	c.do(t, "POST", flow+"/prioritylevelconfigurations", `{"metadata": {"name": "narrow"}, "spec": {"type": "Limited", "limited": {
		"nominalConcurrencyShares": 1, "borrowingLimitPercent": 0, "limitResponse": {"type": "Reject"}}}}`)
	c.do(t, "POST", flow+"/flowschemas", `{"metadata": {"name": "narrow"}, "spec": {"matchingPrecedence": 100, "priorityLevelConfiguration": {"name": "narrow"},
		"rules": [{"subjects": [{"kind": "User", "user": {"name": "replica"}}], "resourceRules": [
			{"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "namespaces": ["`+ns+`"], "verbs": ["*"]}]}]}}`)
	c.do(t, "POST", "/apis/rbac.authorization.k8s.io/v1/namespaces/"+ns+"/rolebindings", `{"metadata": {"name": "all"}, "roleRef": {
		"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"}, "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "replica"}]}`)
	client := rig.KubeClient("replica-token")
	var refused atomic.Int32
	client.Transport = roundTripper{func(req *http.Request, send func(*http.Request) (*http.Response, error)) (*http.Response, error) {
		resp, err := send(req)
		if err == nil && resp.StatusCode == http.StatusTooManyRequests {
			refused.Add(1)
		}
		return resp, err
	}, client.Transport}
	store := open(t, kubetenure.Config{Namespace: ns, URL: c.kube.URL.String(), Client: client})
	testkit.Await(t, "the rights are known", func() bool { return store.Migrate(t.Context()) == nil })
	testkit.Await(t, "the API server refuses requests", func() bool {
		var all sync.WaitGroup
		for i := range 40 {
			all.Go(func() {
				_, err := store.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "widget", ID: fmt.Sprint(i)}}, tenure.Unconditional())
				if err != nil && !errors.Is(err, t.Context().Err()) && !strings.Contains(err.Error(), "429") {
					t.Error(err)
				}
			})
		}
		all.Wait()
		return refused.Load() > 0
	})
	t.Log(refused.Load(), "requests were refused")
}

// fenced writes a ConfigMap with a token, as a job would, at whatever version it has.
func (c *cluster) fenced(t testing.TB, path string, token int64, method string) (accepted bool) {
	t.Helper()
	body := fmt.Sprintf(`{"metadata": {"annotations": {"tenurelib.dev/token": "%d"}}, "data": {"by": "%[1]d"}}`, token)
	if method == http.MethodPut {
		name := path[strings.LastIndex(path, "/")+1:]
		body = strings.Replace(body, `{"metadata": {`, `{"metadata": {"name": "`+name+`", `, 1)
	}
	code, answer := c.call(t, method, path, body)
	for code == http.StatusConflict {
		code, answer = c.call(t, method, path, body)
	}
	if code == http.StatusUnprocessableEntity {
		require.Contains(t, text(t, answer), "the term is over")
		return false
	}
	require.Equal(t, http.StatusOK, code, answer)
	return true
}

func TestAnAdmissionPolicyRefusesLateWrites(t *testing.T) {
	t.Parallel()
	c := start(t)
	c.apply(t, "fence.yaml", "")
	maps := "/api/v1/namespaces/" + c.namespace(t) + "/configmaps"
	body := `{"metadata": {"name": "%s", "annotations": {"tenurelib.dev/token": "1"}}}`
	c.do(t, "POST", maps, fmt.Sprintf(body, "probe"))
	testkit.Await(t, "the policy works", func() bool {
		c.call(t, "PATCH", maps+"/probe", `{"metadata": {"annotations": {"tenurelib.dev/token": "2"}}}`)
		code, _ := c.call(t, "PATCH", maps+"/probe", `{"metadata": {"annotations": {"tenurelib.dev/token": "1"}}}`)
		return code == http.StatusUnprocessableEntity
	})
	code, _ := c.call(t, "PATCH", maps+"/probe", `{"metadata": {"annotations": {"tenurelib.dev/token": null}}}`)
	require.Equal(t, http.StatusUnprocessableEntity, code, "without a token")

	const races, old = 300, 4
	var late, refused atomic.Int32
	for race := range races {
		path := fmt.Sprint(maps, "/race-", race)
		c.do(t, "POST", maps, fmt.Sprintf(body, fmt.Sprint("race-", race)))
		var done atomic.Bool // the new writer's first write was acknowledged
		var all sync.WaitGroup
		begin := make(chan struct{})
		all.Go(func() {
			<-begin
			c.fenced(t, path, 10, http.MethodPut)
			done.Store(true)
		})
		for i := range old {
			all.Go(func() {
				<-begin
				after := done.Load()
				accepted := c.fenced(t, path, int64(2+i/2), []string{http.MethodPut, http.MethodPatch}[i%2])
				if !accepted {
					refused.Add(1)
				} else if after {
					late.Add(1)
				}
			})
		}
		close(begin)
		all.Wait()
		by, err := strconv.Atoi(c.do(t, "GET", path, nil)["data"].(map[string]any)["by"].(string))
		require.NoError(t, err)
		if by != 10 {
			late.Add(1)
		}
	}
	t.Logf("%d of %d late writes refused", refused.Load(), races*old)
	require.Zero(t, late.Load())
	require.NotZero(t, refused.Load())
}
