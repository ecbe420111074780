//go:build unix

package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
)

// steps is how many calls of step a run has.
const steps = 8

// The tests run this test binary as the program. It sends itself a signal at one of its steps.
func TestMain(m *testing.M) {
	at := os.Getenv("RUNS_SIGNAL_AT")
	if at == "" {
		testkit.Main(m)
	}
	var done atomic.Int32
	n, _ := strconv.Atoi(at)
	signal, _ := strconv.Atoi(os.Getenv("RUNS_SIGNAL"))
	step = func() {
		if int(done.Add(1)) == n {
			fmt.Fprintln(os.Stderr, "at step", n)
			syscall.Kill(os.Getpid(), syscall.Signal(signal))
			os.Stdin.Read(make([]byte, 1)) // until the test lets it go on
		}
	}
	main()
}

// scene has a database, a provider, and drivers in separate processes.
type scene struct {
	*testing.T
	url      string
	store    tenure.Database
	provider provider
}

// onEach runs a test on Postgres and on a SQLite file.
func onEach(t *testing.T, test func(s *scene)) {
	t.Run("postgres", func(t *testing.T) { test(newScene(t, testkit.PostgresURL(t))) })
	t.Run("sqlite", func(t *testing.T) { test(newScene(t, filepath.Join(t.TempDir(), "runs.db?shared=true"))) })
}

func newScene(t *testing.T, url string) *scene {
	store, err := tenure.Open(t.Context(), url)
	require.NoError(t, err)
	t.Cleanup(func() { store.Close() })
	require.NoError(t, migrate(t.Context(), store))
	s := &scene{T: t, url: url, store: store, provider: provider{t.TempDir()}}
	for n := range steps {
		_, err := store.DB().Exec(`INSERT INTO runs (id) VALUES ($1)`, fmt.Sprint("order ", n+1))
		require.NoError(t, err)
	}
	return s
}

type driver struct {
	cmd  *exec.Cmd
	log  testkit.SyncBuffer
	goOn io.Closer
}

// start starts a driver that gets a signal at a step, or never if that is 0.
func (s *scene) start(at int, signal syscall.Signal) *driver {
	s.Helper()
	d := &driver{cmd: exec.Command(os.Args[0], "-store", s.url, "-provider", s.provider.dir)}
	if at > 0 {
		d.cmd.Args = append(d.cmd.Args, "-at-once", "1")
	}
	d.cmd.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0",
		fmt.Sprint("RUNS_SIGNAL_AT=", at), fmt.Sprint("RUNS_SIGNAL=", int(signal)))
	d.cmd.Stderr = &d.log
	goOn, err := d.cmd.StdinPipe()
	require.NoError(s, err)
	d.goOn = goOn
	require.NoError(s, d.cmd.Start())
	s.Cleanup(func() {
		d.cmd.Process.Kill()
		d.cmd.Wait()
		if s.Failed() {
			s.Logf("the log of the driver with a signal at %d:\n%s", at, d.log.String())
		}
	})
	return d
}

// driver is start, again if the machine is too busy for the driver to start.
func (s *scene) driver(at int, signal syscall.Signal) *driver {
	s.Helper()
	d := s.start(at, signal)
	says := func(text string) bool { return strings.Contains(d.log.String(), text) }
	testkit.Await(s.T, "a driver starts", func() bool { return says("session begun") || says("at step") || says("check rows") })
	if says("check rows") {
		return s.driver(at, signal)
	}
	return d
}

// drivers starts one driver for each step, which gets the signal at that step, and waits until all
// have got it. Each has begun one run.
func (s *scene) drivers(signal syscall.Signal) (drivers []*driver) {
	s.Helper()
	for at := 1; at <= steps; at++ {
		d := s.driver(at, signal)
		if drivers = append(drivers, d); signal == syscall.SIGSTOP {
			testkit.AwaitPaused(s.T, d.cmd.Process)
			s.awaitWritable(d)
		}
	}
	for _, d := range drivers {
		testkit.Await(s.T, "a driver gets its signal", func() bool { return strings.Contains(d.log.String(), "at step") })
	}
	return drivers
}

func (s *scene) count(query string) (n int) {
	s.Helper()
	require.NoError(s, s.store.DB().QueryRow(query).Scan(&n))
	return n
}

// succeed lets a driver finish all runs.
func (s *scene) succeed() {
	s.Helper()
	began := time.Now()
	s.driver(0, 0)
	testkit.Await(s.T, "all runs are done", func() bool { return s.count(`SELECT count(*) FROM runs WHERE status = 'running'`) == 0 })
	s.Logf("all runs are done %v after a successor was started", time.Since(began).Round(time.Millisecond))
}

