package shards_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/shards"
	"github.com/tenurelib/tenure/storetest"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// cluster is processes that share shards on a Postgres server, in real time.
type cluster struct {
	testing.TB
	url         string
	count       int
	settle, ttl time.Duration
	calls       testkit.Calls

	mu      sync.Mutex
	running map[string]*member
	owners  map[string]*member
	ended   map[string]time.Time // when a shard's func has returned last
	changed time.Time            // when a func has begun last
	moves   int
	gaps    []time.Duration            // from a func's return to the beginning of the next one
	took    map[string][]time.Duration // by statements
}

// member is one of the processes.
type member struct {
	c       *cluster
	name    string
	session *claims.Session
	shards  *shards.Member
	link    *link
	dead    bool                      // guarded by the mu of cluster
	wrote   atomic.Pointer[time.Time] // when it has sent its last renewal
	stop    func()
}

func newCluster(t testing.TB, count int, settle, ttl time.Duration) *cluster {
	c := &cluster{TB: t, url: testkit.PostgresURL(t), count: count, settle: settle, ttl: ttl,
		running: map[string]*member{}, owners: map[string]*member{}, ended: map[string]time.Time{}, took: map[string][]time.Duration{}}
	testkit.MigrateClaims(t, testkit.OpenPostgres(t, c.url, tenure.PostgresConfig{}))
	return c
}

// start begins a process.
func (c *cluster) start(name string) *member {
	m := c.prepare(name)
	m.run()
	return m
}

// prepare makes a process, with connections of its own.
func (c *cluster) prepare(name string) *member {
	m := &member{c: c, name: name, link: newLink(testkit.OpenPostgres(c, c.url+"&pool_max_conns=4", tenure.PostgresConfig{}))}
	m.link.SetHook(c.calls.Count("", func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
		if now := time.Now(); call.Op == "put" {
			m.wrote.Store(&now)
		}
		began := time.Now()
		err := do(ctx)
		c.mu.Lock()
		defer c.mu.Unlock()
		c.took[call.Op] = append(c.took[call.Op], time.Since(began))
		return err
	}))
	var err error
	m.session, err = claims.NewSession(m.link, claims.SessionConfig{TTL: c.ttl, Holder: name, Logger: testkit.Quiet})
	require.NoError(c, err)
	m.shards, err = shards.New(m.session, shards.Config{Kind: "job", Count: c.count, Settle: c.settle, Work: m.work})
	require.NoError(c, err)
	return m
}

func (m *member) run() {
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = m.session.Run(ctx) })
	running.Go(func() { _ = m.shards.Run(ctx) })
	m.stop = sync.OnceFunc(func() { cancel(); running.Wait() })
	m.c.Cleanup(m.stop)
}

func (m *member) work(ctx context.Context, id string) error {
	c := m.c
	c.mu.Lock()
	if other := c.running[id]; other != nil {
		c.Errorf("%s runs %s while %s does", m.name, id, other.name)
	}
	c.changed = time.Now()
	if other := c.owners[id]; other != nil && other != m {
		c.moves++
		if ended, ok := c.ended[id]; ok {
			c.gaps = append(c.gaps, c.changed.Sub(ended))
		}
	}
	c.running[id], c.owners[id] = m, m
	c.mu.Unlock()
	<-ctx.Done()
	c.mu.Lock()
	defer c.mu.Unlock()
	if !m.dead {
		delete(c.running, id)
		c.ended[id] = time.Now()
	}
	return nil
}

// kill cuts a process off for good; its funcs are as if they had never been.
func (m *member) kill() {
	m.c.mu.Lock()
	defer m.c.mu.Unlock()
	m.dead = true
	m.link.SetHook(testkit.Hang)
	for id, by := range m.c.running {
		if by == m {
			delete(m.c.running, id)
			delete(m.c.ended, id)
		}
	}
	go m.stop()
}

// balanced reports whether all shards run, spread evenly over so many processes.
func (c *cluster) balanced(members int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	of := map[*member]int{}
	for _, m := range c.running {
		of[m]++
	}
	for _, n := range of {
		if n < c.count/members || n > (c.count+members-1)/members {
			return false
		}
	}
	return len(c.running) == c.count && len(of) == min(members, c.count)
}

// statements says how many statements of each kind there were since the last call, and how long they
// took.
func (c *cluster) statements() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	took := c.took
	c.took = map[string][]time.Duration{}
	var b strings.Builder
	for _, op := range slices.Sorted(maps.Keys(took)) {
		fmt.Fprintf(&b, "%s %d (p50 %v, p99 %v)  ", op, len(took[op]),
			testkit.Percentile(took[op], 50).Round(10*time.Microsecond), testkit.Percentile(took[op], 99).Round(10*time.Microsecond))
	}
	return b.String()
}

// await returns how long it took after a moment until the shards were balanced, how many have
// moved, and the gaps.
func (c *cluster) await(since time.Time, members int) (took time.Duration, moves int, gaps []time.Duration) {
	c.Helper()
	for end := time.Now().Add(testkit.Patience); !c.balanced(members); time.Sleep(time.Millisecond) {
		require.True(c, time.Now().Before(end), "the shards are not balanced")
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	moves, gaps = c.moves, c.gaps
	c.moves, c.gaps = 0, nil
	return c.changed.Sub(since), moves, gaps
}

func TestProcessesShareShardsOnPostgres(t *testing.T) {
	testkit.Slow(t)
	c := newCluster(t, 50, 500*time.Millisecond, 6*time.Second)
	began := time.Now()
	var ms []*member
	for i := range 4 {
		ms = append(ms, c.start(fmt.Sprint("m", i)))
	}
	c.await(began, 4)

	for range 3 {
		time.Sleep(c.settle)
		began = time.Now()
		joined := c.start("joined")
		took, moves, gaps := c.await(began, 5)
		require.Equal(t, 10, moves)
		t.Logf("join: %v, the longest gap is %v", took, slices.Max(gaps))

		began = time.Now()
		ms[0].stop()
		took, moves, _ = c.await(began, 4)
		t.Logf("leave: %v", took)
		require.InDelta(t, 10, moves, 0)

		ms = append(ms[1:], joined)
	}
	began = time.Now()
	ms[3].kill()
	took, moves, _ := c.await(began, 3)
	t.Logf("kill: %v", took)
	require.Contains(t, []int{12, 13}, moves)
	require.LessOrEqual(t, took, c.ttl+10*time.Second)
	owner, err := ms[0].shards.Owner(t.Context(), "7")
	require.NoError(t, err)
	require.Contains(t, []string{"m3", "joined"}, owner.Holder)
}
