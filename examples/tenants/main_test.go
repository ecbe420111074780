//go:build unix

package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
)

// The tests run this test binary as the program.
func TestMain(m *testing.M) {
	if os.Getenv("TENANTS_IS_THE_PROGRAM") != "" {
		main()
		return
	}
	testkit.Main(m)
}

func eachDatabase(t *testing.T, test func(t *testing.T, url string)) {
	t.Run("SQLite", func(t *testing.T) { test(t, filepath.Join(t.TempDir(), "tenants.db?shared=true")) })
	t.Run("Postgres", func(t *testing.T) { test(t, testkit.PostgresURL(t)) })
}

// program is a replica, in a process of its own.
type program struct {
	cmd  *exec.Cmd
	addr string
	gone chan struct{} // closed when its output has ended
	log  testkit.SyncBuffer
}

// start starts a replica and returns when it listens.
func start(t *testing.T, url string) *program {
	t.Helper()
	p := &program{cmd: exec.Command(os.Args[0], "-store", url, "-listen", "127.0.0.1:0"), gone: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), "TENANTS_IS_THE_PROGRAM=1", "GORACE=atexit_sleep_ms=0")
	stderr, err := p.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	addr := make(chan string, 1)
	go func() {
		defer close(p.gone)
		defer close(addr)
		for lines := bufio.NewScanner(stderr); lines.Scan(); {
			fmt.Fprintln(&p.log, lines.Text())
			if _, at, ok := strings.Cut(lines.Text(), "listening on "); ok {
				addr <- at
			}
		}
	}()
	t.Cleanup(func() {
		p.kill()
		if t.Failed() || strings.Contains(p.log.String(), "DATA RACE") {
			t.Errorf("the log of %s:\n%s", p.addr, p.log.String())
		}
	})
	var ok bool
	if p.addr, ok = <-addr; !ok {
		t.Fatal("it does not listen")
	}
	return p
}

func (p *program) kill() {
	p.cmd.Process.Kill()
	<-p.gone
	p.cmd.Wait()
}

// stop stops the replica as a rollout does.
func (p *program) stop(t *testing.T) {
	t.Helper()
	p.cmd.Process.Signal(syscall.SIGTERM)
	<-p.gone
	if err := p.cmd.Wait(); err != nil {
		t.Errorf("it exits with %v", err)
	}
}

// ask sends a request for a tenant, and returns the number, or 0 if it is not known whether the
// tenant has counted.
func (p *program) ask(tenant string) (n int64, err error) {
	client := http.Client{Timeout: time.Minute}
	response, err := client.Post("http://"+p.addr+"/"+tenant, "", nil)
	if err != nil {
		return 0, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return 0, err
	}
	if response.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("%s: %s", response.Status, body)
	}
	return strconv.ParseInt(strings.TrimSpace(string(body)), 10, 64)
}

// status returns what the status page tells programs.
func (p *program) status(t *testing.T) (status []claims.Status) {
	t.Helper()
	response, err := http.Get("http://" + p.addr + "/sessions")
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if err := json.NewDecoder(response.Body).Decode(&status); err != nil {
		t.Fatal(err)
	}
	return status
}

// ledger has the answers to the clients of one tenant, their times, and how long each request took.
type ledger struct {
	mu       sync.Mutex
	sent     int64
	answers  map[int64]bool
	greatest int64
	answered time.Time
	longest  time.Duration
}

// request sends a request, and fails the test if the answer is one that was given before, or is
// not greater than all that were known when it was sent.
func (l *ledger) request(t *testing.T, p *program, tenant string) {
	l.mu.Lock()
	l.sent++
	greatest := l.greatest
	l.mu.Unlock()
	began := time.Now()
	n, err := p.ask(tenant)
	if err != nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if n <= greatest {
		t.Errorf("%s has answered %d after %d", tenant, n, greatest)
	}
	if l.answers[n] {
		t.Errorf("%s has answered %d twice", tenant, n)
	}
	if n > l.sent {
		t.Errorf("%s has answered %d to %d requests", tenant, n, l.sent)
	}
	l.answers[n], l.greatest = true, max(l.greatest, n)
	l.longest = max(l.longest, time.Since(began))
	l.answered = time.Now()
}

