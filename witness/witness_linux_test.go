package witness_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/proctree"
	"github.com/tenurelib/tenure/internal/testkit"
)

// site is a store, and the processes that compete in it. Its TTL is longer than any test.
type site struct {
	*testing.T
	dir, url string
	store    tenure.Store
}

func newSite(t *testing.T, url string) *site {
	s := &site{T: t, dir: t.TempDir(), url: url}
	if url == "" {
		s.url = filepath.Join(s.dir, "leases.db")
		store, err := tenure.OpenSQLite(t.Context(), s.url, tenure.SQLiteConfig{Shared: true, Logger: testkit.Quiet})
		require.NoError(t, err)
		t.Cleanup(func() { store.Close() })
		s.store = store
		testkit.Migrate(t, store)
	} else {
		store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{Logger: testkit.Quiet})
		testkit.Migrate(t, store)
		s.store = store
	}
	return s
}

// party is a witness with its program, or a process without one.
type party struct {
	*exec.Cmd
	s     *site
	said  chan []string
	errs  *os.File // not a pipe, which its program may keep open
	ended chan struct{}
}

// start starts a role, in an environment with more variables. A witness's program has the second role.
func (s *site) start(env []string, roles ...string) *party {
	s.Helper()
	p := &party{Cmd: exec.Command("/proc/self/exe"), s: s, said: make(chan []string, 1000), ended: make(chan struct{})}
	p.Env = append(os.Environ(), roleEnv+"="+roles[0], "WITNESS_TEST_STORE="+s.url, "WITNESS_TEST_DIR="+s.dir, "WITNESS_TEST_TTL=5m")
	if len(roles) > 1 {
		p.Env = append(p.Env, "WITNESS_TEST_PROGRAM="+roles[1])
		p.Args = append(p.Args, roles[2:]...)
	}
	p.Env = append(p.Env, env...)
	var err error
	p.errs, err = os.CreateTemp(s.dir, "stderr")
	require.NoError(s, err)
	p.Stderr = p.errs
	out, in, err := os.Pipe()
	require.NoError(s, err)
	p.Stdout = in
	require.NoError(s, p.Start())
	in.Close()
	go func() {
		for lines := bufio.NewScanner(out); lines.Scan(); {
			p.said <- strings.Fields(lines.Text())
		}
		close(p.said)
	}()
	go func() {
		defer close(p.ended)
		p.Wait()
	}()
	s.Cleanup(func() {
		for _, d := range proctree.Descendants(p.Process.Pid) {
			syscall.Kill(d.PID, syscall.SIGKILL)
		}
		p.Process.Kill()
		<-p.ended
		if s.Failed() {
			s.Logf("%v %v: %s", roles, p.ProcessState, p.log())
		}
	})
	return p
}

func (p *party) log() string {
	text, _ := os.ReadFile(p.errs.Name())
	return string(text)
}

// begins waits until a job begins, and returns its process and whether its term is witnessed.
func (p *party) begins() (pid int, witnessed bool) {
	p.s.Helper()
	line := p.hears("began")
	pid, err := strconv.Atoi(line[2])
	require.NoError(p.s, err)
	return pid, line[4] == "true"
}

func (p *party) hears(want string) []string {
	p.s.Helper()
	for {
		select {
		case line, ok := <-p.said:
			require.True(p.s, ok, "it has ended: %s", p.log())
			require.Equal(p.s, want, line[0], line)
			return line
		case <-time.After(2 * time.Minute):
			require.FailNow(p.s, "it says nothing", p.log())
		}
	}
}

// exits waits until a process has ended, and returns its status.
func (p *party) exits() int {
	p.s.Helper()
	select {
	case <-p.ended:
		return p.ProcessState.ExitCode()
	case <-time.After(2 * time.Minute):
		require.FailNow(p.s, "it does not end", p.log())
		return 0
	}
}

func (s *site) lease(id string) *tenure.Lease {
	return testkit.NewLease(s, s.store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: id}, Logger: testkit.Quiet})
}

// isHeld requires that a lease stays a process's.
func (s *site) isHeld(by int) {
	s.Helper()
	for range 10 {
		h, err := s.lease("0").Read(s.Context())
		require.NoError(s, err)
		require.Equal(s, strconv.Itoa(by), h.Holder)
		time.Sleep(100 * time.Millisecond)
	}
}

func kill(t *testing.T, pid int, sig syscall.Signal) {
	t.Helper()
	require.NoError(t, syscall.Kill(pid, sig))
}

