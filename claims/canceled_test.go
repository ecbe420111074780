package claims_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
)

// The page on queues shows this config.
var cancelable = func() claims.QueueConfig {
	cfg := tasks
	cfg.Taken, cfg.Released = "status = 'running'", "status = 'queued'"
	cfg.Canceled = "status = 'canceled'"
	return cfg
}()

// requireCanceled fails unless these rows are free, and still as the application left them.
func (db *rowsDB) requireCanceled(n int) {
	db.Helper()
	require.Equal(db, n, db.count(`SELECT count(*) FROM tasks WHERE status = 'canceled' AND session IS NULL`))
	require.Equal(db, n, db.count(`SELECT count(*) FROM tasks WHERE status = 'canceled'`))
}

// Whatever ends the claim of a canceled row frees it, sets nothing in it, and says so.
func TestACanceledRowStaysCanceled(t *testing.T) {
	cfg := cancelable
	cfg.MaxAttempts, cfg.Exhausted = 9, "status = 'failed'"
	cfg.Expires, cfg.Deadline = "expires_at", time.Hour
	eachRowsServer(t, cfg, func(db *rowsDB) {
		db.add(1, 9)
		w := db.worker(claims.SessionConfig{}, cfg)
		got := w.take(8)
		remote := testkit.Must(w.rows.TryTakeFor(db.Context(), db.remote("r", time.Hour), claims.TakeOptions{N: 1}))
		db.exec(`UPDATE tasks SET status = 'canceled' WHERE id <> 2`)
		canceled := func(err error) {
			db.Helper()
			require.ErrorIs(db, err, claims.ErrCanceled)
			require.ErrorIs(db, err, tenure.ErrLost)
		}
		canceled(w.rows.Finish(db.Context(), got[0]))
		canceled(w.rows.Finish(db.Context(), got[1], got[2]))
		require.Equal(db, 1, db.count(`SELECT count(*) FROM tasks WHERE status = 'running' AND session IS NOT NULL`), "all or none")
		canceled(db.finish(w.rows, got[3:4], func(exec) error { return errors.New("not called") }))
		require.ErrorIs(db, db.byStatement(w.rows, got[4]), tenure.ErrLost)
		canceled(w.rows.Queue.Release(db.Context(), got[4]))
		canceled(w.rows.ReleaseAfter(db.Context(), time.Hour, got[5]))
		require.NoError(db, w.rows.Release(db.Context(), got[6]))
		canceled(w.rows.FinishEach(db.Context(), got[7], got[1]))
		canceled(w.rows.Extend(db.Context(), time.Hour, remote...))
		db.requireCanceled(8)
		require.Equal(db, 1, db.count(`SELECT count(*) FROM tasks WHERE status = 'done'`))
		require.Equal(db, 0, db.count(`SELECT count(*) FROM tasks WHERE not_before IS NOT NULL`))

		db.exec(`UPDATE tasks SET status = 'canceled' WHERE id = 2`)
		db.exec(`UPDATE tasks SET status = 'queued' WHERE id = 1`)
		require.ErrorIs(db, w.rows.Finish(db.Context(), got[0]), tenure.ErrLost)
		require.Equal(db, []string{"1"}, takenIDs(testkit.Must(w.rows.Take(db.Context(), 9))), "the claim has ended")
	})
}

// Its owner may be gone, its claim may have expired, or its owner may close.
func TestACanceledRowIsFreedAsItIs(t *testing.T) {
	cfg := cancelable
	cfg.Expires, cfg.Deadline, cfg.LostBackoff = "expires_at", time.Hour, time.Hour
	eachRowsServer(t, cfg, func(db *rowsDB) {
		db.add(1, 3)
		a := db.worker(claims.SessionConfig{}, cfg)
		db.worker(claims.SessionConfig{TTL: time.Second}, cfg) // looks for sessions that are gone
		held := a.take(1)
		gone := db.remote("gone", time.Hour)
		require.Len(db, testkit.Must(a.rows.TryTakeFor(db.Context(), gone, claims.TakeOptions{N: 1})), 1)
		require.Len(db, testkit.Must(a.rows.TryTakeFor(db.Context(), db.remote("hangs", time.Hour), claims.TakeOptions{N: 1})), 1)
		past := "0"
		if db.pool != nil {
			past = "now()"
		}
		db.exec(`UPDATE tasks SET status = 'canceled', expires_at = CASE session WHEN 'hangs' THEN ` + past + ` ELSE expires_at END`)
		db.removeSession(gone)
		testkit.Await(db.T, "the rows are free", func() bool { return db.count(`SELECT count(*) FROM tasks WHERE session IS NULL`) == 2 })
		a.stop()
		db.requireCanceled(3)
		require.Equal(db, 0, db.count(`SELECT count(*) FROM tasks WHERE not_before IS NOT NULL`))
		require.ErrorIs(db, a.rows.Finish(db.Context(), held...), tenure.ErrLost)
	})
}

