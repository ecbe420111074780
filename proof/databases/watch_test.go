package databases_test

import (
	"context"
	"database/sql"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

var watchedKey = tenure.Key{Type: "t", ID: "watched"}

func TestADeletionWakesThoseWhoWatchThroughWhateverHandle(t *testing.T) {
	testkit.EachStore(t, func(t *testing.T, open func() tenure.Store) {
		here, there := open().(testkit.StoreWatcher), open().(testkit.StoreWatcher)
		watches := []tenure.Subscription{testkit.LiveWatch(t, here, watchedKey), testkit.LiveWatch(t, there, watchedKey)}
		for range 3 {
			for _, store := range []testkit.StoreWatcher{here, there} {
				obj := testkit.Put(t, store, tenure.Object{Key: watchedKey})
				for _, watch := range watches {
					testkit.TakeHint(watch)
				}
				testkit.DeleteAndWake(t, store, obj)
				for _, watch := range watches {
					testkit.AwaitHint(t, "deleted", watch)
				}
			}
		}
	})
}

func TestNobodyIsWokenWhereNothingWasDeleted(t *testing.T) {
	testkit.EachStore(t, func(t *testing.T, open func() tenure.Store) {
		here, there := open().(testkit.StoreWatcher), open().(testkit.StoreWatcher)
		obj := testkit.Put(t, here, tenure.Object{Key: watchedKey})
		watches := []tenure.Subscription{testkit.LiveWatch(t, here, watchedKey), testkit.LiveWatch(t, there, watchedKey)}
		for _, watch := range watches {
			testkit.TakeHint(watch)
		}
		testkit.WantErr(t, here.DeleteAndWake(t.Context(), obj.Key, tenure.IfVersion(obj.Version+1)), tenure.ErrConflict)
		testkit.WantErr(t, there.DeleteAndWake(t.Context(), obj.Key, tenure.IfVersion(obj.Version-1)), tenure.ErrConflict)
		testkit.WantErr(t, here.DeleteAndWake(t.Context(), obj.Key, tenure.IfVersion(0)), tenure.ErrInvalid)
		obj, err := there.PutIf(t.Context(), obj, tenure.IfVersion(obj.Version))
		testkit.WantErr(t, err, nil)
		// Hints come in order: behind these deletions, none of those above is under
		// way. The second is for SQLite, whose poll looks for all that is gone in no
		// order.
		for _, id := range []string{"another", "the last"} {
			other := testkit.Put(t, here, tenure.Object{Key: tenure.Key{Type: "t", ID: id}})
			marks := []tenure.Subscription{testkit.LiveWatch(t, here, other.Key), testkit.LiveWatch(t, there, other.Key)}
			testkit.DeleteAndWake(t, here, other)
			for _, mark := range marks {
				testkit.AwaitHint(t, "another object was deleted", mark)
			}
		}
		for i, watch := range watches {
			if testkit.TakeHint(watch) {
				t.Errorf("watch %d was woken, though its object is there", i)
			}
		}
	})
}

func TestAStoreThatIsClosedEndsItsWatches(t *testing.T) {
	testkit.EachStore(t, func(t *testing.T, open func() tenure.Store) {
		keeps := open() // so that what the last handle does at its end is not measured
		testkit.Put(t, keeps, tenure.Object{Key: watchedKey})
		before := goroutines()
		store := open()
		watches := []tenure.Subscription{testkit.LiveWatch(t, store.(testkit.StoreWatcher), watchedKey), testkit.LiveWatch(t, store.(testkit.StoreWatcher), testkit.LeaseKey)}
		store.(testkit.StoreWatcher).Watch(watchedKey).Stop()
		for _, watch := range watches {
			testkit.TakeHint(watch)
		}
		closed := make(chan error, 1)
		go func() { closed <- store.(interface{ Close() error }).Close() }()
		select {
		case err := <-closed:
			testkit.WantErr(t, err, nil)
		case <-time.After(testkit.Patience):
			t.Fatal("Close waits for the watches to be stopped")
		}
		for _, watch := range append(watches, store.(testkit.StoreWatcher).Watch(watchedKey)) {
			if watch.Live() {
				t.Error("a watch of a closed store is live")
			}
		}
		for _, watch := range watches {
			testkit.AwaitHint(t, "the store is closed", watch)
			watch.Stop()
			watch.Stop()
		}
		testkit.Await(t, "no goroutine is left", func() bool { return goroutines() <= before })
	})
}

// onSQLite runs a test with a store in a file, its database, and another
// database on that file, as another process has.
func onSQLite(t *testing.T, conns int, test func(t *testing.T, store *tenure.SQLiteStore, db, other *sql.DB)) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "t.db")
	testkit.Migrate(t, testkit.OpenSQLite(t, path))
	dsn := "file:" + path + "?_pragma=busy_timeout(5000)&_txlock=immediate"
	db, other := testkit.OpenSQL(t, "sqlite", dsn), testkit.OpenSQL(t, "sqlite", dsn)
	db.SetMaxOpenConns(conns)
	store := testkit.Must(tenure.NewSQLiteStore(db, tenure.SQLiteConfig{Shared: true, Logger: testkit.Quiet}))
	t.Cleanup(func() { store.Close() })
	test(t, store, db, other)
}

