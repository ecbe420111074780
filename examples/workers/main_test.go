//go:build unix

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/proof/kit"
)

// The tests run this test binary as the program.
func TestMain(m *testing.M) {
	switch {
	case os.Getenv("WORKERS_IS_THE_PROGRAM") == "":
		kit.Main(m)
	case slices.Contains(os.Args, "work"): // on tasks that take a while, whatever happens meanwhile
		newWorker(strings.Split(os.Args[2], ","), func(context.Context, string) (string, error) {
			log.Print("on a task")
			time.Sleep(50 * time.Millisecond)
			return fmt.Sprint(os.Getpid()), nil
		}).run(context.Background())
	default:
		main()
	}
}

// program is a server or a worker, in a process of its own.
type program struct {
	t    *testing.T
	cmd  *exec.Cmd
	gone chan struct{} // closed when its output has ended
	log  kit.SyncBuffer
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
	for _, found := range regexp.MustCompile(text+` (\S+)`).FindAllStringSubmatch(p.log.String(), -1) {
		words = append(words, found[1])
	}
	return words
}

// awaits waits until the log has a text.
func (p *program) awaits(text string) string {
	p.t.Helper()
	kit.Await(p.t, text, func() bool { return len(p.said(text)) > 0 })
	return p.said(text)[0]
}

func count(t *testing.T, pool *pgxpool.Pool, query string, args ...any) (n int) {
	t.Helper()
	require.NoError(t, pool.QueryRow(context.Background(), query, args...).Scan(&n))
	return n
}

