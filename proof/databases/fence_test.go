package databases_test

import (
	"context"
	"database/sql"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

// On all stores.

func TestAStoreThatIsNoFencerCannotBeFenced(t *testing.T) {
	mem := storetest.NewMem()
	term := testkit.MustAcquire(t, testkit.NewLease(t, mem, tenure.LeaseConfig{}))
	_, err := tenure.Fence(testkit.Bare(mem), term)
	require.ErrorIs(t, err, errors.ErrUnsupported)
	_, err = tenure.Fence(mem, nil)
	require.ErrorIs(t, err, tenure.ErrInvalid)
	_, err = tenure.Fence(nil, term)
	require.ErrorIs(t, err, tenure.ErrInvalid)
}

func TestASingleReplicasWritesPassTheFence(t *testing.T) {
	store, err := tenure.OpenSQLite(t.Context(), ":memory:", tenure.SQLiteConfig{Logger: testkit.Quiet})
	require.NoError(t, err)
	t.Cleanup(func() { store.Close() })
	testkit.Migrate(t, store)
	terms := make(chan *tenure.Term, 1)
	testkit.StartCoordinator(t, testkit.NewJobLog(t), store, "a", tenure.CoordinatorConfig{Reconcile: func(ctx context.Context) error {
		terms <- tenure.TermFromContext(ctx)
		return testkit.UntilDone(ctx)
	}})
	term := <-terms
	fenced, err := tenure.Fence(store, term)
	require.NoError(t, err)
	testkit.Put(t, fenced, tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}})
	require.NoError(t, store.Fenced(t.Context(), term, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(t.Context(), `CREATE TABLE ledger (note text)`)
		return err
	}))
}

func TestAFencedTransactionCommitsOnlyWhileItsTermStands(t *testing.T) {
	type fenced = func(term *tenure.Term, fn func(exec func(string) error) error) error
	test := func(t *testing.T, store tenure.Store, fenced fenced, rows func() int) {
		insert := func(exec func(string) error) error { return exec(`INSERT INTO ledger VALUES ('x')`) }
		lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
		term := testkit.MustAcquire(t, lease)
		require.NoError(t, fenced(term, insert))
		require.NoError(t, lease.Renew(t.Context(), term))
		require.NoError(t, fenced(term, insert))
		require.Equal(t, 2, rows())

		broken := errors.New("broken")
		require.ErrorIs(t, fenced(term, func(exec func(string) error) error { return errors.Join(insert(exec), broken) }), broken)
		require.Error(t, fenced(term, func(exec func(string) error) error { return exec(`INSERT INTO missing VALUES (1)`) }))
		require.PanicsWithValue(t, broken, func() {
			fenced(term, func(exec func(string) error) error { insert(exec); panic(broken) })
		})
		require.Equal(t, 2, rows(), "after failures of fn")
		require.NoError(t, fenced(term, insert)) // all of the above left no transaction open

		require.NoError(t, lease.Release(t.Context(), term))
		require.ErrorIs(t, fenced(term, insert), tenure.ErrLost)
		require.ErrorIs(t, fenced(nil, insert), tenure.ErrInvalid)
		// The process does not know that the term is over: the record decides.
		term = testkit.MustAcquire(t, lease)
		testkit.RemoveRecord(t, store)
		testkit.WantLost(t, fenced(term, insert), term, "")
		require.Equal(t, 3, rows())
	}
	t.Run("postgres", func(t *testing.T) {
		f := newFencedPostgres(t)
		require.NoError(t, f.lease.Release(t.Context(), f.term))
		test(t, f.store, func(term *tenure.Term, fn func(func(string) error) error) error {
			return f.store.Fenced(t.Context(), term, func(tx pgx.Tx) error {
				return fn(func(query string) error { _, err := tx.Exec(t.Context(), query); return err })
			})
		}, f.written)
	})
	t.Run("sqlite", func(t *testing.T) {
		path := t.TempDir() + "/t.db"
		store := testkit.OpenSQLite(t, path)
		testkit.Migrate(t, store)
		db := testkit.OpenSQL(t, "sqlite", "file:"+path+"?_pragma=busy_timeout(5000)")
		testkit.ExecSQL(t, db, `CREATE TABLE ledger (note text)`)
		test(t, store, func(term *tenure.Term, fn func(func(string) error) error) error {
			return store.Fenced(t.Context(), term, func(tx *sql.Tx) error {
				return fn(func(query string) error { _, err := tx.ExecContext(t.Context(), query); return err })
			})
		}, func() int { return countRows(t, db) })
	})
}

// On Postgres.

