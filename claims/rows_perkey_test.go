package claims_test

import (
	"context"
	"flag"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pgobjects"
	"github.com/tenurelib/tenure/internal/sqliteobjects"
	"github.com/tenurelib/tenure/internal/testkit"
)

// perKey is a queue of which at most two rows per customer are claimed at once. The customer is in the column priority.
var perKey = func() claims.QueueConfig {
	cfg := tasks
	cfg.OrderBy, cfg.PerKey = "id", claims.PerKey{Column: "priority", Limit: 2}
	cfg.PollInterval = time.Hour // a test that passes needs no look but the first and those after hints
	return cfg
}()

// addFor adds rows of a customer.
func (db *rowsDB) addFor(customer, from, to int) {
	db.Helper()
	db.exec(fmt.Sprintf(`WITH RECURSIVE n(i) AS (SELECT %d UNION ALL SELECT i + 1 FROM n WHERE i < %d) INSERT INTO tasks (id, priority) SELECT i, %d FROM n`, from, to, customer))
}

// taking calls Take in a goroutine.
func (w *worker) taking(n int) chan []claims.Claim {
	got := make(chan []claims.Claim, 1)
	go func() {
		defer close(got)
		ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
		defer cancel()
		taken, err := w.rows.Take(ctx, n)
		if err != nil {
			w.db.Error(err)
		}
		got <- taken
	}()
	return got
}

func TestAtMostSoManyRowsOfAKeyAreTaken(t *testing.T) {
	eachRowsServer(t, perKey, func(db *rowsDB) {
		db.addFor(1, 1, 50)
		db.addFor(2, 51, 53)
		db.addFor(3, 54, 54)
		a, b := db.worker(claims.SessionConfig{}, perKey), db.worker(claims.SessionConfig{}, perKey)
		first := a.take(2)
		require.Equal(db, []string{"1", "2"}, takenIDs(first))
		require.Equal(db, []string{"51", "52", "54"}, takenIDs(b.take(10)), "customer 1 is full, and has 48 rows in front")
		none, err := a.rows.TryClaim(db.Context(), "3", "53")
		require.NoError(db, err)
		require.Empty(db, none, "given rows count as well")
		remote := db.remote("remote", time.Hour)
		fromRemote := func() []string {
			got, err := b.rows.TryTakeFor(db.Context(), remote, claims.TakeOptions{N: 5, Where: "priority < $1", Args: []any{3}})
			require.NoError(db, err)
			return takenIDs(got)
		}
		require.Empty(db, fromRemote())
		_, err = b.rows.TryTakeFor(db.Context(), "no such session", claims.TakeOptions{N: 1})
		require.ErrorIs(db, err, tenure.ErrLost)

		require.NoError(db, a.rows.Finish(db.Context(), first[0]))
		require.Equal(db, []string{"3"}, fromRemote())
		require.NoError(db, a.rows.Release(db.Context(), first[1]))
		given, err := b.rows.TryClaim(db.Context(), "7", "8", "9")
		require.NoError(db, err)
		require.Len(db, given, 1, "of several given rows as many as there is room for")
		require.Equal(db, 2, db.count(`SELECT count(*) FROM tasks WHERE priority = 1 AND session IS NOT NULL`))
	})
}

// Also where the rows of a full key stand in front.
func TestTheRowsBehindAFullKeyHaveTheirLimitToo(t *testing.T) {
	eachRowsServer(t, perKey, func(db *rowsDB) {
		db.addFor(1, 1, 100)
		db.addFor(2, 101, 110)
		db.addFor(-3, 111, 120)
		w := db.worker(claims.SessionConfig{}, perKey)
		require.Equal(db, []string{"1", "2"}, takenIDs(w.take(2)))
		require.Equal(db, []string{"101"}, takenIDs(w.take(1)))
		require.Equal(db, []string{"102", "111", "112"}, takenIDs(w.take(10)))
	})
}

