package claims_test

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
)

// A session that never began is given no rows.
func TestNothingIsTakenForASessionWithoutARecord(t *testing.T) {
	eachRowsServer(t, tasks, func(db *rowsDB) {
		db.add(1, 2)
		rows := testkit.Must(newRows(testkit.Must(claims.NewSession(db.open(), claims.SessionConfig{Logger: testkit.Quiet})), tasks))
		for _, n := range []int{1, 2} {
			got, err := rows.TryTakeFor(db.Context(), "never", claims.TakeOptions{N: n})
			require.ErrorIs(db, err, tenure.ErrLost)
			require.ErrorContains(db, err, `session "never" has no record`)
			require.Empty(db, got)
		}
		require.Equal(db, 2, db.count(`SELECT count(*) FROM tasks WHERE session IS NULL AND attempts = 0 AND token = 0`))
		require.Equal(db, []string{"1", "2"}, takenIDs(testkit.Must(rows.TryTakeFor(db.Context(), db.remote("r", time.Hour), claims.TakeOptions{N: 9}))))
		waited := make(chan error, 1)
		go func() {
			_, err := rows.TakeFor(db.Context(), "r", claims.TakeOptions{N: 1})
			waited <- err
		}()
		db.removeSession("r")
		db.add(3, 3)
		require.ErrorIs(db, <-waited, tenure.ErrLost)
	})
}

var expiring = func() claims.QueueConfig {
	cfg := tasks
	cfg.Expires, cfg.Deadline = "expires_at", 10*time.Minute
	return cfg
}()

func TestAClaimOfARemoteWorkerExpires(t *testing.T) {
	eachRowsServer(t, expiring, func(db *rowsDB) {
		db.add(1, 3)
		server := db.worker(claims.SessionConfig{}, expiring)
		one, two := db.remote("one", time.Hour), db.remote("two", time.Hour)
		before := time.Now()
		got := testkit.Must(server.rows.TryTakeFor(db.Context(), one, claims.TakeOptions{N: 2}))
		require.WithinRange(db, db.millis("expires_at", 1), before.Add(expiring.Deadline-5*time.Millisecond), time.Now().Add(expiring.Deadline+5*time.Millisecond))
		require.NoError(db, server.rows.Extend(db.Context(), time.Hour, got[1]))
		until := db.millis("expires_at", 2)
		require.WithinRange(db, until, before.Add(time.Hour-5*time.Millisecond), time.Now().Add(time.Hour+5*time.Millisecond))
		require.NoError(db, server.rows.Extend(db.Context(), 2*time.Hour, got...), "several at once")
		until = db.millis("expires_at", 2)
		require.WithinDuration(db, until, db.millis("expires_at", 1), time.Second)
		require.NoError(db, server.rows.Extend(db.Context(), time.Minute, got...))
		require.Equal(db, until, db.millis("expires_at", 2), "none is shortened")
		own := server.take(1) // the process keeps the deadline of these itself
		require.Equal(db, 1, db.count(`SELECT count(*) FROM tasks WHERE id = 3 AND expires_at IS NULL AND session IS NOT NULL`))
		require.NoError(db, server.rows.Finish(db.Context(), own...))
		db.expire(got[0])
		ctx, cancel := context.WithTimeout(db.Context(), testkit.Patience)
		defer cancel()
		next := testkit.Must(server.rows.TakeFor(ctx, two, claims.TakeOptions{N: 9}))
		require.Equal(db, []string{"1"}, takenIDs(next))
		require.Equal(db, 2, next[0].Attempt, "an attempt that expired is used")

		var ended *claims.EndedError
		require.ErrorAs(db, server.rows.Extend(db.Context(), 3*time.Hour, got...), &ended)
		require.Equal(db, got[:1], ended.Claims)
		require.Equal(db, until, db.millis("expires_at", 2), "none is extended")
		require.ErrorIs(db, server.rows.Finish(db.Context(), got[0]), tenure.ErrLost)
		require.NoError(db, server.rows.Finish(db.Context(), got[1]))

		db.expire(next...)
		testkit.Await(db.T, "it is freed although no call asks for rows", func() bool { return db.count(`SELECT count(*) FROM tasks WHERE session IS NOT NULL`) == 0 })
		require.Equal(db, []string{"1"}, takenIDs(server.take(1)))
		server.takesNone()
		require.Equal(db, 1, db.count(`SELECT count(*) FROM tasks WHERE session IS NOT NULL AND expires_at IS NULL`), "the time of a former claim does not count")
		db.add(4, 4)
		require.Len(db, testkit.Must(server.rows.TryTakeFor(db.Context(), one, claims.TakeOptions{N: 1})), 1)
		db.exec(`UPDATE tasks SET session = NULL WHERE id = 4`) // by a program that does not know the column
		require.Equal(db, []string{"4"}, takenIDs(server.take(1)))
		require.Equal(db, 2, db.count(`SELECT count(*) FROM tasks WHERE session IS NOT NULL AND expires_at IS NULL`))
		require.ErrorIs(db, server.rows.Extend(db.Context(), 0, got[0]), tenure.ErrInvalid)
		require.ErrorIs(db, db.worker(claims.SessionConfig{}, tasks).rows.Extend(db.Context(), time.Hour, got[0]), tenure.ErrInvalid)
	})
}

