package claims_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

var limited = func() claims.QueueConfig {
	cfg := tasks
	cfg.MaxAttempts, cfg.Exhausted = 3, "status = 'failed'"
	return cfg
}()

// A rolling deploy stops the process of a long run again and again.
func TestAnAttemptCountsOnlyIfItFailed(t *testing.T) {
	testkit.Slow(t)
	untilDone := func(ctx context.Context) error { <-ctx.Done(); return context.Cause(ctx) }
	begin := func(w *worker, c claims.Claim, fn func(context.Context) error) (returned chan error) {
		begun, returned := make(chan struct{}), make(chan error, 1)
		go func() {
			returned <- w.rows.Do(context.Background(), c, func(ctx context.Context) error { close(begun); return fn(ctx) })
		}()
		<-begun
		return returned
	}
	ways := map[string]struct {
		used bool
		end  func(w *worker, c claims.Claim) error
	}{
		"release":          {false, func(w *worker, c claims.Claim) error { return w.rows.Release(context.Background(), c) }},
		"release by value": {false, func(w *worker, c claims.Claim) error { return w.rows.Queue.Release(context.Background(), c) }},
		"func that returns": {false, func(w *worker, c claims.Claim) error {
			return w.rows.Do(context.Background(), c, func(context.Context) error { return nil })
		}},
		"release of a func": {false, func(w *worker, c claims.Claim) error {
			returned := begin(w, c, untilDone)
			defer func() { <-returned }()
			return w.rows.Release(context.Background(), c)
		}},
		"close, without a func": {false, func(w *worker, c claims.Claim) error { w.stop(); return nil }},
		"close":                 {false, func(w *worker, c claims.Claim) error { begin(w, c, untilDone); w.stop(); return nil }},
		"failure": {true, func(w *worker, c claims.Claim) error {
			_ = w.rows.Do(context.Background(), c, func(context.Context) error { return errors.New("no") })
			return nil
		}},
		"panic": {true, func(w *worker, c claims.Claim) error {
			defer func() { _ = recover() }()
			return w.rows.Do(context.Background(), c, func(context.Context) error { panic("no") })
		}},
		"nack": {true, func(w *worker, c claims.Claim) error { return w.rows.ReleaseAfter(context.Background(), 0, c) }},
	}
	eachRowsServer(t, limited, func(db *rowsDB) {
		for how, way := range ways {
			db.exec(`DELETE FROM tasks`)
			db.add(1, 1)
			for i := range 3 {
				w := db.worker(claims.SessionConfig{}, limited)
				got := w.take(1)
				want := 1
				if way.used {
					want += i
				}
				require.Equal(db, want, got[0].Attempt, how)
				require.NoError(db, way.end(w, got[0]), how)
				w.stop()
				require.NoError(db, w.store.Close()) // or there would be no connection left for others
			}
			attempts := 0
			if way.used {
				attempts = 3
			}
			require.Equal(db, attempts, db.count(`SELECT attempts FROM tasks WHERE session IS NULL`), how)
		}
		db.exec(`UPDATE tasks SET attempts = 3, not_before = NULL`)
		w := db.worker(claims.SessionConfig{}, limited)
		w.takesNone()
		testkit.Await(db.T, "it has failed", func() bool {
			return db.count(`SELECT count(*) FROM tasks WHERE status = 'failed' AND attempts = 4`) == 1
		})
	})
}

func TestAttemptsThatAreTakenBackAreNeverNegative(t *testing.T) {
	eachRowsServer(t, tasks, func(db *rowsDB) {
		db.add(1, 1)
		w := db.worker(claims.SessionConfig{}, tasks)
		got := w.take(1)
		db.exec(`UPDATE tasks SET attempts = 0`) // by an operator
		require.NoError(db, w.rows.Release(db.Context(), got...))
		require.Zero(db, db.count(`SELECT attempts FROM tasks`))
	})
}