// Rows are taken in order, whatever keys they have.
func TestRowsOfSeveralKeysAreTakenInOrder(t *testing.T) {
	cfg := perKey
	cfg.OrderBy = "id DESC"
	eachRowsServer(t, cfg, func(db *rowsDB) {
		for i := 1; i <= 9; i += 3 { // the customers 1, 2 and 3 in turn
			for customer := range 3 {
				db.addFor(customer+1, i+customer, i+customer)
			}
		}
		w := db.worker(claims.SessionConfig{}, cfg)
		require.Equal(db, []string{"9", "8"}, takenIDs(w.take(2)))
		require.Equal(db, []string{"7", "6", "5", "4"}, takenIDs(w.take(10)))
	})
}

// A call that waits gets a row as soon as another with the same key has ended, in whatever way.
func TestWhoeverEndsARowMakesRoomForTheNext(t *testing.T) {
	testkit.Slow(t)
	cfg := perKey
	cfg.PerKey.Limit, cfg.MaxAttempts, cfg.Exhausted = 1, 2, "status = 'dead'"
	eachRowsServer(t, cfg, func(db *rowsDB) {
		a, b := db.worker(claims.SessionConfig{}, cfg), db.worker(claims.SessionConfig{}, cfg)
		ctx := db.Context()
		for how, end := range map[string]func(c claims.Claim) error{
			"finish": func(c claims.Claim) error { return a.rows.Finish(ctx, c) },
			"each":   func(c claims.Claim) error { return a.rows.FinishEach(ctx, c) },
			"func": func(c claims.Claim) error {
				return db.finish(a.rows, []claims.Claim{c}, func(exec) error { return nil })
			},
			"later":         func(c claims.Claim) error { return a.rows.ReleaseAfter(ctx, time.Hour, c) },
			"session":       func(claims.Claim) error { db.removeSession(a.session.ID()); return nil },
			"row exhausted": nil,
		} {
			db.exec(`DELETE FROM tasks`)
			db.addFor(1, 1, 2)
			if end == nil {
				db.exec(`UPDATE tasks SET attempts = 2 WHERE id = 1`)
				require.Equal(db, []string{"2"}, takenIDs(b.take(1)), how)
				continue
			}
			held := a.take(5)
			require.Len(db, held, 1, how)
			next := b.taking(1)
			b.takesNone() // and listens
			require.NoError(db, end(held[0]), how)
			got := <-next
			require.Len(db, got, 1, how)
			require.NoError(db, b.rows.Finish(ctx, got...))
		}
	})
}

// The rows of a process that has crashed count until they are freed.
func TestTheRowsOfADeadWorkerCountUntilTheyAreFreed(t *testing.T) {
	testkit.Slow(t)
	eachRowsServer(t, perKey, func(db *rowsDB) {
		db.addFor(1, 1, 10)
		gone := db.remote("gone", time.Hour)
		a := db.worker(claims.SessionConfig{}, perKey)
		got, err := a.rows.TryTakeFor(db.Context(), gone, claims.TakeOptions{N: 10})
		require.NoError(db, err)
		require.Len(db, got, 2)
		a.takesNone()
		next := a.taking(10)
		db.removeSession(gone)
		require.Len(db, <-next, 2)
	})
}

// A row that the database refuses to have taken hides no others, though a full key has all rows in front.
func TestARefusedRowOfAKeyHidesNoOther(t *testing.T) {
	eachRowsServer(t, perKey, func(db *rowsDB) {
		db.addFor(1, 1, 3000)
		db.addFor(2, 3001, 3002)
		if db.pool != nil {
			db.exec(`CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not this one'; END $$;
				CREATE TRIGGER refuses BEFORE UPDATE ON tasks FOR EACH ROW WHEN (NEW.id = 3001 AND NEW.session IS NOT NULL) EXECUTE FUNCTION refuse()`)
		} else {
			db.exec(`CREATE TRIGGER refuses BEFORE UPDATE ON tasks WHEN NEW.id = 3001 AND NEW.session IS NOT NULL BEGIN SELECT RAISE(ABORT, 'not this one'); END`)
		}
		w := db.worker(claims.SessionConfig{}, perKey)
		require.Len(db, w.take(2), 2)
		require.Equal(db, []string{"3002"}, takenIDs(w.take(1)))
	})
}

