package shards_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/shards"
	"github.com/tenurelib/tenure/storetest"
)

const (
	ttl    = 30 * time.Second
	settle = time.Second
)

// world is a database that processes share in virtual time, and what runs in them.
type world struct {
	*testing.T
	store *tenure.SQLiteStore
	count int // of shards

	mu      sync.Mutex
	running map[string]*process
	tokens  map[string]int64
	owners  map[string]*process // who ran each last
	begun   int
	moves   int // begun by another process than the last time
	ended   map[string]time.Time
	gaps    []time.Duration // of these, from a func's return to the beginning of the next one
	lossy   bool            // the database has lost commits, so funcs may overlap
}

// inBubble runs a test in virtual time, on SQLite in memory.
func inBubble(t *testing.T, count int, test func(w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		store := testkit.OpenSQLite(t, ":memory:")
		testkit.MigrateClaims(t, store)
		test(&world{T: t, store: store, count: count, running: map[string]*process{}, tokens: map[string]int64{}, owners: map[string]*process{}, ended: map[string]time.Time{}})
	})
}

// process is one that takes part.
type process struct {
	w       *world
	name    string
	link    *link
	session *claims.Session
	drain   *tenure.Drain
	shards  *shards.Member
	dead    atomic.Bool
	stops   atomic.Int64 // how long its funcs take to return
	cancel  func()
	ended   chan struct{}
	run     func(ctx context.Context, id string) error // after the world knows of it

	mu     sync.Mutex
	causes map[string]error // why a func was told to return the last time
	onStop func()           // when a func is told to return; nil: nothing
}

// start begins a process, which ends with the test at the latest.
func (w *world) start(name string, options ...func(*process, *shards.Config)) *process {
	w.Helper()
	p := &process{w: w, name: name, link: newLink(w.store), ended: make(chan struct{}), causes: map[string]error{}}
	cfg := shards.Config{Kind: "job", Count: w.count, Work: p.work, Settle: settle}
	for _, option := range options {
		option(p, &cfg)
	}
	var err error
	p.session, err = claims.NewSession(p.link, claims.SessionConfig{
		TTL: ttl, Holder: name, Drain: p.drain, Logger: testkit.Quiet, Labels: map[string]string{"address": name},
	})
	require.NoError(w, err)
	p.shards, err = shards.New(p.session, cfg)
	require.NoError(w, err)
	ctx, cancel := context.WithCancel(context.Background())
	p.cancel = cancel
	go func() {
		defer close(p.ended)
		var both sync.WaitGroup
		both.Go(func() { w.NoError(p.session.Run(ctx)) })
		both.Go(func() { w.NoError(p.shards.Run(ctx)) })
		both.Wait()
	}()
	w.Cleanup(func() { p.heal(); p.stop() })
	return p
}

func (w *world) NoError(err error) {
	if err != nil {
		w.Error(err)
	}
}

func (p *process) stop() { p.cancel(); <-p.ended }

func (p *process) fault(hook storetest.Hook) { p.link.SetHook(hook) }

// heal ends the faults of a process, unless it has crashed.
func (p *process) heal() {
	if !p.dead.Load() {
		p.fault(nil)
	}
}

// crash ends a process for good: nothing that it sends arrives, and its funcs do nothing.
func (p *process) crash() {
	p.dead.Store(true)
	p.fault(testkit.Hang)
	p.w.mu.Lock()
	for id, by := range p.w.running {
		if by == p {
			delete(p.w.running, id)
		}
	}
	p.w.mu.Unlock()
	p.cancel() // its goroutines end
}

// work fails the test if two funcs run for one shard, or if a token does not increase.
func (p *process) work(ctx context.Context, id string) error {
	if p.dead.Load() {
		return nil
	}
	w := p.w
	c := claims.ClaimFromContext(ctx)
	w.mu.Lock()
	if other := w.running[id]; other != nil && (!w.lossy || other == p) {
		w.Errorf("%s runs %s while %s does", p.name, id, other.name)
	}
	if last := w.tokens[id]; c.Token < last || c.Token == last && w.owners[id] != p || c.Key.ID != id {
		w.Errorf("%s runs %s with token %d of %s after %d", p.name, id, c.Token, c, last)
	}
	if w.begun++; w.owners[id] != nil && w.owners[id] != p {
		w.moves++
		w.gaps = append(w.gaps, time.Since(w.ended[id]))
	}
	w.running[id], w.owners[id], w.tokens[id] = p, p, c.Token
	w.mu.Unlock()
	defer func() {
		if !p.dead.Load() {
			w.mu.Lock()
			defer w.mu.Unlock()
			if w.running[id] == p {
				delete(w.running, id)
			}
			w.ended[id] = time.Now()
		}
	}()
	if p.run != nil {
		return p.run(ctx, id)
	}
	<-ctx.Done()
	p.mu.Lock()
	p.causes[id] = context.Cause(ctx)
	if p.onStop != nil {
		p.onStop()
	}
	p.mu.Unlock()
	time.Sleep(time.Duration(p.stops.Load()))
	return nil
}

// runs returns the shards whose funcs run in a process.
func (p *process) runs() (ids []string) {
	p.w.mu.Lock()
	defer p.w.mu.Unlock()
	for id, by := range p.w.running {
		if by == p {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

func (w *world) allRun() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.running) == w.count
}

// spread checks how many shards each process runs, the oldest first.
func (w *world) spread(want []int, processes ...*process) {
	w.Helper()
	var got []int
	for _, p := range processes {
		got = append(got, len(p.runs()))
	}
	require.Equal(w, want, got)
}

// together starts processes at the same moment, and lets them settle.
func (w *world) together(n int, options ...func(*process, *shards.Config)) (processes []*process) {
	w.Helper()
	for i := range n {
		processes = append(processes, w.start(fmt.Sprint("p", i), options...))
		time.Sleep(10 * time.Millisecond) // so that the first is the oldest
	}
	time.Sleep(settle + 100*time.Millisecond)
	return processes
}

func (w *world) takeMoves() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	moves := w.moves
	w.moves = 0
	return moves
}

// funcs returns how many funcs have begun.
func (w *world) funcs() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.begun
}

// cause returns why a func was told to return the last time.
func (p *process) cause(id string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.causes[id]
}