// reacquireSQL is the other way: the row goes and another comes.
const reacquireSQL = `DO $$ BEGIN
	DELETE FROM objects WHERE object_type = 'reconciler_lease' AND id = 'singleton';
	INSERT INTO objects VALUES ('reconciler_lease', 'singleton', NULL, '{}',
		'{"holder":"thief","term":"another","ttl_ms":30000}', 9e15, 0, 0);
END $$`

// fencedPostgres is a lease that is held, and a table of the application, to which a commit
// waits at a gate that the test can hold shut.
type fencedPostgres struct {
	t      *testing.T
	store  *tenure.PostgresStore
	pool   *pgxpool.Pool
	lease  *tenure.Lease
	term   *tenure.Term
	gate   pgx.Tx // holds the gate shut
	result chan error

	isolation string // that fn chooses; empty: the session's
	takeover  string // takeoverSQL or reacquireSQL
	unlocked  bool   // with the check that looks right, to show that the tests would catch it
}

func newFencedPostgres(t *testing.T) *fencedPostgres {
	t.Helper()
	url := testkit.PostgresURL(t)
	f := &fencedPostgres{t: t, takeover: takeoverSQL, result: make(chan error, 1)}
	f.store, f.pool = testkit.OpenPostgres(t, url, tenure.PostgresConfig{}), testkit.PostgresPool(t, url)
	testkit.Migrate(t, f.store)
	testkit.ExecPostgres(t, f.pool, `CREATE TABLE ledger (note text)`)
	testkit.ExecPostgres(t, f.pool, `CREATE FUNCTION wait_at_gate() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN PERFORM pg_advisory_xact_lock_shared(7); RETURN NULL; END $$`)
	testkit.ExecPostgres(t, f.pool, `CREATE CONSTRAINT TRIGGER gate AFTER INSERT ON ledger DEFERRABLE INITIALLY DEFERRED
		FOR EACH ROW EXECUTE FUNCTION wait_at_gate()`)
	f.lease = testkit.NewLease(t, f.store, tenure.LeaseConfig{Holder: "old"})
	f.term = testkit.MustAcquire(t, f.lease)
	return f
}

func (f *fencedPostgres) shutGate() {
	f.t.Helper()
	gate, err := f.pool.Begin(context.Background())
	require.NoError(f.t, err)
	f.gate = gate
	f.t.Cleanup(func() { gate.Rollback(context.Background()) })
	testkit.ExecPostgres(f.t, gate, `SELECT pg_advisory_xact_lock(7)`)
}

func (f *fencedPostgres) openGate() {
	f.t.Helper()
	require.NoError(f.t, f.gate.Commit(context.Background()))
}

func (f *fencedPostgres) fenced(ctx context.Context, fn func(pgx.Tx) error) error {
	if !f.unlocked {
		return f.store.Fenced(ctx, f.term, fn)
	}
	return pgx.BeginFunc(ctx, f.pool, func(tx pgx.Tx) error {
		if err := fn(tx); err != nil {
			return err
		}
		var held bool
		err := tx.QueryRow(ctx, `SELECT EXISTS (SELECT 1 FROM objects WHERE object_type = $1 AND id = $2 AND payload = $3)`,
			f.term.Key().Type, f.term.Key().ID, f.term.Record()).Scan(&held)
		if err == nil && !held {
			err = tenure.ErrLost
		}
		return err
	})
}

// write begins a fenced write. meanwhile runs in fn, after the write.
func (f *fencedPostgres) write(meanwhile func()) {
	go func() {
		f.result <- f.fenced(context.Background(), func(tx pgx.Tx) error {
			if f.isolation != "" {
				if _, err := tx.Exec(context.Background(), `SET TRANSACTION ISOLATION LEVEL `+f.isolation); err != nil {
					return err
				}
			}
			_, err := tx.Exec(context.Background(), `INSERT INTO ledger VALUES ('stale?')`)
			meanwhile()
			return err
		})
	}()
}

// written counts the rows of the table.
func (f *fencedPostgres) written() (n int) {
	if err := f.pool.QueryRow(context.Background(), `SELECT count(*) FROM ledger`).Scan(&n); err != nil {
		f.t.Error(err)
	}
	return n
}

func (f *fencedPostgres) takeOver(ctx context.Context) {
	if _, err := f.pool.Exec(ctx, f.takeover); err != nil {
		f.t.Errorf("takeover: %v", err)
	}
}

