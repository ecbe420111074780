package shards_test

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/shards"
)

const moment = 200 * time.Millisecond

func TestShardsAreSpreadEvenlyAndMoveNoMoreThanTheyMust(t *testing.T) {
	inBubble(t, 10, func(w *world) {
		ps := w.together(3)
		w.spread([]int{3, 3, 4}, ps...)
		require.Zero(w, w.takeMoves())

		time.Sleep(time.Minute)
		d := w.start("d")
		time.Sleep(settle / 2)
		w.spread([]int{3, 3, 4, 0}, append(ps, d)...)
		time.Sleep(settle/2 + moment)
		w.spread([]int{2, 3, 3, 2}, append(ps, d)...)
		require.Equal(w, 2, w.takeMoves())

		ps[0].stop()
		time.Sleep(moment)
		w.spread([]int{3, 3, 4}, ps[1], ps[2], d)
		require.Equal(w, 2, w.takeMoves())

		began := time.Now()
		ps[2].crash()
		time.Sleep(ttl/2 - time.Second)
		require.False(w, w.allRun())
		for !w.allRun() {
			time.Sleep(time.Millisecond)
		}
		require.LessOrEqual(w, time.Since(began), ttl+100*time.Millisecond)
		w.spread([]int{5, 5}, ps[1], d)
		require.Equal(w, 3, w.takeMoves())
	})
}

// Otherwise the new member would claim the shards that some have freed while others free more, which would then
// wait.
func TestMembersStopTheirSurplusOneAfterAnother(t *testing.T) {
	inBubble(t, 40, func(w *world) {
		ps := w.together(4)
		stopped := make([]time.Time, len(ps))
		for i, p := range ps {
			p.mu.Lock()
			p.onStop = func() { stopped[i] = time.Now() }
			p.mu.Unlock()
		}
		w.start("q")
		time.Sleep(settle + moment)
		require.Equal(w, 8, w.takeMoves())
		for i := range stopped[1:] {
			require.Greater(w, stopped[i+1].Sub(stopped[i]), 25*time.Millisecond)
		}
	})
}

// A shard that moves waits for five statements, one after another: the old owner frees it and
// sends a hint, and the new one lists, reads and claims it. Beyond these it waits at most for a
// look that was under way.
func TestAMovedShardWaitsForFiveStatements(t *testing.T) {
	inBubble(t, 200, func(w *world) {
		const statement = 1500 * time.Microsecond
		slow := func(p *process, _ *shards.Config) {
			p.link.Hinted = true
			p.fault(testkit.Slowly(statement))
		}
		ps := w.together(10, slow)
		gaps := func(what string, moves int) {
			w.Helper()
			time.Sleep(moment)
			w.mu.Lock()
			defer w.mu.Unlock()
			w.Logf("%s: the gaps are %v in the middle, %v at the 99th percentile", what, testkit.Percentile(w.gaps, 50), testkit.Percentile(w.gaps, 99))
			require.Len(w, w.gaps, moves)
			require.LessOrEqual(w, testkit.Percentile(w.gaps, 50), 5*statement+time.Millisecond)
			require.LessOrEqual(w, testkit.Percentile(w.gaps, 99), 8*statement+time.Millisecond)
			w.gaps = nil
		}
		q := w.start("q", slow)
		time.Sleep(settle)
		gaps("join", 18)
		time.Sleep(ttl)
		ps[3].stop()
		gaps("leave", 18)
		q.stop()
		gaps("another leave", 20)
	})
}

func TestAProcessThatStaysShortlyMovesNothing(t *testing.T) {
	inBubble(t, 10, func(w *world) {
		ps := w.together(2)
		before := w.funcs()
		for range 20 {
			p := w.start("short")
			time.Sleep(settle * 9 / 10)
			p.stop()
			time.Sleep(moment)
		}
		w.spread([]int{5, 5}, ps...)
		require.Equal(w, before, w.funcs())
	})
}

