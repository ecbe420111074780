package claims_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/pace"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

// The tests in this file run in virtual time, on SQLite in memory.

// rowsWorld is a world with a table of tasks.
type rowsWorld struct {
	*world
	db  *sql.DB
	log testkit.SyncBuffer
}

func inRowsBubble(t *testing.T, cfg claims.QueueConfig, rows int, test func(w *rowsWorld)) {
	t.Helper()
	inBubble(t, func(w *world) {
		db := w.store.(*tenure.SQLiteStore).DB()
		ddl, err := cfg.SQLiteDDL()
		require.NoError(w, err)
		for _, query := range []string{`CREATE TABLE tasks (id INTEGER PRIMARY KEY, status TEXT NOT NULL DEFAULT 'queued', priority INTEGER NOT NULL DEFAULT 0, effects INTEGER NOT NULL DEFAULT 0)`, ddl} {
			_, err := db.Exec(query)
			require.NoError(w, err)
		}
		for i := range rows {
			_, err := db.Exec(`INSERT INTO tasks (id) VALUES (?)`, i+1)
			require.NoError(w, err)
		}
		test(&rowsWorld{world: w, db: db})
	})
}

// rowsOf returns the rows of a process.
func (w *rowsWorld) rowsOf(p *process, cfg claims.QueueConfig) *workedQueue {
	w.Helper()
	rows, err := newRows(p.session, cfg)
	require.NoError(w, err)
	return rows
}

func (w *rowsWorld) count(query string) (n int) {
	w.Helper()
	require.NoError(w, w.db.QueryRow(query).Scan(&n))
	return n
}

func takeOf(w *rowsWorld, rows *workedQueue, n int) []claims.Claim {
	w.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*ttl)
	defer cancel()
	got, err := rows.Take(ctx, n)
	require.NoError(w, err)
	return got
}

// effect is what is done to a row.
var effect = func() claims.QueueConfig {
	cfg := tasks
	cfg.Done = "status = 'done', effects = effects + 1"
	return cfg
}()

// S4.
func TestRowsOfACrashedProcessAreTakenWithinATTL(t *testing.T) {
	inRowsBubble(t, effect, 3000, func(w *rowsWorld) {
		a, b := w.start("a"), w.start("b")
		ofA, ofB := w.rowsOf(a, effect), w.rowsOf(b, effect)
		for range 3 {
			takeOf(w, ofA, 1000)
		}
		time.Sleep(time.Minute)
		crashed := time.Now()
		a.crash()
		got := takeOf(w, ofB, 1)
		require.Len(w, got, 1)
		require.LessOrEqual(w, time.Since(crashed), ttl+60*time.Millisecond)
		require.Greater(w, time.Since(crashed), ttl/2)
		time.Sleep(2 * time.Second)
		require.Equal(w, 1, w.count(`SELECT count(*) FROM tasks WHERE session IS NOT NULL`))
	})
}

func TestAFreeThatFailedIsRepeated(t *testing.T) {
	inRowsBubble(t, effect, 10, func(w *rowsWorld) {
		a, b := w.start("a"), w.start("b")
		ofA, ofB := w.rowsOf(a, effect), w.rowsOf(b, effect)
		takeOf(w, ofA, 10)
		crashed := time.Now()
		a.crash()
		b.fault(testkit.Only("queue.free", testkit.Once(testkit.Refuse)))
		require.Len(w, takeOf(w, ofB, 1), 1)
		require.LessOrEqual(w, time.Since(crashed), ttl+10*time.Second)
	})
}

