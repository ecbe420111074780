//go:build linux

package mysqltenure_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/stores/mysqltenure"
)

var levels = []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable}

const races = 300

// Both begin at the same moment, by chance.
func TestInRacesNoFencedTransactionCommitsAfterATakeover(t *testing.T) {
	t.Parallel()
	for _, level := range levels {
		t.Run(level.String(), func(t *testing.T) {
			t.Parallel()
			name := newDatabase(t, shared(t))
			db := pool(t, strings.Replace(shared(t).DSN("admin", ""), "/"+database, "/"+name, 1))
			store := openOn(t, db, "")
			exec1(t, db, testkit.CreateLedger)
			n := races
			if testing.Short() {
				n /= 10
			}
			testkit.RunFenceRaces(t, store, db, level, "INSERT INTO ledger VALUES (?)", n)
		})
	}
}

// newDatabase creates a database for a test.
func newDatabase(t testing.TB, s *server) string {
	t.Helper()
	name := "of_" + newTable()
	exec1(t, s.db(t, "admin", ""), "CREATE DATABASE "+name)
	return name
}

// A takeover is sent while a transaction is held right before its fence, or right after it. The order of the commits is
// the order in which the calls return: a takeover that waits for the transaction comes after it.
func TestOfForcedRacesNoFencedTransactionCommitsAfterTheTakeover(t *testing.T) {
	t.Parallel()
	for _, level := range levels {
		t.Run(level.String(), func(t *testing.T) {
			t.Parallel()
			table := newTable()
			store := open(t, shared(t), table)
			exec1(t, store.DB(), "CREATE TABLE ledger_"+table+" (token BIGINT NOT NULL)")
			var refused, waited int
			for n := range races {
				afterFence := n%2 == 1
				lease := testkit.NewLease(t, store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: fmt.Sprint(n)}})
				term := testkit.MustAcquire(t, lease)
				record := testkit.Get(t, store, lease.Key())
				record.Payload = []byte(`{"holder":"b","term":"x","ttl_ms":1000}`)
				fence, args, err := store.FenceStatement(term)
				require.NoError(t, err)

				tx, err := store.DB().BeginTx(t.Context(), &sql.TxOptions{Isolation: level})
				require.NoError(t, err)
				var seen int // so that above READ COMMITTED there is a snapshot from before the takeover
				require.NoError(t, tx.QueryRow("SELECT COUNT(*) FROM "+table).Scan(&seen))
				exec1(t, tx, "INSERT INTO ledger_"+table+" VALUES (?)", term.Token())
				if level == sql.LevelSerializable && !afterFence {
					require.NoError(t, tx.Rollback()) // its read has locked the record: the takeover would wait
					tx, err = store.DB().BeginTx(t.Context(), &sql.TxOptions{Isolation: level})
					require.NoError(t, err)
					exec1(t, tx, "INSERT INTO ledger_"+table+" VALUES (?)", term.Token())
				}
				if afterFence {
					exec1(t, tx, fence, args...)
				}
				taken := make(chan error, 1)
				go func() {
					_, err := store.PutIf(context.Background(), record, tenure.IfVersion(record.Version))
					taken <- err
				}()
				if afterFence {
					select {
					case err := <-taken:
						t.Fatalf("the takeover did not wait for the transaction: %v", err)
					case <-time.After(2 * time.Millisecond):
					}
					require.NoError(t, tx.Commit())
					require.NoError(t, <-taken)
					waited++
				} else {
					require.NoError(t, <-taken)
					_, err := tx.ExecContext(t.Context(), fence, args...)
					require.ErrorIs(t, tenure.FenceError(err), tenure.ErrLost)
					require.NoError(t, tx.Rollback())
					refused++
				}
				var rows int
				require.NoError(t, store.DB().QueryRow("SELECT COUNT(*) FROM ledger_"+table+" WHERE token = ?", term.Token()).Scan(&rows))
				require.Equal(t, map[bool]int{true: 1, false: 0}[afterFence], rows)
			}
			t.Logf("%v: %d takeovers waited for the commit, %d transactions were refused, 0 were late", level, waited, refused)
		})
	}
}