// wantJournals checks that each run has each event once.
func (s *scene) wantJournals() {
	s.Helper()
	for n := range steps {
		run := fmt.Sprint("order ", n+1)
		j := &journal{store: s.store, claim: claims.Claim{Key: tenure.Key{ID: run}}, events: map[string]string{}}
		require.NoError(s, j.read(s.Context()))
		receipt, parcel := run+"/charge is done", run+"/ship is done"
		require.Equal(s, map[string]string{
			"charge dispatched": "", "charge done": receipt, "ship dispatched": "", "ship done": parcel, "finished": receipt + ", " + parcel,
		}, j.events, run)
	}
	require.Equal(s, 5*steps, s.count(`SELECT count(*) FROM events`))
	require.Len(s, s.calls(), 2*steps)
}

// calls returns how often each call was made.
func (s *scene) calls() map[string]int {
	s.Helper()
	entries, err := os.ReadDir(s.provider.dir)
	require.NoError(s, err)
	calls := make(map[string]int)
	for _, entry := range entries {
		lines, err := os.ReadFile(filepath.Join(s.provider.dir, entry.Name()))
		require.NoError(s, err)
		calls[entry.Name()] = strings.Count(string(lines), "\n")
	}
	return calls
}

func TestARunGoesOnWhereverItsDriverIsKilled(t *testing.T) {
	testkit.Slow(t)
	onEach(t, func(s *scene) {
		began := time.Now()
		for _, d := range s.drivers(syscall.SIGKILL) {
			require.ErrorContains(s, d.cmd.Wait(), "killed")
		}
		inTime := time.Since(began) < ttl // otherwise some have taken over the runs of others
		for events, want := range map[int]int{0: 1, 1: 2, 2: 1, 3: 2, 4: 1, 5: 1} {
			if got := s.count(fmt.Sprintf(`SELECT count(*) FROM runs WHERE (SELECT count(*) FROM events WHERE run = id) = %d`, events)); inTime {
				require.Equal(s, want, got, "runs with %d events", events)
			}
		}
		s.succeed()
		s.wantJournals()
		for key, calls := range s.calls() {
			require.Equal(s, 1, calls, key)
		}
		if !inTime {
			return
		}
		require.Equal(s, 2*steps, s.count(`SELECT sum(attempts) FROM runs`))
	})
}

func TestAnyProcessAttachesToARun(t *testing.T) {
	testkit.Slow(t)
	onEach(t, func(s *scene) {
		paused := s.driver(3, syscall.SIGSTOP) // drives the first run
		testkit.AwaitPaused(s.T, paused.cmd.Process)
		s.awaitWritable(paused)
		attached := exec.Command(os.Args[0], "-store", s.url, "-provider", s.provider.dir, "-attach", "order 1")
		attached.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0", "RUNS_SIGNAL_AT=0", "RUNS_SIGNAL=0")
		out, err := attached.CombinedOutput()
		require.NoError(s, err, "%s", out)
		require.Equal(s, 1, s.count(`SELECT count(*) FROM runs WHERE id = 'order 1' AND status = 'done'`))
		s.succeed()
		require.NoError(s, paused.cmd.Process.Signal(syscall.SIGCONT))
		require.NoError(s, paused.goOn.Close())
		s.wantJournals()
	})
}

func TestADriverThatWasPausedAddsNothing(t *testing.T) {
	testkit.Slow(t)
	onEach(t, func(s *scene) {
		began := time.Now()
		paused := s.drivers(syscall.SIGSTOP)
		inTime := time.Since(began) < ttl // otherwise some have taken over the runs of others, and are at other steps
		s.succeed()
		s.wantJournals()
		for i, d := range paused {
			require.NoError(s, d.cmd.Process.Signal(syscall.SIGCONT))
			require.NoError(s, d.goOn.Close())
			if step := i + 1; step == 2 || step == 5 || step == 8 || step == 7 && !inTime { // it has nothing to write
				continue
			}
			testkit.Await(s.T, fmt.Sprint("the driver that was paused at step ", i+1, " is refused"), func() bool {
				log := d.log.String()
				return strings.Contains(log, "to the journal") || strings.Contains(log, "taken by another: runs/") ||
					!inTime && strings.Contains(log, "row failed") // it was at a call
			})
		}
		for _, d := range paused {
			require.NoError(s, d.cmd.Process.Signal(syscall.SIGTERM))
			require.NoError(s, d.cmd.Wait())
		}
		s.wantJournals()
	})
}

// awaitWritable lets a driver that was paused, by accident, while its session wrote to a SQLite file
// complete that write: no other process could write before. The driver stays at its step.
func (s *scene) awaitWritable(d *driver) {
	s.Helper()
	writable := func() bool {
		ctx, cancel := context.WithTimeout(s.Context(), time.Second)
		defer cancel()
		_, err := s.store.DB().ExecContext(ctx, `UPDATE runs SET status = status WHERE id = 'none'`)
		return err == nil
	}
	testkit.Await(s.T, "no paused driver has the file's write lock", func() bool {
		if writable() {
			return true
		}
		testkit.ResumeProcess(s.T, d.cmd.Process)
		writable()
		testkit.PauseProcess(s.T, d.cmd.Process)
		return false
	})
}