// A process that removes sessions need not know all tables that name them.
func TestACallThatWaitsForRowsFreesThoseThatTheirRemoverDoesNotKnow(t *testing.T) {
	inRowsBubble(t, effect, 10, func(w *rowsWorld) {
		a, b := w.start("a"), w.start("b")
		ofA, ofB := w.rowsOf(a, effect), w.rowsOf(b, effect)
		takeOf(w, ofA, 10)
		id := a.session.ID()
		got := make(chan time.Time)
		go func() {
			_, _ = ofB.Take(context.Background(), 1)
			got <- time.Now()
		}()
		time.Sleep(time.Second)
		a.crash()
		removed := time.Now()
		obj, err := w.store.Get(w.Context(), claims.SessionKey(id))
		require.NoError(w, err)
		require.NoError(w, w.store.DeleteIf(w.Context(), obj.Key, tenure.IfVersion(obj.Version)))
		require.Less(w, (<-got).Sub(removed), ttl/2)
	})
}

// The session does not know which rows the statement has taken. It compares all that name it, once the statement must have
// landed, and meanwhile takes others.
func TestRowsWhoseTakeWasNotAnsweredAreFreed(t *testing.T) {
	inRowsBubble(t, effect, 5, func(w *rowsWorld) {
		a := w.start("a")
		rows := w.rowsOf(a, effect)
		held := takeOf(w, rows, 1)
		passed := takeOf(w, rows, 1)
		require.NoError(w, rows.Detach(passed...))
		time.Sleep(time.Second) // the database's clock goes on
		a.fault(testkit.Only("queue.take", testkit.Once(testkit.LoseAnswer)))
		got := takeOf(w, rows, 2)
		require.Equal(w, []string{"5"}, takenIDs(got))
		began := time.Now()
		got = append(got, takeOf(w, rows, 9)...)
		require.Equal(w, []string{"5", "3", "4"}, takenIDs(got))
		require.LessOrEqual(w, time.Since(began), ttl, "after the first comparison, or the next look at the rows")
		require.Equal(w, 2, got[1].Attempt, "a caller might have had it: the session has seen a greater token since")
		require.True(w, rows.Holds(held[0]))
		require.NoError(w, rows.Finish(w.Context(), passed...), "by value")
		require.NoError(w, rows.Finish(w.Context(), got...))
	})
}

// A process that only detaches rows would remember each as long as it lives.
func TestClaimsThatWerePassedOnAndHaveEndedAreForgotten(t *testing.T) {
	inRowsBubble(t, effect, 6002, func(w *rowsWorld) {
		a := w.start("a")
		rows := w.rowsOf(a, effect)
		stands := takeOf(w, rows, 1)
		require.NoError(w, rows.Detach(stands...))
		for range 12 {
			require.NoError(w, rows.Detach(takeOf(w, rows, 500)...))
			time.Sleep(ttl) // until it has forgotten
			_, err := w.db.Exec(`UPDATE tasks SET session = NULL, status = 'done' WHERE session IS NOT NULL AND id > 1`)
			require.NoError(w, err)
		}
		require.LessOrEqual(w, rows.Detached(), 4000)
		a.fault(testkit.Only("queue.take", testkit.Once(testkit.LoseAnswer)))
		require.Equal(w, []string{"6002"}, takenIDs(takeOf(w, rows, 2)), "a detached claim is freed")
	})
}

// S1: the row is freed, taken again and to be freed again before the answer to the first has come.
func TestARowThatIsToBeFreedIsNotHeldBefore(t *testing.T) {
	inRowsBubble(t, effect, 1, func(w *rowsWorld) {
		a := w.start("a")
		rows := w.rowsOf(a, effect)
		var takes, frees atomic.Int64
		a.fault(func(ctx context.Context, call storetest.Call, send func(context.Context) error) error {
			switch {
			case call.Op == "queue.take" && takes.Add(1) == 1:
				return errors.New("no") // from now on the session looks for rows that it does not know
			case call.Op == "queue.free" && frees.Add(1) == 1:
				err := send(ctx)
				time.Sleep(2 * time.Second)
				return err
			case call.Op == "queue.free" && frees.Load() == 2:
				time.Sleep(2 * time.Second)
			}
			return send(ctx)
		})
		for range 2 {
			got := takeOf(w, rows, 1)
			go rows.Release(context.Background(), got...)
			time.Sleep(500 * time.Millisecond)
		}
		time.Sleep(1500 * time.Millisecond) // the second is on its way
		got := takeOf(w, rows, 1)
		time.Sleep(3 * time.Second)
		require.True(w, rows.Holds(got[0]))
		require.Equal(w, 1, w.count(fmt.Sprintf(`SELECT count(*) FROM tasks WHERE session IS NOT NULL AND token = %d`, got[0].Token)), "it holds a row that is free")
	})
}

