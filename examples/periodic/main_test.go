package main

import (
	"bufio"
	"context"
	"database/sql"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/tenurelib/tenure/internal/testkit"
)

// The tests run this test binary as the program.
func TestMain(m *testing.M) {
	if os.Getenv("PERIODIC_IS_THE_PROGRAM") != "" {
		main()
		return
	}
	testkit.Main(m)
}

func TestOneReplicaSweepsAndTheOtherTakesOver(t *testing.T) {
	t.Run("SQLite", func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "periodic.db")
		db, err := sql.Open("sqlite", "file:"+file+"?_pragma=busy_timeout(10000)") // the programs write, too
		if err != nil {
			t.Fatal(err)
		}
		testTakeover(t, "sqlite:"+file+"?shared=true", db)
	})
	t.Run("Postgres", func(t *testing.T) {
		url := testkit.PostgresURL(t)
		db, err := sql.Open("pgx", url)
		if err != nil {
			t.Fatal(err)
		}
		testTakeover(t, url, db)
	})
}

func testTakeover(t *testing.T, url string, db *sql.DB) {
	t.Cleanup(func() { db.Close() })
	a := start(t, url)
	<-a.swept
	_, err := db.Exec(`INSERT INTO sessions VALUES ('old', '2001-01-01 00:00:00'), ('new', '2999-01-01 00:00:00')`)
	if err != nil {
		t.Fatal(err)
	}

	b := start(t, url)
	b.await(t, "/readyz", "^200")
	b.await(t, "/livez", "^200")
	b.await(t, "/leases", "standby")
	b.await(t, "/metrics", `tenure_is_holder.*} 0`)
	a.await(t, "/metrics", `tenure_is_holder.*} 1`)
	a.stop(t)
	<-b.swept
	b.await(t, "/metrics", `tenure_is_holder.*} 1`)
	var left string
	if err := db.QueryRow(`SELECT min(id) || count(*) FROM sessions`).Scan(&left); err != nil {
		t.Fatal(err)
	}
	if want := "new1"; left != want {
		t.Errorf("sessions left: got %s, want %s", left, want)
	}
	b.stop(t)
}

// Kubernetes would restart a program that does not answer, again and again until the database is
// up.
func TestAReplicaThatStartsWhileTheDatabaseIsDownIsLiveAndWaits(t *testing.T) {
	server := testkit.StartPostgres(t)
	if err := server.Stop("fast"); err != nil {
		t.Fatal(err)
	}
	a := start(t, server.URL())
	a.await(t, "/readyz", "^503 waiting for the database")
	a.await(t, "/livez", "^200")
	a.await(t, "/leases", "standby")
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	a.await(t, "/readyz", "^200")
	a.await(t, "/metrics", `tenure_is_holder.*} 1`)
	a.stop(t)
}

func TestAReplicaCanBeStoppedWhileTheDatabaseIsDown(t *testing.T) {
	server := testkit.StartPostgres(t)
	if err := server.Stop("fast"); err != nil {
		t.Fatal(err)
	}
	start(t, server.URL()).stop(t)
}

type program struct {
	cmd   *exec.Cmd
	addr  string
	swept chan struct{} // closed when it has swept, or ended
	gone  chan struct{} // closed when its output has ended
}

// start starts the program and returns when it listens.
func start(t *testing.T, url string) *program {
	t.Helper()
	p := &program{cmd: exec.Command(os.Args[0]), swept: make(chan struct{}), gone: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), "PERIODIC_IS_THE_PROGRAM=1", "DATABASE_URL="+url, "LISTEN=127.0.0.1:0")
	stderr, err := p.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.cmd.Process.Kill()
		<-p.gone
		p.cmd.Wait()
	})
	addr := make(chan string, 1)
	go func() {
		defer close(p.gone)
		swept := sync.OnceFunc(func() { close(p.swept) })
		defer swept()
		defer close(addr)
		for lines := bufio.NewScanner(stderr); lines.Scan(); {
			if _, at, ok := strings.Cut(lines.Text(), "listening on "); ok {
				addr <- at
			}
			if strings.Contains(lines.Text(), "sessions deleted") {
				swept()
			}
		}
	}()
	select {
	case p.addr = <-addr:
	case <-time.After(time.Minute):
	}
	if p.addr == "" {
		t.Fatal("it does not listen")
	}
	return p
}

// await waits until a path's answer, with its status and body, matches.
func (p *program) await(t *testing.T, path, pattern string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	want, got := regexp.MustCompile(pattern), ""
	for ; !want.MatchString(got); time.Sleep(20 * time.Millisecond) {
		request, err := http.NewRequestWithContext(ctx, "GET", "http://"+p.addr+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		answer, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatalf("%s: %v; last answer: %s", path, err, got)
		}
		body, err := io.ReadAll(answer.Body)
		answer.Body.Close()
		if err != nil {
			t.Fatal(err)
		}
		got = fmt.Sprintf("%d %s", answer.StatusCode, body)
	}
}

// stop tells the program to end, and waits until it has.
func (p *program) stop(t *testing.T) {
	t.Helper()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	<-p.gone
	if err := p.cmd.Wait(); err != nil {
		t.Errorf("it ended with %v", err)
	}
}
