package databases_test

import (
	"context"
	"database/sql"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/proof/kit"
)

var watchedKey = tenure.Key{Type: "t", ID: "watched"}

func TestADeletionWakesThoseWhoWatchThroughWhateverHandle(t *testing.T) {
	kit.EachStore(t, func(t *testing.T, open func() tenure.Store) {
		here, there := open().(kit.StoreWatcher), open().(kit.StoreWatcher)
		watches := []tenure.Subscription{kit.LiveWatch(t, here, watchedKey), kit.LiveWatch(t, there, watchedKey)}
		for range 3 {
			for _, store := range []kit.StoreWatcher{here, there} {
				obj := kit.Put(t, store, tenure.Object{Key: watchedKey})
				for _, watch := range watches {
					kit.TakeHint(watch)
				}
				kit.DeleteAndWake(t, store, obj)
				for _, watch := range watches {
					kit.AwaitHint(t, "deleted", watch)
				}
			}
		}
	})
}

func TestNobodyIsWokenWhereNothingWasDeleted(t *testing.T) {
	kit.EachStore(t, func(t *testing.T, open func() tenure.Store) {
		here, there := open().(kit.StoreWatcher), open().(kit.StoreWatcher)
		obj := kit.Put(t, here, tenure.Object{Key: watchedKey})
		watches := []tenure.Subscription{kit.LiveWatch(t, here, watchedKey), kit.LiveWatch(t, there, watchedKey)}
		for _, watch := range watches {
			kit.TakeHint(watch)
		}
		kit.WantErr(t, here.DeleteAndWake(t.Context(), obj.Key, tenure.IfVersion(obj.Version+1)), tenure.ErrConflict)
		kit.WantErr(t, there.DeleteAndWake(t.Context(), obj.Key, tenure.IfVersion(obj.Version-1)), tenure.ErrConflict)
		kit.WantErr(t, here.DeleteAndWake(t.Context(), obj.Key, tenure.IfVersion(0)), tenure.ErrInvalid)
		obj, err := there.PutIf(t.Context(), obj, tenure.IfVersion(obj.Version))
		kit.WantErr(t, err, nil)
		// Hints come in order: behind these deletions, none of those above is under
		// way. The second is for SQLite, whose poll looks for all that is gone in no
		// order.
		for _, id := range []string{"another", "the last"} {
			other := kit.Put(t, here, tenure.Object{Key: tenure.Key{Type: "t", ID: id}})
			marks := []tenure.Subscription{kit.LiveWatch(t, here, other.Key), kit.LiveWatch(t, there, other.Key)}
			kit.DeleteAndWake(t, here, other)
			for _, mark := range marks {
				kit.AwaitHint(t, "another object was deleted", mark)
			}
		}
		for i, watch := range watches {
			if kit.TakeHint(watch) {
				t.Errorf("watch %d was woken, though its object is there", i)
			}
		}
	})
}

func TestAStoreThatIsClosedEndsItsWatches(t *testing.T) {
	kit.EachStore(t, func(t *testing.T, open func() tenure.Store) {
		keeps := open() // so that what the last handle does at its end is not measured
		kit.Put(t, keeps, tenure.Object{Key: watchedKey})
		before := goroutines()
		store := open()
		watches := []tenure.Subscription{kit.LiveWatch(t, store.(kit.StoreWatcher), watchedKey), kit.LiveWatch(t, store.(kit.StoreWatcher), kit.LeaseKey)}
		store.(kit.StoreWatcher).Watch(watchedKey).Stop()
		for _, watch := range watches {
			kit.TakeHint(watch)
		}
		closed := make(chan error, 1)
		go func() { closed <- store.(interface{ Close() error }).Close() }()
		select {
		case err := <-closed:
			kit.WantErr(t, err, nil)
		case <-time.After(kit.Patience):
			t.Fatal("Close waits for the watches to be stopped")
		}
		for _, watch := range append(watches, store.(kit.StoreWatcher).Watch(watchedKey)) {
			if watch.Live() {
				t.Error("a watch of a closed store is live")
			}
		}
		for _, watch := range watches {
			kit.AwaitHint(t, "the store is closed", watch)
			watch.Stop()
			watch.Stop()
		}
		kit.Await(t, "no goroutine is left", func() bool { return goroutines() <= before })
	})
}

// onSQLite runs a test with a store in a file, its database, and another
// database on that file, as another process has.
func onSQLite(t *testing.T, conns int, test func(t *testing.T, store *tenure.SQLiteStore, db, other *sql.DB)) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "t.db")
	kit.Migrate(t, kit.OpenSQLite(t, path))
	dsn := "file:" + path + "?_pragma=busy_timeout(5000)&_txlock=immediate"
	db, other := kit.OpenSQL(t, "sqlite", dsn), kit.OpenSQL(t, "sqlite", dsn)
	db.SetMaxOpenConns(conns)
	store := kit.Must(tenure.NewSQLiteStore(db, tenure.SQLiteConfig{Shared: true, Logger: kit.Quiet}))
	t.Cleanup(func() { store.Close() })
	test(t, store, db, other)
}

