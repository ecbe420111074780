//go:build unix

package main

import (
	"bufio"
	"context"
	"fmt"
	"log"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/internal/testkit"
)

// The tests run this test binary as the program.
func TestMain(m *testing.M) {
	switch {
	case os.Getenv("WORKERS_IS_THE_PROGRAM") == "":
		testkit.Main(m)
	case slices.Contains(os.Args, "work"): // on tasks that take a while, whatever happens meanwhile
		log.Fatal(work(context.Background(), strings.Split(os.Args[2], ","), func(context.Context, string) (string, error) {
			log.Print("on a task")
			time.Sleep(50 * time.Millisecond)
			return fmt.Sprint(os.Getpid()), nil
		}))
	default:
		main()
	}
}

// program is a server or a worker, in a process of its own.
type program struct {
	t    *testing.T
	cmd  *exec.Cmd
	gone chan struct{} // closed when its output has ended
	log  testkit.SyncBuffer
}

func start(t *testing.T, args ...string) *program {
	t.Helper()
	p := &program{t: t, cmd: exec.Command(os.Args[0], args...), gone: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), "WORKERS_IS_THE_PROGRAM=1", "GORACE=atexit_sleep_ms=0")
	stderr, err := p.cmd.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, p.cmd.Start())
	go func() {
		defer close(p.gone)
		for lines := bufio.NewScanner(stderr); lines.Scan(); {
			fmt.Fprintln(&p.log, lines.Text())
		}
	}()
	t.Cleanup(func() {
		p.kill()
		if t.Failed() || strings.Contains(p.log.String(), "DATA RACE") {
			t.Errorf("the log of %q:\n%s", args, p.log.String())
		}
	})
	return p
}

func (p *program) kill() {
	p.cmd.Process.Kill()
	<-p.gone
	p.cmd.Wait()
}

// said returns what the log has after a text, so far.
func (p *program) said(text string) (words []string) {
	for _, found := range regexp.MustCompile(text+`(\S+)`).FindAllStringSubmatch(p.log.String(), -1) {
		words = append(words, found[1])
	}
	return words
}

// awaits waits until the log has a text.
func (p *program) awaits(text string) string {
	p.t.Helper()
	testkit.Await(p.t, text, func() bool { return len(p.said(text)) > 0 })
	return p.said(text)[0]
}

func count(t *testing.T, pool *pgxpool.Pool, query string, args ...any) (n int) {
	t.Helper()
	require.NoError(t, pool.QueryRow(context.Background(), query, args...).Scan(&n))
	return n
}

func TestEachResultIsWrittenOnceWhicheverProcessIsKilledOrPaused(t *testing.T) {
	testkit.Slow(t)
	url := testkit.PostgresURL(t)
	pool := testkit.PostgresPool(t, url)
	migrating := start(t, "-store", url, "migrate")
	<-migrating.gone
	serve := func(address string) (*program, string) {
		p := start(t, "-store", url, "-listen", address, "serve")
		return p, p.awaits("listening on ")
	}
	serverA, a := serve("127.0.0.1:0")
	serverB, b := serve("127.0.0.1:0")
	var workers []*program
	for range 3 {
		workers = append(workers, start(t, "-servers", "http://"+a+",http://"+b, "work"))
	}

	const added = 6000
	_, err := pool.Exec(t.Context(), `INSERT INTO tasks (payload) SELECT 'x' FROM generate_series(1, $1)`, added)
	require.NoError(t, err)
	done := func() int { return count(t, pool, `SELECT count(*) FROM results`) }
	more := func(what string) {
		t.Helper()
		before := done()
		testkit.Await(t, what, func() bool { return done() >= before+50 })
	}
	owned := func(session string) int {
		t.Helper()
		return count(t, pool, `SELECT count(*) FROM tasks WHERE session = $1`, session)
	}

	more("work at first")
	serverA.kill()
	more("work with one server")
	serve(a)
	serverB.kill()
	more("work with a server that was restarted")
	serve(b)
	var sessions []string
	for i, w := range workers {
		began := w.said("began session session=")
		require.Len(t, began, 1, "worker %d has lost its session with its server", i)
		sessions = append(sessions, began[0])
	}

	// One worker is killed and one is paused, each when it has begun more tasks than it has
	// reported.
	killed, paused := workers[0], workers[1]
	pauseAtWork := func(w *program) {
		t.Helper()
		testkit.Await(t, "a worker is paused at work", func() bool {
			testkit.PauseProcess(t, w.cmd.Process)
			time.Sleep(100 * time.Millisecond) // for what it has sent
			begun := strings.Count(w.log.String(), "on a task")
			if begun > count(t, pool, `SELECT count(*) FROM results WHERE result #>> '{}' = $1`, fmt.Sprint(w.cmd.Process.Pid)) {
				return true
			}
			testkit.ResumeProcess(t, w.cmd.Process)
			return false
		})
	}
	pauseAtWork(killed)
	pauseAtWork(paused)
	began := time.Now()
	killed.kill()
	left, late := owned(sessions[0]), owned(sessions[1])
	require.NotZero(t, left)
	require.NotZero(t, late)
	refused := func() int { return strings.Count(paused.log.String(), "was refused") }
	before := refused() // a repeated request whose answer was lost
	testkit.Await(t, "their tasks are free", func() bool { return owned(sessions[0])+owned(sessions[1]) == 0 })
	t.Logf("%d tasks of the dead worker and %d of the paused one are free after %v", left, late, time.Since(began).Round(time.Millisecond))
	more("work without them")
	testkit.ResumeProcess(t, paused.cmd.Process)
	testkit.Await(t, "the late results are refused", func() bool { return refused() > before })
	testkit.Await(t, "the worker goes on with another session", func() bool { return len(paused.said("began session session=")) >= 2 })

	for began := time.Now(); done() < added; time.Sleep(100 * time.Millisecond) {
		require.Less(t, time.Since(began), 3*testkit.Patience)
	}
	t.Logf("%d tasks, %d of them taken twice", added, count(t, pool, `SELECT count(*) FROM tasks WHERE attempts = 2`))
	testkit.Await(t, "all rows are free", func() bool { return count(t, pool, `SELECT count(*) FROM tasks WHERE session IS NOT NULL`) == 0 })
	require.Equal(t, added, done())
	require.Equal(t, added, count(t, pool, `SELECT count(DISTINCT task) FROM results`), "a result was written twice")
	require.Equal(t, added, count(t, pool, `SELECT count(*) FROM tasks WHERE status = 'done'`))
}