// Fenced writes of a store race against takeovers. A takeover reads what the writes have left while it has the record's lock, so
// that the order of the commits is known. The versions do not tell it: a takeover that waits for a lock has a version from before.
func TestOfForcedRacesNoStaleWriteIsAccepted(t *testing.T) {
	t.Parallel()
	store, table, _, _ := begun(t)
	db := shared(t).db(t, "app", "interpolateParams=true")
	runStaleWrites(t, store, store, db, table, races)
}

// runStaleWrites makes fenced writes in the first store, and takeovers in the second or in its database, which is
// table's.
func runStaleWrites(t *testing.T, first, second *mysqltenure.Store, db *sql.DB, table string, races int) {
	t.Helper()
	var accepted, refused, inversions int
	var late time.Duration // of the takeover, adapted so that each side wins about as often
	for n := range races {
		lease := testkit.NewLease(t, first, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: fmt.Sprint("stale-", n)}})
		term := testkit.MustAcquire(t, lease)
		fenced, err := first.Fence(term)
		require.NoError(t, err)
		sent := time.Now()
		obj := testkit.Put(t, first, tenure.Object{Key: widget, Payload: []byte("before")})
		took := time.Since(sent)
		before := "before"
		if n%2 == 1 { // the fenced write creates it, which takes a transaction
			require.NoError(t, first.DeleteIf(t.Context(), widget, tenure.IfVersion(obj.Version)))
			before = ""
		}
		testkit.Get(t, second, lease.Key())

		seen, version := make(chan string, 1), int64(0)
		sent = time.Now()
		wait := func(d time.Duration) {
			for time.Since(sent) < d { // a timer is too slow
				runtime.Gosched()
			}
		}
		go func() {
			wait(late)
			saw, err := takeOver(db, table, lease.Key())
			if err != nil {
				saw = err.Error()
			}
			seen <- saw
		}()
		wait(-late)
		landed, stale := fenced.PutIf(t.Context(), tenure.Object{Key: widget, Payload: []byte("fenced")}, tenure.Unconditional())
		saw := <-seen
		version = testkit.Get(t, second, lease.Key()).Version
		now, err := second.Get(t.Context(), widget)
		if !errors.Is(err, tenure.ErrNotFound) {
			require.NoError(t, err)
		}
		is := string(now.Payload)
		require.Contains(t, []string{before, "fenced"}, saw)
		require.Equal(t, saw, is, "race %d: a write landed after the takeover", n)
		if stale == nil {
			require.Equal(t, "fenced", is)
			accepted++
			late -= took / 4
			if landed.Version > version {
				inversions++
			}
		} else {
			require.ErrorIs(t, stale, tenure.ErrLost)
			require.Equal(t, before, is)
			refused++
			late += took / 4
		}
	}
	t.Logf("%d fenced writes came before the takeover (%d of them with a greater version), %d were refused after it, 0 were late", accepted, inversions, refused)
	require.Greater(t, min(accepted, refused), races/20)
}

// takeOver replaces a lease's record, and returns what the widget is while the record is locked.
func takeOver(db *sql.DB, table string, key tenure.Key) (seen string, err error) {
	tx, err := db.BeginTx(context.Background(), &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		return "", err
	}
	defer tx.Rollback()
	_, err = tx.Exec("UPDATE "+table+" SET payload = 'taken', resource_version = GREATEST(resource_version + 1, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))) WHERE object_type = ? AND id = ?", key.Type, key.ID)
	if err == nil {
		err = tx.QueryRow("SELECT COALESCE(payload, '') FROM " + table + " WHERE object_type = 'widget' AND id = 'a'").Scan(&seen)
	}
	if err != nil {
		return "", err
	}
	return seen, tx.Commit()
}

// begun returns a store, its table, and a term.
func begun(t *testing.T) (store *mysqltenure.Store, table string, lease *tenure.Lease, term *tenure.Term) {
	table = newTable()
	store = open(t, shared(t), table)
	lease = testkit.NewLease(t, store, tenure.LeaseConfig{})
	return store, table, lease, testkit.MustAcquire(t, lease)
}

func TestAFenceStatementMakesItsTransactionFail(t *testing.T) {
	t.Parallel()
	table := newTable()
	runFailures(t, shared(t), open(t, shared(t), table), table)
}

