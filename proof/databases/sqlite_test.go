package databases_test

import (
	"context"
	"database/sql"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

// The same on SQLite as TestAVersionIsDrawnAfterTheWaitForALock, for stores whose
// transactions begin with the write lock and for those that begin without.
func TestAVersionIsDrawnAfterTheWaitForTheWriteLock(t *testing.T) {
	for name, params := range map[string]string{"immediate": "&_txlock=immediate", "deferred": ""} {
		t.Run(name, func(t *testing.T) {
			ctx, path := t.Context(), filepath.Join(t.TempDir(), "t.db")
			testkit.Migrate(t, testkit.OpenSQLite(t, path))
			dsn := "file:" + path + "?_pragma=busy_timeout(5000)"
			store := testkit.Must(tenure.NewSQLiteStore(testkit.OpenSQL(t, "sqlite", dsn+params), tenure.SQLiteConfig{}))
			other := testkit.OpenSQL(t, "sqlite", dsn+"&_txlock=immediate")
			key := tenure.Key{Type: "t", ID: "1"}
			old := testkit.Put(t, store, tenure.Object{Key: key})

			tx, err := other.BeginTx(ctx, nil) // takes the write lock
			testkit.WantErr(t, err, nil)
			defer tx.Rollback()
			created := make(chan tenure.Object)
			go func() {
				obj, err := store.PutIf(ctx, tenure.Object{Key: key}, tenure.Unconditional())
				if err != nil {
					t.Error(err)
				}
				created <- obj
			}()
			deleted := old.Version + int64(time.Hour/time.Microsecond)
			for _, statement := range []string{
				`DELETE FROM objects WHERE id = $2 AND $1 <> '' AND $3 > 0`,
				`INSERT INTO objects_tombstones VALUES ($1, $2, $3)`,
			} {
				_, err := tx.ExecContext(ctx, statement, key.Type, key.ID, deleted)
				testkit.WantErr(t, err, nil)
			}
			select {
			case <-created:
				t.Fatal("the write did not wait for the lock; the test tests nothing")
			case <-time.After(50 * time.Millisecond):
			}
			testkit.WantErr(t, tx.Commit(), nil)
			if obj := <-created; obj.Version <= deleted {
				t.Errorf("version %d of the new object is not above %d of the deleted one", obj.Version, deleted)
			}
		})
	}
}

func TestOnlyASharedSQLiteStoreHasMoreThanOneReplica(t *testing.T) {
	for shared, want := range map[bool]bool{false: true, true: false} {
		store := testkit.Must(tenure.NewSQLiteStore(testkit.OpenSQL(t, "sqlite", ":memory:"), tenure.SQLiteConfig{Shared: shared}))
		if got := store.Traits().Alone != nil; got != want {
			t.Errorf("shared %v: got alone %v", shared, got)
		}
	}
}

func TestASQLiteFileIsOpenedInWALModeAndLeavesNoLogBehind(t *testing.T) {
	path := filepath.Join(t.TempDir(), "t.db")
	store := testkit.OpenSQLite(t, path)
	testkit.Migrate(t, store)
	// WAL is a property of the file, that any connection sees.
	var mode string
	db := testkit.OpenSQL(t, "sqlite", path)
	testkit.WantErr(t, db.QueryRow(`PRAGMA journal_mode`).Scan(&mode), nil)
	testkit.WantErr(t, db.Close(), nil)
	if mode != "wal" {
		t.Errorf("journal mode %s", mode)
	}
	testkit.WantErr(t, store.Close(), nil)
	if _, err := os.Stat(path + "-wal"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the log file outlasts Close: %v", err)
	}
}

func TestASQLiteFileThatCannotBeOpenedIsNamed(t *testing.T) {
	dir := t.TempDir()
	text := filepath.Join(dir, "text.db")
	testkit.WantErr(t, os.WriteFile(text, []byte(strings.Repeat("this is no database\n", 100)), 0o600), nil)
	for _, path := range []string{dir, filepath.Join(dir, "missing", "t.db"), text} {
		store, err := tenure.OpenSQLite(t.Context(), path, tenure.SQLiteConfig{})
		if err == nil {
			err = store.Migrate(t.Context())
			store.Close()
		}
		if !errors.Is(err, tenure.ErrSetup) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: got %v, want ErrSetup that names it", path, err)
		}
	}
	_, err := tenure.OpenSQLite(t.Context(), "", tenure.SQLiteConfig{})
	testkit.WantErr(t, err, tenure.ErrInvalid)
}

