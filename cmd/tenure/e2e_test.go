//go:build unix

package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

const (
	testTTL = 3 * time.Second
	soon    = time.Minute // for what happens at once unless the machine is busy
)

// serve is a small service that must never run twice at the same time. It locks a file,
// keeps it locked in all processes that it starts, and logs its events.
//
//	service DIR [stubborn] [child | member | headless] [exit=N]
func serve(args []string) {
	dir, how := args[0], args[1:]
	log, err := os.OpenFile(filepath.Join(dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		panic(err)
	}
	tell := func(what string) {
		fmt.Fprintf(log, "%s %s %s %d\n", what, os.Getenv("TENURE_HOLDER"), os.Getenv("TENURE_TOKEN"), time.Now().UnixNano())
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		panic(err)
	}
	if syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil {
		tell("OVERLAP")
		os.Exit(3)
	}
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGUSR1)
	if leaves := slices.Contains(how, "child"); leaves || slices.Contains(how, "member") { // a child that ignores signals
		child := exec.Command("sh", "-c", `trap "" TERM INT HUP; while :; do sleep 1; done`)
		child.ExtraFiles = []*os.File{lock}
		child.SysProcAttr = &syscall.SysProcAttr{Setsid: leaves} // otherwise it stays in the process group
		if err := child.Start(); err != nil {
			panic(err)
		}
	}
	if slices.Contains(how, "headless") {
		child := exec.Command(os.Args[0], "headless")
		child.ExtraFiles = []*os.File{lock}
		child.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if err := child.Start(); err != nil {
			panic(err)
		}
	}
	tell("start")
	for _, h := range how {
		if n, ok := strings.CutPrefix(h, "exit="); ok {
			status, _ := strconv.Atoi(n)
			tell("stop")
			os.Exit(status)
		}
	}
	for sig := range signals {
		if sig == syscall.SIGHUP || sig == syscall.SIGUSR1 {
			tell("signal-" + strconv.Itoa(int(sig.(syscall.Signal))))
			continue
		}
		if slices.Contains(how, "stubborn") {
			tell("ignored")
			continue
		}
		tell("stop")
		os.Exit(0)
	}
}

// site is what the replicas of a test share: a store and the service's directory.
type site struct {
	store string
	dir   string
}

func newSite(t *testing.T, store string) *site {
	t.Helper()
	s := &site{store: store, dir: t.TempDir()}
	t.Cleanup(func() {
		eventually(t, soon, "nothing of the service is left", s.idle)
		for _, e := range s.events(t) {
			if e.what == "OVERLAP" {
				t.Errorf("two ran at once: %+v", e)
			}
		}
		if t.Failed() {
			log, _ := os.ReadFile(filepath.Join(s.dir, "log"))
			t.Logf("the service's log:\n%s", log)
		}
	})
	return s
}

func sqliteSite(t *testing.T) *site {
	return newSite(t, filepath.Join(t.TempDir(), "tenure.db"))
}

// event is a line of the service's log.
type event struct {
	what, holder string
	token        int64
	at           time.Time
}

// events returns the service's log, and fails the test if the tokens don't increase.
func (s *site) events(t *testing.T) (events []event) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(s.dir, "log"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	newest := int64(0)
	for line := range strings.Lines(string(data)) {
		var e event
		var at int64
		if _, err := fmt.Sscan(line, &e.what, &e.holder, &e.token, &at); err != nil {
			t.Fatalf("log of the service: %q: %v", line, err)
		}
		e.at = time.Unix(0, at)
		if e.what == "start" && e.token <= newest {
			t.Fatalf("token %d came after %d", e.token, newest)
		}
		if e.what == "start" {
			newest = e.token
		}
		events = append(events, e)
	}
	return events
}

// starts returns the start events so far.
func (s *site) starts(t *testing.T) (starts []event) {
	t.Helper()
	return slices.DeleteFunc(s.events(t), func(e event) bool { return e.what != "start" })
}

// has reports whether there has been such an event since the last start.
func (s *site) has(t *testing.T, what string) bool {
	t.Helper()
	events := s.events(t)
	for i := len(events) - 1; i >= 0 && events[i].what != "start"; i-- {
		if events[i].what == what {
			return true
		}
	}
	return false
}

// awaitStart waits for the start with the given index, counting from 0, and returns it.
func (s *site) awaitStart(t *testing.T, after int) event {
	t.Helper()
	var starts []event
	eventually(t, soon, "the service starts", func() bool {
		starts = s.starts(t)
		return len(starts) > after
	})
	return starts[after]
}

