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
	"github.com/tenurelib/tenure/proof/kit"
	"github.com/tenurelib/tenure/storetest"
)

const ttl = 30 * time.Second

// world is a database that processes share, in virtual time or on a server.
type world struct {
	*testing.T
	store interface {
		tenure.Store
		tenure.Watcher
		tenure.Notifier
		tenure.Lister
	}
	table claims.Table
	jobs  jobs
}

func newWorld(t *testing.T, store tenure.Database) *world {
	kit.Migrate(t, store)
	table, err := claims.TableOf(store)
	require.NoError(t, err)
	return &world{T: t, store: store, table: table, jobs: jobs{t: t, running: map[string]string{}, tokens: map[string]int64{}}}
}

// inBubble runs a test in virtual time, on SQLite in memory.
func inBubble(t *testing.T, test func(w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { test(newWorld(t, kit.OpenSQLite(t, ":memory:"))) })
}

// process is one that has a session, and its link to the database.
type process struct {
	w       *world
	name    string
	session *claims.Session
	keys    *claims.Keys
	store   *storetest.FaultyStore
	table   *faultyTable
	dead    atomic.Bool // what it would do is not done
	stop    func()      // closes the session, and waits for it
}

// start runs a process until the test ends.
func (w *world) start(name string) *process { return w.startWith(name, claims.SessionConfig{}) }

func (w *world) startWith(name string, cfg claims.SessionConfig) *process {
	w.Helper()
	p := &process{w: w, name: name, store: storetest.Faulty(w.store, nil), table: &faultyTable{Table: w.table}}
	cfg.Holder, cfg.Logger = name, cmp.Or(cfg.Logger, kit.Quiet)
	var err error
	p.session, err = claims.NewSessionOver(p.store, p.table, cfg)
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
func (p *process) fault(hook storetest.Hook) {
	p.store.SetHook(hook)
	p.table.hook.Store(&hook)
}

// crash stops a process for good: nothing that it sends arrives, and its funcs do nothing.
func (p *process) crash() {
	p.dead.Store(true)
	p.w.jobs.forget(p.name)
	p.fault(kit.Hang)
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

// work runs a func for a claim that ends when it is told to, and takes that long for it.
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
	rows, err := w.table.Owned(context.Background(), session, "", "", 1000, kit.Patience)
	require.NoError(w, err)
	return rows
}

// faultyTable sends each call through a hook.
type faultyTable struct {
	claims.Table
	hook  atomic.Pointer[storetest.Hook]
	looks func(ids []string) // is told what is looked at, unless nil

	server atomic.Int64 // which server answers; 0: the database says that
}

// takerKey is the key under which the context of a statement that takes rows has its session.
type takerKey struct{}

func faulty[T any](ctx context.Context, f *faultyTable, op string, limit time.Duration, send func(context.Context) (T, error)) (T, error) {
	hook := f.hook.Load()
	if hook == nil || *hook == nil {
		return send(ctx)
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var mu sync.Mutex // an answer may come after the hook has returned
	var answer, none T
	err := (*hook)(ctx, storetest.Call{Op: op}, func(ctx context.Context) error {
		a, err := send(ctx)
		mu.Lock()
		defer mu.Unlock()
		answer = a
		return err
	})
	mu.Lock()
	defer mu.Unlock()
	if err != nil {
		return none, err
	}
	return answer, nil
}

func (f *faultyTable) Look(ctx context.Context, kind string, ids []string, limit time.Duration) ([]objects.Claim, error) {
	if f.looks != nil {
		f.looks(ids)
	}
	return faulty(ctx, f, "look", limit, func(ctx context.Context) ([]objects.Claim, error) { return f.Table.Look(ctx, kind, ids, limit) })
}

func (f *faultyTable) Take(ctx context.Context, session, kind string, ids, gone, missing []string, limit time.Duration) ([]objects.Claim, error) {
	ctx = context.WithValue(ctx, takerKey{}, session)
	return faulty(ctx, f, "take", limit, func(ctx context.Context) ([]objects.Claim, error) {
		return f.Table.Take(ctx, session, kind, ids, gone, missing, limit)
	})
}

func (f *faultyTable) Free(ctx context.Context, session, kind string, ids []string, tokens []int64, limit time.Duration) ([]objects.Claim, error) {
	return faulty(ctx, f, "free", limit, func(ctx context.Context) ([]objects.Claim, error) {
		return f.Table.Free(ctx, session, kind, ids, tokens, limit)
	})
}

func (f *faultyTable) Owned(ctx context.Context, session, afterKind, afterID string, n int, limit time.Duration) ([]objects.Claim, error) {
	return faulty(ctx, f, "owned", limit, func(ctx context.Context) ([]objects.Claim, error) {
		return f.Table.Owned(ctx, session, afterKind, afterID, n, limit)
	})
}

func (f *faultyTable) Sessions(ctx context.Context, limit time.Duration) ([]objects.Session, error) {
	sessions, err := faulty(ctx, f, "sessions", limit, func(ctx context.Context) ([]objects.Session, error) { return f.Table.Sessions(ctx, limit) })
	for i := range sessions {
		sessions[i].Server = max(sessions[i].Server, f.server.Load())
	}
	return sessions, err
}

func (f *faultyTable) Prune(ctx context.Context, after int64, n int, limit time.Duration) (last int64, pruned int, err error) {
	type answer struct {
		last   int64
		pruned int
	}
	a, err := faulty(ctx, f, "prune", limit, func(ctx context.Context) (a answer, err error) {
		a.last, a.pruned, err = f.Table.Prune(ctx, after, n, limit)
		return a, err
	})
	return a.last, a.pruned, err
}

func names(n int) (ids []string) {
	for i := range n {
		ids = append(ids, fmt.Sprintf("t%06d", i))
	}
	return ids
}

func logTo(w io.Writer) *slog.Logger { return slog.New(slog.NewTextHandler(w, nil)) }