// No func has worked on a row that its session never heard of.
func TestTheAttemptOfATakeWhoseAnswerWasLostIsTakenBack(t *testing.T) {
	inRowsBubble(t, effect, 2, func(w *rowsWorld) {
		a := w.start("a")
		rows := w.rowsOf(a, effect)
		ctx, cancel := context.WithCancel(context.Background())
		a.fault(testkit.Only("queue.take", testkit.Once(func(ctx context.Context, call storetest.Call, send func(context.Context) error) error {
			cancel()
			return testkit.LoseAnswer(ctx, call, send)
		})))
		_, err := rows.Take(ctx, 2)
		require.Error(w, err)
		require.Equal(w, 2, w.count(`SELECT count(*) FROM tasks WHERE session IS NOT NULL AND attempts = 1`))
		time.Sleep(2 * ttl)
		require.Equal(w, 2, w.count(`SELECT count(*) FROM tasks WHERE session IS NULL AND attempts = 0`))
	})
}

// The session's own renewals may come first when it closes.
func TestARenewalThatComesFirstCostsNoAttempt(t *testing.T) {
	inRowsBubble(t, effect, 1, func(w *rowsWorld) {
		a := w.start("a")
		_ = must(w.rowsOf(a, effect).Take(w.Context(), 1))(w.T)
		var puts atomic.Int32
		a.fault(testkit.Only("put", func(ctx context.Context, _ storetest.Call, send func(context.Context) error) error {
			if puts.Add(1) <= 4 {
				return tenure.ErrConflict
			}
			return send(ctx)
		}))
		a.stop()
		require.Greater(w, puts.Load(), int32(4))
		require.Equal(w, 1, w.count(`SELECT count(*) FROM tasks WHERE session IS NULL AND attempts = 0`))
	})
}

// Otherwise a row with one attempt would be retired although nobody has worked on it.
func TestACallerWhoAsksAgainForARowWhoseAnswerWasLostHasItsFirstAttempt(t *testing.T) {
	cfg := limited
	cfg.MaxAttempts = 1
	inRowsBubble(t, cfg, 2, func(w *rowsWorld) {
		a := w.start("a")
		rows := w.rowsOf(a, cfg)
		earlier := must(rows.TryClaim(w.Context(), "2"))(w.T)
		time.Sleep(time.Second)
		a.fault(testkit.Only("queue.take", testkit.Once(testkit.LoseAnswer)))
		ctx, cancel := context.WithTimeout(w.Context(), ttl)
		defer cancel()
		got := must(rows.Claim(ctx, "1"))(w.T)
		require.Equal(w, 1, got[0].Attempt)
		require.Greater(w, got[0].Token, earlier[0].Token)
	})
}

// Without NotBefore, the session keeps the row of a func that has failed. The row has used its attempt, even if
// the session closes meanwhile.
func TestAFailedAttemptCountsThoughTheSessionKeepsTheRow(t *testing.T) {
	cfg := effect
	cfg.NotBefore, cfg.Backoff = "", func(claims.Claim) time.Duration { return time.Hour }
	inRowsBubble(t, cfg, 1, func(w *rowsWorld) {
		a := w.start("a")
		rows := w.rowsOf(a, cfg)
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		require.NoError(w, rows.Serve(ctx, 1, func(context.Context, claims.Claim) error { return errors.New("no") }))
		a.stop()
		require.Equal(w, 1, w.count(`SELECT count(*) FROM tasks WHERE session IS NULL AND attempts = 1`))
	})
}

func TestAnOverdueFuncHasUsedItsAttempt(t *testing.T) {
	cfg := effect
	cfg.Deadline = time.Minute
	inRowsBubble(t, cfg, 1, func(w *rowsWorld) {
		rows := w.rowsOf(w.start("a"), cfg)
		got := takeOf(w, rows, 1)
		require.ErrorIs(w, rows.Do(context.Background(), got[0], func(ctx context.Context) error { <-ctx.Done(); return nil }), claims.ErrOverdue)
		require.Equal(w, 1, w.count(`SELECT count(*) FROM tasks WHERE session IS NULL AND attempts = 1`))
	})
}

