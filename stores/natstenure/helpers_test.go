package natstenure_test

import (
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/stores/natstenure"
)

// serverDir is set in a child process that is a server, to the directory of its data.
const serverDir = "NATSTENURE_TEST_SERVER"

func TestMain(m *testing.M) {
	if dir := os.Getenv(serverDir); dir != "" {
		s, err := begin(dir, port(os.Getenv(serverDir+"_PORT")), strings.Fields(os.Getenv(serverDir+"_PEERS"))...)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println(s.ClientURL())
		_, _ = io.Copy(io.Discard, os.Stdin) // until the test has ended
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func port(s string) int {
	n := -1
	_, _ = fmt.Sscan(s, &n)
	return n
}

// begin starts a server whose data is in a directory. Given a port for the other servers, followed
// by the ports on which it reaches them, it joins a cluster.
func begin(dir string, client int, peers ...string) (*server.Server, error) {
	opts := &server.Options{ServerName: "test", Port: client, JetStream: true, StoreDir: dir, MaxPayload: 2 << 20}
	if len(peers) > 0 {
		opts.ServerName = "test-" + peers[0]
		// The other servers must not learn this port from each other: they would bypass the
		// proxies.
		opts.Cluster = server.ClusterOpts{Name: "test", Host: "127.0.0.1", Port: port(peers[0]), Advertise: "127.0.0.1:1"}
		for _, peer := range peers[1:] {
			opts.Routes = append(opts.Routes, &url.URL{Scheme: "nats", Host: "127.0.0.1:" + peer})
		}
	}
	return run(opts)
}

// run starts a server on the loopback interface.
func run(opts *server.Options) (*server.Server, error) {
	opts.Host, opts.NoSigs, opts.NoLog = "127.0.0.1", true, true
	s, err := server.NewServer(opts)
	if err != nil {
		return nil, err
	}
	s.Start()
	if !s.ReadyForConnections(time.Minute) {
		return nil, fmt.Errorf("the server is not ready; does another one have port %d or %d?", opts.Port, opts.Cluster.Port)
	}
	return s, nil
}

// start starts a server in this process until the test ends.
func start(t testing.TB) *server.Server {
	t.Helper()
	return startWith(t, &server.Options{ServerName: "test", JetStream: true, MaxPayload: 2 << 20})
}

// startWith is start with other options.
func startWith(t testing.TB, opts *server.Options) *server.Server {
	t.Helper()
	opts.Port, opts.StoreDir = -1, quickDir(t)
	s, err := run(opts)
	require.NoError(t, err)
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	return s
}

// quickDir returns a directory in memory, if the system has one. An unreplicated server syncs
// several files for each atomic batch, whatever its sync_interval, and on a slow disk that would
// take most of a test's time.
func quickDir(t testing.TB) string {
	t.Helper()
	return tempDirIn(t, testkit.MemoryDir())
}

// tempDir is T.TempDir, except that a server may still write while the directory is removed: even
// after its shutdown it removes what is left of batches.
func tempDir(t testing.TB) string {
	t.Helper()
	return tempDirIn(t, "")
}

func tempDirIn(t testing.TB, where string) string {
	t.Helper()
	dir, err := os.MkdirTemp(where, "natstenure")
	require.NoError(t, err)
	t.Cleanup(func() { testkit.Await(t, dir+" is removed", func() bool { return os.RemoveAll(dir) == nil }) })
	return dir
}

// child is a server in a process of its own, which can be killed.
type child struct {
	binary string   // of an older version
	more   string   // more configuration of an older server
	peers  []string // in a cluster: its port for the other servers, and the ports on which it reaches them
	port   string   // for clients
	url    string
	dir    string
	cmd    *exec.Cmd
	stdin  io.Closer
}

func startChild(t testing.TB) *child {
	t.Helper()
	c := &child{dir: tempDir(t)}
	c.start(t)
	t.Cleanup(c.kill)
	return c
}

func freePort(t testing.TB) string {
	t.Helper()
	port, err := testkit.FreePort()
	require.NoError(t, err)
	return fmt.Sprint(port)
}

// start starts the server, or starts it again on the same port.
func (c *child) start(t testing.TB) {
	t.Helper()
	if c.port == "" {
		c.port = freePort(t)
	}
	if c.binary != "" {
		c.startOld(t)
		return
	}
	c.cmd = exec.Command(os.Args[0])
	c.cmd.Stderr = os.Stderr
	c.cmd.Env = append(os.Environ(), serverDir+"="+c.dir, serverDir+"_PORT="+c.port, serverDir+"_PEERS="+strings.Join(c.peers, " "))
	stdin, err := c.cmd.StdinPipe()
	require.NoError(t, err)
	c.stdin = stdin
	stdout, err := c.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, c.cmd.Start())
	_, err = fmt.Fscanln(stdout, &c.url)
	require.NoError(t, err)
}

// startOld is start for a server of an older version.
func (c *child) startOld(t testing.TB) {
	t.Helper()
	config, name := filepath.Join(c.dir, "config"), "test"
	require.NoError(t, os.WriteFile(config, []byte("max_payload: 2097152\n"+c.more), 0o600))
	if len(c.peers) > 0 {
		name = "test-" + c.peers[0]
	}
	args := []string{"-c", config, "-a", "127.0.0.1", "-p", c.port, "-js", "-sd", c.dir, "-n", name}
	if len(c.peers) > 0 {
		args = append(args, "-cluster_name", "test", "-cluster", "nats://127.0.0.1:"+c.peers[0],
			"-cluster_advertise", "127.0.0.1:1", "-routes", "nats://127.0.0.1:"+strings.Join(c.peers[1:], ",nats://127.0.0.1:"))
	}
	c.cmd = exec.Command(c.binary, args...)
	require.NoError(t, c.cmd.Start())
	c.url = "nats://127.0.0.1:" + c.port
	testkit.Await(t, "the server is ready", func() bool {
		nc, err := nats.Connect(c.url, nats.Timeout(time.Second))
		if err != nil {
			return false
		}
		defer nc.Close()
		return nc.IsConnected()
	})
}

// oldBinary builds a server of an older version. The test is skipped if that fails, or fails if
// TENURE_REQUIRE_OLD_NATS is 1.
func oldBinary(t testing.TB, version string) string {
	t.Helper()
	if testing.Short() {
		t.Skip("this test builds a server")
	}
	bin := t.TempDir()
	build := exec.CommandContext(t.Context(), "go", "install", "github.com/nats-io/nats-server/v2@"+version)
	build.Dir, build.Env = bin, append(os.Environ(), "GOBIN="+bin, "GOFLAGS=")
	if out, err := build.CombinedOutput(); err != nil {
		if os.Getenv("TENURE_REQUIRE_OLD_NATS") == "1" {
			t.Fatalf("build nats-server %s: %v\n%s", version, err, out)
		}
		t.Skipf("nats-server %s can't be built: %v", version, err)
	}
	return filepath.Join(bin, "nats-server")
}

func (c *child) kill() {
	_ = c.cmd.Process.Kill()
	_ = c.cmd.Wait()
}

// connect returns a client, which reconnects at once, until the test ends.
func connect(t testing.TB, url string, opts ...nats.Option) jetstream.JetStream {
	t.Helper()
	nc, err := nats.Connect(url, append(opts, nats.ReconnectWait(10*time.Millisecond), nats.ReconnectJitter(0, 0), nats.MaxReconnects(-1))...)
	require.NoError(t, err)
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	require.NoError(t, err)
	return js
}

// open returns a store on a connection of its own, until the test ends.
func open(t testing.TB, url string) *natstenure.Store {
	t.Helper()
	return openOn(t, connect(t, url), natstenure.Config{})
}

func openOn(t testing.TB, js jetstream.JetStream, cfg natstenure.Config) *natstenure.Store {
	t.Helper()
	cfg.SyncAlways, cfg.Logger = true, testkit.Quiet
	store, err := natstenure.New(js, cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, store.Close()) })
	require.NoError(t, store.Migrate(t.Context()))
	return store
}