func TestEachResultIsWrittenOnceWhicheverProcessIsKilledOrPaused(t *testing.T) {
	url := kit.PostgresURL(t)
	pool := kit.PostgresPool(t, url)
	migrating := start(t, "-store", url, "migrate")
	<-migrating.gone
	serve := func(address string) (*program, string) {
		p := start(t, "-store", url, "-listen", address, "serve")
		return p, p.awaits("listening on")
	}
	serverA, a := serve("127.0.0.1:0")
	serverB, b := serve("127.0.0.1:0")
	var workers []*program
	for range 3 {
		workers = append(workers, start(t, "-servers", "http://"+a+",http://"+b, "work"))
	}

	// There is always something to do.
	var added int64
	full := make(chan struct{})
	var adding sync.WaitGroup
	adding.Go(func() {
		for {
			select {
			case <-full:
				return
			case <-time.After(20 * time.Millisecond):
				tag, err := pool.Exec(context.Background(), `
					INSERT INTO tasks (payload) SELECT 'x' FROM generate_series(1, 100)
					WHERE (SELECT count(*) FROM tasks WHERE status = 'queued' AND session IS NULL) < 200`)
				if err != nil {
					t.Error(err)
					return
				}
				added += tag.RowsAffected()
			}
		}
	})
	stop := sync.OnceFunc(func() { close(full); adding.Wait() })
	defer stop()
	done := func() int64 { return int64(count(t, pool, `SELECT count(*) FROM results`)) }
	more := func(what string) {
		t.Helper()
		before := done()
		kit.Await(t, what, func() bool { return done() >= before+50 })
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
		began := w.said("began session")
		require.Len(t, began, 1, "worker %d has lost its session with its server", i)
		sessions = append(sessions, began[0])
	}

	// One worker is killed, and one is paused, each while it has begun more than it has sent.
	killed, paused := workers[0], workers[1]
	pauseAtWork := func(w *program) {
		t.Helper()
		kit.Await(t, "a worker is paused at work", func() bool {
			kit.PauseProcess(t, w.cmd.Process)
			time.Sleep(100 * time.Millisecond) // for what it has sent
			begun := strings.Count(w.log.String(), "on a task")
			if begun > count(t, pool, `SELECT count(*) FROM results WHERE result = $1`, fmt.Sprint(w.cmd.Process.Pid)) {
				return true
			}
			kit.ResumeProcess(t, w.cmd.Process)
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
	refused := func() int { return strings.Count(paused.log.String(), "refused: ") }
	before := refused() // a repeated request whose answer was lost
	kit.Await(t, "their tasks are free", func() bool { return owned(sessions[0])+owned(sessions[1]) == 0 })
	t.Logf("%d tasks of the dead worker and %d of the paused one are free after %v", left, late, time.Since(began).Round(time.Millisecond))
	more("work without them")
	kit.ResumeProcess(t, paused.cmd.Process)
	kit.Await(t, "the late results are refused", func() bool { return refused() > before })
	kit.Await(t, "the worker goes on with another session", func() bool { return len(paused.said("began session")) >= 2 })

	stop()
	kit.Await(t, "all is done", func() bool { return done() >= added })
	t.Logf("%d tasks, %d of them taken twice", added, count(t, pool, `SELECT count(*) FROM tasks WHERE attempts = 2`))
	kit.Await(t, "all rows are free", func() bool { return count(t, pool, `SELECT count(*) FROM tasks WHERE session IS NOT NULL`) == 0 })
	require.Equal(t, added, done())
	require.EqualValues(t, added, count(t, pool, `SELECT count(DISTINCT task) FROM results`), "a result was written twice")
	require.EqualValues(t, added, count(t, pool, `SELECT count(*) FROM tasks WHERE status = 'done'`))
}

// api is a server in this process.
type api struct {
	*testing.T
	url   string
	store *tenure.PostgresStore
	pool  *pgxpool.Pool
}

func newAPI(t *testing.T) *api {
	store := kit.OpenPostgres(t, kit.PostgresURL(t), tenure.PostgresConfig{})
	require.NoError(t, migrate(t.Context(), store))
	queue, err := claims.NewQueue(store, tasks)
	require.NoError(t, err)
	web := httptest.NewServer((&server{store: store, queue: queue}).handler())
	t.Cleanup(web.Close)
	return &api{t, web.URL, store, store.Pool()}
}

// ask sends a request and returns the status, and the answer as whatever it is to be.
func ask[Out any](a *api, path string, in any) (status int, out Out) {
	a.Helper()
	body, err := json.Marshal(in)
	require.NoError(a, err)
	response, err := http.Post(a.url+path, "", bytes.NewReader(body))
	require.NoError(a, err)
	defer response.Body.Close()
	require.NoError(a, json.NewDecoder(response.Body).Decode(&out))
	return response.StatusCode, out
}

func (a *api) does(want int, path string, in any) {
	a.Helper()
	status, _ := ask[any](a, path, in)
	require.Equal(a, want, status)
}

func (a *api) begin(worker string) session {
	a.Helper()
	_, s := ask[session](a, "/begin", worker)
	return s
}

func (a *api) claim(s session, n int, have ...claims.Claim) []task {
	a.Helper()
	status, got := ask[[]task](a, "/claim", claim{s.ID, n, have})
	require.Equal(a, http.StatusOK, status)
	return got
}

func TestWhatAServerAnswers(t *testing.T) {
	a := newAPI(t)
	a.does(200, "/tasks", []string{"one", "two", "three"})
	first, second := a.begin("first"), a.begin("second")
	a.does(200, "/heartbeat", first)
	a.does(409, "/heartbeat", session{ID: first.ID, Term: second.Term, Token: first.Token})

	got := a.claim(first, 2)
	require.Equal(t, []string{"one", "two"}, []string{got[0].Payload, got[1].Payload})
	require.Equal(t, got, a.claim(first, 3), "its answer was lost")
	third := a.claim(first, 3, got[0].Claim, got[1].Claim)
	require.Equal(t, "three", third[0].Payload)
	require.Empty(t, a.claim(second, 1))

	// All results are written, or none.
	a.does(200, "/abandon", giveBack{Claims: []claims.Claim{got[1].Claim}})
	again := a.claim(second, 1)
	require.Equal(t, "two", again[0].Payload)
	all := []result{{got[0].Claim, "1"}, {got[1].Claim, "late"}}
	status, lost := ask[[]claims.Claim](a, "/submit", all)
	require.Equal(t, http.StatusConflict, status)
	require.Equal(t, []claims.Claim{got[1].Claim}, lost)
	require.Zero(t, count(t, a.pool, `SELECT count(*) FROM results`))
	a.does(200, "/submit", []result{all[0], {third[0].Claim, "3"}})
	a.does(409, "/submit", all[:1])
	a.does(409, "/abandon", giveBack{Claims: []claims.Claim{got[1].Claim}})
	require.Equal(t, 2, count(t, a.pool, `SELECT count(*) FROM results`))

	a.does(200, "/nack", giveBack{Claims: []claims.Claim{again[0].Claim}, After: time.Second})
	require.Empty(t, a.claim(first, 1))
	for again = nil; len(again) == 0; {
		again = a.claim(first, 1)
	}
	require.Equal(t, 2, again[0].Claim.Attempt, "the abandoned one is none")

	a.does(200, "/goodbye", first)
	a.does(409, "/heartbeat", first)
	a.does(409, "/submit", []result{{again[0].Claim, "late"}})
	require.Equal(t, "two", a.claim(second, 1)[0].Payload)
}

func TestATaskWithoutAttemptsLeftIsGivenToNobody(t *testing.T) {
	a := newAPI(t)
	a.does(200, "/tasks", []string{"one"})
	s := a.begin("worker")
	_, err := a.pool.Exec(t.Context(), `UPDATE tasks SET session = $1, token = 1, attempts = 6`, s.ID) // by a server that was killed then
	require.NoError(t, err)
	require.Empty(t, a.claim(s, 1))
	require.Equal(t, 1, count(t, a.pool, `SELECT count(*) FROM tasks WHERE status = 'failed' AND session IS NULL`))
}

func TestATaskThatAWorkerHasIsNotGivenToItAgain(t *testing.T) {
	a := newAPI(t)
	a.does(200, "/tasks", []string{"one"})
	s := a.begin("worker")
	got := a.claim(s, 1)
	_, err := a.pool.Exec(t.Context(), `UPDATE tasks SET attempts = 0`) // by an operator
	require.NoError(t, err)
	require.Empty(t, a.claim(s, 1, got[0].Claim))
	a.does(200, "/submit", []result{{got[0].Claim, "1"}})
}

func TestAWorkerThatStopsGivesItsTasksBack(t *testing.T) {
	a := newAPI(t)
	a.does(200, "/tasks", []string{"x", "bad"})
	ctx, stop := context.WithCancel(t.Context())
	begun := make(chan struct{}, 1)
	var running sync.WaitGroup
	running.Go(func() {
		newWorker([]string{a.url}, func(ctx context.Context, payload string) (string, error) {
			if payload == "bad" {
				return "", fmt.Errorf("it is bad")
			}
			begun <- struct{}{}
			<-ctx.Done()
			return "", ctx.Err()
		}).run(ctx)
	})
	<-begun
	kit.Await(t, "a failure is set back", func() bool {
		return count(t, a.pool, `SELECT count(*) FROM tasks WHERE not_before > now() AND session IS NULL`) == 1
	})
	stop()
	running.Wait()
	require.Zero(t, count(t, a.pool, `SELECT count(*) FROM tasks WHERE session IS NOT NULL`))
	sessions, err := a.store.List(t.Context(), "tenure.session", "", 10)
	require.NoError(t, err)
	require.Empty(t, sessions)
}