func TestAFuncIsToldAtItsDeadlineAndLosesItsRowAfterTheGrace(t *testing.T) {
	cfg := effect
	cfg.Deadline = 10 * time.Second
	inRowsBubble(t, cfg, 2, func(w *rowsWorld) {
		a, b := w.start("a"), w.start("b")
		ofA, ofB := w.rowsOf(a, cfg), w.rowsOf(b, cfg)
		began := time.Now()
		got := takeOf(w, ofA, 2)
		told := make(chan time.Duration, 1)
		returned, goOn := make(chan error, 1), make(chan struct{})
		go func() {
			returned <- ofA.Do(w.Context(), got[0], func(ctx context.Context) error {
				<-ctx.Done()
				told <- time.Since(began)
				if !errors.Is(context.Cause(ctx), claims.ErrOverdue) {
					w.Error(context.Cause(ctx))
				}
				<-goOn // hangs
				if err := ofA.Finish(context.Background(), got[0]); !errors.Is(err, tenure.ErrLost) {
					w.Errorf("a late result: %v", err)
				}
				return nil
			})
		}()
		other := takeOf(w, ofB, 1) // the one without a func
		require.Equal(w, []string{"2"}, takenIDs(other))
		require.InDelta(w, 10, time.Since(began).Seconds(), 0.2)
		require.False(w, ofA.Holds(got[1]))
		require.NoError(w, ofB.Finish(w.Context(), other...))
		other = takeOf(w, ofB, 1)
		require.Equal(w, []string{"1"}, takenIDs(other))
		require.InDelta(w, 20, time.Since(began).Seconds(), 0.2)
		require.InDelta(w, 10, (<-told).Seconds(), 0.1)
		require.NoError(w, ofB.Release(w.Context(), other...))
		ctx, cancel := context.WithTimeout(w.Context(), 5*time.Second)
		defer cancel()
		_, err := ofA.Take(ctx, 1)
		require.Error(w, err, "a func of this process still runs for it")
		close(goOn)
		require.ErrorIs(w, <-returned, claims.ErrOverdue)
		require.Equal(w, []string{"1"}, takenIDs(takeOf(w, ofA, 1)))
	})
}

func TestAProcessThatHasLostItsSessionDoesNotRunARowTwice(t *testing.T) {
	inRowsBubble(t, effect, 1, func(w *rowsWorld) {
		a := w.start("a")
		rows := w.rowsOf(a, effect)
		got := takeOf(w, rows, 1)
		hangs, returned := make(chan struct{}), make(chan error, 1)
		go func() {
			returned <- rows.Do(w.Context(), got[0], func(context.Context) error { <-hangs; return nil })
		}()
		time.Sleep(time.Second)
		a.fault(testkit.Refuse)
		time.Sleep(2 * ttl)
		a.fault(nil)
		ctx, cancel := context.WithTimeout(w.Context(), 5*ttl)
		defer cancel()
		_, err := rows.Take(ctx, 1)
		require.ErrorIs(w, err, context.DeadlineExceeded)
		require.Zero(w, w.count(`SELECT count(*) FROM tasks WHERE session IS NOT NULL`), "others may take it")
		close(hangs)
		require.Error(w, <-returned)
		require.Len(w, takeOf(w, rows, 1), 1)
	})
}