// Within the poll, of whoever it is.
func TestOnSQLiteADeletionByAnyProgramWakes(t *testing.T) {
	for _, conns := range []int{0, 3} {
		t.Run(fmt.Sprint("connections ", conns), func(t *testing.T) {
			onSQLite(t, conns, func(t *testing.T, store *tenure.SQLiteStore, _, other *sql.DB) {
				watch := kit.LiveWatch(t, store, watchedKey)
				for range 3 {
					kit.Put(t, store, tenure.Object{Key: watchedKey})
					kit.TakeHint(watch)
					if n := kit.ExecSQL(t, other, `DELETE FROM objects WHERE id = $1`, watchedKey.ID); n != 1 {
						t.Fatalf("%d rows were deleted", n)
					}
					kit.AwaitHint(t, "deleted by another", watch)
				}
			})
		})
	}
}

func TestOnSQLiteCommitsThatLeaveTheObjectWakeNobody(t *testing.T) {
	onSQLite(t, 0, func(t *testing.T, store *tenure.SQLiteStore, _, other *sql.DB) {
		kit.Put(t, store, tenure.Object{Key: watchedKey})
		watch := kit.LiveWatch(t, store, watchedKey)
		kit.TakeHint(watch)
		for _, id := range []string{"one", "two", "three"} {
			mark := kit.Put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: id}})
			marked := kit.LiveWatch(t, store, mark.Key)
			kit.TakeHint(marked)
			kit.ExecSQL(t, other, `UPDATE objects SET updated_at_ms = updated_at_ms + 1, resource_version = resource_version + 1`)
			kit.ExecSQL(t, other, `DELETE FROM objects WHERE id = $1`, id)
			kit.AwaitHint(t, "another object was deleted", marked) // so the poll has looked
		}
		if kit.TakeHint(watch) {
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
			watches := []tenure.Subscription{kit.LiveWatch(t, store, watchedKey), kit.LiveWatch(t, store, kit.LeaseKey)}
			watches[0].Stop()
			watches[0].Stop() // does not count
			if n := inUse(); n != 1 || !watches[1].Live() {
				t.Errorf("%d connections are in use for one watch, live %v; want 1", n, watches[1].Live())
			}
			obj := kit.Put(t, store, tenure.Object{Key: kit.LeaseKey})
			kit.TakeHint(watches[1])
			kit.DeleteAndWake(t, store, obj)
			kit.AwaitHint(t, "deleted", watches[1])
			watches[1].Stop()
			kit.Await(t, "the connection is given back", func() bool { return inUse() == 0 })
			kit.Await(t, "no goroutine is left", func() bool { return goroutines() <= before })
		}
		// And where the next begins while the last poll ends.
		for range 50 {
			store.Watch(watchedKey).Stop()
		}
		watch := kit.LiveWatch(t, store, watchedKey)
		if n := inUse(); n > 1 {
			t.Errorf("%d connections are in use for one watch", n)
		}
		watch.Stop()
		kit.Await(t, "the connection is given back", func() bool { return inUse() == 0 })
	})
}

func TestOnSQLiteASmallPoolIsNotBlockedByWatching(t *testing.T) {
	for _, conns := range []int{1, 2} {
		t.Run(fmt.Sprint("connections ", conns), func(t *testing.T) {
			onSQLite(t, conns, func(t *testing.T, store *tenure.SQLiteStore, db, _ *sql.DB) {
				ctx, cancel := context.WithTimeout(t.Context(), kit.Patience)
				defer cancel()
				watch := kit.BeginWatch(t, store, watchedKey)
				lease := kit.NewLease(t, store, tenure.LeaseConfig{})
				for range 10 {
					obj, err := store.PutIf(ctx, tenure.Object{Key: watchedKey}, tenure.IfAbsent())
					kit.WantErr(t, err, nil)
					term, err := lease.AcquireOrSteal(ctx)
					kit.WantErr(t, err, nil)
					kit.WantErr(t, store.Fenced(ctx, term, func(tx *sql.Tx) error {
						_, err := tx.ExecContext(ctx, `UPDATE objects SET name = name`)
						return err
					}), nil)
					kit.WantErr(t, lease.Release(ctx, term), nil)
					kit.WantErr(t, db.PingContext(ctx), nil)
					kit.TakeHint(watch)
					kit.WantErr(t, store.DeleteAndWake(ctx, obj.Key, tenure.IfVersion(obj.Version)), nil)
					kit.AwaitHint(t, "deleted", watch)
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
	store := kit.OpenSQLite(t, ":memory:")
	kit.Migrate(t, store)
	watch := kit.BeginWatch(t, store, watchedKey)
	// For several times as long as a file takes to be live.
	for end := time.Now().Add(300 * time.Millisecond); time.Now().Before(end); {
		obj := kit.Put(t, store, tenure.Object{Key: watchedKey})
		kit.DeleteAndWake(t, store, obj)
		kit.AwaitHint(t, "deleted", watch)
		if watch.Live() {
			t.Fatal("live")
		}
	}
	before := goroutines()
	watch.Stop()
	kit.Await(t, "its goroutine has ended", func() bool { return goroutines() < before })
}
