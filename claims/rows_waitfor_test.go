package claims_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

// remote begins the session of a worker that cannot reach the database, and returns its ID.
func (db *rowsDB) remote(id string, ttl time.Duration) string {
	db.Helper()
	testkit.AcquireBriefly(db, db.open(), tenure.LeaseConfig{Key: claims.SessionKey(id), TTL: ttl})
	return id
}

func TestAServerWaitsForRowsOfItsWorkers(t *testing.T) {
	testkit.Slow(t)
	cfg := tasks
	cfg.PollInterval = time.Hour
	eachRowsServer(t, cfg, func(db *rowsDB) {
		const short = time.Second
		// By itself it would look after more than 20 s.
		server := db.worker(claims.SessionConfig{TTL: 30 * short, RenewDeadline: 28 * short}, cfg)
		patient := db.remote("patient", time.Hour)
		soon, cancel := context.WithTimeout(db.Context(), 50*time.Millisecond)
		defer cancel()
		none, err := server.rows.TakeFor(soon, patient, claims.TakeOptions{N: 1})
		require.NoError(db, err)
		require.Empty(db, none)
		_, err = server.rows.TakeFor(db.Context(), "", claims.TakeOptions{N: 1})
		require.ErrorIs(db, err, tenure.ErrInvalid)

		got := make(chan []claims.Claim)
		wait := func() {
			claims, err := server.rows.TakeFor(db.Context(), patient, claims.TakeOptions{N: 5})
			if err != nil {
				db.Error(err)
			}
			got <- claims
		}
		go wait()
		time.Sleep(50 * time.Millisecond)
		db.add(1, 2)
		server.rows.Wake()
		first := <-got
		require.Equal(db, []string{"1", "2"}, takenIDs(first))
		require.Equal(db, patient, first[0].Session)
		require.Zero(db, server.rows.Len(), "the claims are the worker's")

		// A session that expires is found at once.
		db.add(3, 4)
		began := time.Now()
		taken, err := server.rows.TakeFor(db.Context(), db.remote("short", short), claims.TakeOptions{N: 5})
		require.NoError(db, err)
		require.Equal(db, []string{"3", "4"}, takenIDs(taken))
		go wait()
		require.Equal(db, []string{"3", "4"}, takenIDs(<-got))
		took := time.Since(began)
		require.Greater(db, took, short*9/10)
		require.Less(db, took, 10*short, "it was found by a look that would have come anyway")
		require.ErrorIs(db, server.rows.Finish(db.Context(), taken...), tenure.ErrLost)
		require.NoError(db, server.rows.Finish(db.Context(), first...))
	})
}

// No worker gets a row without attempts left, even if the row can't be retired.
func TestARowThatCannotBeGivenUpIsNoWorkers(t *testing.T) {
	cfg := tasks
	cfg.MaxAttempts, cfg.Exhausted = 1, "status = 'failed'"
	byFunc := cfg
	byFunc.Exhausted = ""
	eachRowsServer(t, cfg, func(db *rowsDB) {
		if db.pool != nil {
			db.exec(`ALTER TABLE tasks ADD CHECK (status <> 'failed')`)
		} else {
			db.exec(`CREATE TRIGGER refuse BEFORE UPDATE ON tasks WHEN NEW.status = 'failed' BEGIN SELECT RAISE(ABORT, 'no'); END`)
		}
		db.add(1, 1)
		db.exec(`UPDATE tasks SET attempts = 1`)
		remote := db.remote("w", ttl)
		ctx, cancel := context.WithCancel(db.Context())
		byFunc.OnExhausted = func(context.Context, claims.Claim) error {
			cancel() // the caller goes away
			return errors.New("no")
		}
		for _, cfg := range []claims.QueueConfig{cfg, byFunc} {
			db.exec(`UPDATE tasks SET not_before = NULL`)
			got, err := db.worker(claims.SessionConfig{}, cfg).rows.TryTakeFor(ctx, remote, claims.TakeOptions{N: 1})
			require.NoError(db, err)
			require.Empty(db, got)
			require.Zero(db, db.count(`SELECT count(*) FROM tasks WHERE session IS NOT NULL`))
		}
	})
}

func TestTenThousandCallsThatWaitShareALook(t *testing.T) {
	const calls, rows = 10_000, 5
	cfg := effect
	cfg.PollInterval = time.Second
	inRowsBubble(t, cfg, 0, func(w *rowsWorld) {
		a := w.start("a")
		queue := w.rowsOf(a, cfg)
		testkit.AcquireBriefly(w.T, w.store, tenure.LeaseConfig{Key: claims.SessionKey("r"), TTL: 24 * time.Hour})
		counted := &callCounts{}
		a.fault(counted.hook)
		ctx, cancel := context.WithCancel(context.Background())
		var waiting sync.WaitGroup
		var told atomic.Int64
		for i := range calls {
			waiting.Go(func() {
				if i%2 == 0 {
					if queue.AwaitReady(ctx, "") == nil {
						told.Add(1)
					}
					return
				}
				got, err := queue.TakeFor(ctx, "r", claims.TakeOptions{N: 1})
				if err != nil {
					w.Error(err)
				}
				told.Add(int64(len(got)))
			})
		}
		time.Sleep(time.Minute)
		require.InDelta(w, 60, counted.of("queue.ready"), 20)
		require.Equal(w, calls/2, counted.of("queue.take"), "each before it waits")
		require.Zero(w, told.Load())
		for range rows {
			testkit.ExecSQL(w.T, w.db, `INSERT INTO tasks DEFAULT VALUES`)
		}
		queue.Wake()
		synctest.Wait()
		require.EqualValues(w, rows, told.Load())
		cancel()
		waiting.Wait()
	})
}