func TestAFuncWhoseRowIsCanceledIsToldToReturn(t *testing.T) {
	eachRowsServer(t, cancelable, func(db *rowsDB) {
		db.add(1, 2)
		var log testkit.SyncBuffer
		w := db.worker(claims.SessionConfig{Logger: slog.New(slog.NewTextHandler(&log, nil))}, cancelable)
		told, begun := make(chan error, 2), make(chan string)
		serving, stop := context.WithCancel(db.Context())
		defer stop()
		served := make(chan error)
		go func() {
			served <- w.rows.Serve(serving, 2, func(ctx context.Context, c claims.Claim) error {
				begun <- c.Key.ID
				<-ctx.Done()
				told <- context.Cause(ctx)
				if c.Key.ID == "1" {
					return nil // as a func does that has not looked
				}
				return ctx.Err()
			})
		}()
		<-begun
		<-begun
		db.exec(`UPDATE tasks SET status = 'canceled'`)
		require.ErrorIs(db, <-told, claims.ErrCanceled)
		require.ErrorIs(db, <-told, claims.ErrCanceled)
		require.Eventually(db, func() bool { return strings.Count(log.String(), "row was canceled while its func ran") == 2 }, 10*time.Second, time.Millisecond)
		db.requireCanceled(2)
		require.NotContains(db, log.String(), "row failed")
		stop()
		require.NoError(db, <-served)

		db.exec(`UPDATE tasks SET status = 'queued' WHERE id = 1`)
		err := w.rows.Do(db.Context(), w.take(1)[0], func(ctx context.Context) error {
			db.exec(`UPDATE tasks SET status = 'canceled'`)
			<-ctx.Done()
			return nil
		})
		require.ErrorIs(db, err, claims.ErrCanceled)
		db.requireCanceled(2)
	})
}

// A trigger may keep canceled rows from being changed.
func TestACanceledRowThatCannotBeFreedIsNotFinished(t *testing.T) {
	eachRowsServer(t, cancelable, func(db *rowsDB) {
		if db.pool != nil {
			db.exec(`CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'`)
			db.exec(`CREATE TRIGGER keep BEFORE UPDATE ON tasks FOR EACH ROW WHEN (OLD.status = 'canceled') EXECUTE FUNCTION keep()`)
		} else {
			db.exec(`CREATE TRIGGER keep BEFORE UPDATE ON tasks WHEN OLD.status = 'canceled' BEGIN SELECT RAISE(IGNORE); END`)
		}
		db.add(1, 1)
		w := db.worker(claims.SessionConfig{}, cancelable)
		got := w.take(1)
		db.exec(`UPDATE tasks SET status = 'canceled'`)
		called := false
		require.ErrorContains(db, db.finish(w.rows, got, func(exec) error { called = true; return nil }), "trigger")
		require.False(db, called)
		require.True(db, w.rows.Holds(got[0]))
	})
}

// The server of a remote worker tells it at its next heartbeat, and frees the row at its next take.
func TestACanceledRowOfARemoteWorkerIsNotItsOwn(t *testing.T) {
	eachRowsServer(t, cancelable, func(db *rowsDB) {
		db.add(1, 2)
		w := db.worker(claims.SessionConfig{}, cancelable)
		remote := db.remote("r", time.Hour)
		got := testkit.Must(w.rows.TryTakeFor(db.Context(), remote, claims.TakeOptions{N: 2}))
		db.exec(`UPDATE tasks SET status = 'canceled' WHERE id = 1`)
		require.Equal(db, []string{"2"}, takenIDs(testkit.Must(w.rows.OwnedBy(db.Context(), remote))))
		require.Empty(db, testkit.Must(w.rows.TryTakeFor(db.Context(), remote, claims.TakeOptions{N: 2, Have: got[1:]})))
		db.requireCanceled(1)
		require.Equal(db, 1, db.count(`SELECT count(*) FROM tasks WHERE session = 'r'`))
	})
}

// Even a table whose rows are always ready.
func TestACanceledRowIsNotReady(t *testing.T) {
	cfg := cancelable
	cfg.Ready = ""
	eachRowsServer(t, cfg, func(db *rowsDB) {
		db.add(1, 2)
		db.exec(`UPDATE tasks SET status = 'canceled' WHERE id = 1`)
		w := db.worker(claims.SessionConfig{}, cfg)
		require.Equal(db, []string{"2"}, takenIDs(w.take(1)))
		require.Empty(db, testkit.Must(w.rows.TryClaim(db.Context(), "1")))
	})
}

func TestCheckSaysThatTheConditionOfCanceledRowsIsWrong(t *testing.T) {
	eachRowsServer(t, cancelable, func(db *rowsDB) {
		cfg := cancelable
		cfg.Canceled = "stats = 'canceled'"
		err := testkit.Must(claims.NewQueue(db.open(), cfg)).Check(db.Context())
		require.ErrorIs(db, err, tenure.ErrSetup)
		require.ErrorContains(db, err, "the SQL of Canceled")
	})
}
