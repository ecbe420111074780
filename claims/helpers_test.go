package claims_test

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

const ttl = 30 * time.Second

// world is a database that processes share, in virtual time or on a server.
type world struct {
	*testing.T
	store database
	table objects.ClaimsTable
	jobs  jobs
}

// database is a store with all that the processes need.
type database interface {
	tenure.Store
	tenure.Watcher
	tenure.Notifier
	tenure.Lister
	backend
}

type backend interface{ Backend() objects.Backend }

// withTable is a database with another table of claims.
type withTable struct {
	database
	table objects.ClaimsTable
}

func (d withTable) Backend() objects.Backend { return claimsAndRows{d.table, d.database.Backend()} }

type claimsAndRows struct {
	claims objects.ClaimsTable
	objects.Backend
}

func (b claimsAndRows) Claims() objects.ClaimsTable { return b.claims }

func newWorld(t *testing.T, store tenure.Database) *world {
	testkit.MigrateClaims(t, store)
	opened := store.(database)
	return &world{T: t, store: opened, table: opened.Backend().Claims(), jobs: jobs{t: t, running: map[string]string{}, tokens: map[string]int64{}}}
}

// inBubble runs a test in virtual time, on SQLite in memory.
func inBubble(t *testing.T, test func(w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { test(newWorld(t, testkit.OpenSQLite(t, ":memory:"))) })
}

// process is one that has a session, and its link to the database.
type process struct {
	w       *world
	name    string
	session *claims.Session
	keys    *claims.Keys
	store   *storetest.FaultyStore
	server  *server
	dead    atomic.Bool // what it would do is not done
	stop    func()      // closes the session, and waits for it
}

// start runs a process until the test ends.
func (w *world) start(name string) *process { return w.startWith(name, claims.SessionConfig{}) }

func (w *world) startWith(name string, cfg claims.SessionConfig) *process {
	w.Helper()
	p := &process{w: w, name: name, server: &server{ClaimsTable: w.table}}
	p.store = storetest.Faulty(withTable{w.store, p.server}, nil)
	cfg.Holder, cfg.Logger = name, cmp.Or(cfg.Logger, testkit.Quiet)
	var err error
	p.session, err = claims.NewSession(p.store, cfg)
	require.NoError(w, err)
	p.keys, err = claims.NewKeys(p.session, "tenant")
	require.NoError(w, err)
	ctx, cancel := context.WithCancel(context.Background())
	returned := make(chan struct{})
	go func() {
		defer close(returned)
		if err := p.session.Run(ctx); err != nil {
			w.Error(err)
		}
	}()
	p.stop = func() { cancel(); <-returned }
	w.Cleanup(func() { p.fault(nil); p.stop() })
	return p
}

// fault lets what the process sends to the database go through a hook; nil: nothing happens
// to it.
func (p *process) fault(hook storetest.Hook) { p.store.SetHook(hook) }

// crash stops a process for good: nothing that it sends arrives, and its funcs do nothing.
func (p *process) crash() {
	p.dead.Store(true)
	p.w.jobs.forget(p.name)
	p.fault(testkit.Hang)
}

func (p *process) claim(ids ...string) []claims.Claim {
	p.w.Helper()
	got, err := p.keys.TryClaim(context.Background(), ids...)
	require.NoError(p.w, err)
	return got
}

func (p *process) claimOne(id string) claims.Claim {
	p.w.Helper()
	got := p.claim(id)
	require.Len(p.w, got, 1, "%s is not free for %s", id, p.name)
	return got[0]
}

// work runs a func for a claim. The func returns when it is told to, after the given time.
func (p *process) work(c claims.Claim, stopping time.Duration) (returned chan error) {
	returned = make(chan error, 1)
	go func() {
		returned <- p.keys.Do(context.Background(), c, func(ctx context.Context) error {
			p.begin(c)
			<-ctx.Done()
			time.Sleep(stopping)
			p.end(c)
			return context.Cause(ctx)
		})
	}()
	return returned
}

func (p *process) begin(c claims.Claim) {
	if !p.dead.Load() {
		p.w.jobs.begin(p.name, c)
	}
}

func (p *process) end(c claims.Claim) {
	if !p.dead.Load() {
		p.w.jobs.end(p.name, c)
	}
}

// jobs fails the test if two funcs run for one key, or if a token does not increase.
type jobs struct {
	t *testing.T

	mu      sync.Mutex
	running map[string]string
	tokens  map[string]int64
	begun   int
}

func (j *jobs) begin(name string, c claims.Claim) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if other := j.running[c.Key.ID]; other != "" {
		j.t.Errorf("%s runs %s while %s does", name, c, other)
	}
	if last := j.tokens[c.Key.ID]; c.Token <= last {
		j.t.Errorf("%s runs %s with token %d after %d", name, c, c.Token, last)
	}
	j.running[c.Key.ID], j.tokens[c.Key.ID] = name, c.Token
	j.begun++
}

func (j *jobs) end(name string, c claims.Claim) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.running[c.Key.ID] == name {
		delete(j.running, c.Key.ID)
	}
}

func (j *jobs) forget(name string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for id, by := range j.running {
		if by == name {
			delete(j.running, id)
		}
	}
}

// owned returns the rows that a session owns.
func (w *world) owned(session string) []objects.Claim {
	w.Helper()
	rows, err := w.table.Owned(context.Background(), session, "", "", 1000, testkit.Patience)
	require.NoError(w, err)
	return rows
}

// server is a table of claims that says which server has answered.
type server struct {
	objects.ClaimsTable
	number atomic.Int64 // 0: the database says that
}

func (s *server) Sessions(ctx context.Context, limit time.Duration) ([]objects.Session, error) {
	sessions, err := s.ClaimsTable.Sessions(ctx, limit)
	for i := range sessions {
		sessions[i].Server = max(sessions[i].Server, s.number.Load())
	}
	return sessions, err
}

func names(n int) (ids []string) {
	for i := range n {
		ids = append(ids, fmt.Sprintf("t%06d", i))
	}
	return ids
}

func logTo(w io.Writer) *slog.Logger { return slog.New(slog.NewTextHandler(w, nil)) }
