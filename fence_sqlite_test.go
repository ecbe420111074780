package tenure_test

import (
	"bytes"
	"context"
	"database/sql"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tenurelib/tenure"
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
	migrate(t, openSQLite(t, path))
	dsn := "file:" + path + "?_pragma=journal_mode(wal)&_pragma=busy_timeout"
	db := openSQL(t, "sqlite", dsn+"(5000)"+params)
	store := must(tenure.NewSQLiteStore(db, tenure.SQLiteConfig{Shared: true}))
	impatient := openSQL(t, "sqlite", dsn+"(20)&_txlock=immediate")
	execSQL(t, db, `CREATE TABLE ledger (note text)`)
	term := mustAcquire(t, newLease(t, store, tenure.LeaseConfig{}))
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

func TestAStreamOfFencedWritesStarvesNoRenewalOnSQLite(t *testing.T) {
	store := openSQLite(t, t.TempDir()+"/t.db")
	migrate(t, store)
	lease := newLease(t, store, tenure.LeaseConfig{TTL: time.Minute})
	term := mustAcquire(t, lease)
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	var written atomic.Int32
	for range 2 {
		all.Go(func() {
			for ctx.Err() == nil {
				if err := store.Fenced(ctx, term, func(*sql.Tx) error { return nil }); err != nil && ctx.Err() == nil {
					t.Error(err)
				}
				written.Add(1)
			}
		})
	}
	awaitThat(t, "there is a stream", func() bool { return written.Load() > 10 })
	const renewals = 50
	before := written.Load()
	for range renewals {
		require.NoError(t, lease.Renew(t.Context(), term))
	}
	// In turn it would be two or three for each; on a busy machine the goroutine that renews
	// may have to wait now and then.
	require.LessOrEqual(t, written.Load()-before, int32(10*renewals))
	cancel()
	all.Wait()
}