func TestRowsWithoutAttemptsLeftAreGivenUpOnce(t *testing.T) {
	cfg := effect
	cfg.MaxAttempts, cfg.Exhausted = 3, "status = 'failed', effects = effects + 1"
	cfg.Backoff = func(c claims.Claim) time.Duration { return time.Duration(c.Attempt) * time.Second }
	byFunc := cfg
	byFunc.Exhausted = ""
	for name, cfg := range map[string]claims.QueueConfig{"sql": cfg, "func": byFunc} {
		t.Run(name, func(t *testing.T) {
			inRowsBubble(t, effect, 10, func(w *rowsWorld) {
				var rows *workedQueue
				failing := errors.New("no")
				var tried, given atomic.Int64
				if cfg.Exhausted == "" {
					cfg.OnExhausted = func(ctx context.Context, c claims.Claim) error {
						if given.Add(1)%2 == 1 {
							return failing
						}
						return rows.FinishSQLite(ctx, []claims.Claim{c}, writingSQL(`UPDATE tasks SET status = 'failed' WHERE id = `+c.Key.ID))
					}
				}
				rows = w.rowsOf(w.start("a"), cfg)
				ctx, cancel := context.WithTimeout(w.Context(), time.Minute)
				defer cancel()
				require.NoError(w, rows.Serve(ctx, 4, func(ctx context.Context, c claims.Claim) error {
					tried.Add(1)
					if c.Key.ID == "7" {
						return nil
					}
					return failing
				}))
				require.Equal(w, 1, w.count(`SELECT count(*) FROM tasks WHERE status = 'done' AND attempts = 1`))
				require.Equal(w, 9, w.count(`SELECT count(*) FROM tasks WHERE status = 'failed' AND session IS NULL`))
				require.Equal(w, 10, w.count(`SELECT sum(effects) FROM tasks`))
				require.EqualValues(w, 1+9*3, tried.Load())
			})
		})
	}
}

func writingSQL(query string) func(*sql.Tx) error {
	return func(tx *sql.Tx) error { return writing(query, nil)(execIn(tx)) }
}

func TestAPoisonRowDoesNotLoop(t *testing.T) {
	without := effect
	without.NotBefore = ""
	for name, cfg := range map[string]claims.QueueConfig{"with a column for the time": effect, "without": without} {
		t.Run(name, func(t *testing.T) {
			inRowsBubble(t, cfg, 3, func(w *rowsWorld) {
				rows := w.rowsOf(w.start("a"), cfg)
				ctx, cancel := context.WithTimeout(w.Context(), time.Minute)
				defer cancel()
				var tried atomic.Int64
				require.NoError(w, rows.Serve(ctx, 2, func(ctx context.Context, c claims.Claim) error {
					tried.Add(1)
					return errors.New("no")
				}))
				require.LessOrEqual(w, tried.Load(), int64(3*6), "1, 2, 4, … seconds between two attempts")
				require.GreaterOrEqual(w, tried.Load(), int64(3*5))
			})
		})
	}
}

func TestAPanicReleasesTheRowAndIsPassedOn(t *testing.T) {
	inRowsBubble(t, effect, 2, func(w *rowsWorld) {
		rows := w.rowsOf(w.start("a"), effect)
		require.PanicsWithValue(w, "boom", func() {
			_ = rows.Serve(w.Context(), 1, func(context.Context, claims.Claim) error { panic("boom") })
		})
		require.Zero(w, w.count(`SELECT count(*) FROM tasks WHERE session IS NOT NULL OR effects > 0`))
	})
}