// clients send requests for tenants to replicas, until stop is called.
func clients(t *testing.T, tenants int, replicas func() []*program) (ledgers []*ledger, stop func()) {
	var stopped atomic.Bool
	var running sync.WaitGroup
	for i := range tenants {
		l := &ledger{answers: map[int64]bool{}, answered: time.Now()}
		ledgers = append(ledgers, l)
		for range 2 {
			running.Go(func() {
				for !stopped.Load() {
					some, began := replicas(), time.Now()
					l.request(t, some[rand.IntN(len(some))], fmt.Sprintf("tenant-%d", i))
					time.Sleep(min(time.Second, max(100*time.Millisecond, 4*time.Since(began)))) // a busy machine has other things to do, too
				}
			})
		}
	}
	return ledgers, sync.OnceFunc(func() { stopped.Store(true); running.Wait() })
}

func TestEachTenantIsCountedByOneReplicaWhicheverIsKilledOrStopped(t *testing.T) {
	testkit.Slow(t)
	eachDatabase(t, func(t *testing.T, url string) {
		const tenants = 6
		var replicas []*program
		for range 3 {
			replicas = append(replicas, start(t, url))
		}
		var mu sync.Mutex
		up := func() []*program {
			mu.Lock()
			defer mu.Unlock()
			return replicas
		}
		take := func() (first *program) { // out of the load balancer
			mu.Lock()
			defer mu.Unlock()
			first, replicas = replicas[0], replicas[1:]
			return first
		}
		ledgers, stop := clients(t, tenants, up)
		defer stop()
		eachAnswers := func(what string) {
			t.Helper()
			began := time.Now()
			for i, l := range ledgers {
				for answered := false; !answered; time.Sleep(time.Millisecond) {
					l.mu.Lock()
					answered = l.answered.After(began)
					l.mu.Unlock()
					if time.Since(began) > time.Minute {
						t.Fatalf("%s: tenant-%d does not answer", what, i)
					}
				}
			}
			t.Logf("%s: each tenant answers after %v", what, time.Since(began).Round(time.Millisecond))
		}
		eachAnswers("at first")

		// A replica that stops hands its tenants over at once.
		for _, l := range ledgers {
			l.mu.Lock()
			l.longest = 0
			l.mu.Unlock()
		}
		stopped := take()
		stopped.stop(t)
		eachAnswers("after a stop")
		for i, l := range ledgers {
			l.mu.Lock()
			t.Logf("a request for tenant-%d took up to %v", i, l.longest.Round(time.Millisecond))
			l.mu.Unlock()
		}
		if !strings.Contains(stopped.log.String(), "session ended session=") {
			t.Error("the tenants of a replica that stopped had to wait until its session had expired")
		}

		fresh := start(t, url)
		mu.Lock()
		replicas = append(replicas[:len(replicas):len(replicas)], fresh)
		mu.Unlock()
		take().kill()
		eachAnswers("after a kill")
		stop()
		owned := 0
		for _, p := range up() {
			status := p.status(t)
			if len(status) != 1 || len(status[0].Kinds) != 1 || status[0].Kinds[0].Kind != "tenant" {
				t.Fatalf("the status of %s is %+v", p.addr, status)
			}
			owned += status[0].Kinds[0].Claims
		}
		if owned == 0 || owned > tenants {
			t.Errorf("the replicas own %d tenants of %d", owned, tenants)
		}

		// A paused replica resumes with what it has in memory.
		if strings.HasPrefix(url, "postgres") { // one that is paused in the middle of a write to SQLite keeps all others from writing
			paused := take()
			paused.cmd.Process.Signal(syscall.SIGSTOP)
			for i, l := range ledgers {
				l.request(t, fresh, fmt.Sprintf("tenant-%d", i))
			}
			paused.cmd.Process.Signal(syscall.SIGCONT)
			for i, l := range ledgers {
				l.request(t, paused, fmt.Sprintf("tenant-%d", i))
			}
			paused.stop(t)
		}
		for i, l := range ledgers { // the last number counts all that were told, and none that was not sent
			tenant := fmt.Sprintf("tenant-%d", i)
			l.sent++
			n, err := fresh.ask(tenant)
			if err != nil || n <= l.greatest || n < int64(len(l.answers)) || n > l.sent {
				t.Errorf("%s has counted %d (%v): %d were told, the last was %d, %d were sent", tenant, n, err, len(l.answers), l.greatest, l.sent)
			}
			if len(l.answers) < 3 { // one for each call of eachAnswers
				t.Errorf("%s was told %d numbers", tenant, len(l.answers))
			}
		}
		fresh.stop(t)
	})
}