// Takers that want rows of the same key wait for each other, and not for a hint.
func TestTakersOfOneKeyHaveTheirTurn(t *testing.T) {
	testkit.Slow(t)
	cfg := perKey
	cfg.PerKey.Limit = 100
	eachRowsServer(t, cfg, func(db *rowsDB) {
		const takers, each = 8, 5
		db.addFor(1, 1, takers*each)
		var all []chan []claims.Claim
		var workers []*worker
		for range takers {
			workers = append(workers, db.worker(claims.SessionConfig{}, cfg))
		}
		for range each {
			for _, w := range workers {
				all = append(all, w.taking(1))
			}
			for _, got := range all {
				require.Len(db, <-got, 1)
			}
			all = nil
		}
	})
}

var (
	perKeyTakes    = flag.Int("perkey.takes", 300, "how many rows TestTakersAtTheSameTimeKeepTheLimitOfAKey takes on each database")
	perKeyNotNaive = flag.Bool("perkey.only", false, "TestTakersAtTheSameTimeKeepTheLimitOfAKey only does what the library does")
)

// takersAtTheSameTime has eight workers take rows of six customers, most of the first, and returns how often one had more
// than two at once. It ends early if stop returns true.
func (db *rowsDB) takersAtTheSameTime(cfg claims.QueueConfig, takes int, stop func(over int64) bool) (over, most int64) {
	const takers, customers = 8, 6
	db.addFor(1, 1, takes+takers)
	db.exec(fmt.Sprintf(`UPDATE tasks SET priority = id %% %d WHERE id %% 3 = 0`, customers))
	customerOf := make(map[string]int)
	for id := 1; id <= takes+takers; id++ {
		customerOf[strconv.Itoa(id)] = 1
		if id%3 == 0 {
			customerOf[strconv.Itoa(id)] = id % customers
		}
	}
	var held [customers]atomic.Int64
	var left, tooMany, highest atomic.Int64
	left.Store(int64(takes))
	var mu sync.Mutex
	var took []time.Duration
	var working sync.WaitGroup
	for range takers {
		w := db.worker(claims.SessionConfig{}, cfg)
		working.Go(func() {
			for left.Add(-1) >= 0 && !stop(tooMany.Load()) {
				ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
				began := time.Now()
				got, err := w.rows.Take(ctx, 1)
				cancel()
				if err != nil {
					db.Error(err)
					return
				}
				mu.Lock()
				took = append(took, time.Since(began))
				mu.Unlock()
				n := &held[customerOf[got[0].Key.ID]]
				if now := n.Add(1); now > 2 {
					tooMany.Add(1)
					highest.Store(max(highest.Load(), now))
				} else {
					highest.CompareAndSwap(now-1, now)
				}
				time.Sleep(time.Millisecond)
				n.Add(-1)
				if err := w.rows.Finish(context.Background(), got...); err != nil {
					db.Error(err)
				}
			}
		})
	}
	working.Wait()
	db.Logf("%d takes by %d takers: %d over the limit, %d at once at most; a take took p50 %v, p99 %v", len(took), takers, tooMany.Load(), highest.Load(), testkit.Percentile(took, 50), testkit.Percentile(took, 99))
	return tooMany.Load(), highest.Load()
}

func TestTakersAtTheSameTimeKeepTheLimitOfAKey(t *testing.T) {
	testkit.Slow(t)
	eachRowsServer(t, perKey, func(db *rowsDB) {
		cfg := perKey
		cfg.PollInterval = 20 * time.Millisecond
		over, most := db.takersAtTheSameTime(cfg, *perKeyTakes, func(int64) bool { return false })
		require.Zero(db, over)
		require.EqualValues(db, 2, most)
	})
}