func TestServeStopsCleanly(t *testing.T) {
	inRowsBubble(t, effect, 20, func(w *rowsWorld) {
		a := w.start("a")
		rows := w.rowsOf(a, effect)
		ctx, cancel := context.WithCancel(w.Context())
		served := make(chan error, 1)
		var begun atomic.Int64
		go func() {
			served <- rows.Serve(ctx, 3, func(ctx context.Context, c claims.Claim) error {
				begun.Add(1)
				select {
				case <-ctx.Done():
					return context.Cause(ctx)
				case <-time.After(10 * time.Second):
					return nil
				}
			})
		}()
		time.Sleep(15 * time.Second)
		cancel()
		require.NoError(w, <-served)
		require.EqualValues(w, 6, begun.Load())
		require.Equal(w, 6, w.count(`SELECT count(*) FROM tasks WHERE status = 'done' AND effects = 1`))
		require.Equal(w, 6, w.count(`SELECT sum(attempts) FROM tasks`), "none was taken and not worked on")

		go func() {
			served <- rows.Serve(w.Context(), 3, func(ctx context.Context, c claims.Claim) error { <-ctx.Done(); return context.Cause(ctx) })
		}()
		time.Sleep(time.Second)
		a.stop()
		require.NoError(w, <-served)
		require.Zero(w, w.count(`SELECT count(*) FROM tasks WHERE session IS NOT NULL`))
		_, err := rows.Take(w.Context(), 1)
		require.ErrorIs(w, err, claims.ErrClosed)
	})
}

// What a func has done counts even if its session began to close before it returned.
func TestRowsWhoseFuncsReturnWhileTheSessionClosesAreFinished(t *testing.T) {
	inRowsBubble(t, effect, 3, func(w *rowsWorld) {
		a := w.start("a")
		rows := w.rowsOf(a, effect)
		served := make(chan error, 1)
		go func() {
			served <- rows.Serve(w.Context(), 3, func(ctx context.Context, c claims.Claim) error {
				<-ctx.Done()
				if c.Key.ID == "1" {
					return rows.Finish(context.Background(), c)
				}
				time.Sleep(time.Second)
				if c.Key.ID == "2" {
					return context.Cause(ctx)
				}
				return nil
			})
		}()
		time.Sleep(time.Second)
		var ends atomic.Int64
		a.fault(func(ctx context.Context, call storetest.Call, send func(context.Context) error) error {
			if call.Op == "queue.end" {
				if n := ends.Add(1); n == 2 || n == 3 { // of the third row
					return errors.New("no")
				}
			}
			return send(ctx)
		})
		a.stop()
		require.NoError(w, <-served)
		require.Equal(w, 2, w.count(`SELECT count(*) FROM tasks WHERE status = 'done' AND effects = 1`))
		require.Equal(w, 1, w.count(`SELECT count(*) FROM tasks WHERE status = 'queued' AND id = 2`))
		require.Zero(w, w.count(`SELECT count(*) FROM tasks WHERE session IS NOT NULL`))
	})
}

// S5.
func TestAReleaseWhileTheSessionClosesWaitsForTheFunc(t *testing.T) {
	inRowsBubble(t, effect, 1, func(w *rowsWorld) {
		a, b := w.start("a"), w.start("b")
		ofA, ofB := w.rowsOf(a, effect), w.rowsOf(b, effect)
		got := takeOf(w, ofA, 1)
		began := time.Now()
		go ofA.Do(w.Context(), got[0], func(context.Context) error {
			time.Sleep(10 * time.Second)
			return nil
		})
		time.Sleep(time.Second)
		go a.stop()
		time.Sleep(time.Second)
		ctx, cancel := context.WithTimeout(w.Context(), time.Second)
		defer cancel()
		require.ErrorIs(w, ofA.Release(ctx, got...), context.DeadlineExceeded)
		require.Equal(w, 1, w.count(`SELECT count(*) FROM tasks WHERE session IS NOT NULL`), "the row is free, and its func runs")
		require.NoError(w, ofA.Release(w.Context(), got...))
		require.GreaterOrEqual(w, time.Since(began), 10*time.Second)
		require.Len(w, takeOf(w, ofB, 1), 1)
	})
}

