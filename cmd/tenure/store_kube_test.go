//go:build unix

package main

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http/httptest"
	"net/http/httputil"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/tenurelib/tenure/internal/testkit/rig"
)

// startKube starts an API server until the test ends. It skips the test if there is no program of it.
func startKube(t *testing.T) (kube *rig.Kube, authority []byte) {
	t.Helper()
	dir := t.TempDir()
	etcd, err := rig.NewEtcd(t.Context(), dir, "--unsafe-no-fsync")
	if err != nil {
		t.Fatal(err)
	}
	kube, err = rig.NewKube(t.Context(), etcd.URL, dir, dir, rig.KubeTokens{"guest-token": {"guest", "guests"}})
	if errors.Is(err, rig.ErrNotBuilt) && os.Getenv("TENURE_REQUIRE_KUBE") == "" {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { kube.End(syscall.SIGKILL); etcd.End(syscall.SIGKILL) })
	if err := errors.Join(etcd.Start(t.Context()), kube.Start(t.Context())); err != nil {
		t.Fatal(err)
	}
	authority, err = os.ReadFile(filepath.Join(dir, "certificates", "apiserver.crt"))
	if err != nil {
		t.Fatal(err)
	}
	return kube, authority
}

const kubeconfigForm = `apiVersion: v1
kind: Config
current-context: test
contexts: [{name: test, context: {cluster: c, user: u}}, {name: other, context: {cluster: none, user: none}}]
clusters: [{name: c, cluster: {server: "%s", certificate-authority-data: %s}}]
users: [{name: u, user: {%s}}]
`

func TestCommandsOnKubernetes(t *testing.T) {
	kube, authority := startKube(t)
	config := filepath.Join(t.TempDir(), "config")
	use := func(user string) {
		t.Helper()
		text := fmt.Sprintf(kubeconfigForm, kube.URL, base64.StdEncoding.EncodeToString(authority), user)
		if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	use("token: " + rig.KubeAdmin)
	t.Setenv("KUBECONFIG", config)
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	s := newSite(t, "kube://default")
	const ttl = 3 * testTTL // a busy machine must not cost a the lease
	args := append([]string{"--ttl", ttl.String(), "--confirm", "1"}, s.service(t)...)
	a := s.start(t, "a", args...)
	s.awaitStart(t, 0)
	b := s.start(t, "b", args...)
	b.awaitLog(t, `msg="lease has another holder"`)
	if v := s.view(t); v.State != stateHeld || v.Holder != "a" || v.Clock != clockOfHolder {
		t.Errorf("the status is %+v", v)
	}
	if got := s.ask(t, "list"); !strings.Contains(got, "reconciler_lease/svc  a ") {
		t.Errorf("the list is %q", got)
	}
	if got := s.ask(t, "handover", "--to", "b", "--wait", "1m"); !strings.HasSuffix(got, "b holds reconciler_lease/svc\n") {
		t.Errorf("handover: %q", got)
	}
	s.awaitStart(t, 1)
	b.signal(t, syscall.SIGKILL)
	if next := s.awaitStart(t, 2); next.holder != "a" {
		t.Errorf("%s took over", next.holder)
	}
	a.signal(t, syscall.SIGTERM)
	if status := a.awaitExit(t); status != 0 {
		t.Errorf("exit status %d", status)
	}
	if v := s.view(t); v.State != stateFree {
		t.Errorf("after the release the status is %+v", v)
	}

	// A Lease with a name of its own, such as one that candidates of client-go use.
	renamed := "kube://default?lease=" + defaultType + "/svc=the-old-name"
	r := newSite(t, renamed)
	c := r.start(t, "c", append([]string{"--ttl", ttl.String()}, r.service(t)...)...)
	r.awaitStart(t, 0)
	if holder := kubeHolder(t, kube, "the-old-name"); !strings.HasPrefix(holder, "c_") {
		t.Errorf("the-old-name is held by %q", holder)
	}
	if v := r.view(t); v.State != stateHeld || v.Holder != "c" {
		t.Errorf("the status of the renamed Lease is %+v", v)
	}
	c.signal(t, syscall.SIGTERM)
	c.awaitExit(t)

	// A proxy that adds credentials, as kubectl proxy does.
	proxy := httptest.NewServer(&httputil.ReverseProxy{
		Rewrite:   func(r *httputil.ProxyRequest) { r.SetURL(kube.URL) },
		Transport: kube.Client.Transport,
	})
	defer proxy.Close()
	if status, _, stderr := tenureCommand(t, "status", "--store", "kube://default?server="+proxy.URL, "--key", "svc"); status != exitFree {
		t.Errorf("through a proxy: exit status %d and %q", status, stderr)
	}

	for _, test := range []struct {
		user   string
		args   []string
		status int
		store  string
		wants  string
	}{
		{"token: " + rig.KubeAdmin, []string{"list", "--sessions"}, 2, s.store, "on Postgres or SQLite only"},
		{"token: " + rig.KubeAdmin, []string{"list", "--table", "mine"}, 2, s.store, "use another namespace"},
		{"token: " + rig.KubeAdmin, []string{"migrate"}, 1, "kube://missing", "create the namespace first"},
		{"token: " + rig.KubeAdmin, []string{"list"}, 2, "kube://default/lease", "a namespace and nothing else"},
		{"token: " + rig.KubeAdmin, []string{"list"}, 2, "kube://default?context=x", `a parameter "context"`},
		{"token: " + rig.KubeAdmin, []string{"list"}, 2, "kube://default?lease=svc", "must be TYPE/ID=NAME"},
		{"token: " + rig.KubeAdmin, []string{"list"}, 2, "kube://default?lease=a/b=C", "not a valid name of a Lease"},
		{"token: " + rig.KubeAdmin, []string{"list"}, 2, "kube:default", "with // after it"},
		{"token: guest-token", []string{"migrate"}, 1, s.store, "a Role with the verbs"},
		{"token: wrong-token", []string{"migrate"}, 1, s.store, "does not know these credentials"},
		{"exec: {command: aws}", []string{"list"}, 2, s.store, "kubectl proxy works for every context"},
		{"client-certificate-data: x", []string{"list"}, 2, s.store, "a client certificate that cannot be read"},
	} {
		use(test.user)
		status, stdout, stderr := tenureCommand(t, append(test.args, "--store", test.store)...)
		if status != test.status || stdout != "" || strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, test.wants) || strings.Contains(stderr, "-token") {
			t.Errorf("%q on %s: exit status %d, %q and %q", test.args, test.store, status, stdout, stderr)
		}
	}
	token := filepath.Join(filepath.Dir(config), "token")
	if err := os.WriteFile(token, []byte(rig.KubeAdmin+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	use("tokenFile: token")
	if status, _, stderr := tenureCommand(t, "migrate", "--store", s.store); status != 0 {
		t.Errorf("with a file: %q", stderr)
	}
}

// kubeHolder returns the holder in a Lease's spec.
func kubeHolder(t *testing.T, kube *rig.Kube, name string) string {
	t.Helper()
	resp, err := kube.Client.Get(kube.URL.JoinPath("apis/coordination.k8s.io/v1/namespaces/default/leases", name).String())
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var lease struct {
		Spec struct {
			HolderIdentity string `json:"holderIdentity"`
		} `json:"spec"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&lease); err != nil {
		t.Fatal(err)
	}
	return lease.Spec.HolderIdentity
}