// fenceOrders are the three orders of a takeover and a fenced transaction. Each returns how
// many rows the new holder saw when its term began, how many there were in the end, and what
// the writer was told.
var fenceOrders = map[string]func(f *fencedPostgres) (seen, final int, err error){
	"the takeover commits before the check": func(f *fencedPostgres) (seen, final int, err error) {
		f.write(func() { f.takeOver(context.Background()); seen = f.written() })
		err = <-f.result
		return seen, f.written(), err
	},
	"the takeover commits between the check's snapshot and its lock": func(f *fencedPostgres) (seen, final int, err error) {
		f.shutGate()
		takeover, err := f.pool.Begin(context.Background())
		require.NoError(f.t, err)
		defer takeover.Rollback(context.Background())
		testkit.ExecPostgres(f.t, takeover, f.takeover)
		f.write(func() {})
		testkit.AwaitLockWait(f.t, f.pool) // of the check for the takeover, or of the commit at the gate
		require.NoError(f.t, takeover.Commit(context.Background()))
		seen = f.written()
		f.openGate()
		err = <-f.result
		return seen, f.written(), err
	},
	"the takeover comes between the check and the commit": func(f *fencedPostgres) (seen, final int, err error) {
		f.shutGate()
		f.write(func() {})
		testkit.AwaitLockWait(f.t, f.pool) // at the gate
		took := make(chan int, 1)
		go func() { f.takeOver(context.Background()); took <- f.written() }()
		testkit.Await(f.t, "the takeover is complete, or waits as well", func() bool {
			return len(took) > 0 || testkit.LockWaits(f.t, f.pool) == 2
		})
		f.openGate()
		seen = <-took
		err = <-f.result
		return seen, f.written(), err
	},
}

func TestNoWriteOfAFencedTransactionFollowsATakeover(t *testing.T) {
	testkit.Slow(t)
	t.Parallel()
	for order, run := range fenceOrders {
		t.Run(order, func(t *testing.T) {
			for _, how := range []struct {
				isolation, takeover string
				bouncer             bool
			}{
				{"", takeoverSQL, false},
				{"", takeoverSQL, true},
				{"", reacquireSQL, false},
				{"REPEATABLE READ", takeoverSQL, false},
				{"REPEATABLE READ", reacquireSQL, false},
				{"SERIALIZABLE", takeoverSQL, false},
			} {
				f := newFencedPostgres(t)
				f.isolation, f.takeover = how.isolation, how.takeover
				if how.bouncer {
					f.store = testkit.OpenPostgres(t, testkit.StartBouncer(t, f.pool.Config().ConnString())+"&default_query_exec_mode=exec", tenure.PostgresConfig{})
				}
				seen, final, err := run(f)
				require.Equal(t, seen, final, "%+v: a stale write landed", how)
				if final == 1 {
					require.NoError(t, err, how)
				} else if require.Error(t, err, how); how.isolation == "" {
					require.ErrorIs(t, err, tenure.ErrLost, how)
				}
			}
		})
	}
}

func TestTheTestsOfTheFenceCatchAnUnlockedCheck(t *testing.T) {
	testkit.Slow(t)
	caught := 0
	for order, run := range fenceOrders {
		t.Run(order, func(t *testing.T) {
			f := newFencedPostgres(t)
			f.unlocked = true
			if seen, final, _ := run(f); final != seen {
				caught++
			}
		})
	}
	require.Equal(t, 2, caught, "it sees a takeover that was complete before it")
}

func TestAFencedTransactionAboveReadCommittedIsEndedByARenewalRatherThanPassed(t *testing.T) {
	testkit.Slow(t)
	for _, level := range []string{"REPEATABLE READ", "SERIALIZABLE"} {
		f := newFencedPostgres(t)
		f.isolation = level
		f.write(func() {})
		require.NoError(t, <-f.result)
		f.write(func() {
			if err := f.lease.Renew(context.Background(), f.term); err != nil {
				t.Error(err)
			}
		})
		err := <-f.result
		require.NotErrorIs(t, err, tenure.ErrLost)
		require.ErrorContains(t, err, "40001", "a serialization failure")
		require.ErrorContains(t, err, "READ COMMITTED", "what to do")
		f.write(func() {})
		require.NoError(t, <-f.result)
		require.Equal(t, 2, f.written())
	}
}

func TestAFencedTransactionHoldsUpNeitherRenewalsNorATakeover(t *testing.T) {
	f := newFencedPostgres(t)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	f.write(func() {
		if err := f.lease.Renew(ctx, f.term); err != nil {
			t.Errorf("renewal while fn runs: %v", err)
		}
		f.takeOver(ctx)
	})
	testkit.WantLost(t, <-f.result, f.term, "thief")
}