func TestAClaimLastsAsLongAsItsCallAsksFor(t *testing.T) {
	perKey := expiring
	perKey.PerKey = claims.PerKey{Column: "priority", Limit: 9}
	for name, cfg := range map[string]claims.QueueConfig{"": expiring, "per key": perKey} {
		t.Run(name, func(t *testing.T) {
			eachRowsServer(t, cfg, func(db *rowsDB) {
				db.add(1, 4)
				rows, remote := db.worker(claims.SessionConfig{}, cfg).rows, db.remote("r", time.Hour)
				about := func(d time.Duration, id int) {
					db.Helper()
					require.WithinDuration(db, time.Now().Add(d), db.millis("expires_at", id), 30*time.Second)
				}
				take := func(o claims.TakeOptions) []claims.Claim {
					db.Helper()
					return testkit.Must(rows.TryTakeFor(db.Context(), remote, o))
				}
				first := take(claims.TakeOptions{N: 1, Lasts: time.Hour, Where: "id < $1", Args: []any{9}})
				about(time.Hour, 1)
				require.Len(db, take(claims.TakeOptions{N: 1, Lasts: 3 * time.Minute}), 1)
				about(3*time.Minute, 2)
				require.Len(db, take(claims.TakeOptions{N: 1}), 1)
				about(cfg.Deadline, 3)
				again := take(claims.TakeOptions{N: 9, Have: first, Lasts: 2 * time.Hour})
				require.Equal(db, []string{"2", "3"}, takenIDs(again))
				about(time.Hour, 1)
				about(2*time.Hour, 2)
				about(2*time.Hour, 3)
				for _, bad := range []claims.TakeOptions{{N: 1, Lasts: -time.Second}, {N: 1, Lasts: 30}} {
					_, err := rows.TakeFor(db.Context(), remote, bad)
					require.ErrorIs(db, err, tenure.ErrInvalid)
				}
				_, err := rows.TakeWith(db.Context(), claims.TakeOptions{N: 1, Lasts: time.Hour})
				require.ErrorIs(db, err, tenure.ErrInvalid)
				_, err = db.worker(claims.SessionConfig{}, tasks).rows.TryTakeFor(db.Context(), remote, claims.TakeOptions{N: 1, Lasts: time.Hour})
				require.ErrorContains(db, err, "set Expires")
			})
		})
	}
}

func TestAnExpiredRowThatCannotBeFreedKeepsNoOther(t *testing.T) {
	cfg := expiring
	cfg.LostBackoff = time.Hour
	eachRowsServer(t, cfg, func(db *rowsDB) {
		db.add(1, 5)
		server := db.worker(claims.SessionConfig{}, cfg)
		got := testkit.Must(server.rows.TryTakeFor(db.Context(), db.remote("r", time.Hour), claims.TakeOptions{N: 5}))
		require.Len(db, got, 5)
		if db.pool != nil {
			db.exec(`ALTER TABLE tasks ADD CHECK (id <> 1 OR session IS NOT NULL) NOT VALID`)
		} else {
			db.exec(`CREATE TRIGGER refuses BEFORE UPDATE ON tasks WHEN NEW.id = 1 AND NEW.session IS NULL BEGIN SELECT RAISE(ABORT, 'refused'); END`)
		}
		db.expire(got...)
		testkit.Await(db.T, "the others are free", func() bool {
			return db.count(`SELECT count(*) FROM tasks WHERE session IS NULL AND not_before IS NOT NULL`) == 4
		})
		server.takesNone()
		db.exec(`DELETE FROM tasks WHERE id = 1`) // which could not be freed at the end either
	})
}

var expiringEffect = func() claims.QueueConfig {
	cfg := effect
	cfg.Expires, cfg.Deadline, cfg.PollInterval = "expires_at", time.Minute, time.Second
	return cfg
}()

// whileARowIsClaimed calls test when the only row of expiringEffect has been taken for a remote worker, r.
func whileARowIsClaimed(t *testing.T, test func(w *rowsWorld, a *process, rows *workedQueue)) {
	t.Helper()
	inRowsBubble(t, expiringEffect, 1, func(w *rowsWorld) {
		a := w.start("a")
		rows := w.rowsOf(a, expiringEffect)
		testkit.AcquireBriefly(w.T, w.store, tenure.LeaseConfig{Key: claims.SessionKey("r"), TTL: 24 * time.Hour})
		require.Len(w, testkit.Must(rows.TryTakeFor(context.Background(), "r", claims.TakeOptions{N: 1})), 1)
		test(w, a, rows)
	})
}