func runFailures(t *testing.T, s *server, store *mysqltenure.Store, table string) {
	t.Helper()
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
	term := testkit.MustAcquire(t, lease)
	fence, args, err := store.FenceStatement(term)
	require.NoError(t, err)
	for _, parameters := range []string{"", "interpolateParams=true", "sql_mode=''", "sql_mode=''&interpolateParams=true", "clientFoundRows=true", "charset=latin1"} {
		db := s.db(t, "app", parameters)
		exec1(t, db, fence, args...)
		require.NoError(t, lease.Renew(t.Context(), term), "the version stays")
		exec1(t, db, fence, args...)
	}
	fails := func(what string) {
		t.Helper()
		for _, parameters := range []string{"", "interpolateParams=true", "sql_mode=''", "sql_mode=''&interpolateParams=true"} {
			_, err := s.db(t, "app", parameters).ExecContext(t.Context(), fence, args...)
			require.ErrorIs(t, tenure.FenceError(err), tenure.ErrLost, what+" "+parameters)
		}
	}
	record := testkit.Get(t, store, lease.Key())
	other := record
	other.Payload = []byte("another's")
	other, err = store.PutIf(t.Context(), other, tenure.IfVersion(record.Version))
	require.NoError(t, err)
	fails("taken over")
	require.NoError(t, store.DeleteIf(t.Context(), other.Key, tenure.IfVersion(other.Version)))
	fails("deleted")
	exec1(t, s.db(t, "app", ""), "DELETE FROM "+table)
	fails("there is no row")
	var rows int
	require.NoError(t, store.DB().QueryRow("SELECT COUNT(*) FROM "+table).Scan(&rows))
	require.Zero(t, rows)

	_, _, err = store.FenceStatement(nil)
	require.ErrorIs(t, err, tenure.ErrInvalid)
	require.ErrorIs(t, lease.Renew(t.Context(), term), tenure.ErrLost)
	_, _, err = store.FenceStatement(term)
	require.ErrorIs(t, err, tenure.ErrLost, "it is known to be over")
}

func TestAFenceHoldsForWritesToAnotherDatabaseOfTheServer(t *testing.T) {
	t.Parallel()
	name := newDatabase(t, shared(t))
	there := pool(t, strings.Replace(shared(t).DSN("admin", ""), "/"+database, "/"+name, 1))
	store, table, lease, term := begun(t)
	openOn(t, there, table) // which has such a table, too
	exec1(t, there, "CREATE TABLE mine (n INT)")
	insert := func(tx *sql.Tx) error {
		_, err := tx.ExecContext(t.Context(), "INSERT INTO mine VALUES (1)")
		return err
	}
	require.NoError(t, tenure.FencedTx(t.Context(), store, term, there, nil, insert))
	exec1(t, store.DB(), "UPDATE "+table+" SET payload = 'other' WHERE id = ?", lease.Config().Key.ID)
	require.ErrorIs(t, tenure.FencedTx(t.Context(), store, term, there, nil, insert), tenure.ErrLost)
	var rows int
	require.NoError(t, there.QueryRow("SELECT COUNT(*) FROM mine").Scan(&rows))
	require.Equal(t, 1, rows)
}