func TestAMemberWarnsOfAShardThatItIsNotConfiguredWith(t *testing.T) {
	inBubble(t, 2, func(w *world) {
		var log testkit.SyncBuffer
		w.start("a", func(_ *process, cfg *shards.Config) { cfg.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
		w.start("b", func(_ *process, cfg *shards.Config) { cfg.Count = 20 })
		time.Sleep(settle + 3*ttl)
		require.Equal(w, 1, strings.Count(log.String(), "that this one is not configured with"), log.String())
	})
}

// Graceful: no other begins before the old owner's func has returned, and one that hangs holds
// up no other shard.
func TestAFuncThatDoesNotStopHoldsUpOnlyItsShard(t *testing.T) {
	inBubble(t, 12, func(w *world) {
		ps := w.together(2)
		hung := ps[0].runs()[5] // one of the newest
		ps[0].stops.Store(int64(5 * time.Minute))
		c := w.start("c")
		time.Sleep(settle + moment)
		w.spread([]int{6, 4, 2}, ps[0], ps[1], c) // two of the first process hang
		require.Contains(w, ps[0].runs(), hung)
		d := w.start("d")
		time.Sleep(settle + moment)
		w.spread([]int{6, 3}, ps...)
		require.Len(w, append(c.runs(), d.runs()...), 3)
		for _, s := range ps[0].shards.Status().Shards {
			if s.ID == hung {
				require.NotZero(w, s.Stopping)
				require.False(w, s.Stuck)
			}
		}
		time.Sleep(15 * time.Second)
		require.Equal(w, 3, ps[0].shards.Status().Stuck)
		require.Zero(w, ps[1].shards.Status().Stuck)
		time.Sleep(10 * time.Minute)
		require.Zero(w, ps[0].shards.Status().Stuck)
		w.spread([]int{3, 3, 3, 3}, ps[0], ps[1], c, d)
	})
}

// A shard that was told to stop goes on where it is, if it need not move any more.
func TestAShardThatNeedNotMoveAnyMoreGoesOn(t *testing.T) {
	inBubble(t, 4, func(w *world) {
		p := w.together(1)[0]
		p.stops.Store(int64(time.Minute))
		q := w.start("q")
		time.Sleep(settle + moment)
		require.Len(w, p.runs(), 4, "two of them stop")
		before := p.shards.Status().Shards
		begun := w.funcs()
		q.stop()
		time.Sleep(time.Minute)
		w.spread([]int{4}, p)
		require.Equal(w, begun+2, w.funcs())
		require.Zero(w, w.takeMoves())
		for i, s := range p.shards.Status().Shards {
			require.Zero(w, s.Stopping)
			require.Equal(w, before[i].Token, s.Token, "it was never free")
		}
	})
}

func TestAFuncIsToldWhyItEnds(t *testing.T) {
	inBubble(t, 4, func(w *world) {
		p := w.together(1)[0]
		q := w.start("q")
		time.Sleep(settle + moment)
		w.spread([]int{2, 2}, p, q)
		for _, id := range q.runs() {
			require.ErrorIs(w, p.cause(id), tenure.ErrResigned)
		}
		ids := p.runs()
		p.stop()
		for _, id := range ids {
			require.ErrorIs(w, p.cause(id), tenure.ErrShutdown)
		}
		time.Sleep(moment)
		w.spread([]int{4}, q)
		q.fault(testkit.Hang)
		time.Sleep(ttl)
		for _, id := range []string{"0", "1", "2", "3"} {
			require.ErrorIs(w, q.cause(id), tenure.ErrDeadline)
		}
		require.Empty(w, q.runs())
		q.heal()
		time.Sleep(ttl + settle) // its old session has to expire
		w.spread([]int{4}, q)
	})
}

func TestAFuncThatReturnsIsRunAgain(t *testing.T) {
	inBubble(t, 3, func(w *world) {
		var log testkit.SyncBuffer
		var mu sync.Mutex
		var begins []time.Time
		p := w.start("p", func(p *process, cfg *shards.Config) {
			cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
			p.run = func(ctx context.Context, id string) error {
				if id == "1" {
					mu.Lock()
					defer mu.Unlock()
					begins = append(begins, time.Now())
					return errors.New("no such partition")
				}
				<-ctx.Done()
				return nil
			}
		})
		time.Sleep(settle + 10*time.Minute)
		require.Contains(w, log.String(), "no such partition")
		require.Len(w, p.runs(), 2)
		status := p.shards.Status()
		require.Equal(w, "no such partition", status.Shards[1].Error)
		require.Greater(w, status.Shards[1].Failures, 20)
		require.Less(w, status.Shards[1].Failures, 40)
		require.Zero(w, status.Shards[0].Failures)
		require.True(w, status.Shards[1].Failing)
		require.Equal(w, 1, status.Failing)
		q := w.start("q") // what waits is told as well
		time.Sleep(settle + moment)
		require.Len(w, q.shards.Status().Shards, 1)
		mu.Lock()
		defer mu.Unlock()
		for i := 2; i < len(begins); i++ {
			pause := begins[i].Sub(begins[i-1])
			require.LessOrEqual(w, pause, 30*time.Second)
			require.GreaterOrEqual(w, pause, min(75*time.Millisecond<<(i-1), 22*time.Second))
		}
	})
}

func TestAFuncThatEndsByGoexitIsRunAgainAfterAPause(t *testing.T) {
	inBubble(t, 1, func(w *world) {
		var log testkit.SyncBuffer
		p := w.start("p", func(p *process, cfg *shards.Config) {
			cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
			p.run = func(context.Context, string) error {
				if w.funcs() < 1000 {
					runtime.Goexit() // as t.FailNow does
				}
				return nil
			}
		})
		time.Sleep(settle + 10*time.Minute)
		require.Greater(w, w.funcs(), 20)
		require.Less(w, w.funcs(), 40)
		require.Equal(w, 1, p.shards.Status().Claimed, "its claim does not end")
		require.Contains(w, log.String(), "runtime.Goexit")
	})
}

func TestAnUnfitProcessGivesUpItsShardsIfAnotherIsThere(t *testing.T) {
	inBubble(t, 6, func(w *world) {
		var sick [2]atomic.Bool
		with := func(i int) func(*process, *shards.Config) {
			return func(_ *process, cfg *shards.Config) {
				cfg.Check = func(context.Context) error {
					if sick[i].Load() {
						return errors.New("no disk")
					}
					return nil
				}
			}
		}
		sick[0].Store(true)
		p := w.start("p", with(0))
		time.Sleep(time.Minute)
		require.Empty(w, p.runs(), "it does not begin to take part")
		require.Equal(w, "no disk", p.shards.Status().Unhealthy)
		sick[0].Store(false)
		time.Sleep(ttl/3 + settle + moment)
		w.spread([]int{6}, p)

		sick[0].Store(true)
		time.Sleep(time.Minute)
		w.spread([]int{6}, p) // no other process is there
		q := w.start("q", with(1))
		time.Sleep(settle + moment)
		w.spread([]int{0, 6}, p, q)
		for _, id := range q.runs() {
			require.ErrorIs(w, p.cause(id), tenure.ErrUnhealthy)
			require.ErrorContains(w, p.cause(id), "no disk")
		}
		sick[0].Store(false)
		time.Sleep(ttl/3 + settle + moment)
		w.spread([]int{3, 3}, p, q)
		sick[1].Store(true)
		time.Sleep(ttl/3 + settle + moment)
		w.spread([]int{6, 0}, p, q)
	})
}

func TestACheckThatHangsFails(t *testing.T) {
	inBubble(t, 2, func(w *world) {
		var hangs atomic.Bool
		p := w.start("p", func(_ *process, cfg *shards.Config) {
			cfg.Check = func(ctx context.Context) error {
				if hangs.Load() {
					<-ctx.Done()
				}
				return nil
			}
		})
		time.Sleep(settle + moment)
		w.spread([]int{2}, p)
		hangs.Store(true)
		time.Sleep(ttl)
		require.Contains(w, p.shards.Status().Unhealthy, "in time")
		q := w.start("q")
		time.Sleep(settle + moment)
		w.spread([]int{0, 2}, p, q)
	})
}

func TestOwnerTellsWhereToRouteARequest(t *testing.T) {
	inBubble(t, 2, func(w *world) {
		ps := w.together(2)
		for _, p := range ps {
			owner, err := ps[0].shards.Owner(w.Context(), p.runs()[0])
			require.NoError(w, err)
			require.Equal(w, p.name, owner.Labels["address"])
		}
		_, err := ps[0].shards.Owner(w.Context(), "2")
		require.ErrorIs(w, err, tenure.ErrInvalid)
		ps[0].stop()
		ps[1].stop()
		_, err = ps[0].shards.Owner(w.Context(), "1")
		require.ErrorIs(w, err, tenure.ErrNotFound)
	})
}

// What a process sends at rest does not depend on how many shards there are.
func TestAtRestFewStatementsAreSent(t *testing.T) {
	for _, count := range []int{2, 500} {
		inBubble(t, count, func(w *world) {
			ps := w.together(2, func(p *process, _ *shards.Config) { p.link.Hinted = true })
			time.Sleep(ttl)
			var calls testkit.Calls
			ps[0].fault(calls.Count("", nil))
			const ttls = 40
			time.Sleep(ttls * ttl)
			got := calls.Take()
			total := 0
			for _, n := range got {
				total += n
			}
			w.Logf("%d shards: %v", count, got)
			require.LessOrEqual(w, got["claims.list"], ttls*3/2)
			require.LessOrEqual(w, total, ttls*9)
		})
	}
}

// One row per life would add up if a process crashes and restarts again and again.
func TestMembersThatAreGoneLeaveNothing(t *testing.T) {
	inBubble(t, 2, func(w *world) {
		w.together(1)
		for range 10 {
			p := w.start("p")
			time.Sleep(2 * settle)
			p.stop()
			time.Sleep(2 * settle)
		}
		var rows int
		require.NoError(w, w.store.DB().QueryRow(`SELECT count(*) FROM objects_claims WHERE kind = 'job/member'`).Scan(&rows))
		require.LessOrEqual(w, rows, 2)
	})
}

// Hints only save time.
func TestWithoutHintsShardsMoveAllTheSame(t *testing.T) {
	inBubble(t, 6, func(w *world) {
		lost := func(p *process, _ *shards.Config) { p.fault(testkit.Only("wake", testkit.Refuse)) }
		ps := w.together(2, lost)
		time.Sleep(ttl)
		w.spread([]int{3, 3}, ps...)
		q := w.start("q", lost)
		time.Sleep(ttl + settle + moment)
		w.spread([]int{2, 2, 2}, append(ps, q)...)
		ps[0].stop()
		time.Sleep(2 * ttl)
		w.spread([]int{3, 3}, ps[1], q)
	})
}

// The answer to a claim is lost: the next look finds the shards.
func TestShardsWhoseClaimWasNotAnsweredAreRun(t *testing.T) {
	inBubble(t, 6, func(w *world) {
		p := w.start("p")
		time.Sleep(settle / 2)
		p.fault(testkit.Only("claims.take", testkit.Once(testkit.LoseAnswer)))
		time.Sleep(settle/2 + 6*time.Second)
		w.spread([]int{6}, p)
	})
}

// The answer to the claim by which it joins is lost, so it has two rows.
func TestAProcessIsOneMember(t *testing.T) {
	inBubble(t, 6, func(w *world) {
		p := w.start("p")
		q := w.start("q", func(p *process, _ *shards.Config) {
			p.fault(testkit.Only("claims.take", testkit.Once(testkit.LoseAnswer)))
		})
		time.Sleep(4 * time.Second)
		var rows int
		require.NoError(w, w.store.DB().QueryRow(`SELECT count(*) FROM objects_claims WHERE kind = 'job/member'`).Scan(&rows))
		require.Equal(w, 3, rows)
		require.Equal(w, 2, p.shards.Status().Members)
		w.spread([]int{3, 3}, p, q)
	})
}

func TestTheNewestShardsMove(t *testing.T) {
	inBubble(t, 12, func(w *world) {
		ps := w.together(3)
		old := [][]string{ps[0].runs(), ps[1].runs()}
		ps[2].stop()
		time.Sleep(moment)
		w.spread([]int{6, 6}, ps[0], ps[1])
		w.start("d")
		time.Sleep(settle + moment)
		require.Equal(w, old, [][]string{ps[0].runs(), ps[1].runs()})
	})
}

func TestTheRowOfAMemberThatWasDeletedIsMadeAgain(t *testing.T) {
	inBubble(t, 6, func(w *world) {
		ps := w.together(2)
		_, err := w.store.DB().Exec(`DELETE FROM objects_claims WHERE kind = 'job/member'`)
		require.NoError(w, err)
		begun := w.funcs()
		time.Sleep(ttl + 4*settle)
		w.spread([]int{3, 3}, ps...)
		require.Equal(w, begun, w.funcs(), "its funcs run on")
		q := w.start("q")
		time.Sleep(settle + moment)
		w.spread([]int{2, 2, 2}, append(ps, q)...)
	})
}

// A server takes over that lacks the last commits, so rows are again what they were before a process
// joined.
func TestAfterAFailoverThatLacksTheLastCommitsAllShardsRunAgain(t *testing.T) {
	inBubble(t, 6, func(w *world) {
		ps := w.together(2)
		exec := func(query string) {
			_, err := w.store.DB().Exec(query)
			require.NoError(w, err)
		}
		exec(`CREATE TABLE standby AS SELECT * FROM objects_claims`)
		q := w.start("q")
		time.Sleep(settle + moment)
		w.spread([]int{2, 2, 2}, append(ps, q)...)
		all := append(ps, q)
		w.mu.Lock()
		w.lossy = true
		w.mu.Unlock()
		exec(`DELETE FROM objects_claims`)
		exec(`INSERT INTO objects_claims SELECT * FROM standby`)
		for _, p := range all { // it cannot be reached for a while
			p.fault(testkit.Only("claims.sessions", testkit.Refuse))
		}
		time.Sleep(2 * ttl)
		for _, p := range all {
			p.fault(nil)
		}
		time.Sleep(2*ttl + 4*settle)
		require.True(w, w.allRun())
		w.spread([]int{2, 2, 2}, all...)
		for _, p := range all {
			owned := 0
			require.NoError(w, w.store.DB().QueryRow(`SELECT count(*) FROM objects_claims WHERE kind = 'job' AND session = ?`, p.session.ID()).Scan(&owned))
			require.Equal(w, 2, owned)
		}
	})
}

func TestASessionThatIsClosedEndsRun(t *testing.T) {
	inBubble(t, 2, func(w *world) {
		session, err := claims.NewSession(w.store, claims.SessionConfig{Logger: testkit.Quiet})
		require.NoError(w, err)
		var begun, ended atomic.Int32
		sh, err := shards.New(session, shards.Config{Kind: "job", IDs: []string{"b", "a"}, Work: func(ctx context.Context, id string) error {
			begun.Add(1)
			<-ctx.Done()
			time.Sleep(time.Second)
			ended.Add(1)
			return nil
		}})
		require.NoError(w, err)
		ctx, cancel := context.WithCancel(w.Context())
		go func() { _ = session.Run(ctx) }()
		result := make(chan error)
		go func() { result <- sh.Run(w.Context()) }()
		time.Sleep(2 * time.Second)
		require.EqualValues(w, 2, begun.Load())
		cancel()
		require.ErrorIs(w, <-result, claims.ErrClosed)
		require.EqualValues(w, 2, ended.Load())
		require.ErrorIs(w, sh.Run(w.Context()), tenure.ErrInvalid)
		synctest.Wait()
	})
}

func TestStatusIsShownAsJSON(t *testing.T) {
	inBubble(t, 3, func(w *world) {
		ps := w.together(2)
		status := ps[1].shards.Status()
		require.Equal(w, ps[1].session.ID(), status.Session)
		require.Equal(w, []int{2, 2, 2, 3}, []int{status.Members, status.Counted, status.Share, status.Count})
		text, err := json.Marshal(status)
		require.NoError(w, err)
		require.Contains(w, string(text), `"kind":"job"`)
		require.NotContains(w, string(text), "stopping")
		require.True(w, status.Settled)
		require.Equal(w, []int{2, 0}, []int{status.Claimed, status.GivenUp})
		w.start("q")
		time.Sleep(settle + moment)
		require.Equal(w, []int{2, 1}, []int{ps[1].shards.Status().Claimed, ps[1].shards.Status().GivenUp})
		ps[1].stop()
		status = ps[1].shards.Status()
		require.Empty(w, status.Session)
		require.Empty(w, status.Shards)
	})
}

func TestBadInput(t *testing.T) {
	store := testkit.OpenSQLite(t, ":memory:")
	session, err := claims.NewSession(store, claims.SessionConfig{})
	require.NoError(t, err)
	run := func(context.Context, string) error { return nil }
	_, err = shards.New(nil, shards.Config{Kind: "job", Count: 1, Work: run})
	require.ErrorIs(t, err, tenure.ErrInvalid)
	for wrong, cfg := range map[string]shards.Config{
		"Kind is empty":          {Count: 1, Work: run},
		"kind":                   {Kind: "\xff", Count: 1, Work: run},
		"Work is nil":            {Kind: "job", Count: 1},
		"set Count or IDs":       {Kind: "job", Work: run},
		"Count -1":               {Kind: "job", Count: -1, Work: run},
		"both Count and IDs":     {Kind: "job", Count: 1, IDs: []string{"a"}, Work: run},
		"given twice":            {Kind: "job", IDs: []string{"a", "b", "a"}, Work: run},
		"an ID is empty":         {Kind: "job", IDs: []string{"a", ""}, Work: run},
		"\"\\xff\"":              {Kind: "job", IDs: []string{"a", "\xff"}, Work: run},
		"Settle -1s is negative": {Kind: "job", Count: 1, Settle: -time.Second, Work: run},
	} {
		_, err := shards.New(session, cfg)
		require.ErrorIs(t, err, tenure.ErrInvalid)
		require.ErrorContains(t, err, wrong)
	}
	_, err = shards.New(session, shards.Config{Kind: "job", Count: 1, Work: run})
	require.NoError(t, err)
	_, err = shards.New(session, shards.Config{Kind: "job", Count: 1, Work: run})
	require.ErrorContains(t, err, "already")

	_, err = claims.NewKeys(session, "half/member")
	require.NoError(t, err)
	_, err = shards.New(session, shards.Config{Kind: "half", Count: 1, Work: run})
	require.ErrorContains(t, err, "already")
	_, err = claims.NewKeys(session, "half")
	require.NoError(t, err, "a refused one has left it behind")
}

func TestASessionThatIsClosedEndsRunOfAProcessThatIsNotFit(t *testing.T) {
	inBubble(t, 2, func(w *world) {
		session, err := claims.NewSession(w.store, claims.SessionConfig{Logger: testkit.Quiet})
		require.NoError(w, err)
		sh, err := shards.New(session, shards.Config{
			Kind: "job", Count: 2, Work: func(context.Context, string) error { return nil },
			Check: func(context.Context) error { return errors.New("no disk") },
		})
		require.NoError(w, err)
		ctx, cancel := context.WithCancel(w.Context())
		go func() { _ = session.Run(ctx) }()
		result := make(chan error, 1)
		go func() { result <- sh.Run(w.Context()) }()
		time.Sleep(time.Minute)
		cancel()
		time.Sleep(time.Minute)
		select {
		case err := <-result:
			require.ErrorIs(w, err, claims.ErrClosed)
		default:
			w.Error("Run has not returned")
		}
	})
}

func TestALogThatBlocksKeepsNoShardFromMovingOrFromRunningAgain(t *testing.T) {
	inBubble(t, 10, func(w *world) {
		release := make(chan struct{})
		defer close(release)
		var failures atomic.Int64
		fails := func(p *process, cfg *shards.Config) {
			cfg.Logger = slog.New(testkit.BlockedLog(release))
			p.run = func(ctx context.Context, id string) error {
				if failures.Add(1) <= 20 {
					return errors.New("refused")
				}
				<-ctx.Done()
				return nil
			}
		}
		ps := w.together(2, fails)
		time.Sleep(time.Minute)
		w.spread([]int{5, 5}, ps...)
		ps[0].stop()
		time.Sleep(moment)
		w.spread([]int{10}, ps[1])
	})
}

func TestRunWithoutTheTablesOfClaimsSaysWhichCallMakesThem(t *testing.T) {
	run := func(t *testing.T, store tenure.Database) {
		testkit.Migrate(t, store)
		session, err := claims.NewSession(store, claims.SessionConfig{Logger: testkit.Quiet})
		require.NoError(t, err)
		member, err := shards.New(session, shards.Config{Kind: "job", Count: 3, Work: func(context.Context, string) error { return nil }})
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
		defer cancel()
		ran := make(chan error, 1)
		go func() { ran <- session.Run(ctx) }()
		err = member.Run(ctx)
		require.ErrorIs(t, err, tenure.ErrSetup)
		require.ErrorContains(t, err, "call claims.Migrate once")
		cancel()
		require.NoError(t, <-ran)
	}
	t.Run("postgres", func(t *testing.T) { run(t, testkit.OpenPostgres(t, testkit.PostgresURL(t), tenure.PostgresConfig{})) })
	t.Run("sqlite", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) { run(t, testkit.OpenSQLite(t, ":memory:")) })
	})
}

func TestADrainedProcessGivesItsShardsToTheOthers(t *testing.T) {
	inBubble(t, 4, func(w *world) {
		var log testkit.SyncBuffer
		drain := testkit.Must(tenure.NewDrain(w.store, "p0", testkit.Quiet))
		ctx, cancel := context.WithCancel(context.Background())
		ran := make(chan error, 1)
		go func() { ran <- drain.Run(ctx) }()
		defer func() { cancel(); <-ran }()
		p := w.start("p0", func(p *process, cfg *shards.Config) {
			p.drain, cfg.Logger = drain, slog.New(slog.NewTextHandler(&log, nil))
		})
		q := w.start("q")
		time.Sleep(2*settle + moment)
		w.spread([]int{2, 2}, p, q)
		require.NoError(w, drain.Start(w.Context()))
		time.Sleep(moment)
		w.spread([]int{0, 4}, p, q)
		time.Sleep(time.Hour)
		w.spread([]int{0, 4}, p, q)
		require.NotContains(w, log.String(), "failed")
		drain.Stop()
		time.Sleep(ttl)
		w.spread([]int{2, 2}, p, q)
	})
}
