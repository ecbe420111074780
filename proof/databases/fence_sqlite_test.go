package databases_test

import (
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

// On SQLite, where one transaction writes at a time. What comes between has to wait, so it
// is the place of the check that matters.

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

// takeoverUnderWayOnSQLite returns how many rows the new holder saw, how many there were in
// the end, and what the writer was told. comes is how long the fenced transaction has to
// reach the lock that the takeover has.
func takeoverUnderWayOnSQLite(t *testing.T, fenced fencedSQLite, params string, comes time.Duration) (seen, final int, err error) {
	ctx, path := t.Context(), t.TempDir()+"/t.db"
	testkit.Migrate(t, testkit.OpenSQLite(t, path))
	dsn := "file:" + path + "?_pragma=journal_mode(wal)&_pragma=busy_timeout"
	db := testkit.OpenSQL(t, "sqlite", dsn+"(5000)"+params)
	store := testkit.Must(tenure.NewSQLiteStore(db, tenure.SQLiteConfig{Shared: true}))
	impatient := testkit.OpenSQL(t, "sqlite", dsn+"(20)&_txlock=immediate")
	testkit.ExecSQL(t, db, `CREATE TABLE ledger (note text)`)
	term := testkit.MustAcquire(t, testkit.NewLease(t, store, tenure.LeaseConfig{}))
	insert := func(tx *sql.Tx) error { _, err := tx.ExecContext(ctx, `INSERT INTO ledger VALUES ('x')`); return err }

	// A takeover that comes between the check and the commit has to wait.
	require.NoError(t, fenced(store, db, term, func(tx *sql.Tx) error {
		if err := insert(tx); err != nil {
			return err
		}
		_, err := impatient.ExecContext(ctx, takeoverSQL)
		require.Error(t, err)
		return nil
	}))

	// One that is under way when the fenced transaction begins is complete before that gets
	// the lock.
	takeover, err := impatient.BeginTx(ctx, nil)
	require.NoError(t, err)
	defer takeover.Rollback()
	_, err = takeover.ExecContext(ctx, takeoverSQL)
	require.NoError(t, err)
	result := make(chan error)
	go func() { result <- fenced(store, db, term, insert) }()
	select {
	case err := <-result:
		t.Fatalf("the fenced transaction did not wait for the takeover: %v", err)
	case <-time.After(comes):
	}
	seen = countRows(t, takeover) // nobody writes meanwhile
	require.NoError(t, takeover.Commit())
	err = <-result
	return seen, countRows(t, db), err
}

func TestNoWriteOfAFencedTransactionFollowsATakeoverOnSQLite(t *testing.T) {
	for _, params := range []string{"&_txlock=immediate", ""} {
		seen, final, err := takeoverUnderWayOnSQLite(t, lockedSQLite, params, 100*time.Millisecond)
		require.ErrorIs(t, err, tenure.ErrLost)
		require.Equal(t, []int{1, 1}, []int{seen, final}, params)
	}
}

func TestTheTestOfTheFenceOnSQLiteCatchesAnUnlockedCheck(t *testing.T) {
	for comes := 100 * time.Millisecond; comes < 10*time.Second; comes *= 2 { // the machine may be slow
		if seen, final, _ := takeoverUnderWayOnSQLite(t, unlockedSQLite, "&_txlock=immediate", comes); final != seen {
			return
		}
	}
	t.Error("the unlocked check was not caught")
}

// What a refused write says contains names, which must not be taken for what SQLite says.
func TestAFenceOnSQLiteIsLostToAHolderOfAnyName(t *testing.T) {
	store := testkit.OpenSQLite(t, ":memory:")
	testkit.Migrate(t, store)
	term := testkit.MustAcquire(t, testkit.NewLease(t, store, tenure.LeaseConfig{}))
	fenced, err := tenure.Fence(store, term)
	require.NoError(t, err)
	require.NoError(t, store.DeleteIf(t.Context(), term.Key(), tenure.IfVersion(testkit.Get(t, store, term.Key()).Version)))
	for _, name := range []string{"no such table", "no such column", "UNIQUE constraint failed", "readonly database"} {
		other := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: name})
		took := testkit.MustAcquire(t, other)
		_, err = fenced.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}}, tenure.IfAbsent())
		require.ErrorIs(t, err, tenure.ErrLost)
		require.NotErrorIs(t, err, tenure.ErrSetup)
		require.NotErrorIs(t, err, tenure.ErrTaken)
		require.ErrorContains(t, err, name)
		require.NoError(t, other.Release(t.Context(), took))
	}
}

// A renewal waits for the writes that were there before it, and for none that come later.
func TestAStreamOfFencedWritesStarvesNoRenewalOnSQLite(t *testing.T) {
	testkit.Slow(t)
	const rounds, writes = 10, 20
	store := testkit.OpenSQLite(t, t.TempDir()+"/t.db")
	testkit.Migrate(t, store)
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{TTL: time.Minute})
	term := testkit.MustAcquire(t, lease)
	awaitWriters := func(n int) {
		t.Helper()
		testkit.Await(t, fmt.Sprintf("%d calls write, or wait to write", n), func() bool { return stacksOf("sqliteobjects.(*Table).transact(") == n })
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
		before := testkit.Get(t, store, testkit.LeaseKey)
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
	require.LessOrEqual(t, overtook.Load(), int32(rounds*writes/10))
}

func TestFencedTransactionsOnTheStoresOwnSQLiteHandleWaitForEachOther(t *testing.T) {
	store := testkit.OpenSQLite(t, t.TempDir()+"/t.db")
	testkit.Migrate(t, store)
	testkit.ExecSQL(t, store.DB(), `CREATE TABLE counter (n INTEGER); INSERT INTO counter VALUES (0)`)
	term := testkit.MustAcquire(t, testkit.NewLease(t, store, tenure.LeaseConfig{}))
	var all sync.WaitGroup
	for range 16 {
		all.Go(func() {
			for range 10 {
				err := tenure.FencedTx(context.Background(), store, term, store.DB(), nil, func(tx *sql.Tx) error {
					var n int
					if err := tx.QueryRow(`SELECT n FROM counter`).Scan(&n); err != nil {
						return err
					}
					_, err := tx.Exec(`UPDATE counter SET n = ?`, n+1)
					return err
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	var n int
	require.NoError(t, store.DB().QueryRow(`SELECT n FROM counter`).Scan(&n))
	require.Equal(t, 160, n)
}