func TestASQLiteColumnThatDoesNotFitIsNamed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "t.db")
	store := testkit.OpenSQLite(t, path)
	db := testkit.OpenSQL(t, "sqlite", path)
	testkit.ExecSQL(t, db, `CREATE TABLE objects (object_type TEXT, id TEXT PRIMARY KEY, name TEXT, labels TEXT, payload BLOB,
		resource_version REAL, created_at_ms INTEGER, updated_at_ms INTEGER)`)
	testkit.Migrate(t, store)
	testkit.ExecSQL(t, db, `INSERT INTO objects VALUES ('t', '1', NULL, NULL, '', 1e17, 0, 0)`) // and 1 more is the same
	_, err := store.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}}, tenure.Unconditional())
	if !errors.Is(err, tenure.ErrSetup) || !strings.Contains(err.Error(), "resource_version") {
		t.Errorf("got %v, want ErrSetup that names the column", err)
	}

	testkit.ExecSQL(t, db, `DROP TABLE objects`)
	testkit.ExecSQL(t, db, `CREATE TABLE objects (object_type TEXT, id TEXT PRIMARY KEY, payload BLOB)`)
	err = store.Migrate(t.Context())
	if !errors.Is(err, tenure.ErrSetup) || !strings.Contains(err.Error(), "name") {
		t.Errorf("got %v, want ErrSetup that names what is missing", err)
	}
}

func TestOnSQLiteTooATombstoneKeepsVersionsUpUntilTheClockIsADayPastIt(t *testing.T) {
	path := filepath.Join(t.TempDir(), "t.db")
	store := testkit.OpenSQLite(t, path)
	testkit.Migrate(t, store)
	db := testkit.OpenSQL(t, "sqlite", "file:"+path+"?_pragma=busy_timeout(5000)")
	key := tenure.Key{Type: "t", ID: "1"}
	obj := testkit.Put(t, store, tenure.Object{Key: key})
	ahead := obj.Version + int64(72*time.Hour/time.Microsecond) // as if written while the clock was
	testkit.ExecSQL(t, db, `UPDATE objects SET resource_version = ?`, ahead)
	testkit.WantErr(t, store.DeleteIf(t.Context(), key, tenure.IfVersion(ahead)), nil)
	testkit.ExecSQL(t, db, `INSERT INTO objects_tombstones VALUES ('t', 'old', 1)`)
	other := testkit.Put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: "other"}})
	testkit.WantErr(t, store.DeleteIf(t.Context(), other.Key, tenure.IfVersion(other.Version)), nil) // which prunes
	if obj := testkit.Put(t, store, tenure.Object{Key: key}); obj.Version <= ahead {
		t.Errorf("version %d follows %d", obj.Version, ahead)
	}
	var ids string
	testkit.WantErr(t, db.QueryRow(`SELECT group_concat(id) FROM (SELECT id FROM objects_tombstones ORDER BY id)`).Scan(&ids), nil)
	if ids != "1,other" {
		t.Errorf("got tombstones of %s, want of 1 and other", ids)
	}
}

func TestOnSQLiteACallWaitsForTheWriteLockAsLongAsItsContextAllows(t *testing.T) {
	path := filepath.Join(t.TempDir(), "t.db")
	store := testkit.OpenSQLite(t, path)
	testkit.Migrate(t, store)
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
	term := testkit.MustAcquire(t, lease)
	fenced, err := tenure.Fence(store, term)
	testkit.WantErr(t, err, nil)
	obj := testkit.Put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}})
	other := testkit.OpenSQL(t, "sqlite", "file:"+path+"?_txlock=immediate")
	calls := map[string]func(context.Context) error{
		"put": func(ctx context.Context) error { _, err := store.PutIf(ctx, obj, tenure.Unconditional()); return err },
		"replace": func(ctx context.Context) error {
			_, err := store.PutIf(ctx, obj, tenure.IfVersion(obj.Version))
			return err
		},
		"delete":     func(ctx context.Context) error { return store.DeleteIf(ctx, obj.Key, tenure.IfVersion(obj.Version)) },
		"fenced put": func(ctx context.Context) error { _, err := fenced.PutIf(ctx, obj, tenure.Unconditional()); return err },
		"fenced":     func(ctx context.Context) error { return store.Fenced(ctx, term, func(*sql.Tx) error { return nil }) },
		"renew":      func(ctx context.Context) error { return lease.Renew(ctx, term) },
	}
	for name, call := range calls {
		t.Run(name, func(t *testing.T) {
			tx, err := other.Begin()
			testkit.WantErr(t, err, nil)
			defer tx.Rollback()
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			began := time.Now()
			testkit.WantErr(t, call(ctx), context.DeadlineExceeded)
			if took := time.Since(began); took > 4*time.Second { // less than SQLite would wait by itself
				t.Errorf("it took %v", took)
			}
		})
	}
	tx, err := other.Begin()
	testkit.WantErr(t, err, nil)
	time.AfterFunc(300*time.Millisecond, func() { tx.Rollback() })
	testkit.WantErr(t, lease.Renew(t.Context(), term), nil) // longer than SQLite waits by itself
}

