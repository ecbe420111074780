//go:build unix

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

// The tests run this test binary as the gateway, with the race detector if the tests have it.
func TestMain(m *testing.M) {
	if os.Getenv("GATEWAY_IS_THE_PROGRAM") != "" {
		main()
		return
	}
	slog.SetDefault(slog.New(slog.DiscardHandler))
	testkit.Main(m)
}

// fleet has the gateways of a test, which share a store and a backend.
type fleet struct {
	store    string
	state    string
	flags    []string
	gateways []*gateway
}

func newFleet(t *testing.T, store string, flags ...string) *fleet {
	t.Helper()
	return &fleet{store: store, state: t.TempDir(), flags: flags}
}

// gateway is a running gateway process.
type gateway struct {
	name   string
	addr   string
	cmd    *exec.Cmd
	exited chan struct{} // closed when the process has been collected
	log    testkit.SyncBuffer
}

// start starts a gateway, in place of an earlier one with its name, and returns when it
// serves. It ends with the test.
func (f *fleet) start(t *testing.T, name string, flags ...string) *gateway {
	t.Helper()
	args := append([]string{"-listen", "127.0.0.1:0", "-replica", name, "-state", f.state, "-store", f.store}, f.flags...)
	g := &gateway{name: name, cmd: exec.Command(os.Args[0], append(args, flags...)...), exited: make(chan struct{})}
	g.cmd.Env = append(os.Environ(), "GATEWAY_IS_THE_PROGRAM=1", "GORACE=atexit_sleep_ms=0")
	g.cmd.Stderr = &g.log
	require.NoError(t, g.cmd.Start())
	go func() {
		g.cmd.Wait()
		close(g.exited)
	}()
	t.Cleanup(func() {
		g.cmd.Process.Kill() // also ends a stopped process
		<-g.exited
		if t.Failed() || strings.Contains(g.log.String(), "DATA RACE") {
			t.Errorf("gateway %s:\n%s", g.name, g.log.String())
		}
	})
	listening := regexp.MustCompile(`listening addr=(\S+)`)
	testkit.Await(t, name+" serves", func() bool {
		match := listening.FindStringSubmatch(g.log.String())
		if match != nil {
			g.addr = match[1]
		}
		require.False(t, g.hasExited(), "%s exited", name)
		return match != nil
	})
	f.gateways = append(slices.DeleteFunc(f.gateways, func(old *gateway) bool { return old.name == name }), g)
	return g
}

func (g *gateway) hasExited() bool {
	select {
	case <-g.exited:
		return true
	default:
		return false
	}
}

func (g *gateway) signal(t *testing.T, sig syscall.Signal) {
	t.Helper()
	require.NoError(t, g.cmd.Process.Signal(sig))
}

// stop stops a gateway as a rollout does.
func (g *gateway) stop(t *testing.T) {
	t.Helper()
	g.signal(t, syscall.SIGTERM)
	<-g.exited
	require.True(t, g.cmd.ProcessState.Success(), "%s: %v", g.name, g.cmd.ProcessState)
}

var client = &http.Client{
	Timeout:   requestTimeout,
	Transport: &http.Transport{DisableKeepAlives: true}, // gateways come and go
}

