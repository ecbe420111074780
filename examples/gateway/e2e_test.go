//go:build unix

package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
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

	"github.com/google/uuid"
	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/verify/pgtest"
)

// asGateway is an environment variable that makes the test binary act as the gateway. So
// nothing needs to be built, and the race detector is on if it is on in the tests.
const asGateway = "TENURE_TEST_AS_GATEWAY"

func TestMain(m *testing.M) {
	if os.Getenv(asGateway) != "" {
		main()
	}
	pgtest.Main(m)
}

// backend is the store and the state that all gateways of a test share.
type backend struct {
	store []string // flags
	state string
}

func newBackend(t *testing.T, store ...string) backend {
	t.Helper()
	b := backend{store: store, state: filepath.Join(t.TempDir(), "state")}
	t.Cleanup(func() {
		d, err := newProcessDriver(b.state)
		if err != nil {
			t.Error(err)
			return
		}
		d.killAfter = 0
		deleteAll(t, d)
		d.Close()
	})
	return b
}

// gateway is a running gateway process.
type gateway struct {
	name   string
	url    string
	addr   string
	cmd    *exec.Cmd
	exited chan struct{} // closed when the process has been collected

	mu   sync.Mutex
	logs bytes.Buffer
}

// start runs a gateway until the end of the test. It returns when the gateway serves.
func start(t *testing.T, b backend, name string, flags ...string) *gateway {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	args := append([]string{"-listen", "127.0.0.1:0", "-replica", name, "-state", b.state}, b.store...)
	g := &gateway{name: name, cmd: exec.Command(self, append(args, flags...)...), exited: make(chan struct{})}
	g.cmd.Env = append(os.Environ(), asGateway+"=1", "GORACE=atexit_sleep_ms=0")
	stderr, err := g.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := g.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(g.exited)
		lines := bufio.NewScanner(stderr)
		for lines.Scan() {
			g.mu.Lock()
			fmt.Fprintln(&g.logs, lines.Text())
			g.mu.Unlock()
		}
		g.cmd.Wait()
	}()
	t.Cleanup(func() {
		g.cmd.Process.Kill() // also ends a stopped process
		<-g.exited
		if strings.Contains(g.log(), "DATA RACE") {
			t.Error("there was a data race")
		}
		if t.Failed() {
			t.Logf("gateway %s:\n%s", g.name, g.log())
		}
	})
	listening := regexp.MustCompile(`msg=listening addr=(\S+)`)
	eventually(t, soon, name+" serves", func() bool {
		match := listening.FindStringSubmatch(g.log())
		if match != nil {
			g.addr, g.url = match[1], "http://"+match[1]
		}
		return match != nil || g.hasExited()
	})
	if g.hasExited() {
		t.Fatalf("%s exited", name)
	}
	return g
}

func (g *gateway) log() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.logs.String()
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
	if err := g.cmd.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
}

// awaitEnd checks that the gateway exits properly after SIGTERM.
func (g *gateway) awaitEnd(t *testing.T) {
	t.Helper()
	<-g.exited
	if code := g.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("%s exited with code %d, want 0", g.name, code)
	}
}

var client = &http.Client{
	Timeout:   requestTimeout + cleanupTimeout,
	Transport: &http.Transport{DisableKeepAlives: true}, // gateways come and go
}

