//go:build unix

package kubetenure_test

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/testkit/rig"
	"github.com/tenurelib/tenure/stores/kubetenure"
)

func TestAConfigThatCannotWorkIsRefused(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	widget, other := tenure.Key{Type: "widget", ID: "a"}, tenure.Key{Type: "widget", ID: "b"}
	for says, cfg := range map[string]kubetenure.Config{
		"Namespace is empty":           {URL: "https://host"},
		`"Team A" is not a valid name`: {Namespace: "Team A", URL: "https://host"},
		"URL is empty":                 {Namespace: "default"},
		"https://HOST:PORT":            {Namespace: "default", URL: "host:6443"},
		"credentials come from":        {Namespace: "default", URL: "https://user:pa55word@host"},
		`"A" of widget/a`:              {Namespace: "default", URL: "https://host", Leases: map[tenure.Key]string{widget: "A"}},
		"Leases: invalid":              {Namespace: "default", URL: "https://host", Leases: map[tenure.Key]string{{}: "a"}},
		"that of widget/":              {Namespace: "default", URL: "https://host", Leases: map[tenure.Key]string{widget: "a", other: "a"}},
	} {
		_, err := kubetenure.New(cfg)
		require.ErrorIs(t, err, tenure.ErrInvalid, says)
		require.ErrorContains(t, err, says)
		require.NotContains(t, err.Error(), "pa55word")
	}
}

const role = `{"metadata": {"name": "sweeper"}, "rules": [{"apiGroups": ["coordination.k8s.io"], "resources": ["leases"],
	"resourceNames": ["sweeper.lease", "tenure-probe"], "verbs": ["get", "list", "watch", "create", "update"]}]}`

// grant gives the user named replica the rights of the page's Role.
func (c *cluster) grant(t testing.TB, ns string) {
	t.Helper()
	roles := "/apis/rbac.authorization.k8s.io/v1/namespaces/" + ns
	c.do(t, "POST", roles+"/roles", role)
	c.do(t, "POST", roles+"/rolebindings", `{"metadata": {"name": "sweeper"}, "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "sweeper"},
		"subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "replica"}]}`)
}

func TestAReplicaNeedsRightsForItsLeaseOnly(t *testing.T) {
	t.Parallel()
	c := running(t)
	ns := c.namespace(t)
	c.grant(t, ns)
	store := open(t, kubetenure.Config{Namespace: ns, URL: c.kube.URL.String(), Client: rig.KubeClient("replica-token")})
	testkit.Await(t, "the rights are known", func() bool { return store.Migrate(t.Context()) == nil })
	watch := live(t, store, sweeper)
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{Key: sweeper, Holder: "a"})
	term, err := lease.TryAcquire(t.Context())
	require.NoError(t, err)
	require.NoError(t, lease.Renew(t.Context(), term))
	is, err := lease.Read(t.Context())
	require.NoError(t, err)
	awaitChange(t, watch, is.Version)
	require.NoError(t, lease.Release(t.Context(), term))

	for _, do := range []func() error{
		func() error {
			_, err := store.PutIf(t.Context(), tenure.Object{Key: widget}, tenure.IfAbsent())
			return err
		},
		func() error { _, err := store.List(t.Context(), "lease", "", 10); return err },
	} {
		err := do()
		require.ErrorIs(t, err, tenure.ErrSetup)
		require.ErrorContains(t, err, "a Role with the verbs")
		require.ErrorContains(t, err, `User "replica" cannot`)
	}
}

func TestWhatIsMissingIsNamed(t *testing.T) {
	t.Parallel()
	c := running(t)
	ns := c.namespace(t)
	website := httptest.NewServer(http.NotFoundHandler())
	defer website.Close()
	page := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "<html>") }))
	defer page.Close()
	for what, test := range map[string]struct {
		cfg  kubetenure.Config
		want error
		says string
	}{
		"no rights":         {kubetenure.Config{Namespace: ns, Client: rig.KubeClient("guest-token")}, tenure.ErrSetup, `User "guest" cannot update resource "leases"`},
		"wrong token":       {kubetenure.Config{Namespace: ns, Client: rig.KubeClient("nobody's")}, tenure.ErrSetup, "does not know these credentials"},
		"no namespace":      {kubetenure.Config{Namespace: "missing"}, tenure.ErrSetup, `create the namespace first (404 NotFound: namespaces "missing" not found)`},
		"another server":    {kubetenure.Config{Namespace: ns, URL: website.URL}, tenure.ErrSetup, "not that of a Kubernetes API"},
		"not even a Status": {kubetenure.Config{Namespace: ns, URL: page.URL}, nil, "not that of a Kubernetes API"},
		"nobody there":      {kubetenure.Config{Namespace: ns, URL: "https://127.0.0.1:1"}, nil, "connection refused"},
	} {
		if test.cfg.URL == "" {
			test.cfg.URL = c.kube.URL.String()
		}
		store := open(t, test.cfg)
		err := store.Migrate(t.Context())
		require.ErrorContains(t, err, test.says, what)
		require.Equal(t, test.want != nil, errors.Is(err, tenure.ErrSetup), what)
		_, err = store.PutIf(t.Context(), tenure.Object{Key: widget}, tenure.IfAbsent())
		require.Error(t, err)
		require.NotContains(t, err.Error(), "-token", what)
	}
}

