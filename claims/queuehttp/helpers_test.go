package queuehttp_test

import (
	"bytes"
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/claims/queuehttp"
	"github.com/tenurelib/tenure/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

var tasks = claims.QueueConfig{
	Table: "tasks", Attempts: "attempts", NotBefore: "not_before", Ready: "status = 'queued'", Done: "status = 'done'",
	MaxAttempts: 5, Exhausted: "status = 'failed'", PollInterval: 100 * time.Millisecond, Logger: testkit.Quiet,
}

// world is a database with a table of tasks, and servers of it.
type world struct {
	*testing.T
	store tenure.Database
	db    *sql.DB
	cfg   claims.QueueConfig
	queue *claims.Queue
}

func newWorld(t *testing.T, store tenure.Database, db *sql.DB, cfg claims.QueueConfig, ddl string, err error) *world {
	require.NoError(t, err)
	testkit.MigrateClaims(t, store)
	w := &world{T: t, store: store, db: db, cfg: cfg, queue: testkit.Must(claims.NewQueue(store, cfg))}
	w.exec(`CREATE TABLE tasks (id integer PRIMARY KEY, payload text, status text NOT NULL DEFAULT 'queued')`)
	w.exec(`CREATE TABLE results (task integer NOT NULL, result text NOT NULL)`)
	w.exec(ddl)
	return w
}

// eachServer runs a test on a real Postgres and on a SQLite file.
func eachServer(t *testing.T, test func(w *world)) { eachServerOf(t, tasks, test) }

func eachServerOf(t *testing.T, cfg claims.QueueConfig, test func(w *world)) {
	t.Run("postgres", func(t *testing.T) { test(onPostgres(t, cfg, testkit.PostgresURL(t))) })
	t.Run("sqlite", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "tenure.db")
		ddl, err := cfg.SQLiteDDL()
		test(newWorld(t, testkit.OpenSQLite(t, path), testkit.OpenSQL(t, "sqlite", "file:"+path+"?_txlock=immediate&_pragma=busy_timeout(10000)"), cfg, ddl, err))
	})
}

func onPostgres(t *testing.T, cfg claims.QueueConfig, url string) *world {
	ddl, err := cfg.PostgresDDL()
	return newWorld(t, testkit.OpenPostgres(t, url, tenure.PostgresConfig{}), testkit.OpenSQL(t, "pgx", url), cfg, ddl, err)
}

// inBubble runs a test in virtual time, on SQLite in memory.
func inBubble(t *testing.T, test func(w *world)) { t.Helper(); inBubbleOf(t, tasks, test) }

func inBubbleOf(t *testing.T, cfg claims.QueueConfig, test func(w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ddl, err := cfg.SQLiteDDL()
		store := testkit.OpenSQLite(t, ":memory:")
		test(newWorld(t, store, store.DB(), cfg, ddl, err))
	})
}

func (w *world) exec(query string) { w.Helper(); testkit.ExecSQL(w.T, w.db, query) }

func (w *world) count(query string) (n int) {
	w.Helper()
	require.NoError(w, w.db.QueryRow(query).Scan(&n))
	return n
}

// add adds tasks with the IDs from one to another, whose payloads are "p" and the ID.
func (w *world) add(from, to int) {
	w.Helper()
	for id := from; id <= to; id++ {
		w.exec(fmt.Sprintf(`INSERT INTO tasks (id, payload) VALUES (%d, 'p%d')`, id, id))
	}
	w.queue.Wake()
}

// handler returns the handler of another server.
func (w *world) handler(cfg queuehttp.Config) *queuehttp.Handler {
	w.Helper()
	cfg.Logger = cmp.Or(cfg.Logger, testkit.Quiet)
	if cfg.Payloads == nil {
		cfg.Payloads = w.payloads
	}
	if cfg.Finish == nil {
		cfg.Finish = w.finish
	}
	return testkit.Must(queuehttp.NewHandler(w.store, testkit.Must(claims.NewQueue(w.store, w.cfg)), cfg))
}

// run runs the session of a handler until the test ends.
func (w *world) run(h *queuehttp.Handler) *queuehttp.Handler {
	ctx, cancel := context.WithCancel(context.Background())
	returned := make(chan struct{})
	go func() { defer close(returned); _ = h.Run(ctx) }()
	w.Cleanup(func() { cancel(); <-returned })
	return h
}