func TestCallsThatWaitSeeExpiredClaimsInTheirOwnLook(t *testing.T) {
	whileARowIsClaimed(t, func(w *rowsWorld, a *process, rows *workedQueue) {
		counted := &callCounts{}
		a.fault(counted.hook)
		began := time.Now()
		require.NoError(w, rows.AwaitReady(context.Background(), ""))
		require.WithinDuration(w, began.Add(expiringEffect.Deadline), time.Now(), 2*expiringEffect.PollInterval)
		require.LessOrEqual(w, counted.of("queue.expired"), 2, "only to free the row, and perhaps once before the first look")
		require.InDelta(w, 60, counted.of("queue.ready"), 25)
		require.Len(w, testkit.Must(rows.TryTakeFor(context.Background(), "r", claims.TakeOptions{N: 1})), 1)
		a.fault(nil)
	})
}

func TestCallsThatWaitFreeExpiredRowsWithoutAWorker(t *testing.T) {
	eachRowsServer(t, expiring, func(db *rowsDB) {
		db.add(1, 1)
		queue := testkit.Must(claims.NewQueue(db.open(), expiring))
		got := testkit.Must(queue.TryTakeFor(db.Context(), db.remote("r", time.Hour), claims.TakeOptions{N: 1}))
		require.Len(db, got, 1)
		db.expire(got...)
		ctx, cancel := context.WithTimeout(db.Context(), testkit.Patience)
		defer cancel()
		require.NoError(db, queue.AwaitReady(ctx, ""))
		require.Equal(db, 1, db.count(`SELECT count(*) FROM tasks WHERE session IS NULL`))
	})
}

// Otherwise each look would wake all calls that wait, also those of other processes.
func TestAnExpiredRowThatIsLockedDoesNotCountAsFreed(t *testing.T) {
	testkit.Slow(t)
	cfg := expiring
	log := &testkit.SyncBuffer{}
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	db := rowsTableOnPostgres(t, cfg)
	db.add(1, 1)
	queue := testkit.Must(claims.NewQueue(db.open(), cfg))
	got := testkit.Must(queue.TryTakeFor(t.Context(), db.remote("r", time.Hour), claims.TakeOptions{N: 1}))
	db.expire(got...)
	tx := testkit.Must(db.pool.Begin(t.Context()))
	defer func() { _ = tx.Rollback(context.Background()) }()
	testkit.ExecPostgres(t, tx, `SELECT FROM tasks FOR UPDATE`)
	soon, cancel := context.WithTimeout(t.Context(), 10*cfg.PollInterval)
	defer cancel()
	require.ErrorIs(t, queue.AwaitReady(soon, ""), context.DeadlineExceeded)
	require.NotContains(t, log.String(), "freed rows")
	require.NoError(t, tx.Rollback(t.Context()))
	require.NoError(t, queue.AwaitReady(t.Context(), ""))
	require.Contains(t, log.String(), "freed rows whose claims have expired")
}

func TestAnExpiredRowThatCannotBeFreedIsTriedOncePerPollInterval(t *testing.T) {
	whileARowIsClaimed(t, func(w *rowsWorld, a *process, rows *workedQueue) {
		testkit.ExecSQL(w.T, w.db, `CREATE TRIGGER refuse BEFORE UPDATE OF session ON tasks BEGIN SELECT RAISE(IGNORE); END`)
		time.Sleep(2 * expiringEffect.Deadline)
		counted := &callCounts{}
		a.fault(counted.hook)
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		var calls sync.WaitGroup
		for i := range 3 {
			calls.Go(func() {
				_ = rows.AwaitReady(ctx, "id <> $1", 100+i) // each with looks of its own
			})
		}
		for ctx.Err() == nil {
			rows.Wake()
			time.Sleep(10 * time.Millisecond)
		}
		calls.Wait()
		require.InDelta(w, 60, counted.of("queue.expire"), 15)
		a.fault(nil)
	})
}

func TestClaimsThatDoNotExpireCauseNoLooks(t *testing.T) {
	inRowsBubble(t, effect, 1, func(w *rowsWorld) {
		a := w.start("a")
		rows := w.rowsOf(a, effect)
		counted := &callCounts{}
		a.fault(counted.hook)
		testkit.AcquireBriefly(w.T, w.store, tenure.LeaseConfig{Key: claims.SessionKey("r"), TTL: 24 * time.Hour})
		got := testkit.Must(rows.TryTakeFor(context.Background(), "r", claims.TakeOptions{N: 1}))
		require.Len(w, got, 1)
		time.Sleep(time.Minute)
		require.Zero(w, counted.of("queue.expired"))
		require.Equal(w, 1, counted.of("queue.take"))
	})
}
