//go:build unix

package etcdtenure_test

import (
	"bufio"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/testkit/rig"
	"github.com/tenurelib/tenure/stores/etcdtenure"
)

// TestMain runs more tests at once than there are cores, since they mostly wait.
func TestMain(m *testing.M) {
	flag.Parse()
	if err := flag.Set("test.parallel", "4"); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

// server is etcd in a process of its own.
type server struct {
	*rig.Etcd
	client string // URL
}

func newServer(t testing.TB, args ...string) *server {
	t.Helper()
	etcd, err := rig.NewEtcd(t.Context(), quickDir(t), args...)
	require.NoError(t, err)
	return &server{etcd, etcd.URL.String()}
}

// start starts a server for this test. It does not sync, because no test makes the machine lose
// power.
func start(t testing.TB, args ...string) *server {
	t.Helper()
	s := newServer(t, append([]string{"--unsafe-no-fsync"}, args...)...)
	s.begin(t)
	s.awaitHealth(t)
	return s
}

// startDurable is start with a server that syncs, and may be killed.
func startDurable(t testing.TB) *server {
	t.Helper()
	s := newServer(t)
	s.begin(t)
	s.awaitHealth(t)
	return s
}

// begin starts the process.
func (s *server) begin(t testing.TB) {
	t.Helper()
	require.NoError(t, s.Process.Start())
	t.Cleanup(s.kill)
}

func (s *server) awaitHealth(t testing.TB) { t.Helper(); require.NoError(t, s.AwaitReady(t.Context())) }

func (s *server) kill() { _ = s.End(syscall.SIGKILL) }

func (s *server) process(t testing.TB) *os.Process {
	t.Helper()
	process, err := os.FindProcess(s.PID())
	require.NoError(t, err)
	return process
}

// pause stops the process until resume, or until the test ends.
func (s *server) pause(t testing.TB) { t.Helper(); testkit.PauseProcess(t, s.process(t)) }

func (s *server) resume(t testing.TB) { t.Helper(); testkit.ResumeProcess(t, s.process(t)) }

// metric returns one of the server's metrics.
func (s *server) metric(t testing.TB, name string) int {
	t.Helper()
	resp, err := http.Get(s.client + "/metrics")
	require.NoError(t, err)
	defer resp.Body.Close()
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		var n int
		if _, err := fmt.Sscanf(lines.Text(), name+" %d", &n); err == nil {
			return n
		}
	}
	t.Fatal("no metric ", name)
	return 0
}

// snapshot saves a snapshot of a server and returns its path.
func (s *server) snapshot(t testing.TB) string {
	t.Helper()
	r, err := connect(t, s.client).Snapshot(t.Context())
	require.NoError(t, err)
	defer r.Close()
	path := filepath.Join(t.TempDir(), "snapshot")
	f, err := os.Create(path)
	require.NoError(t, err)
	_, err = io.Copy(f, r)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	return path
}

// restore restarts the server with the content of a snapshot.
func (s *server) restore(t testing.TB, snapshot, token string) {
	t.Helper()
	s.kill()
	require.NoError(t, s.Restore(t.Context(), snapshot, token))
	s.begin(t)
	s.awaitHealth(t)
}

// quickDir returns a directory in memory, if the system has one.
func quickDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp(testkit.MemoryDir(), "etcdtenure")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// connect returns a client that reconnects quickly, until the test ends.
func connect(t testing.TB, urls ...string) *clientv3.Client {
	t.Helper()
	return connectWith(t, clientv3.Config{Endpoints: urls})
}

func connectWith(t testing.TB, config clientv3.Config) *clientv3.Client {
	t.Helper()
	config.Logger = zap.NewNop()
	config.BackoffWaitBetween = 10 * time.Millisecond
	config.DialTimeout = 5 * time.Second
	client, err := clientv3.New(config)
	require.NoError(t, err)
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// open returns a store on a client of its own, until the test ends.
func open(t testing.TB, urls ...string) *etcdtenure.Store {
	t.Helper()
	return openOn(t, connect(t, urls...), etcdtenure.Config{})
}

func openOn(t testing.TB, client *clientv3.Client, cfg etcdtenure.Config) *etcdtenure.Store {
	t.Helper()
	cfg.Logger = testkit.Quiet
	store, err := etcdtenure.New(client, cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, store.Close()) })
	require.NoError(t, store.Migrate(t.Context()))
	return store
}
