package tenure_test

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

// takeoverSQL is another replica's way to a term, in a transaction of its own, so
// that a test can stop it anywhere.
const takeoverSQL = `UPDATE objects SET payload = '{"holder":"thief","term":"another","ttl_ms":30000}',
	resource_version = resource_version + 1 WHERE object_type = 'reconciler_lease' AND id = 'singleton'`

// reacquireSQL is the other way: the row goes and another comes.
const reacquireSQL = `DO $$ BEGIN
	DELETE FROM objects WHERE object_type = 'reconciler_lease' AND id = 'singleton';
	INSERT INTO objects VALUES ('reconciler_lease', 'singleton', NULL, '{}',
		'{"holder":"thief","term":"another","ttl_ms":30000}', 9e15, 0, 0);
END $$`

// fencedPostgres runs fn in a fenced transaction; unlockedPostgres is the same
// with the check that looks right, to show that the tests would catch it.
type fencedPostgres func(ctx context.Context, store *tenure.PostgresStore, pool *pgxpool.Pool, term *tenure.Term, fn func(pgx.Tx) error) error

func lockedPostgres(ctx context.Context, store *tenure.PostgresStore, _ *pgxpool.Pool, term *tenure.Term, fn func(pgx.Tx) error) error {
	return store.Fenced(ctx, term, fn)
}

func unlockedPostgres(ctx context.Context, _ *tenure.PostgresStore, pool *pgxpool.Pool, term *tenure.Term, fn func(pgx.Tx) error) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if err := fn(tx); err != nil {
			return err
		}
		var held bool
		err := tx.QueryRow(ctx, `SELECT EXISTS (SELECT 1 FROM objects WHERE object_type = $1 AND id = $2 AND payload = $3)`,
			term.Key().Type, term.Key().ID, term.Record()).Scan(&held)
		if err == nil && !held {
			err = tenure.ErrLost
		}
		return err
	})
}

// fenceTrial is one fenced write to a table of the application, whose commit
// waits at a gate that the test holds shut.
type fenceTrial struct {
	t      *testing.T
	store  *tenure.PostgresStore
	pool   *pgxpool.Pool
	term   *tenure.Term
	gate   pgx.Tx // holds the gate shut
	result chan error
	fenced fencedPostgres

	isolation string // that fn chooses; empty: the session's
	takeover  string // takeoverSQL or reacquireSQL
}

func newFenceTrial(t *testing.T, fenced fencedPostgres, isolation, takeover string) *fenceTrial {
	url := postgresURL(t)
	f := &fenceTrial{t: t, fenced: fenced, isolation: isolation, takeover: takeover, result: make(chan error, 1)}
	f.store = openPostgres(t, url, tenure.PostgresConfig{})
	migrate(t, f.store)
	f.pool = postgresPool(t, url)
	execPostgres(t, f.pool, `CREATE TABLE ledger (note text)`)
	execPostgres(t, f.pool, `CREATE FUNCTION wait_at_gate() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN PERFORM pg_advisory_xact_lock_shared(7); RETURN NULL; END $$`)
	execPostgres(t, f.pool, `CREATE CONSTRAINT TRIGGER gate AFTER INSERT ON ledger DEFERRABLE INITIALLY DEFERRED
		FOR EACH ROW EXECUTE FUNCTION wait_at_gate()`)
	f.term = mustAcquire(t, newLease(t, f.store, tenure.LeaseConfig{Holder: "old"}))
	return f
}

func (f *fenceTrial) shutGate() {
	f.t.Helper()
	gate, err := f.pool.Begin(context.Background())
	wantErr(f.t, err, nil)
	f.gate = gate
	f.t.Cleanup(func() { gate.Rollback(context.Background()) })
	execPostgres(f.t, gate, `SELECT pg_advisory_xact_lock(7)`)
}

func (f *fenceTrial) openGate() {
	f.t.Helper()
	wantErr(f.t, f.gate.Commit(context.Background()), nil)
}