// Within the poll, of whoever it is.
func TestOnSQLiteADeletionByAnyProgramWakes(t *testing.T) {
	for _, conns := range []int{0, 3} {
		t.Run(fmt.Sprint("connections ", conns), func(t *testing.T) {
			onSQLite(t, conns, func(t *testing.T, store *tenure.SQLiteStore, _, other *sql.DB) {
				watch := testkit.LiveWatch(t, store, watchedKey)
				for range 3 {
					testkit.Put(t, store, tenure.Object{Key: watchedKey})
					testkit.TakeHint(watch)
					if n := testkit.ExecSQL(t, other, `DELETE FROM objects WHERE id = $1`, watchedKey.ID); n != 1 {
						t.Fatalf("%d rows were deleted", n)
					}
					testkit.AwaitHint(t, "deleted by another", watch)
				}
			})
		})
	}
}

func TestOnSQLiteCommitsThatLeaveTheObjectWakeNobody(t *testing.T) {
	onSQLite(t, 0, func(t *testing.T, store *tenure.SQLiteStore, _, other *sql.DB) {
		testkit.Put(t, store, tenure.Object{Key: watchedKey})
		watch := testkit.LiveWatch(t, store, watchedKey)
		testkit.TakeHint(watch)
		for _, id := range []string{"one", "two", "three"} {
			mark := testkit.Put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: id}})
			marked := testkit.LiveWatch(t, store, mark.Key)
			testkit.TakeHint(marked)
			testkit.ExecSQL(t, other, `UPDATE objects SET updated_at_ms = updated_at_ms + 1, resource_version = resource_version + 1`)
			testkit.ExecSQL(t, other, `DELETE FROM objects WHERE id = $1`, id)
			testkit.AwaitHint(t, "another object was deleted", marked) // so the poll has looked
		}
		if testkit.TakeHint(watch) {
			t.Error("woken, though the object is there")
		}
	})
}

func TestOnSQLiteThePollEndsWithTheLastWatch(t *testing.T) {
	onSQLite(t, 0, func(t *testing.T, store *tenure.SQLiteStore, db, _ *sql.DB) {
		before := goroutines()
		inUse := func() int { return db.Stats().InUse }
		for range 3 {
			if n := inUse(); n != 0 {
				t.Fatalf("%d connections are in use, and nobody watches", n)
			}
			watches := []tenure.Subscription{testkit.LiveWatch(t, store, watchedKey), testkit.LiveWatch(t, store, testkit.LeaseKey)}
			watches[0].Stop()
			watches[0].Stop() // does not count
			if n := inUse(); n != 1 || !watches[1].Live() {
				t.Errorf("%d connections are in use for one watch, live %v; want 1", n, watches[1].Live())
			}
			obj := testkit.Put(t, store, tenure.Object{Key: testkit.LeaseKey})
			testkit.TakeHint(watches[1])
			testkit.DeleteAndWake(t, store, obj)
			testkit.AwaitHint(t, "deleted", watches[1])
			watches[1].Stop()
			testkit.Await(t, "the connection is given back", func() bool { return inUse() == 0 })
			testkit.Await(t, "no goroutine is left", func() bool { return goroutines() <= before })
		}
		// And where the next begins while the last poll ends.
		for range 50 {
			store.Watch(watchedKey).Stop()
		}
		watch := testkit.LiveWatch(t, store, watchedKey)
		if n := inUse(); n > 1 {
			t.Errorf("%d connections are in use for one watch", n)
		}
		watch.Stop()
		testkit.Await(t, "the connection is given back", func() bool { return inUse() == 0 })
	})
}

func TestOnSQLiteASmallPoolIsNotBlockedByWatching(t *testing.T) {
	for _, conns := range []int{1, 2} {
		t.Run(fmt.Sprint("connections ", conns), func(t *testing.T) {
			onSQLite(t, conns, func(t *testing.T, store *tenure.SQLiteStore, db, _ *sql.DB) {
				ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
				defer cancel()
				watch := testkit.BeginWatch(t, store, watchedKey)
				lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
				for range 10 {
					obj, err := store.PutIf(ctx, tenure.Object{Key: watchedKey}, tenure.IfAbsent())
					testkit.WantErr(t, err, nil)
					term, err := lease.AcquireOrSteal(ctx)
					testkit.WantErr(t, err, nil)
					testkit.WantErr(t, store.Fenced(ctx, term, func(tx *sql.Tx) error {
						_, err := tx.ExecContext(ctx, `UPDATE objects SET name = name`)
						return err
					}), nil)
					testkit.WantErr(t, lease.Release(ctx, term), nil)
					testkit.WantErr(t, db.PingContext(ctx), nil)
					testkit.TakeHint(watch)
					testkit.WantErr(t, store.DeleteAndWake(ctx, obj.Key, tenure.IfVersion(obj.Version)), nil)
					testkit.AwaitHint(t, "deleted", watch)
				}
				if n := db.Stats().InUse; n != 0 || watch.Live() {
					t.Errorf("%d connections are in use, live %v", n, watch.Live())
				}
			})
		})
	}
}

// Who else writes there cannot always be seen, so a standby has to poll.
func TestOnSQLiteInMemoryAWatchIsNeverLiveAndIsWokenByItsStore(t *testing.T) {
	store := testkit.OpenSQLite(t, ":memory:")
	testkit.Migrate(t, store)
	watch := testkit.BeginWatch(t, store, watchedKey)
	// For several times as long as a file takes to be live.
	for end := time.Now().Add(300 * time.Millisecond); time.Now().Before(end); {
		obj := testkit.Put(t, store, tenure.Object{Key: watchedKey})
		testkit.DeleteAndWake(t, store, obj)
		testkit.AwaitHint(t, "deleted", watch)
		if watch.Live() {
			t.Fatal("live")
		}
	}
	before := goroutines()
	watch.Stop()
	testkit.Await(t, "its goroutine has ended", func() bool { return goroutines() < before })
}