func TestADeadProgramsLeaseIsTheNextReplicasAtOnce(t *testing.T) {
	for role, status := range map[string]int{"hold": 137, "leaves": 137, "closes": 137, "panics": 2, "exits": 3} {
		t.Run(role, func(t *testing.T) {
			t.Parallel()
			s := newSite(t, "")
			a := s.start(nil, "witness", role)
			program, witnessed := a.begins()
			require.True(t, witnessed)
			if role == "leaves" {
				a.hears("left")
			}
			b := s.start(nil, "hold")
			if status == 137 {
				s.isHeld(program)
				kill(t, program, syscall.SIGKILL)
			}
			next, witnessed := b.begins() // long before the TTL has passed
			require.False(t, witnessed)
			require.Equal(t, status, a.exits())
			s.isHeld(next)
			daemon, err := os.OpenFile(filepath.Join(s.dir, "daemon"), os.O_CREATE|os.O_RDWR, 0o600)
			require.NoError(t, err)
			defer daemon.Close()
			require.NoError(t, syscall.Flock(int(daemon.Fd()), syscall.LOCK_EX|syscall.LOCK_NB), "what the program has left still runs")
		})
	}
}

func TestAProgramIsItsOwnWitness(t *testing.T) {
	s := newSite(t, "")
	a := s.start(nil, "main")
	program, witnessed := a.begins()
	require.True(t, witnessed)
	require.NotEqual(t, a.Process.Pid, program)
	kill(t, program, syscall.SIGKILL)
	require.Equal(t, 137, a.exits())
	require.Contains(t, a.log(), "left to expire", "the term is young")
	s.isHeld(program)

	off := newSite(t, "")
	b := off.start([]string{"TENURE_WITNESS=off"}, "main")
	program, witnessed = b.begins()
	require.False(t, witnessed)
	require.Equal(t, b.Process.Pid, program)
}

func TestAProcessThatLivesKeepsItsLease(t *testing.T) {
	for name, do := range map[string]func(*testing.T, int){
		"stopped":          func(t *testing.T, pid int) { kill(t, pid, syscall.SIGSTOP) },
		"execs another":    func(t *testing.T, pid int) { kill(t, pid, syscall.SIGUSR1) },
		"closes its files": func(*testing.T, int) {},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSite(t, "")
			a := s.start(nil, "witness", map[string]string{"execs another": "execs", "closes its files": "closes"}[name]+map[string]string{"stopped": "hold"}[name])
			program, _ := a.begins()
			do(t, program)
			s.isHeld(program)
			kill(t, program, syscall.SIGKILL)
			require.Equal(t, 137, a.exits())
			_, err := s.lease("0").Read(t.Context())
			testkit.WantErr(t, err, tenure.ErrNotFound)
		})
	}
}

func TestAWitnessThatWasStoppedReleasesNothingOfTheNextHolder(t *testing.T) {
	testkit.Slow(t)
	s := newSite(t, "")
	a := s.start([]string{"WITNESS_TEST_TTL=1s"}, "witness", "hold")
	program, _ := a.begins()
	b := s.start(nil, "hold")
	kill(t, a.Process.Pid, syscall.SIGSTOP)
	kill(t, program, syscall.SIGKILL)
	next, _ := b.begins() // after the TTL
	kill(t, a.Process.Pid, syscall.SIGCONT)
	require.Equal(t, 137, a.exits())
	s.isHeld(next)
}

func TestAWitnessThatIsKilledEndsNothing(t *testing.T) {
	testkit.Slow(t)
	s := newSite(t, "")
	a := s.start([]string{"WITNESS_TEST_TTL=6s"}, "witness", "hold")
	program, _ := a.begins()
	kill(t, a.Process.Pid, syscall.SIGKILL)
	a.exits()
	s.isHeld(program)
	testkit.WantErr(t, s.lease("0").RequestRelease(t.Context()), nil)
	for { // the term that follows names no witness
		if line := a.hears("began"); line[4] == "false" {
			break
		}
	}
	kill(t, program, syscall.SIGKILL)
}

func TestOfNestedWitnessesTheInnerOneReleases(t *testing.T) {
	s := newSite(t, "")
	outer := s.start(nil, "witness", "main") // which, under a witness, is none
	program, witnessed := outer.begins()
	require.True(t, witnessed)
	p, ok := proctree.Read(program)
	require.True(t, ok)
	require.Equal(t, outer.Process.Pid, p.Parent)
	kill(t, program, syscall.SIGKILL)
	require.Equal(t, 137, outer.exits())
	_, err := s.lease("0").Read(t.Context())
	testkit.WantErr(t, err, tenure.ErrNotFound)
}

