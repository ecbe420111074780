package claims_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

// callCounts counts the calls of each operation.
type callCounts struct {
	mu sync.Mutex
	n  map[string]int
}

func (c *callCounts) hook(ctx context.Context, call storetest.Call, send func(context.Context) error) error {
	c.mu.Lock()
	if c.n == nil {
		c.n = make(map[string]int)
	}
	c.n[call.Op]++
	c.mu.Unlock()
	return send(ctx)
}

func (c *callCounts) of(op string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n[op]
}

func ofTenant(tenant string, n int) claims.TakeOptions {
	return claims.TakeOptions{N: n, Where: `result <> '$9 it''s' AND result = $1 -- not $2`, Args: []any{tenant}}
}

func TestCallersWithDifferentFiltersGetTheirOwnRows(t *testing.T) {
	eachRowsServer(t, tasks, func(db *rowsDB) {
		w := db.worker(claims.SessionConfig{}, tasks)
		remote := db.remote("r", time.Hour)
		patient, giveUp := context.WithCancel(db.Context())
		defer giveUp()
		var nobodys, all sync.WaitGroup
		nobodys.Go(func() { _, _ = w.rows.TakeWith(patient, ofTenant("nobody's", 9)) }) // it waits all the time
		ctx, cancel := context.WithTimeout(db.Context(), testkit.Patience)
		defer cancel()
		for i := range 16 {
			tenant := fmt.Sprint("t", i%4)
			all.Go(func() {
				take := func() ([]claims.Claim, error) { return w.rows.TakeWith(ctx, ofTenant(tenant, 5)) }
				if i%4 == 3 {
					take = func() ([]claims.Claim, error) { return w.rows.TakeFor(ctx, remote, ofTenant(tenant, 5)) }
				}
				for n := 0; n < 5; {
					got, err := take()
					if err != nil || len(got) == 0 || len(got) > 5 {
						db.Errorf("%s got %v, error %v", tenant, got, err)
						return
					}
					for _, c := range got {
						if owner := db.count(`SELECT count(*) FROM tasks WHERE result = '` + tenant + `' AND id = ` + c.Key.ID); owner != 1 {
							db.Errorf("%s got %s", tenant, c)
						}
					}
					n += len(got)
					if n > 5 {
						_ = w.rows.Queue.Release(ctx, got[5-n+len(got):]...)
					}
				}
			})
		}
		for i := range 4 {
			db.add(1+100*i, 20+100*i)
			db.exec(fmt.Sprintf(`UPDATE tasks SET result = 't%d' WHERE result IS NULL`, i)) // a row without a tenant is not taken
		}
		w.rows.Wake()
		all.Wait()
		require.Equal(db, 80, db.count(`SELECT count(*) FROM tasks WHERE session IS NOT NULL`))
		giveUp()
		nobodys.Wait()
		for _, bad := range []claims.TakeOptions{
			{N: 1, Where: "id = $1"}, {N: 1, Where: "id = 1", Args: []any{1}}, {N: 1, Where: "id = $2", Args: []any{1}}, {N: 1, Args: []any{1}}, {N: 0}, {N: 1, Where: "\x00"},
		} {
			_, err := w.rows.TakeWith(db.Context(), bad)
			require.ErrorIs(db, err, tenure.ErrInvalid, bad.Where)
			_, err = w.rows.TryTakeFor(db.Context(), remote, bad)
			require.ErrorIs(db, err, tenure.ErrInvalid, bad.Where)
		}
	})
}

// When the database refuses a row, the others are looked for with the filter, too.
func TestAFilterHoldsAlsoWhenARowIsRefused(t *testing.T) {
	eachRowsServer(t, tasks, func(db *rowsDB) {
		db.add(1, 8)
		db.exec(`UPDATE tasks SET result = CASE WHEN id IN (2, 5, 7) THEN 'mine' ELSE 'theirs' END`)
		if db.pool != nil {
			db.exec(`ALTER TABLE tasks ADD CHECK (id <> 2 OR session IS NULL)`)
		} else {
			db.exec(`CREATE TRIGGER refuses BEFORE UPDATE ON tasks WHEN NEW.id = 2 AND NEW.session IS NOT NULL BEGIN SELECT RAISE(ABORT, 'refused'); END`)
		}
		w := db.worker(claims.SessionConfig{}, tasks)
		got := testkit.Must(w.rows.TakeWith(db.Context(), ofTenant("mine", 1)))
		require.Equal(db, []string{"5"}, takenIDs(got))
		got = testkit.Must(w.rows.TryTakeFor(db.Context(), db.remote("r", time.Hour), ofTenant("mine", 9)))
		require.Equal(db, []string{"7"}, takenIDs(got))
	})
}