// write begins the fenced write. meanwhile runs in fn, after the write.
func (f *fenceTrial) write(meanwhile func()) {
	go func() {
		f.result <- f.fenced(context.Background(), f.store, f.pool, f.term, func(tx pgx.Tx) error {
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

func (f *fenceTrial) written() (n int) {
	f.t.Helper()
	wantErr(f.t, f.pool.QueryRow(context.Background(), `SELECT count(*) FROM ledger`).Scan(&n), nil)
	return n
}

// The three orders of a takeover and a fenced transaction. Each returns how many
// rows the new holder saw when its term began, how many there were in the end,
// and what the writer was told.
var fenceOrders = map[string]func(f *fenceTrial) (seen, final int, err error){
	"the takeover commits before the check": func(f *fenceTrial) (seen, final int, err error) {
		f.write(func() { execPostgres(f.t, f.pool, f.takeover); seen = f.written() })
		err = <-f.result
		return seen, f.written(), err
	},
	"the takeover commits between the check's snapshot and its lock": func(f *fenceTrial) (seen, final int, err error) {
		f.shutGate()
		takeover, beginErr := f.pool.Begin(context.Background())
		wantErr(f.t, beginErr, nil)
		defer takeover.Rollback(context.Background())
		execPostgres(f.t, takeover, f.takeover)
		f.write(func() {})
		awaitLockWait(f.t, f.pool) // of the check for the takeover, or of the commit at the gate
		wantErr(f.t, takeover.Commit(context.Background()), nil)
		seen = f.written()
		f.openGate()
		err = <-f.result
		return seen, f.written(), err
	},
	"the takeover comes between the check and the commit": func(f *fenceTrial) (seen, final int, err error) {
		f.shutGate()
		f.write(func() {})
		awaitLockWait(f.t, f.pool) // at the gate
		took := make(chan int, 1)
		go func() {
			if _, err := f.pool.Exec(context.Background(), f.takeover); err != nil {
				f.t.Error(err)
			}
			took <- f.written()
		}()
		awaitThat(f.t, "the takeover is complete, or waits as well", func() bool {
			return len(took) > 0 || lockWaits(f.t, f.pool) == 2
		})
		f.openGate()
		seen = <-took
		err = <-f.result
		return seen, f.written(), err
	},
}

// I2.
func TestNoWriteOfAFencedTransactionFollowsATakeover(t *testing.T) {
	for order, run := range fenceOrders {
		t.Run(order, func(t *testing.T) {
			for _, how := range []struct{ isolation, takeover string }{
				{"", takeoverSQL},
				{"", reacquireSQL},
				{"REPEATABLE READ", takeoverSQL},
				{"REPEATABLE READ", reacquireSQL},
				{"SERIALIZABLE", takeoverSQL},
			} {
				seen, final, err := run(newFenceTrial(t, lockedPostgres, how.isolation, how.takeover))
				if final != seen {
					t.Errorf("%+v: a stale write landed: the new holder saw %d rows, and then there were %d", how, seen, final)
				}
				if lost := errors.Is(err, tenure.ErrLost); final == 0 && err == nil || final == 1 && err != nil ||
					how.isolation == "" && final == 0 && !lost {
					t.Errorf("%+v: %d rows, but the writer was told %v", how, final, err)
				}
			}
		})
	}
}

func TestTheTestsOfTheFenceCatchAnUnlockedCheck(t *testing.T) {
	caught := 0
	for order, run := range fenceOrders {
		t.Run(order, func(t *testing.T) {
			if seen, final, err := run(newFenceTrial(t, unlockedPostgres, "", takeoverSQL)); final != seen {
				t.Logf("caught: the new holder saw %d rows, then there were %d (error %v)", seen, final, err)
				caught++
			}
		})
	}
	if caught != 2 { // an unlocked check sees a takeover that was complete before it
		t.Errorf("the unlocked check was caught in %d orders, want 2", caught)
	}
}

func TestAFencedTransactionAboveReadCommittedIsEndedByARenewalRatherThanPassed(t *testing.T) {
	for _, level := range []string{"REPEATABLE READ", "SERIALIZABLE"} {
		f := newFenceTrial(t, lockedPostgres, level, takeoverSQL)
		lease := newLease(t, f.store, tenure.LeaseConfig{Holder: "old"})
		f.write(func() {})
		wantErr(t, <-f.result, nil)
		f.write(func() { wantErr(t, lease.Renew(context.Background(), f.term), nil) })
		if err := <-f.result; err == nil || errors.Is(err, tenure.ErrLost) || !strings.Contains(err.Error(), "40001") || !strings.Contains(err.Error(), "READ COMMITTED") {
			t.Errorf("%s: got %v, want a serialization failure that says what to do", level, err)
		}
		f.write(func() {})
		wantErr(t, <-f.result, nil)
		if got := f.written(); got != 2 {
			t.Errorf("%s: %d rows, want 2", level, got)
		}
	}
}

func TestAFencedTransactionHoldsUpNeitherRenewalsNorATakeover(t *testing.T) {
	f := newFenceTrial(t, lockedPostgres, "", takeoverSQL)
	lease := newLease(t, f.store, tenure.LeaseConfig{Holder: "old"})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	f.write(func() {
		if err := lease.Renew(ctx, f.term); err != nil {
			t.Errorf("renewal while fn runs: %v", err)
		}
		if _, err := f.pool.Exec(ctx, f.takeover); err != nil {
			t.Errorf("takeover while fn runs: %v", err)
		}
	})
	err := <-f.result
	var lost *tenure.LostError
	if !errors.As(err, &lost) || lost.To == nil || lost.To.Holder != "thief" {
		t.Errorf("got %v, want a LostError to thief", err)
	}
	if f.term.Valid() {
		t.Error("the term is valid after the store said that it is over")
	}
}

// fencedStores runs a test with Fenced of both stores, on a table of the
// application's with one column. exec runs a statement in the transaction.
func fencedStores(t *testing.T, test func(t *testing.T, store tenure.Store, fenced func(*tenure.Term, func(exec func(string) error) error) error, count func() int)) {
	t.Run("postgres", func(t *testing.T) {
		url := postgresURL(t)
		store := openPostgres(t, url, tenure.PostgresConfig{})
		migrate(t, store)
		pool := postgresPool(t, url)
		execPostgres(t, pool, `CREATE TABLE ledger (note text)`)
		test(t, store, func(term *tenure.Term, fn func(func(string) error) error) error {
			return store.Fenced(t.Context(), term, func(tx pgx.Tx) error {
				return fn(func(query string) error { _, err := tx.Exec(t.Context(), query); return err })
			})
		}, func() (n int) {
			wantErr(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM ledger`).Scan(&n), nil)
			return n
		})
	})
	t.Run("sqlite", func(t *testing.T) {
		path := t.TempDir() + "/t.db"
		store := openSQLite(t, path)
		migrate(t, store)
		db := openSQL(t, "sqlite", "file:"+path+"?_pragma=busy_timeout(5000)")
		execSQL(t, db, `CREATE TABLE ledger (note text)`)
		test(t, store, func(term *tenure.Term, fn func(func(string) error) error) error {
			return store.Fenced(t.Context(), term, func(tx *sql.Tx) error {
				return fn(func(query string) error { _, err := tx.ExecContext(t.Context(), query); return err })
			})
		}, func() (n int) {
			wantErr(t, db.QueryRow(`SELECT count(*) FROM ledger`).Scan(&n), nil)
			return n
		})
	})
}

func TestAFencedTransactionCommitsOnlyWhileItsTermStands(t *testing.T) {
	fencedStores(t, func(t *testing.T, store tenure.Store, fenced func(*tenure.Term, func(func(string) error) error) error, count func() int) {
		insert := func(exec func(string) error) error { return exec(`INSERT INTO ledger VALUES ('x')`) }
		lease := newLease(t, store, tenure.LeaseConfig{})
		term := mustAcquire(t, lease)
		wantErr(t, fenced(term, insert), nil)
		wantErr(t, lease.Renew(t.Context(), term), nil)
		wantErr(t, fenced(term, insert), nil)
		if got := count(); got != 2 {
			t.Fatalf("%d rows, want 2", got)
		}

		broken := errors.New("broken")
		wantErr(t, fenced(term, func(exec func(string) error) error { return errors.Join(insert(exec), broken) }), broken)
		if err := fenced(term, func(exec func(string) error) error { return exec(`INSERT INTO missing VALUES (1)`) }); err == nil {
			t.Error("a statement that fails is no error")
		}
		func() {
			defer func() {
				if got := recover(); got != broken {
					t.Errorf("recovered %v, want fn's panic", got)
				}
			}()
			fenced(term, func(exec func(string) error) error { insert(exec); panic(broken) })
		}()
		if got := count(); got != 2 {
			t.Fatalf("%d rows after failures of fn, want 2", got)
		}
		wantErr(t, fenced(term, insert), nil) // all of the above left no transaction open

		wantErr(t, lease.Release(t.Context(), term), nil)
		wantErr(t, fenced(term, insert), tenure.ErrLost)
		wantErr(t, fenced(nil, insert), tenure.ErrInvalid)
		// A copy of the term in a process that does not know of the release: the
		// record decides.
		again := mustAcquire(t, lease)
		h, err := lease.Read(t.Context())
		wantErr(t, err, nil)
		wantErr(t, store.DeleteIf(t.Context(), leaseKey, h.Version), nil)
		wantErr(t, fenced(again, insert), tenure.ErrLost)
		if again.Valid() {
			t.Error("the term is valid after the store said that it is over")
		}
		if got := count(); got != 3 {
			t.Errorf("%d rows, want 3", got)
		}
	})
}

func TestFnCannotEndAFencedTransactionByItself(t *testing.T) {
	f := newFenceTrial(t, lockedPostgres, "", takeoverSQL)
	ctx := t.Context()
	err := f.store.Fenced(ctx, f.term, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `INSERT INTO ledger VALUES ('x')`); err != nil {
			return err
		}
		wantErr(t, tx.Commit(ctx), tenure.ErrInvalid)
		wantErr(t, tx.Rollback(ctx), tenure.ErrInvalid)
		return pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error { // a savepoint is fine
			_, err := tx.Exec(ctx, `INSERT INTO ledger VALUES ('y')`)
			return err
		})
	})
	wantErr(t, err, nil)
	if got := f.written(); got != 2 {
		t.Errorf("%d rows, want 2", got)
	}
	err = f.store.Fenced(ctx, f.term, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `COMMIT`)
		return err
	})
	wantErr(t, err, tenure.ErrInvalid)
}

// The orders for SQLite, where one transaction writes at a time: what comes
// between must wait, so it is the check's place that matters. Each returns
// whether a stale write landed.

type fencedSQLite func(store *tenure.SQLiteStore, db *sql.DB, term *tenure.Term, fn func(*sql.Tx) error) error

func lockedSQLite(store *tenure.SQLiteStore, _ *sql.DB, term *tenure.Term, fn func(*sql.Tx) error) error {
	return store.Fenced(context.Background(), term, fn)
}

// unlockedSQLite checks before its transaction has the lock.
func unlockedSQLite(store *tenure.SQLiteStore, db *sql.DB, term *tenure.Term, fn func(*sql.Tx) error) error {
	obj, err := store.Get(context.Background(), term.Key())
	if err != nil || !bytes.Equal(obj.Payload, term.Record()) {
		return tenure.ErrLost
	}
	tx, err := db.Begin()
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := fn(tx); err != nil {
		return err
	}
	return tx.Commit()
}

// comes is how long the fenced transaction has to come to the lock that the takeover
// has.
func takeoverUnderWayOnSQLite(t *testing.T, fenced fencedSQLite, params string, comes time.Duration) (seen, final int, err error) {
	ctx, path := t.Context(), t.TempDir()+"/t.db"
	migrate(t, openSQLite(t, path))
	dsn := "file:" + path + "?_pragma=journal_mode(wal)&_pragma=busy_timeout"
	db := openSQL(t, "sqlite", dsn+"(5000)"+params)
	store := must(tenure.NewSQLiteStore(db, tenure.SQLiteConfig{Shared: true}))
	impatient := openSQL(t, "sqlite", dsn+"(20)&_txlock=immediate")
	execSQL(t, db, `CREATE TABLE ledger (note text)`)
	term := mustAcquire(t, newLease(t, store, tenure.LeaseConfig{}))
	rows := func() (n int) {
		wantErr(t, db.QueryRow(`SELECT count(*) FROM ledger`).Scan(&n), nil)
		return n
	}
	insert := func(tx *sql.Tx) error { _, err := tx.ExecContext(ctx, `INSERT INTO ledger VALUES ('x')`); return err }

	// One that comes between the check and the commit has to wait.
	wantErr(t, fenced(store, db, term, func(tx *sql.Tx) error {
		if err := insert(tx); err != nil {
			return err
		}
		if _, err := impatient.ExecContext(ctx, takeoverSQL); err == nil {
			t.Error("a takeover committed between the check and the commit")
		}
		return nil
	}), nil)

	// One that is under way when the fenced transaction begins is complete before
	// it gets the lock.
	takeover, err := impatient.BeginTx(ctx, nil)
	wantErr(t, err, nil)
	defer takeover.Rollback()
	_, err = takeover.ExecContext(ctx, takeoverSQL)
	wantErr(t, err, nil)
	result := make(chan error)
	go func() { result <- fenced(store, db, term, insert) }()
	select {
	case err := <-result:
		t.Fatalf("the fenced transaction did not wait for the takeover: %v", err)
	case <-time.After(comes):
	}
	// The new holder looks within its own transaction: nobody writes meanwhile.
	wantErr(t, takeover.QueryRowContext(ctx, `SELECT count(*) FROM ledger`).Scan(&seen), nil)
	wantErr(t, takeover.Commit(), nil)
	err = <-result
	return seen, rows(), err
}

func TestNoWriteOfAFencedTransactionFollowsATakeoverOnSQLite(t *testing.T) {
	for name, params := range map[string]string{"immediate": "&_txlock=immediate", "deferred": ""} {
		t.Run(name, func(t *testing.T) {
			seen, final, err := takeoverUnderWayOnSQLite(t, lockedSQLite, params, 100*time.Millisecond)
			wantErr(t, err, tenure.ErrLost)
			if seen != 1 || final != 1 {
				t.Errorf("the new holder saw %d rows, and then there were %d; want 1 and 1", seen, final)
			}
		})
	}
}

func TestTheTestOfTheFenceOnSQLiteCatchesAnUnlockedCheck(t *testing.T) {
	for comes := 100 * time.Millisecond; comes < 10*time.Second; comes *= 2 { // the machine may be slow
		seen, final, err := takeoverUnderWayOnSQLite(t, unlockedSQLite, "&_txlock=immediate", comes)
		if final != seen {
			return
		}
		t.Logf("%d rows before and after (error %v)", seen, err)
	}
	t.Error("the unlocked check was not caught")
}

func TestAStoreThatIsNoFencerCannotBeFenced(t *testing.T) {
	mem := storetest.NewMem()
	term := mustAcquire(t, newLease(t, mem, tenure.LeaseConfig{}))
	_, err := tenure.Fence(struct{ tenure.Store }{mem}, term)
	wantErr(t, err, errors.ErrUnsupported)
	_, err = tenure.Fence(mem, nil)
	wantErr(t, err, tenure.ErrInvalid)
	_, err = tenure.Fence(nil, term)
	wantErr(t, err, tenure.ErrInvalid)
}

func TestASingleReplicasWritesPassTheFence(t *testing.T) {
	store, err := tenure.OpenSQLite(t.Context(), ":memory:", tenure.SQLiteConfig{Logger: quiet})
	wantErr(t, err, nil)
	defer store.Close()
	migrate(t, store)
	ctx, cancel := context.WithCancel(t.Context())
	c, err := tenure.NewCoordinator(newLease(t, store, tenure.LeaseConfig{}), tenure.CoordinatorConfig{
		Reconcile: func(ctx context.Context) error {
			defer cancel()
			term := tenure.TermFromContext(ctx)
			fenced, err := tenure.Fence(store, term)
			wantErr(t, err, nil)
			put(t, fenced, tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}})
			wantErr(t, store.Fenced(ctx, term, func(tx *sql.Tx) error {
				_, err := tx.ExecContext(ctx, `CREATE TABLE ledger (note text)`)
				return err
			}), nil)
			return nil
		},
	})
	wantErr(t, err, nil)
	wantErr(t, c.Run(ctx), nil)
}

func TestAFenceIsOneRoundTrip(t *testing.T) {
	url := postgresURL(t)
	store := openPostgres(t, url, tenure.PostgresConfig{})
	migrate(t, store)
	term := mustAcquire(t, newLease(t, store, tenure.LeaseConfig{}))

	proxied, trips := countRoundTrips(t, url)
	counted := openPostgres(t, proxied+"&pool_max_conns=1", tenure.PostgresConfig{})
	fenced, err := tenure.Fence(counted, term)
	wantErr(t, err, nil)
	obj := tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}}
	round := func() (tenure.Object, tenure.Object) {
		created, err := fenced.PutIf(t.Context(), obj, tenure.MustCreate())
		wantErr(t, err, nil)
		written, err := fenced.PutIf(t.Context(), obj, tenure.MatchVersion(created.Version))
		wantErr(t, err, nil)
		return created, written
	}
	_, written := round() // prepares the statements
	wantErr(t, fenced.DeleteIf(t.Context(), obj.Key, written.Version), nil)

	before := trips()
	_, written = round()
	wantErr(t, fenced.DeleteIf(t.Context(), obj.Key, written.Version), nil)
	if got := trips() - before; got != 3 {
		t.Errorf("create, replace and delete took %d round trips, want 3", got)
	}
}

func TestAFencedTransactionThatIdlesTooLongIsEndedByTheServer(t *testing.T) {
	for session, want := range map[string]string{"0": "1min", "90s": "1min", "5s": "5s"} {
		f := newFenceTrial(t, lockedPostgres, "", takeoverSQL)
		f.store = openPostgres(t, f.pool.Config().ConnString()+"&idle_in_transaction_session_timeout="+session, tenure.PostgresConfig{})
		ctx := t.Context()
		err := f.store.Fenced(ctx, f.term, func(tx pgx.Tx) error {
			var got string
			err := tx.QueryRow(ctx, `SHOW idle_in_transaction_session_timeout`).Scan(&got)
			if got != want {
				t.Errorf("session %s: got timeout %s, want %s", session, got, want)
			}
			return err
		})
		wantErr(t, err, nil)
		idle := func(meanwhile func()) error {
			return f.store.Fenced(ctx, f.term, func(tx pgx.Tx) error {
				if _, err := tx.Exec(ctx, `LOCK TABLE ledger`); err != nil {
					return err
				}
				// Shorter, so that the test need not wait.
				if _, err := tx.Exec(ctx, `SET LOCAL idle_in_transaction_session_timeout = 20`); err != nil {
					return err
				}
				// Another replica waits for what this paused one has locked.
				execPostgres(t, f.pool, `INSERT INTO ledger VALUES ('x')`)
				meanwhile()
				return nil
			})
		}
		if err := idle(func() {}); err == nil || errors.Is(err, tenure.ErrLost) || !strings.Contains(err.Error(), "idle") {
			t.Errorf("got %v, want the server's error", err)
		}
		wantErr(t, idle(func() { execPostgres(t, f.pool, takeoverSQL) }), tenure.ErrLost)
	}
}

func TestATransactionThatOutlivesFencedIsClosed(t *testing.T) {
	f := newFenceTrial(t, lockedPostgres, "", takeoverSQL)
	ctx := t.Context()
	var kept pgx.Tx
	wantErr(t, f.store.Fenced(ctx, f.term, func(tx pgx.Tx) error { kept = tx; return nil }), nil)
	_, err := kept.Exec(ctx, `INSERT INTO ledger VALUES ('stale')`)
	wantErr(t, err, pgx.ErrTxClosed)
	if got := f.written(); got != 0 {
		t.Errorf("%d rows, want none", got)
	}
}

func TestManyFencedTransactionsThatLoseAtOnceAreAllToldSo(t *testing.T) {
	for _, conns := range []string{"1", "4"} {
		f := newFenceTrial(t, lockedPostgres, "", takeoverSQL)
		store := openPostgres(t, f.pool.Config().ConnString()+"&pool_max_conns="+conns, tenure.PostgresConfig{})
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		takeover := sync.OnceFunc(func() { execPostgres(t, f.pool, takeoverSQL) })
		var all sync.WaitGroup
		for range 8 {
			all.Go(func() {
				err := store.Fenced(ctx, f.term, func(tx pgx.Tx) error { takeover(); return nil })
				var lost *tenure.LostError
				if !errors.As(err, &lost) || lost.To == nil || lost.To.Holder != "thief" {
					t.Errorf("%s connections: got %v, want it lost to thief", conns, err)
				}
			})
		}
		all.Wait()
	}
}

func TestRenewalsDoNotWaitForFencedTransactions(t *testing.T) {
	f := newFenceTrial(t, lockedPostgres, "", takeoverSQL)
	lease := newLease(t, f.store, tenure.LeaseConfig{Holder: "old"})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	renewed := make(chan struct{})
	var busy, all sync.WaitGroup
	busy.Add(4) // all of the pool's connections
	for range 8 {
		first := sync.OnceFunc(busy.Done)
		all.Go(func() {
			err := f.store.Fenced(ctx, f.term, func(pgx.Tx) error {
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
	wantErr(t, lease.Renew(ctx, f.term), nil)
	close(renewed)
	all.Wait()
}

// A renewal waits for the writes that were there before it, and for none that come later.
func TestAStreamOfFencedWritesStarvesNoRenewalOnSQLite(t *testing.T) {
	const rounds, writes = 10, 20
	store := openSQLite(t, t.TempDir()+"/t.db")
	migrate(t, store)
	lease := newLease(t, store, tenure.LeaseConfig{TTL: time.Minute})
	term := mustAcquire(t, lease)
	awaitWriters := func(n int) {
		t.Helper()
		awaitThat(t, fmt.Sprintf("%d calls write, or wait to write", n), func() bool { return stacksOf("sqliteobjects.(*Table).transact(") == n })
	}
	var all sync.WaitGroup
	fenced := func(fn func(tx *sql.Tx) error) {
		all.Go(func() {
			if err := store.Fenced(t.Context(), term, fn); err != nil {
				t.Error(err)
			}
		})
	}
	var overtook atomic.Int32
	for range rounds {
		before, err := store.Get(t.Context(), leaseKey)
		wantErr(t, err, nil)
		entered, leave := make(chan struct{}), make(chan struct{})
		fenced(func(*sql.Tx) error { close(entered); <-leave; return nil })
		<-entered
		all.Go(func() {
			if err := lease.Renew(t.Context(), term); err != nil {
				t.Error(err)
			}
		})
		awaitWriters(2)
		for range writes {
			fenced(func(tx *sql.Tx) error {
				var version int64
				err := tx.QueryRow(`SELECT resource_version FROM objects`).Scan(&version)
				if version == before.Version {
					overtook.Add(1)
				}
				return err
			})
		}
		awaitWriters(2 + writes)
		close(leave)
		all.Wait()
	}
	// A renewal that is seen to wait may not have joined the queue yet. Without a queue, most
	// of the writes overtake it.
	if n := overtook.Load(); n > rounds*writes/10 {
		t.Errorf("%d of %d writes overtook a renewal that waited already", n, rounds*writes)
	}
}