// A shell in front of the program does no harm, nor does one that starts it in the background.
func TestSignalsAndStatusesPassThrough(t *testing.T) {
	for script, want := range map[string]int{
		"exit 7": 7, "kill -TERM $$": 143, "true": 0,
		`trap "exit 9" USR1; kill -USR1 $PPID; while :; do sleep 0.01; done`:  9,
		`trap "exit 10" TERM; kill -TERM $PPID; while :; do sleep 0.01; done`: 10,
		`trap "" TERM; kill -TERM $PPID; while :; do sleep 0.01; done`:        137, // by the stop timeout
	} {
		s := newSite(t, "")
		require.Equal(t, want, s.start([]string{"WITNESS_TEST_STOP_TIMEOUT=300ms"}, "witness", "sh", script).exits(), script)
	}
	s := newSite(t, "")
	self, err := os.Executable()
	require.NoError(t, err)
	a := s.start(nil, "witness", "sh", roleEnv+"=hold "+self+" & wait; exit 4")
	program, witnessed := a.begins()
	require.True(t, witnessed)
	kill(t, program, syscall.SIGKILL)
	require.Equal(t, 4, a.exits())
	_, err = s.lease("0").Read(t.Context())
	testkit.WantErr(t, err, tenure.ErrNotFound)
}

// witnessOf returns the name in a record.
func witnessOf(obj tenure.Object) string {
	var payload struct{ Witness string }
	_ = json.Unmarshal(obj.Payload, &payload)
	return payload.Witness
}

// takes takes a lease and the lock of its job, as the next replica would, and reports whether the former job's process
// still had the lock.
func (s *site) takes(id string) (overlaps bool) {
	s.Helper()
	testkit.MustAcquire(s, s.lease(id))
	lock, err := os.OpenFile(filepath.Join(s.dir, id), os.O_CREATE|os.O_RDWR, 0o600)
	require.NoError(s, err)
	defer lock.Close()
	return syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil
}

// A process that was killed runs on until the kernel has taken its memory. The first round is the control, a
// witness that is content with the signal: it must overlap, or the second one proves nothing.
func TestNothingIsReleasedBeforeTheKernelSaysThatTheProcessIsDead(t *testing.T) {
	testkit.Slow(t)
	for round := 0; ; round++ {
		s := newSite(t, "")
		program, _ := s.start([]string{"WITNESS_TEST_MIB=256"}, "witness", "hold").begins()
		obj := testkit.Get(t, s.store, s.lease("0").Key())
		kill(t, program, syscall.SIGKILL)
		_, err := s.lease("0").ReleaseDead(t.Context(), witnessOf(obj), 0)
		require.NoError(t, err)
		if s.takes("0") {
			break
		}
		require.Less(t, round, 60, "no overlap although the lease was released too early")
	}
	s := newSite(t, "")
	a := s.start([]string{"WITNESS_TEST_MIB=256"}, "witness", "hold")
	program, _ := a.begins()
	kill(t, program, syscall.SIGKILL)
	for {
		if _, err := s.lease("0").Read(t.Context()); err != nil {
			testkit.WantErr(t, err, tenure.ErrNotFound)
			break
		}
	}
	require.False(t, s.takes("0"))
}

func TestAWitnessIsTheFirstProcessOfAContainer(t *testing.T) {
	s := newSite(t, "")
	a := s.container(roleEnv + "=witness WITNESS_TEST_PROGRAM=leaves")
	_, witnessed := a.begins()
	require.True(t, witnessed)
	a.hears("left")
	for _, d := range proctree.Descendants(a.Process.Pid) {
		if text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", d.PID)); bytes.Contains(text, []byte(roleEnv+"=leaves")) {
			kill(t, d.PID, syscall.SIGKILL)
			break
		}
	}
	require.Equal(t, 137, a.exits())
	_, err := s.lease("0").Read(t.Context())
	testkit.WantErr(t, err, tenure.ErrNotFound)
}

// container starts this program as the first process of a namespace, with an environment.
func (s *site) container(env string) *party {
	unshare := []string{"unshare", "--pid", "--fork", "--mount-proc", "--kill-child"}
	if err := exec.Command(unshare[0], append(unshare[1:], "true")...).Run(); err != nil {
		s.Skipf("no namespace of its own can be had: %v", err)
	}
	self, err := os.Executable()
	require.NoError(s, err)
	return s.start(nil, "sh", "", "exec "+strings.Join(unshare, " ")+" env "+env+" "+self)
}