// do sends a request, decodes the answer into body unless body is nil, and returns the
// status, or 0 if there was no answer.
func (g *gateway) do(method, path string, body any) int {
	r, err := http.NewRequest(method, "http://"+g.addr+path, nil)
	if err != nil {
		return 0
	}
	resp, err := client.Do(r)
	if err != nil {
		return 0
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil || body != nil && resp.StatusCode == http.StatusOK && json.Unmarshal(data, body) != nil {
		return 0
	}
	return resp.StatusCode
}

func (g *gateway) status(t *testing.T) (status tenure.Status) {
	t.Helper()
	require.Equal(t, http.StatusOK, g.do("GET", "/healthz", &status), g.name)
	return status
}

// holds reports whether a gateway has a term that it may still trust.
func holds(status tenure.Status) bool {
	return status.Role == tenure.RoleHolder && status.TrustLeft > 0
}

// sweeps returns how many sweeps a gateway has done.
func sweeps(status tenure.Status) (n int) {
	for _, runs := range status.Runs {
		n += runs.Succeeded
	}
	return n
}

// await waits until a sandbox is in a phase, or "none".
func (g *gateway) await(t *testing.T, name string, phase Phase) {
	t.Helper()
	testkit.Await(t, fmt.Sprintf("%s is %s", name, phase), func() bool {
		var sb Sandbox
		status := g.do("GET", "/sandboxes/"+name, &sb)
		return sb.Phase == phase || status == http.StatusNotFound && phase == "none"
	})
}

func (g *gateway) create(t *testing.T, name string) (sb Sandbox) {
	t.Helper()
	status := g.do("PUT", "/sandboxes/"+name, &sb)
	require.True(t, status == http.StatusOK && sb.Phase == Ready, "%s: creating %s answered %d, %+v", g.name, name, status, sb)
	return sb
}

// delete deletes a sandbox, and checks that nothing is left of it.
func (f *fleet) delete(t *testing.T, by *gateway, sb Sandbox) {
	t.Helper()
	require.Equal(t, http.StatusOK, by.do("DELETE", "/sandboxes/"+sb.Name, nil))
	require.Equal(t, http.StatusNotFound, by.do("GET", "/sandboxes/"+sb.Name, nil))
	require.NoFileExists(t, filepath.Join(f.state, sb.Instance))
}

// fail makes the instance of a sandbox fail.
func (f *fleet) fail(t *testing.T, sb Sandbox) {
	t.Helper()
	require.NoError(t, os.Remove(filepath.Join(f.state, sb.Instance)))
}

func TestOneGatewayKeepsItsSandboxes(t *testing.T) {
	testkit.Slow(t)
	t.Parallel()
	f := newFleet(t, filepath.Join(t.TempDir(), "gateway.db"))

	// The sweep interval and the grace period are so long that only the watch can notice.
	g := f.start(t, "a", "-sweep", "1h", "-grace", "1h")
	testkit.Await(t, "it has swept once", func() bool { return sweeps(g.status(t)) == 1 })
	sb := g.create(t, "web")
	flipped, exists := time.Now(), true
	testkit.Await(t, "the watch notices that an instance is gone", func() bool {
		var now Sandbox
		g.do("GET", "/sandboxes/web", &now)
		if time.Since(flipped) > time.Second { // the watch has probably looked since
			if exists = !exists; exists {
				require.NoError(t, os.WriteFile(filepath.Join(f.state, sb.Instance), nil, 0o600))
			} else {
				f.fail(t, sb)
			}
			flipped = time.Now()
		}
		return now.Phase == Error
	})
	f.delete(t, g, sb)

	// A sandbox outlives its gateway, and the next one finds it.
	sb = g.create(t, "web")
	g.stop(t)
	g = f.start(t, "a", "-sweep", "200ms", "-grace", "3s")
	testkit.Await(t, "it has swept", func() bool { return sweeps(g.status(t)) > 0 })
	var found Sandbox
	g.do("GET", "/sandboxes/web", &found)
	require.Equal(t, sb, found)
	f.fail(t, sb)
	g.await(t, "web", Error)
	g.await(t, "web", "none")
}

// With a lease it would wait until the TTL has passed.
func TestAGatewayThatIsAloneWithItsFileWorksAtOnceAfterItWasKilled(t *testing.T) {
	t.Parallel()
	f := newFleet(t, filepath.Join(t.TempDir(), "gateway.db"), "-sweep", "100ms")
	g := f.start(t, "a")
	testkit.Await(t, "it has swept", func() bool { return sweeps(g.status(t)) > 0 })
	sb := g.create(t, "web")

	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	refused := exec.CommandContext(ctx, os.Args[0], "-listen", "127.0.0.1:0", "-replica", "b", "-state", f.state, "-store", f.store)
	refused.Env = append(os.Environ(), "GATEWAY_IS_THE_PROGRAM=1")
	said, err := refused.CombinedOutput()
	require.Error(t, err, "a second gateway has ended")
	require.Contains(t, string(said), fmt.Sprintf("process %d has it open too", g.cmd.Process.Pid))
	require.Contains(t, string(said), "add ?shared=true")

	g.signal(t, syscall.SIGKILL)
	<-g.exited
	f.fail(t, sb)
	began := time.Now()
	g = f.start(t, "b")
	g.await(t, "web", Error)
	took := time.Since(began)
	t.Logf("killed, started again, and reconciled %v after the start", took.Round(time.Millisecond))
	require.Less(t, took, 5*time.Second, "the TTL is 30 s")
}

const replicaTTL = 6 * time.Second

// holder waits until a gateway other than those given holds the lease, and returns it.
func (f *fleet) holder(t *testing.T, except ...*gateway) (holder *gateway) {
	t.Helper()
	testkit.Await(t, "a gateway holds the lease", func() bool {
		for _, g := range f.gateways {
			if !slices.Contains(except, g) && holds(g.status(t)) {
				holder = g
			}
		}
		return holder != nil
	})
	return holder
}

func TestThreeGatewaysOnPostgres(t *testing.T) {
	testkit.Slow(t)
	t.Parallel()
	server := testkit.StartPostgres(t)
	f := exercise(t, server.URL())
	began := time.Now()
	f.restartUnderLoad(t, server)
	t.Logf("Postgres restarts under load: %.1fs", time.Since(began).Seconds())
}

func TestThreeGatewaysOnOneSQLiteFile(t *testing.T) {
	testkit.Slow(t)
	t.Parallel()
	exercise(t, filepath.Join(t.TempDir(), "gateway.db?shared=true"))
}

// exercise takes the lease from its holder in each way in which a gateway can fail or end.
func exercise(t *testing.T, store string) *fleet {
	t.Helper()
	f := newFleet(t, store, "-ttl", replicaTTL.String(), "-sweep", "200ms", "-grace", "10m")
	for _, name := range []string{"a", "b", "c"} {
		f.start(t, name)
	}
	for _, step := range []struct {
		name string
		run  func(t *testing.T)
	}{
		{"only the holder sweeps", f.onlyTheHolderSweeps},
		{"a stopped holder releases the lease and is replaced", f.stoppedHolder},
		{"a killed holder is replaced", f.killedHolder},
		{"a paused holder is none from its first answer on", f.pausedHolder},
	} {
		began := time.Now()
		step.run(t)
		t.Logf("%s: %.1fs", step.name, time.Since(began).Seconds())
	}
	return f
}

func (f *fleet) onlyTheHolderSweeps(t *testing.T) {
	holder := f.holder(t)
	testkit.Await(t, "the holder sweeps, and all know it", func() bool {
		for _, g := range f.gateways {
			if g.status(t).Holder != holder.name {
				return false
			}
		}
		return sweeps(holder.status(t)) >= 5
	})
	for _, g := range f.gateways {
		h := g.status(t)
		if g == holder {
			require.True(t, h.Token > 0 && h.TrustLeft > 0 && h.TrustLeft <= replicaTTL, "the holder answered %+v", h)
			continue
		}
		require.True(t, h.Role == tenure.RoleStandby && h.Token == 0 && sweeps(h) == 0, "%s answered %+v", g.name, h)

		// A standby serves requests as well, but only the holder reconciles.
		sb := g.create(t, "web")
		f.fail(t, sb)
		g.await(t, "web", Error)
		f.delete(t, g, sb)
	}
}

// replaced waits for the next holder, which has a greater token.
func (f *fleet) replaced(t *testing.T, holder *gateway, token int64) (next *gateway) {
	t.Helper()
	next = f.holder(t, holder)
	require.Greater(t, next.status(t).Token, token)
	return next
}

func (f *fleet) stoppedHolder(t *testing.T) {
	holder := f.holder(t)
	token := holder.status(t).Token
	sb := holder.create(t, "web")
	holder.stop(t)
	next := f.replaced(t, holder, token)
	require.Contains(t, holder.log.String(), "lease released")
	next.await(t, "web", Ready)
	f.delete(t, next, sb)
	f.start(t, holder.name)
}

func (f *fleet) killedHolder(t *testing.T) {
	holder := f.holder(t)
	token := holder.status(t).Token
	sb := holder.create(t, "web")
	holder.signal(t, syscall.SIGKILL)
	next := f.replaced(t, holder, token)
	f.fail(t, sb)
	next.await(t, "web", Error) // the next holder watches the dead gateway's sandbox
	f.delete(t, next, sb)
	<-holder.exited
	f.start(t, holder.name)
}

func (f *fleet) pausedHolder(t *testing.T) {
	holder := f.holder(t)
	token := holder.status(t).Token
	testkit.PauseProcess(t, holder.cmd.Process)
	f.replaced(t, holder, token)

	// Send a request now, so that it is the first that the holder answers when it continues.
	conn, err := net.Dial("tcp", holder.addr)
	require.NoError(t, err)
	defer conn.Close()
	_, err = fmt.Fprint(conn, "GET /healthz HTTP/1.1\r\nHost: gateway\r\n\r\n")
	require.NoError(t, err)
	testkit.ResumeProcess(t, holder.cmd.Process)
	conn.SetReadDeadline(time.Now().Add(testkit.Patience))
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	defer resp.Body.Close()
	var status tenure.Status
	require.NoError(t, json.NewDecoder(resp.Body).Decode(&status))
	require.False(t, holds(status), "its first answer is %+v", status)
	testkit.Await(t, "it is a standby of another holder, or has a later term", func() bool {
		now := holder.status(t)
		return now.Role == tenure.RoleStandby && now.Holder != "" && now.Holder != holder.name || now.Token > token
	})
}

func (f *fleet) restartUnderLoad(t *testing.T, server *testkit.PostgresServer) {
	var mu sync.Mutex
	var acknowledged []Sandbox
	stop := make(chan struct{})
	var load sync.WaitGroup
	for worker, g := range f.gateways {
		load.Go(func() {
			for i := 0; ; i++ {
				var sb Sandbox
				if g.do("PUT", fmt.Sprintf("/sandboxes/load-%d-%d", worker, i), &sb) == http.StatusOK {
					mu.Lock()
					acknowledged = append(acknowledged, sb)
					mu.Unlock()
				}
				select {
				case <-stop:
					return
				case <-time.After(50 * time.Millisecond):
				}
			}
		})
	}
	count := func() int {
		mu.Lock()
		defer mu.Unlock()
		return len(acknowledged)
	}
	testkit.Await(t, "sandboxes are created", func() bool { return count() >= 10 })
	require.NoError(t, server.Restart("immediate"))
	before := count()
	testkit.Await(t, "sandboxes are created again", func() bool { return count() >= before+10 })
	close(stop)
	load.Wait()

	var holder *gateway // the lease may have passed to another one meanwhile
	swept := make(map[*gateway]int)
	for _, g := range f.gateways {
		swept[g] = sweeps(g.status(t))
	}
	testkit.Await(t, "the holder keeps sweeping", func() bool {
		for _, g := range f.gateways {
			if status := g.status(t); holds(status) && sweeps(status) >= swept[g]+2 {
				holder = g
			}
		}
		return holder != nil
	})
	for _, g := range f.gateways {
		require.False(t, g.hasExited(), g.name)
	}
	var list []Sandbox
	require.Equal(t, http.StatusOK, holder.do("GET", "/sandboxes", &list))
	stored := make(map[string]Sandbox)
	for _, sb := range list {
		stored[sb.Name] = sb
	}
	t.Logf("%d sandboxes acknowledged, %d stored", len(acknowledged), len(list))
	for _, want := range acknowledged {
		require.Equal(t, want, stored[want.Name])
		require.FileExists(t, filepath.Join(f.state, want.Instance))
	}
}