func (w *world) payloads(ctx context.Context, ids []string) (map[string]any, error) {
	payloads := make(map[string]any)
	for _, id := range ids {
		var payload string
		if err := w.db.QueryRowContext(ctx, `SELECT payload FROM tasks WHERE id = `+id).Scan(&payload); err != nil {
			return nil, err
		}
		payloads[id] = payload
	}
	return payloads, nil
}

// finish finishes tasks together with their results.
func (w *world) finish(ctx context.Context, results []queuehttp.Result) error {
	var done []claims.Claim
	for _, r := range results {
		done = append(done, r.Claim)
	}
	write := func(exec func(query string) error) error {
		for _, r := range results {
			if string(r.Result) == `"bad"` {
				return fmt.Errorf("%w: it is bad", tenure.ErrInvalid)
			}
			if err := exec(`INSERT INTO results VALUES (` + r.Claim.Key.ID + `, '` + string(r.Result) + `')`); err != nil {
				return err
			}
		}
		return nil
	}
	if _, ok := w.store.(*tenure.SQLiteStore); ok {
		return w.queue.FinishSQLite(ctx, done, func(tx *sql.Tx) error { return write(testkit.ExecInSQL(tx)) })
	}
	return w.queue.FinishPostgres(ctx, done, func(tx pgx.Tx) error { return write(testkit.ExecIn(tx)) })
}

// wire carries requests to servers of this process, by host name, and can fail them.
type wire struct {
	servers map[string]http.Handler
	hook    atomic.Pointer[hook]
	carries sync.WaitGroup // requests, also those that their clients have given up
}

// hook carries a request. The func that it gets lets a server answer it.
type hook func(r *http.Request, send func() *http.Response) (*http.Response, error)

func (l *wire) fail(h hook) { l.hook.Store(&h) }

func (l *wire) RoundTrip(r *http.Request) (*http.Response, error) {
	send := func() *http.Response {
		answer := httptest.NewRecorder()
		l.servers[r.URL.Host].ServeHTTP(answer, r)
		return answer.Result()
	}
	h := l.hook.Load()
	type result struct {
		response *http.Response
		err      error
	}
	done := make(chan result, 1)
	l.carries.Go(func() {
		if h != nil {
			response, err := (*h)(r, send)
			done <- result{response, err}
			return
		}
		done <- result{send(), nil}
	})
	select {
	case got := <-done:
		return got.response, got.err
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
}

// serve runs a client until stop is called.
func (w *world) serve(l *wire, n int, fn func(context.Context, queuehttp.Task) (any, error)) (stop func()) {
	w.Helper()
	return w.serveAs(queuehttp.ClientConfig{}, l, n, fn)
}

func (w *world) serveAs(cfg queuehttp.ClientConfig, l *wire, n int, fn func(context.Context, queuehttp.Task) (any, error)) (stop func()) {
	w.Helper()
	for host := range l.servers {
		cfg.Servers = append(cfg.Servers, "http://"+host+"/api")
	}
	cfg.HTTP, cfg.Logger = &http.Client{Transport: l}, testkit.Quiet
	client, err := queuehttp.NewClient(cfg)
	require.NoError(w, err)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := client.Serve(ctx, n, fn); err != nil {
			w.Error(err)
		}
	})
	stop = func() { cancel(); running.Wait() }
	w.Cleanup(stop)
	return stop
}

// ask sends a request of any client to a handler. It repeats requests that a busy machine has not answered in time.
func ask(t *testing.T, h http.Handler, name string, in any) (status int, out answer) {
	t.Helper()
	for range 5 {
		status, out = send(t, h, name, in)
		if status != http.StatusServiceUnavailable || name != "begin" && name != "heartbeat" && name != "take" {
			break
		}
	}
	return status, out
}

func send(t *testing.T, h http.Handler, name string, in any) (status int, out answer) {
	t.Helper()
	body, err := json.Marshal(in)
	require.NoError(t, err)
	r := httptest.NewRequest(http.MethodPost, "/any/where/"+name, bytes.NewReader(body))
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	require.NoError(t, json.Unmarshal(w.Body.Bytes(), &out), w.Body)
	return w.Code, out
}

// in is a request, and answer is an answer, as a worker in another language sees them.
type in map[string]any

type answer struct {
	Ready   bool             `json:"ready"`
	Lease   float64          `json:"lease_seconds"`
	Session in               `json:"session"`
	Tasks   []queuehttp.Task `json:"tasks"`
	Ended   []claims.Claim   `json:"ended"`
	Refused []in             `json:"refused"`
	Error   string           `json:"error"`
}