// idle reports whether no process holds the service's lock.
func (s *site) idle() bool {
	lock, err := os.OpenFile(filepath.Join(s.dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return false
	}
	defer lock.Close()
	return syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil
}

// open opens the store.
func (s *site) open(t *testing.T) database {
	t.Helper()
	store, err := (&storeFlag{flag: s.store}).open(t.Context(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	return store
}

// holding returns what the store knows about the lease; held is false if nobody holds it
// or the store does not answer.
func holding(t *testing.T, store database) (h tenure.Holding, held bool) {
	t.Helper()
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: defaultType, ID: "svc"}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	h, err = lease.Read(ctx)
	return h, err == nil
}

// awaitRenewal returns just after the next renewal, when nothing is being written.
func awaitRenewal(t *testing.T, store database) {
	t.Helper()
	last := int64(0)
	eventually(t, soon, "the lease is renewed", func() bool {
		h, held := holding(t, store)
		if held && last == 0 {
			last = h.Version
		}
		return held && h.Version > last && (store.Traits().Clockless || h.Age > 10*time.Millisecond && h.Age < 300*time.Millisecond)
	})
}

// replica is a running "tenure run".
type replica struct {
	name   string
	cmd    *exec.Cmd
	exited chan struct{} // closed when the process has been collected
	state  *os.ProcessState

	mu   sync.Mutex
	logs bytes.Buffer
}

// start runs a replica until the end of the test. The args are flags, followed by the
// site's service or another program.
func (s *site) start(t *testing.T, name string, args ...string) *replica {
	t.Helper()
	return s.startWith(t, name, nil, append([]string{"--store", s.store}, args...)...)
}

func (s *site) startWith(t *testing.T, name string, env []string, args ...string) *replica {
	t.Helper()
	r := &replica{name: name, exited: make(chan struct{})}
	r.cmd = exec.Command(testBinary(t), append([]string{"run", "--key", "svc", "--ttl", testTTL.String(), "--replica", name}, args...)...)
	r.cmd.Env = slices.Concat(environ(), []string{asTenure + "=1", "GORACE=atexit_sleep_ms=0"}, env)
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stderr, err := r.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	silent := make(chan struct{})
	go func() {
		defer close(silent)
		lines := bufio.NewScanner(stderr)
		for lines.Buffer(nil, 1<<20); lines.Scan(); { // some names are long
			r.mu.Lock()
			fmt.Fprintln(&r.logs, lines.Text())
			r.mu.Unlock()
		}
	}()
	go func() {
		defer close(r.exited)
		r.state, _ = r.cmd.Process.Wait()
	}()
	t.Cleanup(func() {
		r.cmd.Process.Signal(syscall.SIGTERM)
		r.cmd.Process.Signal(syscall.SIGCONT)
		for what, over := range map[string]chan struct{}{"tenure": r.exited, "something it started": silent} {
			select {
			case <-over:
			case <-time.After(soon):
				t.Errorf("%s: %s does not end", r.name, what)
				r.cmd.Process.Kill()
			}
		}
		if strings.Contains(r.log(), "DATA RACE") {
			t.Error("there was a data race")
		}
		if t.Failed() {
			t.Logf("replica %s:\n%s", r.name, r.log())
		}
	})
	return r
}

func testBinary(t *testing.T) string {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// service returns the end of a command line that runs the site's service.
func (s *site) service(t *testing.T, how ...string) []string {
	t.Helper()
	return append([]string{"--", testBinary(t), "service", s.dir}, how...)
}

func (r *replica) log() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.logs.String()
}

// awaitLog waits for the replica's log to contain a text, because lines arrive with a
// delay.
func (r *replica) awaitLog(t *testing.T, says string) {
	t.Helper()
	eventually(t, soon, r.name+" logs: "+says, func() bool { return strings.Contains(r.log(), says) })
}

func (r *replica) signal(t *testing.T, sig syscall.Signal) {
	t.Helper()
	if err := r.cmd.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
}

// awaitExit waits until the replica exits, and returns its exit status.
func (r *replica) awaitExit(t *testing.T) int {
	t.Helper()
	select {
	case <-r.exited:
	case <-time.After(soon):
		t.Fatalf("%s does not exit", r.name)
	}
	return r.state.ExitCode()
}

// pid returns the PID of the "program" or the "guard" that was started last.
func (r *replica) pid(t *testing.T, what string) (pid int) {
	t.Helper()
	found := regexp.MustCompile(`msg="` + what + ` started" pid=(\d+)`)
	eventually(t, soon, r.name+" logs the PID of its "+what, func() bool {
		all := found.FindAllStringSubmatch(r.log(), -1)
		if all != nil {
			pid, _ = strconv.Atoi(all[len(all)-1][1])
		}
		return pid != 0
	})
	return pid
}

func eventually(t *testing.T, within time.Duration, what string, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(within); !cond(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", within, what)
		}
	}
}

// fleet is three replicas that run one service.
type fleet struct {
	*site
	replicas map[string]*replica
	args     []string
}

func startFleet(t *testing.T, s *site, args ...string) *fleet {
	t.Helper()
	f := &fleet{site: s, replicas: make(map[string]*replica), args: args}
	for _, name := range []string{"a", "b", "c"} {
		f.replicas[name] = s.start(t, name, args...)
	}
	return f
}

// runner returns the replica that started the service last, and the number of starts so
// far.
func (f *fleet) runner(t *testing.T) (*replica, int) {
	t.Helper()
	f.awaitStart(t, 0)
	starts := f.starts(t)
	return f.replicas[starts[len(starts)-1].holder], len(starts)
}

func (f *fleet) restart(t *testing.T, r *replica) {
	t.Helper()
	f.replicas[r.name] = f.start(t, r.name, f.args...)
}

func TestThreeReplicasOnPostgres(t *testing.T) {
	t.Parallel()
	server := testkit.StartPostgres(t)
	s := newSite(t, server.URL())
	f := startFleet(t, s, s.service(t)...)
	f.exercise(t)
	began := time.Now()
	f.databaseRestarts(t, server)
	t.Logf("the database restarts: %.1fs", time.Since(began).Seconds())
}

func TestThreeReplicasOnOneSQLiteFile(t *testing.T) {
	t.Parallel()
	s := sqliteSite(t)
	startFleet(t, s, s.service(t)...).exercise(t)
}

func TestThreeReplicasOnNATS(t *testing.T) {
	t.Parallel()
	s := natsSite(t)
	startFleet(t, s, s.service(t)...).exercise(t)
}

// exercise takes the lease from its holder in each way that a process can fail or end.
func (f *fleet) exercise(t *testing.T) {
	t.Helper()
	store := f.open(t)
	for _, step := range []struct {
		name string
		run  func(t *testing.T, store database, r *replica, starts int)
	}{
		{"a holder that is told to end", f.toldToEnd},
		{"a holder that is killed", f.killed},
		{"a holder that is stopped and continued", f.paused},
	} {
		began := time.Now()
		r, starts := f.runner(t)
		step.run(t, store, r, starts)
		t.Logf("%s: %.1fs", step.name, time.Since(began).Seconds())
	}
}

func (f *fleet) toldToEnd(t *testing.T, store database, r *replica, starts int) {
	r.signal(t, syscall.SIGTERM)
	if status := r.awaitExit(t); status != 0 {
		t.Errorf("%s exited with %d", r.name, status)
	}
	next := f.awaitStart(t, starts)
	if next.holder == r.name {
		t.Errorf("%s started it again", r.name)
	}
	r.awaitLog(t, `msg="lease released"`)
	f.restart(t, r)
}

func (f *fleet) killed(t *testing.T, store database, r *replica, starts int) {
	r.signal(t, syscall.SIGKILL)
	eventually(t, soon, "its guard tells the service to end", func() bool {
		return f.has(t, "stop") || len(f.starts(t)) > starts
	})
	f.awaitStart(t, starts)
	<-r.exited
	f.restart(t, r)
}

func (f *fleet) paused(t *testing.T, store database, r *replica, starts int) {
	awaitRenewal(t, store) // paused during a write, it would hold SQLite's lock throughout
	r.signal(t, syscall.SIGSTOP)
	if next := f.awaitStart(t, starts); next.holder == r.name {
		t.Errorf("%s started it again", r.name)
	}
	token := f.starts(t)[starts-1].token
	if !slices.ContainsFunc(f.events(t), func(e event) bool { return e.what == "stop" && e.token == token }) {
		t.Errorf("the service of %s was not told to end", r.name)
	}
	r.signal(t, syscall.SIGCONT)
	eventually(t, soon, r.name+" notices that it has lost the lease", func() bool {
		return strings.Contains(r.log(), `msg="lease lost`)
	})
}

func (f *fleet) databaseRestarts(t *testing.T, server *testkit.PostgresServer) {
	store := f.open(t)
	r, starts := f.runner(t)
	if err := server.Restart("immediate"); err != nil {
		t.Fatal(err)
	}
	// A restart that is quick enough costs nothing. A slower one ends the service.
	awaitRenewal(t, store)
	if next, now := f.runner(t); next == r && now != starts {
		t.Errorf("%s started it again", r.name)
	}
	if err := server.Stop("fast"); err != nil {
		t.Fatal(err)
	}
	eventually(t, soon, "the service ends while the database is down", f.idle)
	_, starts = f.runner(t)
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	f.awaitStart(t, starts)
}

// handsOver runs replicas through a handover, a death, and the release at the end, and looks at what the command says of the
// lease, whose age is by that clock.
func (s *site) handsOver(t *testing.T, clock string) {
	t.Helper()
	const ttl = 3 * testTTL // a busy machine must not cost a the lease
	args := append([]string{"--ttl", ttl.String(), "--confirm", "1"}, s.service(t)...)
	a := s.start(t, "a", args...)
	s.awaitStart(t, 0)
	b := s.start(t, "b", args...)
	b.awaitLog(t, `msg="lease has another holder"`)
	if v := s.view(t); v.State != stateHeld || v.Holder != "a" || v.Clock != clock || v.AgeMS > v.TTLMS {
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
	killed := time.Now()
	if next := s.awaitStart(t, 2); next.holder != "a" || next.at.Sub(killed) < ttl-ttl/3 { // b has renewed it at most an interval before
		t.Errorf("%s took over after %v", next.holder, next.at.Sub(killed))
	}
	a.signal(t, syscall.SIGTERM)
	if status := a.awaitExit(t); status != 0 {
		t.Errorf("exit status %d", status)
	}
	if v := s.view(t); v.State != stateFree {
		t.Errorf("after the release the status is %+v", v)
	}
}
