//go:build unix

package etcdtenure_test

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/tenurelib/tenure/etcdtenure"
	"github.com/tenurelib/tenure/proof/kit"
	"github.com/tenurelib/tenure/proof/rig"
)

// TestMain runs more tests at once than there are cores, since they mostly wait.
func TestMain(m *testing.M) {
	flag.Parse()
	if err := flag.Set("test.parallel", "4"); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

// program returns the path of a program of etcd, which the go command builds once.
func program(path string) string {
	program, err := rig.Program(context.Background(), path)
	if err != nil {
		panic(err)
	}
	return program
}

var (
	etcd    = sync.OnceValue(func() string { return program("go.etcd.io/etcd/server/v3") })
	etcdutl = sync.OnceValue(func() string { return program("go.etcd.io/etcd/etcdutl/v3") })
)

// server is etcd in a process of its own.
type server struct {
	name   string
	dir    string
	client string // URL
	peer   string // URL
	args   []string

	process, guard *exec.Cmd
}

// freeURL returns a URL of a port on which nothing listens.
func freeURL() string {
	port, err := kit.FreePort()
	if err != nil {
		panic(err)
	}
	return fmt.Sprint("http://127.0.0.1:", port)
}

func newServer(name, dir string, args ...string) *server {
	return &server{name: name, dir: dir, args: args, client: freeURL(), peer: freeURL()}
}

// start starts a server of its own until the test ends. It does not sync, since no test makes
// the machine lose power.
func start(t testing.TB, args ...string) *server {
	t.Helper()
	s := newServer("test", quickDir(t), append([]string{"--unsafe-no-fsync"}, args...)...)
	s.begin(t)
	s.awaitHealth(t)
	return s
}

// startDurable is start with a server that syncs, and may be killed.
func startDurable(t testing.TB) *server {
	t.Helper()
	s := newServer("test", quickDir(t))
	s.begin(t)
	s.awaitHealth(t)
	return s
}

// begin starts the process.
func (s *server) begin(t testing.TB) {
	t.Helper()
	args := append([]string{"--name", s.name, "--data-dir", s.dir, "--log-level", "error",
		"--listen-client-urls", s.client, "--advertise-client-urls", s.client,
		"--listen-peer-urls", s.peer}, s.args...)
	if !slices.Contains(s.args, "--initial-cluster") {
		args = append(args, "--initial-advertise-peer-urls", s.peer, "--initial-cluster", s.name+"="+s.peer)
	}
	s.process = exec.Command(etcd(), args...)
	require.NoError(t, s.process.Start())
	// If this process should vanish, the shell reads the end of its input and kills the server.
	s.guard = exec.Command("/bin/sh", "-c", fmt.Sprint("read x; kill -9 ", s.process.Process.Pid))
	_, err := s.guard.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, s.guard.Start())
	t.Cleanup(s.kill)
}

func (s *server) awaitHealth(t testing.TB) {
	t.Helper()
	client := connect(t, s.client)
	kit.Await(t, s.name+" answers", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := client.Get(ctx, "x")
		return err == nil
	})
}

func (s *server) kill() { s.end(syscall.SIGKILL) }

// stop lets the server end by itself.
func (s *server) stop() { s.end(syscall.SIGTERM) }

func (s *server) end(sig os.Signal) {
	if s.process == nil {
		return
	}
	_ = s.guard.Process.Kill()
	_ = s.guard.Wait()
	_ = s.process.Process.Signal(sig)
	_ = s.process.Wait()
	s.process = nil
}

// pause stops the process until resume, or until the test ends.
func (s *server) pause(t testing.TB) { t.Helper(); kit.PauseProcess(t, s.process.Process) }

func (s *server) resume(t testing.TB) { t.Helper(); kit.ResumeProcess(t, s.process.Process) }

// metric returns a number that the server tells of itself.
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

// restore starts the server again with what a snapshot has.
func (s *server) restore(t testing.TB, snapshot, token string, args ...string) {
	t.Helper()
	s.kill()
	require.NoError(t, os.RemoveAll(s.dir))
	out, err := exec.Command(etcdutl(), append([]string{"snapshot", "restore", snapshot, "--data-dir", s.dir, "--name", s.name,
		"--initial-cluster", s.name + "=" + s.peer, "--initial-advertise-peer-urls", s.peer, "--initial-cluster-token", token}, args...)...).CombinedOutput()
	require.NoError(t, err, "%s", out)
	s.begin(t)
	s.awaitHealth(t)
}

// quickDir is a directory in memory where there is one.
func quickDir(t testing.TB) string {
	t.Helper()
	memory := "/dev/shm"
	if _, err := os.Stat(memory); err != nil {
		memory = ""
	}
	dir, err := os.MkdirTemp(memory, "etcdtenure")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// connect returns a client, which connects again soon, until the test ends.
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
	cfg.Logger = kit.Quiet
	store, err := etcdtenure.New(client, cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, store.Close()) })
	require.NoError(t, store.Migrate(t.Context()))
	return store
}