// No caller may get the rows of another whose answer was lost.
func TestACallerGetsNoRowsOfAnotherFilterThoughAnAnswerWasLost(t *testing.T) {
	inRowsBubble(t, effect, 4, func(w *rowsWorld) {
		testkit.ExecSQL(w.T, w.db, `UPDATE tasks SET priority = -(id % 2)`)
		a := w.start("a")
		rows := w.rowsOf(a, effect)
		of := func(priority, n int) claims.TakeOptions {
			return claims.TakeOptions{N: n, Where: "priority = $1", Args: []any{priority}}
		}
		for range 2 {
			ctx, cancel := context.WithCancel(context.Background())
			a.fault(testkit.Only("queue.take", testkit.Once(func(ctx context.Context, call storetest.Call, send func(context.Context) error) error {
				cancel()
				return testkit.LoseAnswer(ctx, call, send)
			})))
			_, err := rows.TakeWith(ctx, of(0, 1))
			require.Error(w, err)
			time.Sleep(time.Millisecond)
			got, err := rows.TakeWith(w.Context(), of(-1, 9))
			require.NoError(w, err)
			require.Equal(w, []string{"1", "3"}, takenIDs(got))
			require.NoError(w, rows.Release(w.Context(), got...))
		}
		time.Sleep(2 * ttl)
		require.Zero(w, w.count(`SELECT count(*) FROM tasks WHERE session IS NOT NULL`))
	})
}

func TestCallersWithTheSameFilterShareStatements(t *testing.T) {
	inRowsBubble(t, effect, 20, func(w *rowsWorld) {
		a := w.start("a")
		rows := w.rowsOf(a, effect)
		takeOf(w, rows, 1)
		counted := &callCounts{}
		a.fault(func(ctx context.Context, call storetest.Call, send func(context.Context) error) error {
			if call.Op == "queue.take" {
				time.Sleep(time.Second)
			}
			return counted.hook(ctx, call, send)
		})
		var all sync.WaitGroup
		for range 10 {
			all.Go(func() {
				got, err := rows.TakeWith(context.Background(), claims.TakeOptions{N: 1, Where: "id > $1", Args: []any{5}})
				if err != nil || len(got) != 1 {
					w.Errorf("got %v, error %v", got, err)
				}
			})
		}
		all.Wait()
		require.Equal(w, 2, counted.of("queue.take"))
	})
}

func TestQueuesOfOneTableShareASession(t *testing.T) {
	commands, mails := tasks, tasks
	commands.Ready, mails.Ready = "status = 'queued' AND priority = 1", "status = 'queued' AND priority = 0"
	mails.Done, mails.Deadline = "status = 'done', result = 'sent'", time.Hour
	eachRowsServer(t, commands, func(db *rowsDB) {
		db.add(1, 6)
		db.exec(`UPDATE tasks SET priority = id % 2`)
		w := db.worker(claims.SessionConfig{}, commands)
		second := testkit.Must(newRows(w.session, mails))
		require.Equal(db, []string{"1", "3", "5"}, takenIDs(w.take(9)))
		got := testkit.Must(second.Take(db.Context(), 9))
		require.Equal(db, []string{"2", "4", "6"}, takenIDs(got))
		require.NoError(db, second.Finish(db.Context(), got[0]))
		require.False(db, second.Holds(got[0]))
		require.Equal(db, 5, w.rows.Len())
		require.NoError(db, second.Worker.Do(db.Context(), got[1], func(ctx context.Context) error {
			require.ErrorIs(db, w.rows.Do(ctx, got[1], func(context.Context) error { return nil }), tenure.ErrInvalid, "a func runs for it")
			return nil
		}))
		require.Equal(db, 1, db.count(`SELECT count(*) FROM tasks WHERE result = 'sent' AND id = 2`))
		other := mails
		other.Released = "priority = 9"
		_, err := newRows(w.session, other)
		require.ErrorContains(db, err, "make them the same, or use two sessions")
		_, err = claims.NewWorker(w.session, second.Queue)
		require.ErrorIs(db, err, tenure.ErrInvalid, "twice")
		w.stop()
		require.Zero(db, db.count(`SELECT count(*) FROM tasks WHERE session IS NOT NULL`))
	})
}

