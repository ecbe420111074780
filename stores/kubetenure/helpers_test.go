//go:build unix

package kubetenure_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/testkit/rig"
	"github.com/tenurelib/tenure/stores/kubetenure"
)

// TestMain runs more tests at once than there are cores, since they mostly wait.
func TestMain(m *testing.M) {
	flag.Parse()
	if err := flag.Set("test.parallel", "4"); err != nil {
		panic(err)
	}
	code := m.Run()
	common.end()
	os.Exit(code)
}

// cluster is an API server and its etcd, each in a process of its own.
type cluster struct {
	etcd *rig.Etcd
	kube *rig.Kube
	dir  string
}

// common is the cluster of all tests that break nothing.
var common struct {
	once sync.Once
	*cluster
	err error
}

// users are the tokens of the tests' servers.
var users = rig.KubeTokens{"replica-token": {"replica", "replicas"}, "guest-token": {"guest", "guests"}}

func begin(ctx context.Context, args ...string) (c *cluster, err error) {
	c = &cluster{}
	if c.dir, err = os.MkdirTemp(testkit.MemoryDir(), "kubetenure"); err != nil {
		return nil, err
	}
	if c.etcd, err = rig.NewEtcd(ctx, c.dir, "--unsafe-no-fsync"); err != nil {
		return c, err
	}
	if c.kube, err = rig.NewKube(ctx, c.etcd.URL, c.dir, c.dir, users, args...); err != nil {
		return c, err
	}
	if err := c.etcd.Start(ctx); err != nil {
		return c, err
	}
	return c, c.kube.Start(ctx)
}

func (c *cluster) end() {
	if c == nil {
		return
	}
	if c.kube != nil {
		_ = c.kube.End(syscall.SIGKILL)
	}
	if c.etcd != nil {
		_ = c.etcd.End(syscall.SIGKILL)
	}
	_ = os.RemoveAll(c.dir)
}

// checked skips the test if there is no program of the API server, unless $TENURE_REQUIRE_KUBE is
// set.
func checked(t testing.TB, err error) {
	t.Helper()
	if errors.Is(err, rig.ErrNotBuilt) && os.Getenv("TENURE_REQUIRE_KUBE") == "" {
		t.Skip(err)
	}
	require.NoError(t, err)
}

// start starts a cluster of its own until the test ends.
func start(t testing.TB, args ...string) *cluster {
	t.Helper()
	c, err := begin(t.Context(), args...)
	t.Cleanup(c.end)
	checked(t, err)
	return c
}

// running returns the common cluster.
func running(t testing.TB) *cluster {
	t.Helper()
	common.once.Do(func() { common.cluster, common.err = begin(context.Background()) })
	checked(t, common.err)
	return common.cluster
}

// call sends a request as a user who may do everything, with a body that is JSON or will be, and decodes
// the answer.
func (c *cluster) call(t testing.TB, method, path string, body any) (code int, answer map[string]any) {
	t.Helper()
	var text []byte
	switch body := body.(type) {
	case nil:
	case string:
		text = []byte(body)
	default:
		var err error
		text, err = json.Marshal(body)
		require.NoError(t, err)
	}
	req, err := http.NewRequestWithContext(context.Background(), method, c.kube.URL.String()+path, bytes.NewReader(text))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	if method == http.MethodPatch {
		req.Header.Set("Content-Type", "application/merge-patch+json")
	}
	resp, err := c.kube.Client.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	text, err = io.ReadAll(resp.Body)
	require.NoError(t, err)
	_ = json.Unmarshal(text, &answer)
	return resp.StatusCode, answer
}

// do is call of a request that must succeed.
func (c *cluster) do(t testing.TB, method, path string, body any) map[string]any {
	t.Helper()
	code, answer := c.call(t, method, path, body)
	require.Equal(t, 2, code/100, "%s %s: %v", method, path, answer)
	return answer
}

var namespaces atomic.Int32

// namespace creates a namespace.
func (c *cluster) namespace(t testing.TB) string {
	t.Helper()
	name := fmt.Sprint("test-", namespaces.Add(1))
	c.do(t, "POST", "/api/v1/namespaces", `{"metadata": {"name": "`+name+`"}}`)
	return name
}

func leases(namespace string) string {
	return "/apis/coordination.k8s.io/v1/namespaces/" + namespace + "/leases"
}

// store returns a store with a client of its own until the test ends.
func (c *cluster) store(t testing.TB, namespace string) *kubetenure.Store {
	t.Helper()
	return open(t, kubetenure.Config{Namespace: namespace, URL: c.kube.URL.String()})
}

// open fills in a client with all rights.
func open(t testing.TB, cfg kubetenure.Config) *kubetenure.Store {
	t.Helper()
	if cfg.Client == nil {
		cfg.Client = rig.KubeClient(rig.KubeAdmin)
	}
	if cfg.Logger == nil {
		cfg.Logger = testkit.Quiet
	}
	store, err := kubetenure.New(cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, store.Close()); cfg.Client.CloseIdleConnections() })
	return store
}

var (
	widget  = tenure.Key{Type: "widget", ID: "a"}
	sweeper = tenure.Key{Type: "lease", ID: "sweeper"}
)

// unfenced is a store for helpers that want one that can fence its writes.
type unfenced struct{ *kubetenure.Store }

func (unfenced) Fence(tenure.Guard) (tenure.Store, error) { return nil, errors.ErrUnsupported }

// awaitChange waits until a watch tells of that version, as the newest.
func awaitChange(t *testing.T, watch tenure.ChangeSubscription, version int64) {
	t.Helper()
	testkit.Await(t, "the change has arrived", func() bool { change, ok := watch.Last(); return ok && change.Object.Version == version })
}

// live returns a watch that is live until the test ends.
func live(t *testing.T, store *kubetenure.Store, key tenure.Key) tenure.ChangeSubscription {
	t.Helper()
	watch := store.Watch(key).(tenure.ChangeSubscription)
	t.Cleanup(watch.Stop)
	testkit.Await(t, "the watch is live", watch.Live)
	return watch
}

// through passes the requests of a client through a func.
type through func(req *http.Request, send func(*http.Request) (*http.Response, error)) (*http.Response, error)

// client returns a client with all rights.
func (f through) client() *http.Client {
	client := rig.KubeClient(rig.KubeAdmin)
	client.Transport = roundTripper{f, client.Transport}
	return client
}

type roundTripper struct {
	through
	to http.RoundTripper
}

func (r roundTripper) RoundTrip(req *http.Request) (*http.Response, error) {
	return r.through(req, r.to.RoundTrip)
}

func (r roundTripper) CloseIdleConnections() {
	r.to.(interface{ CloseIdleConnections() }).CloseIdleConnections()
}

// isWatch reports whether a request begins a watch.
func isWatch(req *http.Request) bool { return req.URL.Query().Get("watch") != "" }

// text returns an answer as JSON.
func text(t testing.TB, answer any) string {
	t.Helper()
	b, err := json.Marshal(answer)
	require.NoError(t, err)
	return strings.TrimSpace(string(b))
}

const soon = 30 * time.Second