func TestACallThatWaitsIsToldThatTheStoreFails(t *testing.T) {
	inRowsBubble(t, effect, 0, func(w *rowsWorld) {
		a := w.start("a")
		queue := w.rowsOf(a, effect)
		testkit.AcquireBriefly(w.T, w.store, tenure.LeaseConfig{Key: claims.SessionKey("r"), TTL: 24 * time.Hour})
		failed := make(chan error)
		go func() {
			_, err := queue.TakeFor(context.Background(), "r", claims.TakeOptions{N: 1})
			failed <- err
		}()
		time.Sleep(time.Minute)
		down := errors.New("it is down")
		a.fault(func(context.Context, storetest.Call, func(context.Context) error) error { return down })
		require.ErrorIs(w, <-failed, down)
		a.fault(nil)
	})
}

func TestARowThatCannotBeTakenIsTriedOncePerPollInterval(t *testing.T) {
	cfg := effect
	cfg.PollInterval = time.Second
	inRowsBubble(t, cfg, 1, func(w *rowsWorld) {
		a := w.start("a")
		queue := w.rowsOf(a, cfg)
		testkit.ExecSQL(w.T, w.db, `CREATE TRIGGER refuse BEFORE UPDATE OF session ON tasks BEGIN SELECT RAISE(IGNORE); END`)
		testkit.AcquireBriefly(w.T, w.store, tenure.LeaseConfig{Key: claims.SessionKey("r"), TTL: 24 * time.Hour})
		counted := &callCounts{}
		a.fault(counted.hook)
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		got, err := queue.TakeFor(ctx, "r", claims.TakeOptions{N: 1})
		require.NoError(w, err)
		require.Empty(w, got)
		require.Less(w, counted.of("queue.ready")+counted.of("queue.take"), 200)
		a.fault(nil)
		testkit.ExecSQL(w.T, w.db, `DROP TRIGGER refuse`)
		began := time.Now()
		ctx, cancel = context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		for len(got) == 0 && time.Since(began) < 2*ttl { // it is left for a while
			got = testkit.Must(queue.TakeFor(ctx, "r", claims.TakeOptions{N: 1}))
		}
		require.Len(w, got, 1)
	})
}

// A call that finds a row which the database refuses tries the next ones, and none that another transaction has locked.
func TestLockedRowsKeepNoCallFromTheRowsBehindThem(t *testing.T) {
	testkit.Slow(t)
	db := rowsTableOnPostgres(t, tasks)
	db.add(1, 1202)
	db.exec(`CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
		IF NEW.id = 1201 AND NEW.session IS NOT NULL THEN RAISE EXCEPTION 'no' USING ERRCODE = 'check_violation'; END IF; RETURN NEW; END $$`)
	db.exec(`CREATE TRIGGER refuse BEFORE UPDATE ON tasks FOR EACH ROW EXECUTE FUNCTION refuse()`)
	tx := testkit.Must(db.pool.Begin(t.Context()))
	defer func() { _ = tx.Rollback(context.Background()) }()
	testkit.ExecPostgres(t, tx, `SELECT FROM tasks WHERE id <= 1200 FOR UPDATE`)
	got := testkit.Must(db.worker(claims.SessionConfig{}, tasks).rows.TryTakeFor(t.Context(), db.remote("r", time.Hour), claims.TakeOptions{N: 1}))
	require.Equal(t, []string{"1202"}, takenIDs(got))
}

func TestAFloodOfHintsWithoutRowsCostsFewLooks(t *testing.T) {
	cfg := effect
	cfg.PollInterval = time.Second
	inRowsBubble(t, cfg, 0, func(w *rowsWorld) {
		a := w.start("a")
		queue := w.rowsOf(a, cfg)
		counted := &callCounts{}
		a.fault(counted.hook)
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		var waking sync.WaitGroup
		defer waking.Wait()
		waking.Go(func() {
			for ctx.Err() == nil {
				queue.Wake()
				time.Sleep(time.Millisecond)
			}
		})
		require.ErrorIs(w, queue.AwaitReady(ctx, ""), context.DeadlineExceeded)
		require.Less(w, counted.of("queue.ready"), 300)
		a.fault(nil)
	})
}

func TestEachCallIsToldWhileThereAreRows(t *testing.T) {
	cfg := effect
	cfg.PollInterval = time.Hour
	inRowsBubble(t, cfg, 10, func(w *rowsWorld) {
		a := w.start("a")
		queue := w.rowsOf(a, cfg)
		began := time.Now()
		for range 3 { // each for a worker that has not begun to take rows yet
			require.NoError(w, queue.AwaitReady(context.Background(), ""))
		}
		require.Less(w, time.Since(began), time.Second)
	})
}