// One take finds rows of a customer, and before it locks the customer, another take has claimed as many as there may be.
func TestWhatOthersHaveTakenSinceRowsWereFoundCounts(t *testing.T) {
	const gate = 4711
	db := rowsTableOnPostgres(t, perKey)
	db.addFor(1, 1, 100)
	db.exec(fmt.Sprintf(`CREATE FUNCTION gate() RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN
		PERFORM pg_advisory_lock_shared(%[1]d), pg_advisory_unlock_shared(%[1]d); RETURN true; END $$`, gate))
	slow := perKey
	slow.Ready += " AND gate()"
	a, b := db.worker(claims.SessionConfig{}, slow), db.worker(claims.SessionConfig{}, perKey)
	remote := db.remote("remote", time.Hour)
	got := make(chan []claims.Claim)
	require.NoError(t, pgx.BeginFunc(t.Context(), db.pool, func(tx pgx.Tx) error {
		testkit.ExecPostgres(t, tx, fmt.Sprintf(`SELECT pg_advisory_xact_lock(%d)`, gate))
		go func() {
			taken, err := a.rows.TryTakeFor(context.Background(), remote, claims.TakeOptions{N: 2})
			if err != nil {
				t.Error(err)
			}
			got <- taken
		}()
		testkit.Await(t, "a has begun to look", func() bool {
			return db.count(fmt.Sprintf(`SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = %d AND NOT granted`, gate)) == 1
		})
		require.Len(t, b.take(2), 2)
		return nil
	}))
	require.Empty(t, <-got)
}

// TestTakersAtTheSameTimeKeepTheLimitOfAKey would notice if rows were counted in the statement that takes them: it does not see what others take
// meanwhile.
func TestACountInTheStatementThatTakesRowsIsNotEnough(t *testing.T) {
	testkit.Slow(t)
	if *perKeyNotNaive {
		t.Skip("-perkey.only")
	}
	cfg := perKey
	cfg.PerKey, cfg.PollInterval = claims.PerKey{}, 20*time.Millisecond
	db := rowsTableOnPostgres(t, perKey)
	cfg.Ready += ` AND (SELECT count(*) FROM tasks other WHERE other.session IS NOT NULL AND other.priority = tasks.priority) < 2`
	over, _ := db.takersAtTheSameTime(cfg, 100_000, func(over int64) bool { return over >= 10 })
	require.Positive(db, over)
}

func TestTheCheckOfATableWithAKeyNamesWhatIsWrong(t *testing.T) {
	testkit.Slow(t)
	cfg := perKey
	cfg.PerKey.Column = "customer"
	for name, db := range map[string]*rowsDB{"postgres": rowsOnPostgres(t), "sqlite": rowsOnSQLite(t)} {
		t.Run(name, func(t *testing.T) {
			db.T = t
			ddl, err := cfg.PostgresDDL()
			if db.pool == nil {
				ddl, err = cfg.SQLiteDDL()
			}
			require.NoError(t, err)
			columns, indexes := ddl, ""
			if i := strings.Index(ddl, "CREATE INDEX"); i >= 0 {
				columns, indexes = ddl[:i], ddl[i:]
			}
			for _, c := range []struct{ column, without, says string }{
				{"", "customer", `column "customer" for PerKey is missing`},
				{", customer float NOT NULL DEFAULT 1", "", `column "customer" for PerKey is of type`},
				{", customer text", "", `column "customer" for PerKey may be NULL`},
				{", customer text NOT NULL DEFAULT 'a'", "_claimed_per_key", `no index finds the claimed rows with a value of column "customer" (CREATE INDEX IF NOT EXISTS "tasks_claimed_per_key" ON`},
				{", customer text NOT NULL DEFAULT 'a'", "", ""},
			} {
				db.exec(`DROP TABLE IF EXISTS tasks`)
				db.exec(`CREATE TABLE tasks (id integer PRIMARY KEY, status text NOT NULL DEFAULT 'queued'` + c.column + `)`)
				db.exec(columns)
				for statement := range strings.SplitSeq(strings.TrimSpace(indexes), ";\n") {
					if c.without == "" || !strings.Contains(statement, c.without) {
						db.exec(statement)
					}
				}
				w := db.worker(claims.SessionConfig{}, cfg)
				err := w.rows.Check(t.Context())
				if c.says == "" {
					require.NoError(t, err)
					db.exec(`INSERT INTO tasks (id, customer) VALUES (1, 'it''s {1,"2"}'), (2, ''), (3, 'it''s {1,"2"}'), (4, 'it''s {1,"2"}')`)
					require.Equal(t, []string{"1", "2", "3"}, takenIDs(w.take(10)))
					continue
				}
				require.ErrorIs(t, err, tenure.ErrSetup, c.says)
				require.ErrorContains(t, err, c.says)
			}
		})
	}
}