// do sends a request, decodes the answer into body unless body is nil, and returns the
// status, or 0 if there was no answer.
func (g *gateway) do(method, path, request string, body any) int {
	r, err := http.NewRequest(method, g.url+path, strings.NewReader(request))
	if err != nil {
		return 0
	}
	resp, err := client.Do(r)
	if err != nil {
		return 0
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil || body != nil && json.Unmarshal(data, body) != nil {
		return 0
	}
	return resp.StatusCode
}

func (g *gateway) health(t *testing.T) (h health) {
	t.Helper()
	if got := g.do("GET", "/healthz", "", &h); got != http.StatusOK {
		t.Fatalf("%s: GET /healthz answered %d", g.name, got)
	}
	return h
}

func (g *gateway) get(t *testing.T, name string) (sb Sandbox) {
	t.Helper()
	if got := g.do("GET", "/sandboxes/"+name, "", &sb); got != http.StatusOK {
		t.Fatalf("%s: GET of %s answered %d", g.name, name, got)
	}
	return sb
}

// create creates a sandbox that runs until it is ended.
func (g *gateway) create(t *testing.T, name string) (sb Sandbox) {
	t.Helper()
	got := g.do("POST", "/sandboxes", fmt.Sprintf(`{"name":%q,"command":["sleep","1000"]}`, name), &sb)
	if got != http.StatusCreated || sb.Phase != Ready || !exists(sb.PID) {
		t.Fatalf("%s: creating %s answered %d, %+v", g.name, name, got, sb)
	}
	return sb
}

// delete deletes a sandbox, and checks that nothing of it is left.
func (g *gateway) delete(t *testing.T, sb Sandbox) {
	t.Helper()
	if got := g.do("DELETE", "/sandboxes/"+sb.Name, "", nil); got != http.StatusNoContent {
		t.Errorf("%s: deleting %s answered %d, want %d", g.name, sb.Name, got, http.StatusNoContent)
	}
	if got := g.do("GET", "/sandboxes/"+sb.Name, "", nil); got != http.StatusNotFound {
		t.Errorf("%s: GET of the deleted %s answered %d, want %d", g.name, sb.Name, got, http.StatusNotFound)
	}
	if _, alive, err := inspectProcess(sb.PID); alive || err != nil {
		t.Errorf("the process of the deleted %s is alive: %v, %v", sb.Name, alive, err)
	}
}

func kill(t *testing.T, sb Sandbox) {
	t.Helper()
	if err := syscall.Kill(sb.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

func TestOneGatewayKeepsItsSandboxes(t *testing.T) {
	t.Parallel()
	b := newBackend(t, "-store", filepath.Join(t.TempDir(), "gateway.db"))

	// The sweep interval and the grace period are so long that only the watch stream can
	// notice.
	g := start(t, b, "a", "-sweep", "1h", "-grace", "1h")
	eventually(t, soon, "it has swept once", func() bool { return g.health(t).Sweeps == 1 })
	sb := g.create(t, "web")
	kill(t, sb)
	eventually(t, soon, "the sandbox whose process was killed is an error", func() bool {
		return g.get(t, "web").Phase == Error
	})
	g.delete(t, sb)
	if entries, err := os.ReadDir(filepath.Join(b.state, "instances")); err != nil || len(entries) != 0 {
		t.Errorf("the backend has %v, %v", entries, err)
	}
	var quick Sandbox
	if got := g.do("POST", "/sandboxes", `{"name":"quick","command":["true"]}`, &quick); got != http.StatusCreated {
		t.Errorf("creating quick answered %d", got)
	}
	eventually(t, soon, "the sandbox whose process exited is an error", func() bool {
		return g.get(t, "quick").Phase == Error
	})

	// A sandbox outlives its gateway, and the next one finds it.
	sb = g.create(t, "web")
	g.signal(t, syscall.SIGTERM)
	g.awaitEnd(t)
	if !exists(sb.PID) {
		t.Error("the sandbox's process ended with its gateway")
	}
	g = start(t, b, "a", "-sweep", "200ms", "-grace", "3s")
	eventually(t, soon, "it has swept", func() bool { return g.health(t).Sweeps > 0 })
	if got := g.get(t, "web"); got.Phase != Ready || got.PID != sb.PID {
		t.Errorf("after the restart the sandbox is %+v, want %+v", got, sb)
	}
	kill(t, sb)
	eventually(t, soon, "the sandbox is an error", func() bool { return g.get(t, "web").Phase == Error })
	eventually(t, soon, "it is pruned", func() bool {
		return g.do("GET", "/sandboxes/web", "", nil) == http.StatusNotFound
	})
	eventually(t, soon, "its instance is forgotten", func() bool {
		entries, err := os.ReadDir(filepath.Join(b.state, "instances"))
		return err == nil && len(entries) == 0
	})
}

const replicaTTL = 6 * time.Second

// fleet is three gateways on one backend.
type fleet struct {
	backend
	flags    []string
	gateways []*gateway
}

func startFleet(t *testing.T, b backend, flags ...string) *fleet {
	t.Helper()
	f := &fleet{backend: b, flags: append([]string{"-ttl", replicaTTL.String(), "-sweep", "200ms", "-grace", "10m"}, flags...)}
	for _, name := range []string{"a", "b", "c"} {
		f.gateways = append(f.gateways, f.startOne(t, name))
	}
	return f
}

func (f *fleet) startOne(t *testing.T, name string) *gateway {
	t.Helper()
	return start(t, f.backend, name, f.flags...)
}

// restart replaces a gateway that has exited.
func (f *fleet) restart(t *testing.T, g *gateway) {
	t.Helper()
	f.gateways[slices.Index(f.gateways, g)] = f.startOne(t, g.name)
}

// holder waits until a gateway other than those given holds the lease, and returns it.
func (f *fleet) holder(t *testing.T, except ...*gateway) (holder *gateway) {
	t.Helper()
	eventually(t, soon, "a gateway holds the lease", func() bool {
		for _, g := range f.gateways {
			if !slices.Contains(except, g) && g.health(t).IsHolder {
				holder = g
			}
		}
		return holder != nil
	})
	return holder
}

func (f *fleet) standby(t *testing.T) *gateway {
	t.Helper()
	holder := f.holder(t)
	return f.gateways[slices.IndexFunc(f.gateways, func(g *gateway) bool { return g != holder })]
}

func TestThreeGatewaysOnPostgres(t *testing.T) {
	t.Parallel()
	server := pgtest.Cluster(t)
	f := startFleet(t, newBackend(t, "-store", server.URL()))
	f.exercise(t)
	t.Run("PostgresRestartsUnderLoad", func(t *testing.T) { f.restartUnderLoad(t, server) })
}

func TestThreeGatewaysOnOneSQLiteFile(t *testing.T) {
	t.Parallel()
	f := startFleet(t, newBackend(t, "-shared", "-store", filepath.Join(t.TempDir(), "gateway.db")))
	f.exercise(t)
}

// exercise takes the lease from its holder in each way that a gateway can fail or end. The
// processes that it starts belong to the whole test, not to the subtests.
func (f *fleet) exercise(t *testing.T) {
	for _, step := range []struct {
		name string
		run  func(t *testing.T)
	}{
		{"OnlyTheHolderSweeps", f.onlyTheHolderSweeps},
		{"AStoppedHolderReleasesAndIsReplaced", f.stoppedHolder},
		{"AKilledHolderIsReplaced", f.killedHolder},
		{"APausedHolderIsNoneFromItsFirstAnswerOnAndWritesNothing", f.pausedHolder},
	} {
		began := time.Now()
		step.run(t)
		if t.Failed() {
			t.Fatalf("in the step %s", step.name)
		}
		t.Logf("%s: %.1fs", step.name, time.Since(began).Seconds())
	}
}

func (f *fleet) onlyTheHolderSweeps(t *testing.T) {
	holder := f.holder(t)
	eventually(t, soon, "the holder sweeps, and all know it", func() bool {
		for _, g := range f.gateways {
			if g.health(t).Holder != holder.name {
				return false
			}
		}
		return holder.health(t).Sweeps >= 5
	})
	for _, g := range f.gateways {
		h := g.health(t)
		if g == holder {
			if !h.IsHolder || h.Role != "holder" || h.Token <= 0 || h.TrustSeconds == nil || *h.TrustSeconds <= 0 || *h.TrustSeconds > replicaTTL.Seconds() {
				t.Errorf("the holder answered %+v", h)
			}
			continue
		}
		if h.IsHolder || h.Role != "standby" || h.Token != 0 || h.Sweeps != 0 {
			t.Errorf("the standby %s answered %+v", g.name, h)
		}
	}
	// Standbys serve requests as well, but only the holder watches the process.
	standby := f.standby(t)
	sb := standby.create(t, "web")
	kill(t, sb)
	eventually(t, soon, "the sandbox whose process was killed is an error", func() bool {
		return standby.get(t, "web").Phase == Error
	})
	standby.delete(t, sb)
}

func (f *fleet) stoppedHolder(t *testing.T) {
	holder := f.holder(t)
	token := holder.health(t).Token
	sb := holder.create(t, "web")
	holder.signal(t, syscall.SIGTERM)
	next := f.holder(t, holder)
	if got := next.health(t).Token; got <= token {
		t.Errorf("the next token is %d, want more than %d", got, token)
	}
	holder.awaitEnd(t)
	if !strings.Contains(holder.log(), `msg="lease released"`) {
		t.Errorf("%s left its lease to expire", holder.name)
	}
	if got := next.get(t, "web"); got.Phase != Ready {
		t.Errorf("the stopped gateway's sandbox is %+v", got)
	}
	next.delete(t, sb)
	f.restart(t, holder)
}

func (f *fleet) killedHolder(t *testing.T) {
	holder := f.holder(t)
	token := holder.health(t).Token
	sb := holder.create(t, "web")
	holder.signal(t, syscall.SIGKILL)
	next := f.holder(t, holder)
	if got := next.health(t).Token; got <= token {
		t.Errorf("the next token is %d, want more than %d", got, token)
	}
	kill(t, sb)
	eventually(t, soon, "the next holder watches the dead one's sandbox", func() bool {
		return next.get(t, "web").Phase == Error
	})
	next.delete(t, sb)
	<-holder.exited
	f.restart(t, holder)
}

// open opens the gateways' store.
func (f *fleet) open(t *testing.T) sandboxes {
	t.Helper()
	opts, err := parseOptions(f.store, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	db, err := openStore(t.Context(), opts.store, opts.shared, quiet)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return sandboxes{db}
}

// addUndying adds a sandbox in phase Deleting whose process no driver can end: it doesn't
// lead a process group, so the signal reaches nothing. A sweep that finds it is stuck in
// the middle of the deletion for as long as the test wants.
func (f *fleet) addUndying(t *testing.T, store sandboxes) (sb Sandbox, end func()) {
	t.Helper()
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	end = sync.OnceFunc(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	t.Cleanup(end)

	inst := Instance{ID: uuid.NewString(), Name: "undying", Command: cmd.Args, CreatedAt: time.Now(), PID: cmd.Process.Pid}
	var err error
	if inst.Birth, _, err = inspectProcess(inst.PID); err != nil {
		t.Fatal(err)
	}
	driver := &processDriver{dir: f.state}
	if err := os.Mkdir(driver.live(inst.ID), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := driver.record(inst); err != nil {
		t.Fatal(err)
	}
	sb = Sandbox{Name: inst.Name, record: record{Instance: inst.ID, Command: inst.Command, Phase: Deleting}}
	if sb, err = store.put(t.Context(), sb, tenure.MustCreate()); err != nil {
		t.Fatal(err)
	}
	eventually(t, soon, "a sweep has begun its deletion", func() bool {
		_, err := os.Stat(driver.deleted(inst.ID))
		return err == nil
	})
	return sb, end
}

func (f *fleet) pausedHolder(t *testing.T) {
	holder := f.holder(t)
	token := holder.health(t).Token
	store := f.open(t)
	undying, end := f.addUndying(t, store)
	stopped := time.Now()
	holder.signal(t, syscall.SIGSTOP)
	next := f.holder(t, holder)
	if got := next.health(t).Token; got <= token {
		t.Errorf("the next token is %d, want more than %d", got, token)
	}

	// Send a request now, so that it is the first that the holder answers when it continues.
	conn, err := net.Dial("tcp", holder.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := fmt.Fprint(conn, "GET /healthz HTTP/1.1\r\nHost: gateway\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	<-time.After(time.Until(stopped.Add(2 * replicaTTL)))
	if log := holder.log(); strings.Contains(log[strings.LastIndex(log, "job started"):], "job stopped") {
		t.Error("the job stopped before the pause")
	}
	// Now the process ends that the paused holder's sweep waits for. The next holder, which
	// waits for it too, is killed first: its term lasts until the TTL has passed, and nobody
	// but the old holder touches the record. Only the fence stops the old holder.
	next.signal(t, syscall.SIGKILL)
	<-next.exited
	terms := len(ledger(t, f.gateways...))
	end()
	continued := time.Now()
	holder.signal(t, syscall.SIGCONT)
	conn.SetReadDeadline(continued.Add(soon))
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var h health
	if err := json.NewDecoder(resp.Body).Decode(&h); err != nil {
		t.Fatal(err)
	}
	if h.IsHolder || h.TrustSeconds == nil || *h.TrustSeconds != 0 {
		t.Errorf("its first answer is %+v", h)
	}

	ended := regexp.MustCompile(fmt.Sprintf(`time=(\S+) .*msg="job stopped" token=%d`, token))
	var match []string
	eventually(t, soon, "its job stops", func() bool {
		match = ended.FindStringSubmatch(holder.log())
		return match != nil
	})
	at, err := time.Parse(time.RFC3339, match[1])
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("the job stopped %v after the pause", at.Sub(continued))
	refused := fmt.Sprintf(`level=WARN msg="write refused: the term is over" token=%d sandbox=%s error=`, token, undying.Name)
	eventually(t, soon, "its write is refused", func() bool {
		return strings.Contains(holder.log(), refused)
	})
	got, err := store.get(t.Context(), undying.Name)
	if len(ledger(t, f.gateways...)) > terms {
		t.Log("the machine is so slow that the next term has begun and may have written the record")
	} else if err != nil || got.Version != undying.Version {
		t.Errorf("after the refused write the record is %+v, %v, want it unchanged, %+v", got, err, undying)
	}
	eventually(t, soon, "it is a standby of another holder, or has a later term", func() bool {
		h := holder.health(t)
		return h.Role == "standby" && h.Holder != "" && h.Holder != holder.name || h.Token > token
	})

	f.restart(t, next)
	f.holder(t)
	eventually(t, soon, "the deletion is finished in a later term", func() bool {
		_, err := store.get(t.Context(), undying.Name)
		return errors.Is(err, tenure.ErrNotFound)
	})
}

func (f *fleet) restartUnderLoad(t *testing.T, server *pgtest.Server) {
	var mu sync.Mutex
	var acknowledged []Sandbox
	refused := 0
	stop := make(chan struct{})
	var load sync.WaitGroup
	for worker, g := range f.gateways {
		load.Go(func() {
			tick := time.NewTicker(50 * time.Millisecond)
			defer tick.Stop()
			for i := 0; ; i++ {
				var sb Sandbox
				request := fmt.Sprintf(`{"name":"load-%d-%d","command":["sleep","1000"]}`, worker, i)
				status := g.do("POST", "/sandboxes", request, &sb)
				mu.Lock()
				if status == http.StatusCreated {
					acknowledged = append(acknowledged, sb)
				} else {
					refused++
				}
				mu.Unlock()
				select {
				case <-stop:
					return
				case <-tick.C:
				}
			}
		})
	}
	count := func() int {
		mu.Lock()
		defer mu.Unlock()
		return len(acknowledged)
	}
	eventually(t, soon, "sandboxes are created", func() bool { return count() >= 10 })
	if err := server.Restart("immediate"); err != nil {
		t.Fatal(err)
	}
	before := count()
	eventually(t, soon, "sandboxes are created again", func() bool { return count() >= before+10 })
	close(stop)
	load.Wait()

	holder := f.holder(t)
	sweeps := holder.health(t).Sweeps
	eventually(t, soon, "the holder keeps sweeping", func() bool { return holder.health(t).Sweeps >= sweeps+2 })
	for _, g := range f.gateways {
		if g.hasExited() {
			t.Errorf("%s exited", g.name)
		}
	}
	var list []Sandbox
	if got := holder.do("GET", "/sandboxes", "", &list); got != http.StatusOK {
		t.Fatalf("GET /sandboxes answered %d", got)
	}
	stored := make(map[string]Sandbox)
	for _, sb := range list {
		stored[sb.Name] = sb
	}
	t.Logf("%d sandboxes acknowledged, %d refused, %d stored", len(acknowledged), refused, len(list))
	for _, want := range acknowledged {
		if got := stored[want.Name]; got.Phase != Ready || got.PID != want.PID || !exists(got.PID) {
			t.Errorf("the acknowledged %+v is now %+v", want, got)
		}
	}
}