// S3.
func TestTokensOfRowsIncreaseWhateverTheClockSays(t *testing.T) {
	eachRowsServer(t, tasks, func(db *rowsDB) {
		db.add(1, 2)
		ahead := time.Now().Add(time.Hour).UnixMicro()
		db.exec(fmt.Sprintf(`UPDATE tasks SET token = CASE WHEN id = 1 THEN %d ELSE 9223372036854775807 END`, ahead))
		got := db.worker(claims.SessionConfig{}, tasks).take(2)
		require.Equal(db, ahead+1, got[0].Token)
		require.Less(db, got[1].Token, ahead, "the greatest token can't be followed, and keeps no other row")
	})
}

func TestAFinishThatIsNotAnsweredIsNoLoss(t *testing.T) {
	inRowsBubble(t, effect, 1, func(w *rowsWorld) {
		a := w.startWith("a", claims.SessionConfig{Logger: logTo(&w.log)})
		rows := w.rowsOf(a, effect)
		a.fault(testkit.Only("queue.end", testkit.Once(testkit.LoseAnswer)))
		ctx, cancel := context.WithTimeout(w.Context(), ttl)
		defer cancel()
		require.NoError(w, rows.Serve(ctx, 1, func(context.Context, claims.Claim) error { return nil }))
		require.Equal(w, 1, w.count(`SELECT count(*) FROM tasks WHERE effects = 1 AND attempts = 1 AND session IS NULL`))
		require.NotContains(w, w.log.String(), "row failed")
	})
}

// The session learns of a statement in the func's own transaction when it finishes the row.
func TestARowThatItsFuncFinishesByAStatementHasNotFailed(t *testing.T) {
	inRowsBubble(t, effect, 2, func(w *rowsWorld) {
		a := w.startWith("a", claims.SessionConfig{Logger: logTo(&w.log)})
		rows := w.rowsOf(a, effect)
		ctx, cancel := context.WithTimeout(w.Context(), ttl)
		defer cancel()
		require.NoError(w, rows.Serve(ctx, 1, func(_ context.Context, c claims.Claim) error {
			query, args, err := rows.FinishStatement(c)
			if err == nil && c.Key.ID == "1" { // the other one's transaction is rolled back, and the func forgets to say so
				_, err = w.db.Exec(query, args...)
			}
			return err
		}))
		require.Equal(w, 2, w.count(`SELECT count(*) FROM tasks WHERE effects = 1 AND attempts = 1 AND session IS NULL`))
		require.NotContains(w, w.log.String(), "row failed")
	})
}

// An expensive Done needs longer than a session with the default TTL would wait for it.
func TestAFinishHasTheTimeLimitOfItsSession(t *testing.T) {
	t.Parallel()
	inRowsBubble(t, effect, 1, func(w *rowsWorld) {
		a := w.startWith("a", claims.SessionConfig{TTL: 60 * time.Second}) // its statements have 10 s
		rows := w.rowsOf(a, effect)
		a.fault(testkit.Only("queue.end", func(ctx context.Context, _ storetest.Call, send func(context.Context) error) error {
			if !pace.Sleep(ctx, 7*time.Second) {
				return ctx.Err()
			}
			return send(ctx)
		}))
		go rows.Serve(context.Background(), 1, func(context.Context, claims.Claim) error { return nil })
		time.Sleep(2 * time.Minute)
		require.Equal(w, 1, w.count(`SELECT count(*) FROM tasks WHERE status = 'done' AND effects = 1 AND attempts = 1 AND session IS NULL`))
	})
}