func TestWorkersThatAreMadeAtOnceShareTheClaimsOfATable(t *testing.T) {
	inRowsBubble(t, effect, 0, func(w *rowsWorld) {
		for range 20 {
			session := testkit.Must(claims.NewSession(w.store, claims.SessionConfig{}))
			shared := testkit.Must(claims.NewQueue(w.store, effect))
			var made atomic.Int32
			var all sync.WaitGroup
			for _, queue := range []*claims.Queue{shared, shared, testkit.Must(claims.NewQueue(w.store, effect)), testkit.Must(claims.NewQueue(w.store, effect))} {
				all.Go(func() {
					if _, err := claims.NewWorker(session, queue); err == nil {
						made.Add(1)
					}
				})
			}
			all.Wait()
			require.EqualValues(w, 3, made.Load(), "one for each queue")
		}
	})
}

// One queue never gets the rows of another, even if an answer was lost.
func TestAQueueDoesNotGetTheRowsOfAnother(t *testing.T) {
	odd, even := effect, effect
	odd.Ready, even.Ready = "status = 'queued' AND id % 2 = 1", "status = 'queued' AND id % 2 = 0"
	inRowsBubble(t, odd, 4, func(w *rowsWorld) {
		a := w.start("a")
		ofOdd, ofEven := w.rowsOf(a, odd), w.rowsOf(a, even)
		ctx, cancel := context.WithCancel(context.Background())
		a.fault(testkit.Only("queue.take", testkit.Once(func(ctx context.Context, call storetest.Call, send func(context.Context) error) error {
			cancel()
			return testkit.LoseAnswer(ctx, call, send)
		})))
		_, err := ofOdd.Take(ctx, 2)
		require.Error(w, err)
		require.Equal(w, []string{"2", "4"}, takenIDs(takeOf(w, ofEven, 9)))
		time.Sleep(2 * ttl)
		require.Equal(w, []string{"1", "3"}, takenIDs(takeOf(w, ofOdd, 9)))
	})
}

func TestWhatATakeAndAReleaseAssign(t *testing.T) {
	testkit.Slow(t)
	cfg := tasks
	cfg.Taken, cfg.Released, cfg.LostBackoff = "status = 'running', result = coalesce(result, '') || 't'", "status = 'queued', result = result || 'r'", time.Millisecond
	eachRowsServer(t, cfg, func(db *rowsDB) {
		db.add(1, 1)
		w := db.worker(claims.SessionConfig{}, cfg)
		is := func(status, log string) {
			db.Helper()
			require.Equal(db, 1, db.count(fmt.Sprintf(`SELECT count(*) FROM tasks WHERE status = '%s' AND result = '%s'`, status, log)), "want %s %s", status, log)
		}
		got := w.take(1)
		is("running", "t")
		require.NoError(db, w.rows.Release(db.Context(), got...))
		is("queued", "tr")
		require.NoError(db, w.rows.Queue.Release(db.Context(), w.take(1)...))
		is("queued", "trtr")
		require.NoError(db, w.rows.ReleaseAfter(db.Context(), 0, w.take(1)...))
		is("queued", "trtrtr")
		require.Len(db, testkit.Must(w.rows.TakeFor(db.Context(), db.remote("gone", time.Hour), claims.TakeOptions{N: 1})), 1)
		is("running", "trtrtrt")
		db.removeSession("gone")
		got = w.take(1)
		is("running", "trtrtrtrt")
		require.NoError(db, w.rows.Finish(db.Context(), got...))
		is("done", "trtrtrtrt")
	})
}

func TestEachRowOfABatchHasItsOwnVerdict(t *testing.T) {
	eachRowsServer(t, tasks, func(db *rowsDB) {
		db.add(1, 4)
		w := db.worker(claims.SessionConfig{}, tasks)
		got := w.take(4)
		db.exec(`UPDATE tasks SET session = NULL WHERE id = 2`)
		db.exec(`DELETE FROM tasks WHERE id = 3`)
		if db.pool != nil {
			db.exec(`ALTER TABLE tasks ADD CHECK (id <> 4 OR status <> 'done')`)
		} else {
			db.exec(`CREATE TRIGGER refuses BEFORE UPDATE ON tasks WHEN NEW.id = 4 AND NEW.status = 'done' BEGIN SELECT RAISE(ABORT, 'refused'); END`)
		}
		var ended *claims.EndedError
		err := w.rows.FinishEach(db.Context(), got...)
		require.ErrorAs(db, err, &ended)
		require.Equal(db, got[1:3], ended.Claims)
		require.ErrorContains(db, err, "tasks/4")
		require.Equal(db, 1, db.count(`SELECT count(*) FROM tasks WHERE status = 'done' AND session IS NULL`))
		require.Equal(db, []bool{false, false, false, true}, []bool{w.rows.Holds(got[0]), w.rows.Holds(got[1]), w.rows.Holds(got[2]), w.rows.Holds(got[3])})
		require.ErrorIs(db, w.rows.FinishEach(db.Context()), tenure.ErrInvalid)
	})
}