// The whole container is killed at once, as when its memory runs out, and the sidecar goes on.
func TestASidecarReleasesWhenNothingOfAContainerIsLeft(t *testing.T) {
	s := newSite(t, "")
	socket := filepath.Join(s.dir, "witness.sock")
	sidecar := s.start(nil, "sidecar", "", socket)
	testkit.Await(t, "it listens", func() bool { _, err := os.Stat(socket); return err == nil })

	// A process that is not the first of its container may leave others behind.
	outside := s.start([]string{"TENURE_WITNESS=" + socket, "WITNESS_TEST_TTL=1s"}, "hold")
	program, witnessed := outside.begins()
	require.False(t, witnessed)
	kill(t, program, syscall.SIGKILL)

	for range 3 {
		a := s.container(roleEnv + "=leaves TENURE_WITNESS=" + socket)
		_, witnessed = a.begins()
		require.True(t, witnessed)
		a.hears("left")
		first := proctree.Descendants(a.Process.Pid)[0].PID
		kill(t, first, syscall.SIGKILL)
		testkit.Await(t, "it is released", func() bool { // long before the TTL
			h, err := s.lease("0").Read(t.Context())
			return errors.Is(err, tenure.ErrNotFound) || h.Holder == "" // an offer, if the takeover from outside was not confirmed yet
		})
		daemon, err := os.OpenFile(filepath.Join(s.dir, "daemon"), os.O_RDWR, 0o600)
		require.NoError(t, err)
		require.NoError(t, syscall.Flock(int(daemon.Fd()), syscall.LOCK_EX|syscall.LOCK_NB), "its daemon still runs")
		daemon.Close()
	}
	kill(t, sidecar.Process.Pid, syscall.SIGTERM)
	require.Equal(t, 0, sidecar.exits())
}

// What the server still executes for a dead program is not committed after the release, also if a pooler in transaction
// mode is in between. Without the drain it is, or this would prove nothing.
func TestNoStatementOfADeadProgramIsCommittedAfterTheRelease(t *testing.T) {
	for name, drains := range map[string]bool{"drains": true, "drains through a pooler": true, "does not drain": false} {
		direct := testkit.PostgresURL(t)
		url := direct
		if strings.HasSuffix(name, "pooler") {
			url = testkit.StartBouncer(t, direct) + "&default_query_exec_mode=exec"
		}
		s := newSite(t, url)
		pool := testkit.PostgresPool(t, direct)
		testkit.ExecPostgres(t, pool, `CREATE TABLE late (n int)`)
		a := s.start([]string{map[bool]string{true: "PGAPPNAME=a program with a name of more than sixty three bytes, which Postgres cuts", false: "WITNESS_TEST_NO_DRAIN=1"}[drains]}, "witness", "writes")
		program, _ := a.begins()
		testkit.Await(t, "it is written", func() bool {
			var busy int
			testkit.WantErr(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'INSERT INTO late%' AND state = 'active'`).Scan(&busy), nil)
			return busy > 0
		})
		kill(t, program, syscall.SIGKILL)
		require.Equal(t, 137, a.exits())
		require.Contains(t, a.log(), "released=1")
		testkit.Await(t, "nothing of it is left", func() bool {
			var busy int
			testkit.WantErr(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'INSERT INTO late%'`).Scan(&busy), nil)
			return busy == 0
		})
		var rows int
		testkit.WantErr(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM late`).Scan(&rows), nil)
		require.Equal(t, map[bool]int{true: 0, false: 1}[drains], rows, name)
	}
}

func TestTheKeysOfADeadProgramAreClaimedAtOnce(t *testing.T) {
	for _, url := range []func() string{func() string { return "" }, func() string { return testkit.PostgresURL(t) }} {
		s := newSite(t, url())
		testkit.MigrateClaims(t, s.store.(tenure.Database))
		a := s.start(nil, "witness", "session")
		program, _ := a.begins()
		b := s.start(nil, "session")
		time.Sleep(300 * time.Millisecond) // it waits
		killed := time.Now()
		kill(t, program, syscall.SIGKILL)
		b.begins() // long before the TTL, and its PollInterval
		t.Logf("100 keys after %v", time.Since(killed))
		a.exits()
	}
}