// The row of an older claim is ready, and only the func that still runs keeps it from being claimed.
func TestARowForWhichAFuncStillRunsIsNotTakenAllTheTime(t *testing.T) {
	cfg := effect
	cfg.Done = "" // the row may be taken again and again
	inRowsBubble(t, cfg, 1, func(w *rowsWorld) {
		a := w.start("a")
		rows := w.rowsOf(a, cfg)
		got := takeOf(w, rows, 1)
		returned := make(chan error, 1)
		go func() {
			returned <- rows.Do(context.Background(), got[0], func(context.Context) error {
				query, args, err := rows.FinishStatement(got[0])
				if err == nil {
					_, err = w.db.Exec(query, args...)
				}
				time.Sleep(10 * time.Second)
				return err
			})
		}()
		ctx, cancel := context.WithTimeout(context.Background(), 9*time.Second)
		defer cancel()
		var traffic testkit.Calls
		a.fault(traffic.Count("", nil))
		_, err := rows.Take(ctx, 1)
		require.ErrorIs(w, err, context.DeadlineExceeded)
		require.LessOrEqual(w, traffic.Take()["queue.free"], 1)
		require.LessOrEqual(w, w.count(`SELECT attempts FROM tasks`), 2)
		require.NoError(w, <-returned)
		require.Equal(w, []string{"1"}, takenIDs(takeOf(w, rows, 1)))
	})
}

// A queue may live as long as its process.
func TestAQueueForgetsTheWorkersOfClosedSessions(t *testing.T) {
	inRowsBubble(t, effect, 0, func(w *rowsWorld) {
		q, err := claims.NewQueue(w.store, effect)
		require.NoError(w, err)
		for range 3 {
			s, err := claims.NewSession(w.store, claims.SessionConfig{Logger: testkit.Quiet})
			require.NoError(w, err)
			_, err = claims.NewWorker(s, q)
			require.NoError(w, err)
			require.Equal(w, 1, q.Workers())
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			require.NoError(w, s.Run(ctx))
			cancel()
			require.Zero(w, q.Workers())
		}
	})
}

func TestWhatATakeGotTooLateIsGivenBack(t *testing.T) {
	inRowsBubble(t, effect, 3, func(w *rowsWorld) {
		a := w.start("a")
		rows := w.rowsOf(a, effect)
		a.fault(testkit.Only("queue.take", testkit.AnswerAfter(2*time.Second)))
		ctx, cancel := context.WithTimeout(w.Context(), 3*time.Second)
		defer cancel()
		var others sync.WaitGroup
		for range 2 { // the second one takes for the third, too
			others.Go(func() { takeOf(w, rows, 1) })
			time.Sleep(time.Millisecond)
		}
		_, err := rows.Take(ctx, 1)
		require.Error(w, err)
		others.Wait()
		time.Sleep(10 * time.Second)
		require.Equal(w, 2, w.count(`SELECT count(*) FROM tasks WHERE session IS NOT NULL`))
		require.Equal(w, 2, w.count(`SELECT sum(attempts) FROM tasks`))
	})
}

// The effect of each row is written exactly once, whatever happens to the processes and what
// they send, and each attempt is counted unless it is taken back.
func TestEveryRowsEffectHappensExactlyOnce(t *testing.T) {
	testkit.Slow(t)
	for seed := range *rowsSeeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			defer testkit.NoteFailure(t, fmt.Sprintf("go test ./claims -run %s$ -rows.seeds=%d -count=50", t.Name(), seed+1))
			inRowsBubble(t, effect, 200, func(w *rowsWorld) { simulateRows(w, seed) })
		})
	}
}