// In a pod, everything comes from its files and environment, and the token and the authority are
// exchanged under way.
func TestAPodNeedsNoConfig(t *testing.T) {
	c := running(t)
	ns := c.namespace(t)
	c.grant(t, ns)
	dir := t.TempDir()
	kubetenure.SetServiceAccount(t, dir)
	write := func(name, text string) {
		t.Helper()
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	host, port, err := net.SplitHostPort(c.kube.URL.Host)
	require.NoError(t, err)
	t.Setenv("KUBERNETES_SERVICE_HOST", host)
	t.Setenv("KUBERNETES_SERVICE_PORT", port)
	_, err = kubetenure.New(kubetenure.Config{})
	require.ErrorIs(t, err, tenure.ErrInvalid)
	require.ErrorContains(t, err, "not a pod")

	authority, err := os.ReadFile(filepath.Join(c.dir, "certificates", "apiserver.crt"))
	require.NoError(t, err)
	write("namespace", ns+"\n")
	write("token", "replica-token\n")
	write("ca.crt", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("not one")})))
	store, err := kubetenure.New(kubetenure.Config{Logger: testkit.Quiet})
	require.NoError(t, err)
	defer store.Close()
	require.ErrorContains(t, store.Migrate(t.Context()), "certificate")
	write("ca.crt", string(authority)) // each new connection reads it
	testkit.Await(t, "the rights are known", func() bool { return store.Migrate(t.Context()) == nil })
	term, err := testkit.NewLease(t, store, tenure.LeaseConfig{Key: sweeper, Holder: "a"}).TryAcquire(t.Context())
	require.NoError(t, err)

	// A token that is refused is read again at once.
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{Key: sweeper, Holder: "a"})
	kubetenure.SetToken(store, "expired", 0)
	require.NoError(t, lease.Renew(t.Context(), term))
	write("token", "nobody's")
	kubetenure.SetToken(store, "expired", 0)
	require.ErrorIs(t, lease.Renew(t.Context(), term), tenure.ErrSetup)
	write("token", "replica-token")
	require.NoError(t, lease.Renew(t.Context(), term))

	// A file that cannot be read takes away no token, except one that is refused.
	require.NoError(t, os.Remove(filepath.Join(dir, "token")))
	kubetenure.SetToken(store, "replica-token", time.Hour)
	require.NoError(t, lease.Renew(t.Context(), term))
	kubetenure.SetToken(store, "expired", time.Hour)
	require.ErrorIs(t, lease.Renew(t.Context(), term), os.ErrNotExist)
}

// The API server's machine accepts connections, and nothing answers on them.
func TestAConnectionThatIsNeverSecuredIsGivenUp(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var accepted, open atomic.Int32
	var connections sync.WaitGroup
	connections.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			open.Add(1)
			accepted.Add(1)
			connections.Go(func() {
				defer conn.Close()
				_, _ = io.Copy(io.Discard, conn)
				open.Add(-1)
			})
		}
	})
	dir := t.TempDir()
	kubetenure.SetServiceAccount(t, dir)
	for _, name := range []string{"namespace", "token", "ca.crt"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte("default"), 0o600))
	}
	host, port, err := net.SplitHostPort(listener.Addr().String())
	require.NoError(t, err)
	t.Setenv("KUBERNETES_SERVICE_HOST", host)
	t.Setenv("KUBERNETES_SERVICE_PORT", port)
	store, err := kubetenure.New(kubetenure.Config{Logger: testkit.Quiet})
	require.NoError(t, err)
	defer store.Close()
	for range 5 {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		_, err := store.Get(ctx, widget)
		cancel()
		require.ErrorIs(t, err, context.DeadlineExceeded)
	}
	testkit.Await(t, "all connections are closed", func() bool { return accepted.Load() > 0 && open.Load() == 0 })
	require.NoError(t, listener.Close())
	connections.Wait()
}

// tooMany answers 429 to the first requests.
func TestARequestWaitsWhileTheAPIServerHasTooMany(t *testing.T) {
	t.Parallel()
	c := running(t)
	var mu sync.Mutex
	refusals := 2
	busy := through(func(req *http.Request, send func(*http.Request) (*http.Response, error)) (*http.Response, error) {
		mu.Lock()
		defer mu.Unlock()
		if refusals == 0 {
			return send(req)
		}
		refusals--
		text, _ := json.Marshal(map[string]any{"kind": "Status", "code": 429, "message": "too many"})
		return &http.Response{
			StatusCode: http.StatusTooManyRequests, Header: http.Header{"Retry-After": {"1"}},
			Body: io.NopCloser(strings.NewReader(string(text))), Request: req,
		}, nil
	})
	store := open(t, kubetenure.Config{Namespace: c.namespace(t), URL: c.kube.URL.String(), Client: busy.client()})
	began := time.Now()
	_, err := store.PutIf(t.Context(), tenure.Object{Key: widget}, tenure.IfAbsent()) // a read and a write
	require.NoError(t, err)
	require.GreaterOrEqual(t, time.Since(began), 2*time.Second)

	mu.Lock()
	refusals = 100
	mu.Unlock()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err = store.Get(ctx, widget)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "429")
}