func TestFencedCommitsOnlyWhileTheTermStands(t *testing.T) {
	t.Parallel()
	store, table, lease, term := begun(t)
	exec1(t, store.DB(), "CREATE TABLE mine_"+table+" (n INT)")
	insert := func(tx *sql.Tx) error {
		_, err := tx.ExecContext(t.Context(), "INSERT INTO mine_"+table+" VALUES (1)")
		return err
	}
	rows := func() (n int) {
		require.NoError(t, store.DB().QueryRow("SELECT COUNT(*) FROM mine_"+table).Scan(&n))
		return n
	}
	require.NoError(t, store.Fenced(t.Context(), term, insert))
	require.Equal(t, 1, rows())

	failed := errors.New("fn has failed")
	require.ErrorIs(t, store.Fenced(t.Context(), term, func(tx *sql.Tx) error { return errors.Join(insert(tx), failed) }), failed)
	for _, ending := range []string{"COMMIT", "ROLLBACK", "COMMIT; BEGIN", "ROLLBACK; BEGIN", "COMMIT; BEGIN; SAVEPOINT own", "CREATE TABLE ddl_" + table + " (n INT)"} {
		err := store.Fenced(t.Context(), term, func(tx *sql.Tx) error {
			return testkit.SendEnding(t.Context(), ending, func(ctx context.Context, query string) error {
				_, err := tx.ExecContext(ctx, query)
				return err
			})
		})
		require.ErrorContains(t, err, "fn has ended the transaction itself", ending)
	}
	err := store.Fenced(t.Context(), term, func(tx *sql.Tx) error {
		_, _ = tx.ExecContext(t.Context(), "KILL CONNECTION_ID()")
		return nil
	})
	require.Error(t, err)
	require.NotContains(t, err.Error(), "fn has ended", "its connection is gone")
	for _, harmless := range []string{"SAVEPOINT own; ROLLBACK TO SAVEPOINT own", "SAVEPOINT own; RELEASE SAVEPOINT own"} {
		require.NoError(t, store.Fenced(t.Context(), term, func(tx *sql.Tx) error {
			return testkit.SendEnding(t.Context(), harmless, func(ctx context.Context, query string) error {
				_, err := tx.ExecContext(ctx, query)
				return err
			})
		}), harmless)
	}
	require.Equal(t, 1, rows())

	require.NoError(t, lease.Release(t.Context(), term))
	require.ErrorIs(t, store.Fenced(t.Context(), term, insert), tenure.ErrLost)
	next := testkit.MustAcquire(t, lease)
	record := testkit.Get(t, store, lease.Key())
	require.NoError(t, store.Fenced(t.Context(), next, insert))
	err = store.Fenced(t.Context(), next, func(tx *sql.Tx) error {
		record.Payload = []byte(`{"holder":"b","term":"x","ttl_ms":1000}`)
		_, err := store.PutIf(t.Context(), record, tenure.IfVersion(record.Version)) // it does not wait for fn
		return errors.Join(err, insert(tx))
	})
	require.ErrorIs(t, err, tenure.ErrLost)
	require.ErrorContains(t, err, "is held by b")
	require.Equal(t, 2, rows())
}

func TestAPutStatementWritesAtItsVersionOnly(t *testing.T) {
	t.Parallel()
	store, table, _, term := begun(t)
	obj := testkit.Put(t, store, tenure.Object{Key: widget, Payload: []byte("1")})
	put := func(payload string, version int64) error {
		query, args, err := store.PutStatement(tenure.Object{Key: widget, Name: "n", Labels: map[string]string{"a": "b"}, Payload: []byte(payload)}, version)
		require.NoError(t, err)
		return store.Fenced(t.Context(), term, func(tx *sql.Tx) error {
			_, err := tx.ExecContext(t.Context(), query, args...)
			return err
		})
	}
	require.NoError(t, put("2", obj.Version))
	is := testkit.Get(t, store, widget)
	require.Greater(t, is.Version, obj.Version)
	require.Equal(t, "2 n map[a:b]", fmt.Sprint(string(is.Payload), " ", is.Name, " ", is.Labels))
	require.Equal(t, obj.CreatedAt, is.CreatedAt)

	for _, version := range []int64{obj.Version, is.Version + 1} {
		err := put("3", version)
		require.ErrorContains(t, err, "the object has another version")
		require.NotErrorIs(t, err, tenure.ErrLost)
	}
	require.NoError(t, store.DeleteIf(t.Context(), widget, tenure.IfVersion(is.Version)))
	require.ErrorContains(t, put("3", is.Version), "the object has another version", "it is deleted")
	exec1(t, store.DB(), "DELETE FROM "+table+" WHERE id = 'a'")
	require.ErrorContains(t, put("3", is.Version), "the object has another version", "it never was")

	fenced, err := store.Fence(term)
	require.NoError(t, err)
	_, _, err = fenced.(tenure.SQLStore).PutStatement(obj, 1)
	require.ErrorIs(t, err, errors.ErrUnsupported)
	_, _, err = store.PutStatement(obj, 0)
	require.ErrorIs(t, err, tenure.ErrInvalid)
}