// No take reads all rows of a key that is full.
func TestTheRowsOfAFullKeyAreNotRead(t *testing.T) {
	testkit.Slow(t)
	t.Parallel()
	config := objects.RowsConfig{
		Table: "tasks", ID: "id", Session: "session", Token: "token", Attempts: "attempts", NotBefore: "not_before",
		Ready: perKey.Ready, OrderBy: perKey.OrderBy, Done: perKey.Done, PerKey: perKey.PerKey.Column, KeyLimit: perKey.PerKey.Limit,
	}
	many := func(db *rowsDB) {
		db.addFor(1, 1, *manyRows)
		for customer := 2; customer < 20; customer++ {
			db.addFor(customer, *manyRows+100*customer, *manyRows+100*customer+99)
		}
		db.exec(`UPDATE tasks SET session = 's', token = 1 WHERE id < 3 OR id % 100 = 50 AND priority > 1`)
		db.exec(`ANALYZE`)
	}
	t.Run("postgres", func(t *testing.T) {
		db := rowsTableOnPostgres(t, perKey)
		many(db)
		rows := db.open().(*tenure.PostgresStore).Backend().Rows(config, testkit.Quiet).(*pgobjects.Rows)
		require.NoError(t, rows.Check(t.Context(), time.Minute))
		statements, args := rows.Statements("s0", []string{"1"}, []int64{1})
		read := regexp.MustCompile(`actual rows=(\d+) loops=(\d+)|Rows Removed by \w+: (\d+)`)
		require.NoError(t, pgx.BeginFunc(t.Context(), db.pool, func(tx pgx.Tx) error {
			testkit.ExecPostgres(t, tx, `SET LOCAL plan_cache_mode = force_custom_plan; SET LOCAL random_page_cost = 0.1`)
			for _, name := range []string{"lock keys", "take per key", "ready per key"} {
				got, err := tx.Query(t.Context(), "EXPLAIN (ANALYZE, COSTS off, TIMING off) "+statements[name], args[name]...)
				require.NoError(t, err)
				lines, err := pgx.CollectRows(got, pgx.RowTo[string])
				require.NoError(t, err)
				plan := strings.Join(lines, "\n")
				t.Log(name, plan)
				require.NotContains(t, plan, "Seq Scan on tasks", name)
				for _, found := range read.FindAllStringSubmatch(plan, -1) {
					n, loops := 0, 1
					fmt.Sscan(found[1]+found[3], &n)
					fmt.Sscan(found[2], &loops)
					require.Less(t, n*loops, 1000, "%s: %s", name, found[0])
				}
			}
			var locked string
			require.NoError(t, tx.QueryRow(t.Context(), `SELECT current_setting('tenure.keys')`).Scan(&locked))
			require.Equal(t, "{2,3,4,5,6,7,8,9,10,11}", locked)
			return nil
		}))
	})
	t.Run("sqlite", func(t *testing.T) {
		db := rowsOnSQLite(t)
		db.exec(fmt.Sprintf(createTasks, "integer"))
		db.exec(must(perKey.SQLiteDDL())(t))
		many(db)
		rows := db.open().(*tenure.SQLiteStore).Backend().Rows(config, testkit.Quiet).(*sqliteobjects.Rows)
		for _, name := range []string{"open", "open of all"} {
			got, err := db.sql.Query("EXPLAIN QUERY PLAN "+rows.Statements()[name], 10, "[]", 1, nil)
			if name == "open" {
				got, err = db.sql.Query("EXPLAIN QUERY PLAN "+rows.Statements()[name], "[]", 10)
			}
			require.NoError(t, err)
			searches := 0
			for got.Next() {
				var id, parent, unused int
				var detail string
				require.NoError(t, got.Scan(&id, &parent, &unused, &detail))
				t.Log(name, id, parent, detail)
				if strings.Contains(detail, "_per_key (priority") {
					searches++
				}
				require.NotRegexp(t, `SCAN (main\.)?(tasks|r)\b`, detail, name)
			}
			got.Close()
			require.Equal(t, map[string]int{"open": 1, "open of all": 4}[name], searches, name)
		}
		sight, err := rows.Ready(t.Context(), objects.Taking{N: 10}, time.Minute)
		require.NoError(t, err)
		require.Len(t, sight.IDs, 10)
	})
}