func TestFnCannotEndAFencedTransactionItself(t *testing.T) {
	f, ctx := newFencedPostgres(t), t.Context()
	var kept pgx.Tx
	require.NoError(t, f.fenced(ctx, func(tx pgx.Tx) error {
		kept = tx
		_, err := tx.Exec(ctx, `INSERT INTO ledger VALUES ('x')`)
		require.NoError(t, err)
		require.ErrorIs(t, tx.Commit(ctx), tenure.ErrInvalid)
		require.ErrorIs(t, tx.Rollback(ctx), tenure.ErrInvalid)
		return pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error { // a savepoint is fine
			_, err := tx.Exec(ctx, `INSERT INTO ledger VALUES ('y')`)
			return err
		})
	}))
	_, err := kept.Exec(ctx, `INSERT INTO ledger VALUES ('stale')`)
	require.ErrorIs(t, err, pgx.ErrTxClosed)
	require.Equal(t, 2, f.written())
	require.ErrorIs(t, f.fenced(ctx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `COMMIT`)
		return err
	}), tenure.ErrInvalid)
}

func TestAFenceIsOneRoundTrip(t *testing.T) {
	url := testkit.PostgresURL(t)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	term := testkit.MustAcquire(t, testkit.NewLease(t, store, tenure.LeaseConfig{}))

	proxied, trips := countRoundTrips(t, url)
	fenced, err := tenure.Fence(testkit.OpenPostgres(t, proxied+"&pool_max_conns=1", tenure.PostgresConfig{}), term)
	require.NoError(t, err)
	obj := tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}}
	createReplaceAndDelete := func() {
		created, err := fenced.PutIf(t.Context(), obj, tenure.IfAbsent())
		require.NoError(t, err)
		written, err := fenced.PutIf(t.Context(), obj, tenure.IfVersion(created.Version))
		require.NoError(t, err)
		require.NoError(t, fenced.DeleteIf(t.Context(), obj.Key, tenure.IfVersion(written.Version)))
	}
	createReplaceAndDelete() // prepares the statements
	before := trips()
	createReplaceAndDelete()
	require.Equal(t, 3, trips()-before)
}

func TestAFencedTransactionThatIdlesTooLongIsEndedByTheServer(t *testing.T) {
	testkit.Slow(t)
	for session, want := range map[string]string{"0": "1min", "90s": "1min", "5s": "5s"} {
		f, ctx := newFencedPostgres(t), t.Context()
		f.store = testkit.OpenPostgres(t, f.pool.Config().ConnString()+"&idle_in_transaction_session_timeout="+session, tenure.PostgresConfig{})
		require.NoError(t, f.fenced(ctx, func(tx pgx.Tx) error {
			var got string
			err := tx.QueryRow(ctx, `SHOW idle_in_transaction_session_timeout`).Scan(&got)
			require.Equal(t, want, got, "session %s", session)
			return err
		}))
		idle := func(meanwhile func()) error {
			return f.fenced(ctx, func(tx pgx.Tx) error {
				// Shorter, so that the test need not wait.
				if _, err := tx.Exec(ctx, `LOCK TABLE ledger; SET LOCAL idle_in_transaction_session_timeout = 20`); err != nil {
					return err
				}
				testkit.ExecPostgres(t, f.pool, `INSERT INTO ledger VALUES ('x')`) // which waits for the lock
				meanwhile()
				return nil
			})
		}
		err := idle(func() {})
		require.NotErrorIs(t, err, tenure.ErrLost)
		require.ErrorContains(t, err, "idle")
		require.ErrorIs(t, idle(func() { f.takeOver(ctx) }), tenure.ErrLost)
	}
}

func TestManyFencedTransactionsThatLoseAtOnceAreAllToldSo(t *testing.T) {
	testkit.Slow(t)
	for _, conns := range []string{"1", "4"} {
		f := newFencedPostgres(t)
		f.store = testkit.OpenPostgres(t, f.pool.Config().ConnString()+"&pool_max_conns="+conns, tenure.PostgresConfig{})
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		takeOver := sync.OnceFunc(func() { f.takeOver(ctx) })
		told := make(chan error, 8)
		for range cap(told) {
			go func() { told <- f.fenced(ctx, func(pgx.Tx) error { takeOver(); return nil }) }()
		}
		for range cap(told) {
			testkit.WantLost(t, <-told, f.term, "thief")
		}
	}
}

func TestRenewalsDoNotWaitForFencedTransactions(t *testing.T) {
	f := newFencedPostgres(t)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	renewed := make(chan struct{})
	var busy, all sync.WaitGroup
	busy.Add(4) // all of the pool's connections
	for range 8 {
		first := sync.OnceFunc(busy.Done)
		all.Go(func() {
			err := f.fenced(ctx, func(pgx.Tx) error {
				select {
				case <-renewed:
				default:
					first()
				}
				<-renewed
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	busy.Wait()
	require.NoError(t, f.lease.Renew(ctx, f.term))
	close(renewed)
	all.Wait()
}