func simulateRows(w *rowsWorld, seed uint64) {
	var mu sync.Mutex
	rng := rand.New(rand.NewPCG(seed, 17))
	n := func(below int) int { mu.Lock(); defer mu.Unlock(); return rng.IntN(below) }
	upTo := func(d time.Duration) time.Duration {
		return time.Duration(n(int(d/time.Millisecond))+1) * time.Millisecond
	}
	cfg := effect
	cfg.PollInterval = 2 * time.Second
	if seed%3 == 0 {
		cfg.Deadline = 20 * time.Second
	}
	weather := storetest.Hook(func(ctx context.Context, call storetest.Call, send func(context.Context) error) error {
		switch n(40) {
		case 0:
			return testkit.LoseAnswer(ctx, call, send)
		case 1:
			return testkit.Refuse(ctx, call, send)
		case 2:
			return testkit.Slowly(upTo(8*time.Second))(ctx, call, send)
		case 3:
			return testkit.AnswerAfter(upTo(8*time.Second))(ctx, call, send)
		}
		return send(ctx)
	})
	type life struct {
		*process
		cancel context.CancelFunc
	}
	testkit.ExecSQL(w.T, w.db, `CREATE TABLE takes (id INTEGER)`)
	testkit.ExecSQL(w.T, w.db, `CREATE TRIGGER takes AFTER UPDATE ON tasks WHEN OLD.session IS NULL AND NEW.session IS NOT NULL BEGIN INSERT INTO takes VALUES (NEW.id); END`)
	testkit.ExecSQL(w.T, w.db, `CREATE TABLE back (id INTEGER)`)
	testkit.ExecSQL(w.T, w.db, `CREATE TRIGGER back AFTER UPDATE ON tasks WHEN NEW.session IS NULL AND NEW.attempts = OLD.attempts - 1 BEGIN INSERT INTO back VALUES (NEW.id); END`)
	alive, started := map[int]life{}, 0
	done := func() bool { return w.count(`SELECT count(*) FROM tasks WHERE status <> 'done'`) == 0 }
	start := func() {
		started++
		p := w.start(fmt.Sprint("p", started))
		p.fault(weather)
		rows := w.rowsOf(p, cfg)
		ctx, cancel := context.WithCancel(context.Background())
		w.Cleanup(cancel)
		alive[started] = life{p, cancel}
		go func() {
			_ = rows.Serve(ctx, 5, func(ctx context.Context, c claims.Claim) error {
				p.begin(c)
				defer p.end(c)
				select {
				case <-ctx.Done():
					if n(2) == 0 {
						return context.Cause(ctx)
					}
				case <-time.After(upTo(5 * time.Second)):
				}
				if n(30) == 0 { // hangs longer than it may, unless it is stopped
					select {
					case <-ctx.Done():
					case <-time.After(2 * ttl):
					}
				}
				if n(10) == 0 {
					return errors.New("no")
				}
				if p.dead.Load() || n(2) == 0 {
					return nil
				}
				return rows.Finish(ctx, c)
			})
		}()
	}
	for range 3 {
		start()
	}
	for began := time.Now(); !done(); {
		time.Sleep(upTo(15 * time.Second))
		if time.Since(began) > 2*time.Hour {
			w.Fatalf("not done: %d rows left", w.count(`SELECT count(*) FROM tasks WHERE status <> 'done'`))
		}
		victim := slices.Sorted(maps.Keys(alive))[n(len(alive))]
		p := alive[victim]
		switch n(6) {
		case 0:
			p.crash()
			delete(alive, victim)
			start()
		case 1: // cut off, or paused before it sends anything
			p.fault(testkit.Hang)
			time.Sleep(upTo(2 * ttl))
			p.fault(weather)
		case 2:
			p.cancel()
			p.fault(nil)
			p.stop()
			delete(alive, victim)
			start()
		}
	}
	for _, p := range alive {
		p.cancel()
		p.fault(nil)
		p.stop()
	}
	time.Sleep(2 * ttl)
	require.Zero(w, w.count(`SELECT count(*) FROM tasks WHERE effects <> 1`))
	taken := w.count(`SELECT count(*) FROM takes`)
	require.Equal(w, taken, w.count(`SELECT sum(attempts) FROM tasks`)+w.count(`SELECT count(*) FROM back`))
	require.Zero(w, w.count(`SELECT count(*) FROM tasks WHERE attempts < 1`))
	w.Logf("%d processes, %d attempts", started, taken)
}