// Whoever finds a lease held must not have kept its holder from renewing it.
func TestOnSQLiteAnAttemptAtALeaseThatIsHeldTakesNoWriteLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "t.db")
	store := testkit.OpenSQLite(t, path)
	testkit.Migrate(t, store)
	term := testkit.MustAcquire(t, testkit.NewLease(t, store, tenure.LeaseConfig{}))
	standby := testkit.NewLease(t, store, tenure.LeaseConfig{})
	attempt := func() {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err := standby.TryAcquire(ctx)
		testkit.WantErr(t, err, tenure.ErrHeld)
	}

	tx, err := testkit.OpenSQL(t, "sqlite", "file:"+path+"?_txlock=immediate").Begin()
	testkit.WantErr(t, err, nil)
	defer tx.Rollback()
	attempt()
	testkit.WantErr(t, tx.Rollback(), nil)

	testkit.WantErr(t, store.Fenced(t.Context(), term, func(*sql.Tx) error { attempt(); return nil }), nil)
}

// Of two first fenced writes the one that has little time must not wait for the other.
func TestOnSQLiteAFencedCallThatHasLittleTimeDoesNotWaitForOneThatHasMore(t *testing.T) {
	path := filepath.Join(t.TempDir(), "t.db")
	testkit.Migrate(t, testkit.OpenSQLite(t, path))
	db := testkit.OpenSQL(t, "sqlite", "file:"+path+"?_txlock=immediate")
	db.SetMaxOpenConns(1)
	store := testkit.Must(tenure.NewSQLiteStore(db, tenure.SQLiteConfig{Shared: true}))
	t.Cleanup(func() { store.Close() })
	term := testkit.MustAcquire(t, testkit.NewLease(t, store, tenure.LeaseConfig{}))
	fenced, err := tenure.Fence(store, term)
	testkit.WantErr(t, err, nil)
	write := func(ctx context.Context, id string) error {
		_, err := fenced.PutIf(ctx, tenure.Object{Key: tenure.Key{Type: "t", ID: id}}, tenure.IfAbsent())
		return err
	}

	conn, err := db.Conn(t.Context()) // the only one
	testkit.WantErr(t, err, nil)
	defer conn.Close()
	patient := make(chan error, 1)
	go func() { patient <- write(t.Context(), "patient") }()
	for db.Stats().WaitCount == 0 {
		runtime.Gosched()
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	hurried := make(chan error, 1)
	go func() { hurried <- write(ctx, "hurried") }()
	select {
	case err := <-hurried:
		testkit.WantErr(t, err, context.DeadlineExceeded)
	case <-time.After(10 * time.Second):
		t.Error("it waits still")
	}
	testkit.WantErr(t, conn.Close(), nil)
	testkit.WantErr(t, <-patient, nil)
}

func TestASQLiteFileMayHaveAnyPath(t *testing.T) {
	dir := t.TempDir()
	for _, path := range []string{dir + "/a.db", "/" + dir + "/b.db", "//" + dir + "//c.db", dir + "/?d#%41 é.db", dir + "/x=1;y&z@h:1.db", "e.db", "./f.db", "./a:g=1?@h.db", "h;i&j.db"} {
		t.Run(path, func(t *testing.T) {
			t.Chdir(dir)
			testkit.Migrate(t, testkit.OpenSQLite(t, path))
			if _, err := os.Stat(path); err != nil {
				t.Errorf("it is somewhere else: %v", err)
			}
		})
	}
}

// A process may lack file descriptors for a moment, and a caller that waits ends on ErrSetup.
func TestASQLiteFileThatCannotBeOpenedForAMomentNeedsNoAttention(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	require.NoError(t, os.Mkdir(dir, 0o700))
	store, err := tenure.OpenSQLite(t.Context(), filepath.Join(dir, "objects.db"), tenure.SQLiteConfig{Shared: true, Logger: testkit.Quiet})
	require.NoError(t, err)
	defer store.Close()
	testkit.Migrate(t, store)
	store.DB().SetMaxIdleConns(-1) // so that each call opens the file
	require.NoError(t, os.Rename(dir, dir+".away"))
	_, err = store.Get(t.Context(), tenure.Key{Type: "thing", ID: "a"})
	require.ErrorContains(t, err, "unable to open database file")
	require.NotErrorIs(t, err, tenure.ErrSetup)
	require.NoError(t, os.Rename(dir+".away", dir))
	_, err = store.Get(t.Context(), tenure.Key{Type: "thing", ID: "a"})
	require.ErrorIs(t, err, tenure.ErrNotFound)
}