// millis returns a time of a row in Unix milliseconds.
func (db *rowsDB) millis(column string, id int) time.Time {
	db.Helper()
	query := `SELECT ` + column + ` FROM tasks WHERE id = $1`
	if db.pool != nil {
		query = `SELECT (extract(epoch FROM ` + column + `) * 1000)::bigint FROM tasks WHERE id = $1`
	}
	var ms int64
	require.NoError(db, db.sql.QueryRow(query, id).Scan(&ms))
	return time.UnixMilli(ms)
}

func TestTheRowsOfALostSessionRest(t *testing.T) {
	testkit.Slow(t)
	cfg := tasks
	cfg.LostBackoff = time.Minute
	eachRowsServer(t, cfg, func(db *rowsDB) {
		db.add(1, 20)
		db.exec(`UPDATE tasks SET attempts = CASE id WHEN 1 THEN 0 WHEN 2 THEN 1 ELSE 40 END`)
		w := db.worker(claims.SessionConfig{}, cfg)
		_, err := w.rows.TryTakeFor(db.Context(), db.remote("gone", time.Hour), claims.TakeOptions{N: 20})
		require.NoError(db, err)
		before := time.Now()
		db.removeSession("gone")
		testkit.Await(db.T, "the rows are free", func() bool {
			w.takesNone()
			return db.count(`SELECT count(*) FROM tasks WHERE session IS NULL`) == 20
		})
		after, rests := time.Now(), make(map[time.Duration]bool)
		for id := 1; id <= 20; id++ {
			until, rest := db.millis("not_before", id), 10*time.Minute
			if id <= 2 {
				rest = time.Duration(id) * time.Minute
			}
			require.Greater(db, until.Sub(before)+time.Second, rest*3/4, id)
			require.Less(db, until.Sub(after)-time.Second, rest, id)
			rests[until.Sub(before)/time.Millisecond] = true
		}
		require.Greater(db, len(rests), 10, "they differ, so that they do not all come at once")
		db.exec(`UPDATE tasks SET not_before = NULL WHERE id = 1`)
		require.NoError(db, w.rows.Release(db.Context(), w.take(1)...))
		require.Len(db, w.take(1), 1, "an orderly release needs no rest")
	})
}

func TestARowMayHaveALimitOfItsOwn(t *testing.T) {
	cfg := tasks
	cfg.Limit, cfg.MaxAttempts, cfg.Exhausted = "most", 2, "status = 'failed'"
	eachRowsServer(t, cfg, func(db *rowsDB) {
		db.add(1, 3)
		db.exec(`UPDATE tasks SET most = CASE id WHEN 1 THEN 1 WHEN 2 THEN 3 END`)
		w := db.worker(claims.SessionConfig{}, cfg)
		remote := db.remote("r", time.Hour)
		tried := make(map[string][]int)
		for round := range 8 {
			got := []claims.Claim(nil)
			if round%2 == 0 {
				got = testkit.Must(w.rows.TryTakeFor(db.Context(), remote, claims.TakeOptions{N: 9}))
			} else {
				ctx, cancel := context.WithTimeout(db.Context(), 300*time.Millisecond)
				got, _ = w.rows.Take(ctx, 9)
				cancel()
			}
			for _, c := range got {
				tried[c.Key.ID] = append(tried[c.Key.ID], c.Attempt)
				require.NoError(db, w.rows.ReleaseAfter(db.Context(), 0, c))
			}
			time.Sleep(2 * time.Millisecond)
		}
		require.Equal(db, map[string][]int{"1": {1}, "2": {1, 2, 3}, "3": {1, 2}}, tried)
		testkit.Await(db.T, "all have failed", func() bool {
			return db.count(`SELECT count(*) FROM tasks WHERE status = 'failed' AND session IS NULL`) == 3
		})
	})
}
