package shards_test

import (
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/shards"
)

// rollout is a service that is deployed with another number of shards. Item h of 60 is in shard h % Count.
type rollout struct {
	testing.TB
	open func() tenure.Store
	logs testkit.SyncBuffer

	mu   sync.Mutex
	by   map[int]string // who works on each item
	over map[string]func()
}

const items = 60

// start begins a member, and returns once it is present. It ends when over is called or with the test. Its funcs take as long to return as lasts.
func (r *rollout) start(name string, count int, lasts time.Duration) {
	session, err := claims.NewSession(r.open(), claims.SessionConfig{Holder: name, Logger: testkit.Quiet})
	require.NoError(r, err)
	member, err := shards.New(session, shards.Config{Kind: "job", Count: count, Settle: 200 * time.Millisecond,
		Logger: slog.New(slog.NewTextHandler(&r.logs, nil)), Work: func(ctx context.Context, id string) error {
			shard := testkit.Must(strconv.Atoi(id))
			r.set(name, count, shard, true)
			<-ctx.Done()
			time.Sleep(lasts)
			r.set(name, count, shard, false)
			return nil
		}})
	require.NoError(r, err)
	ctx, cancel := context.WithCancel(context.Background())
	var both sync.WaitGroup
	both.Go(func() { _ = session.Run(ctx) })
	both.Go(func() { _ = member.Run(ctx) })
	r.over[name] = sync.OnceFunc(func() { cancel(); both.Wait() })
	r.Cleanup(r.over[name])
	testkit.Await(r, name+" is a member", func() bool { return member.Status().Session != "" })
}

func (r *rollout) set(name string, count, shard int, works bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for h := shard; h < items; h += count {
		if by := r.by[h]; works && by != "" {
			r.Errorf("%s works on item %d while %s does", name, h, by)
		}
		if delete(r.by, h); works {
			r.by[h] = name
		}
	}
}

// await returns when all items are worked on by members whose names begin so.
func (r *rollout) await(prefix string) {
	r.Helper()
	testkit.Await(r, "all items are worked on by "+prefix, func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, by := range r.by {
			if !strings.HasPrefix(by, prefix) {
				return false
			}
		}
		return len(r.by) == items
	})
}

func TestAnotherCountIsRolledOutWithoutWorkOnOneItemByTwo(t *testing.T) {
	test := func(t *testing.T, open func() tenure.Store) {
		r := &rollout{TB: t, open: open, by: map[int]string{}, over: map[string]func(){}}
		for i := range 3 {
			r.start(fmt.Sprint("old", i), 8, 300*time.Millisecond)
		}
		r.await("old")
		for i := range 3 { // each new member is there before an old one stops
			r.start(fmt.Sprint("new", i), 12, 0)
			r.await("old")
			if i == 1 {
				r.over["old1"]()
				r.start("old1", 8, 0) // is started once more, and waits until the new ones have ended
			} else {
				r.over[fmt.Sprint("old", i)]()
			}
		}
		r.await("new")
		require.Contains(t, r.logs.String(), "members disagree on the number of shards")
		r.over["new0"]() // and back
		r.await("new1")
		r.over["new1"]()
		r.await("old1")
		r.over["old1"]()
		r.await("new2")
	}
	t.Run("real", func(t *testing.T) {
		testkit.Slow(t)
		testkit.EachStore(t, func(t *testing.T, open func() tenure.Store) {
			testkit.MigrateClaims(t, open().(tenure.Database))
			test(t, open)
		})
	})
	t.Run("virtual", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			store := testkit.OpenSQLite(t, ":memory:")
			testkit.MigrateClaims(t, store)
			test(t, func() tenure.Store { return store })
		})
	})
}

// The claim of its place took so long that a member that came later may have begun without seeing it.
func TestAMemberWhosePlaceWasLateWaitsForThoseThatMayHaveBegun(t *testing.T) {
	inBubble(t, 2, func(w *world) {
		late := w.start("late", func(p *process, _ *shards.Config) {
			p.fault(testkit.Only("claims.take", testkit.Once(testkit.AnswerAfter(2*settle))))
		})
		time.Sleep(settle)
		next := w.start("next", func(_ *process, cfg *shards.Config) { cfg.Count = 3 })
		time.Sleep(10 * settle)
		w.spread([]int{0, 3}, late, next)
		next.stop()
		time.Sleep(2 * settle)
		w.spread([]int{2}, late)
	})
}
