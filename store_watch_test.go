package tenure_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/verify/pgtest"
)

var watchedKey = tenure.Key{Type: "t", ID: "watched"}

// takeHint takes the hint that is there.
func takeHint(watch tenure.Subscription) bool {
	select {
	case <-watch.C():
		return true
	default:
		return false
	}
}

func awaitHint(t *testing.T, what string, watch tenure.Subscription) {
	t.Helper()
	select {
	case <-watch.C():
	case <-time.After(patience):
		t.Fatalf("%s: not woken", what)
	}
}

func deleteAndWake(t *testing.T, store tenure.Notifier, obj tenure.Object) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	wantErr(t, store.DeleteAndWake(ctx, obj.Key, obj.Version), nil)
}

func TestADeletionWakesThoseWhoWatchThroughWhateverHandle(t *testing.T) {
	eachStore(t, func(t *testing.T, open func() tenure.Store) {
		here, there := open().(storeWatcher), open().(storeWatcher)
		watches := []tenure.Subscription{liveWatch(t, here, watchedKey), liveWatch(t, there, watchedKey)}
		for range 3 {
			for _, store := range []storeWatcher{here, there} {
				obj := put(t, store, tenure.Object{Key: watchedKey})
				for _, watch := range watches {
					takeHint(watch)
				}
				deleteAndWake(t, store, obj)
				for _, watch := range watches {
					awaitHint(t, "deleted", watch)
				}
			}
		}
	})
}

func TestNobodyIsWokenWhereNothingWasDeleted(t *testing.T) {
	eachStore(t, func(t *testing.T, open func() tenure.Store) {
		here, there := open().(storeWatcher), open().(storeWatcher)
		obj := put(t, here, tenure.Object{Key: watchedKey})
		watches := []tenure.Subscription{liveWatch(t, here, watchedKey), liveWatch(t, there, watchedKey)}
		for _, watch := range watches {
			takeHint(watch)
		}
		wantErr(t, here.DeleteAndWake(t.Context(), obj.Key, obj.Version+1), tenure.ErrConflict)
		wantErr(t, there.DeleteAndWake(t.Context(), obj.Key, obj.Version-1), tenure.ErrConflict)
		wantErr(t, here.DeleteAndWake(t.Context(), obj.Key, 0), tenure.ErrInvalid)
		obj, err := there.PutIf(t.Context(), obj, tenure.MatchVersion(obj.Version))
		wantErr(t, err, nil)
		// Hints come in order: behind these deletions, none of those above is under
		// way. The second is for SQLite, whose poll looks for all that is gone in no
		// order.
		for _, id := range []string{"another", "the last"} {
			other := put(t, here, tenure.Object{Key: tenure.Key{Type: "t", ID: id}})
			marks := []tenure.Subscription{liveWatch(t, here, other.Key), liveWatch(t, there, other.Key)}
			deleteAndWake(t, here, other)
			for _, mark := range marks {
				awaitHint(t, "another object was deleted", mark)
			}
		}
		for i, watch := range watches {
			if takeHint(watch) {
				t.Errorf("watch %d was woken, though its object is there", i)
			}
		}
	})
}

func TestAStoreThatIsClosedEndsItsWatches(t *testing.T) {
	eachStore(t, func(t *testing.T, open func() tenure.Store) {
		keeps := open() // so that what the last handle does at its end is not measured
		put(t, keeps, tenure.Object{Key: watchedKey})
		before := goroutines()
		store := open()
		watches := []tenure.Subscription{liveWatch(t, store.(storeWatcher), watchedKey), liveWatch(t, store.(storeWatcher), leaseKey)}
		store.(storeWatcher).Watch(watchedKey).Stop()
		for _, watch := range watches {
			takeHint(watch)
		}
		closed := make(chan error, 1)
		go func() { closed <- store.(interface{ Close() error }).Close() }()
		select {
		case err := <-closed:
			wantErr(t, err, nil)
		case <-time.After(patience):
			t.Fatal("Close waits for the watches to be stopped")
		}
		for _, watch := range append(watches, store.(storeWatcher).Watch(watchedKey)) {
			if watch.Live() {
				t.Error("a watch of a closed store is live")
			}
		}
		for _, watch := range watches {
			awaitHint(t, "the store is closed", watch)
			watch.Stop()
			watch.Stop()
		}
		awaitThat(t, "no goroutine is left", func() bool { return goroutines() <= before })
	})
}

// listeners counts the connections to this database that listen.
func listeners(t *testing.T, pool *pgxpool.Pool) (n int) {
	t.Helper()
	err := pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity
		WHERE datname = current_database() AND pid <> pg_backend_pid() AND query LIKE 'LISTEN%'`).Scan(&n)
	wantErr(t, err, nil)
	return n
}

func TestOnPostgresAStoreThatOnlyPollsHoldsNoConnectionToListenOn(t *testing.T) {
	url := postgresURL(t)
	polls := openPostgres(t, url, tenure.PostgresConfig{PollOnly: true})
	migrate(t, polls)
	pool := postgresPool(t, url)
	deaf := beginWatch(t, polls, watchedKey)
	other := openPostgres(t, url, tenure.PostgresConfig{})
	if n := listeners(t, pool); n != 0 {
		t.Errorf("before anybody watches otherwise, %d connections listen", n)
	}
	live := liveWatch(t, other, watchedKey)
	if n := listeners(t, pool); n != 1 {
		t.Errorf("%d connections listen, want that of the other store only", n)
	}
	takeHint(live)
	deleteAndWake(t, polls, put(t, polls, tenure.Object{Key: watchedKey}))
	awaitHint(t, "deleted by a store that only polls", live)
	if deaf.Live() || takeHint(deaf) {
		t.Error("a watch of a store that only polls is live, or was woken")
	}
	deaf.Stop()
}

func TestOnPostgresOneConnectionListensForAllWatchesOfAStore(t *testing.T) {
	url := postgresURL(t)
	store := openPostgres(t, url, tenure.PostgresConfig{})
	migrate(t, store)
	pool := postgresPool(t, url)
	if n := listeners(t, pool); n != 0 {
		t.Errorf("%d connections listen before anybody watches", n)
	}
	for i := range 20 {
		liveWatch(t, store, tenure.Key{Type: "t", ID: fmt.Sprint(i)})
	}
	if n := listeners(t, pool); n != 1 {
		t.Errorf("%d connections listen, want 1", n)
	}
	wantErr(t, store.Close(), nil)
	awaitThat(t, "the connection is closed", func() bool { return listeners(t, pool) == 0 })
}

func TestOnPostgresAListenURLThatCannotBeParsedIsRefusedWithoutItsPassword(t *testing.T) {
	_, err := tenure.OpenPostgres(t.Context(), postgresURL(t), tenure.PostgresConfig{ListenURL: "postgres://u:sEcrEt@host:port/db"})
	wantErr(t, err, tenure.ErrInvalid)
	if strings.Contains(err.Error(), "sEcrEt") || !strings.Contains(err.Error(), "ListenURL") {
		t.Errorf("got error %q, want one that names ListenURL and tells no password", err)
	}
}

func TestOnPostgresAKeyTooLongForANotificationWakesAllTheSame(t *testing.T) {
	url := postgresURL(t)
	store := openPostgres(t, url, tenure.PostgresConfig{})
	migrate(t, store)
	for shift := range 3 { // so that it is cut within a character of three bytes, too
		key := tenure.Key{Type: "t", ID: strings.Repeat("x", shift) + strings.Repeat("長", 5000)}
		watch := liveWatch(t, store, key)
		takeHint(watch)
		deleteAndWake(t, store, put(t, store, tenure.Object{Key: key}))
		awaitHint(t, fmt.Sprintf("a key of %d bytes", len(key.ID)), watch)
	}
}

// tracer is a caller's, who wants to hear of all that happens on connections.
type tracer struct{ connects, queries atomic.Int64 }

func (c *tracer) TraceConnectStart(ctx context.Context, _ pgx.TraceConnectStartData) context.Context {
	c.connects.Add(1)
	return ctx
}
func (c *tracer) TraceConnectEnd(context.Context, pgx.TraceConnectEndData) {}
func (c *tracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	c.queries.Add(1)
	return ctx
}
func (c *tracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func TestOnPostgresHandlersOfTheCallersPoolDoNotBreakWatching(t *testing.T) {
	ctx, url := t.Context(), postgresURL(t)
	config, err := pgxpool.ParseConfig(url)
	wantErr(t, err, nil)
	heard := make(chan string, 100)
	trace := &tracer{}
	config.ConnConfig.OnNotification = func(_ *pgconn.PgConn, n *pgconn.Notification) { heard <- n.Channel + " " + n.Payload }
	config.ConnConfig.Tracer = trace
	config.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(ctx, config)
	wantErr(t, err, nil)
	t.Cleanup(pool.Close)
	store := must(tenure.NewPostgresStore(pool, tenure.PostgresConfig{Logger: quiet}))
	t.Cleanup(func() { store.Close() })
	migrate(t, store)
	execPostgres(t, pool, `LISTEN callers`)

	watch := liveWatch(t, store, watchedKey)
	for range 3 {
		obj := put(t, store, tenure.Object{Key: watchedKey})
		takeHint(watch)
		deleteAndWake(t, store, obj)
		awaitHint(t, "deleted", watch)
	}
	// The caller's connections are still as the caller wants them.
	execPostgres(t, pool, `NOTIFY callers, 'theirs'`)
	select {
	case got := <-heard:
		if got != "callers theirs" {
			t.Errorf("the caller's handler was given %q", got)
		}
	case <-time.After(patience):
		t.Error("the caller's handler is not called any more")
	}
	if len(heard) != 0 {
		t.Errorf("the caller's handler was given %q", <-heard)
	}
	if trace.connects.Load() == 0 || trace.queries.Load() == 0 {
		t.Error("the tracer was not asked; the test tests nothing")
	}
}

// As where a password, or here the role, is fetched for each connection anew.
func TestOnPostgresTheListenerAsksTheCallersPoolWhomToConnectAs(t *testing.T) {
	ctx, url := t.Context(), postgresURL(t)
	admin := postgresPool(t, url)
	migrate(t, openPostgres(t, url, tenure.PostgresConfig{}))
	for _, role := range []string{"watch_before", "watch_after"} {
		execPostgres(t, admin, `DROP ROLE IF EXISTS `+role)
		execPostgres(t, admin, `CREATE ROLE `+role+` LOGIN`)
		execPostgres(t, admin, `GRANT ALL ON objects, objects_tombstones TO `+role)
		t.Cleanup(func() {
			execPostgres(t, admin, `DROP OWNED BY `+role)
			execPostgres(t, admin, `DROP ROLE `+role)
		})
	}
	config, err := pgxpool.ParseConfig(strings.Replace(url, "postgres@", "nobody_here@", 1))
	wantErr(t, err, nil)
	var role atomic.Value
	role.Store("watch_before")
	config.BeforeConnect = func(_ context.Context, conn *pgx.ConnConfig) error {
		conn.User = role.Load().(string)
		return nil
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	wantErr(t, err, nil)
	t.Cleanup(pool.Close)
	store := must(tenure.NewPostgresStore(pool, tenure.PostgresConfig{Logger: quiet}))
	t.Cleanup(func() { store.Close() })

	listensAs := func() (user string) {
		err := admin.QueryRow(ctx, `SELECT coalesce(string_agg(usename, ','), '') FROM pg_stat_activity
			WHERE datname = current_database() AND query LIKE 'LISTEN%'`).Scan(&user)
		wantErr(t, err, nil)
		return user
	}
	watch := liveWatch(t, store, watchedKey)
	if got := listensAs(); got != "watch_before" {
		t.Errorf("%q listens", got)
	}
	role.Store("watch_after")
	execPostgres(t, admin, `ALTER ROLE watch_before NOLOGIN`)
	execPostgres(t, admin, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'watch_before'`)
	awaitThat(t, "it listens as the other role", func() bool { return watch.Live() && listensAs() == "watch_after" })
	takeHint(watch)
	deleteAndWake(t, store, put(t, store, tenure.Object{Key: watchedKey}))
	awaitHint(t, "deleted", watch)
}

func TestOnPostgresADeletionThatWakesIsWhollyThereAfterACrashOrNotAtAll(t *testing.T) {
	ctx := t.Context()
	// What is not flushed by a commit is not flushed at all before the crash.
	server := pgtest.Cluster(t, "fsync=on", "full_page_writes=on", "wal_writer_delay=10s", "autovacuum=off")
	migrate(t, openPostgres(t, server.URL(), tenure.PostgresConfig{}))
	var gone, back int
	for round := range 4 {
		key := tenure.Key{Type: "t", ID: fmt.Sprint("round ", round)}
		store := openPostgres(t, server.URL()+"&pool_max_conns=1", tenure.PostgresConfig{})
		old := put(t, store, tenure.Object{Key: key, Name: key.ID, Labels: map[string]string{"a": "b"}, Payload: []byte("payload")})
		deleteAndWake(t, store, old)
		durable := round%2 == 1
		if durable { // and so all before it
			put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: "other"}, Payload: []byte(key.ID)})
		}
		wantErr(t, server.Restart("immediate"), nil)
		store.Close()

		store = openPostgres(t, server.URL(), tenure.PostgresConfig{})
		got, err := store.Get(ctx, key)
		var tombstone int64
		pool := postgresPool(t, server.URL())
		wantErr(t, pool.QueryRow(ctx, `SELECT coalesce(max(resource_version), 0) FROM objects_tombstones WHERE id = $1`, key.ID).Scan(&tombstone), nil)
		switch {
		case err == nil:
			back++
			got.Age = old.Age
			if fmt.Sprint(got) != fmt.Sprint(old) || tombstone != 0 {
				t.Errorf("round %d: the object is back as\n%v, with a tombstone of version %d; it was\n%v", round, got, tombstone, old)
			}
			if durable {
				t.Errorf("round %d: the object is back, though a durable write followed its deletion", round)
			}
			deleteAndWake(t, store, got)
		default:
			gone++
			wantErr(t, err, tenure.ErrNotFound)
			if tombstone != old.Version {
				t.Errorf("round %d: the object is gone, and its tombstone has version %d, not %d", round, tombstone, old.Version)
			}
		}
		if durable {
			other, err := store.Get(ctx, tenure.Key{Type: "t", ID: "other"})
			if err != nil || string(other.Payload) != key.ID {
				t.Errorf("round %d: a write behind the deletion was lost: got %q, %v", round, other.Payload, err)
			}
		}
		// Ahead of the clock, so that only the tombstone can keep the version up.
		ahead := old.Version + int64(time.Hour/time.Microsecond)
		execPostgres(t, pool, `UPDATE objects_tombstones SET resource_version = $1 WHERE id = $2`, ahead, key.ID)
		if again, err := store.PutIf(ctx, tenure.Object{Key: key}, tenure.MustCreate()); err != nil || again.Version <= ahead {
			t.Errorf("round %d: version %d follows %d, %v", round, again.Version, ahead, err)
		}
		pool.Close()
		store.Close()
	}
	if back == 0 {
		t.Error("no crash undid a deletion: it waited for the disk, and held up all who notify")
	}
	t.Logf("%d deletions lasted, %d were undone", gone, back)
}

// A deletion that wakes makes its own commit not wait for the disk, and no other.
func TestOnPostgresWritesAroundADeletionThatWakesAreDurable(t *testing.T) {
	ctx := t.Context()
	server := pgtest.Cluster(t, "fsync=on", "full_page_writes=on", "wal_writer_delay=10s", "autovacuum=off")
	migrate(t, openPostgres(t, server.URL(), tenure.PostgresConfig{}))
	for what, write := range map[string]func(store tenure.Store, obj tenure.Object) (exists bool){
		"a write": func(store tenure.Store, obj tenure.Object) bool {
			put(t, store, obj)
			return true
		},
		"a deletion that wakes nobody": func(store tenure.Store, obj tenure.Object) bool {
			wantErr(t, store.DeleteIf(ctx, obj.Key, obj.Version), nil)
			return false
		},
	} {
		t.Run(what, func(t *testing.T) {
			store := openPostgres(t, server.URL()+"&pool_max_conns=1", tenure.PostgresConfig{}) // one session does it all
			obj := put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}})
			deleteAndWake(t, store, put(t, store, tenure.Object{Key: watchedKey}))
			exists := write(store, obj)
			wantErr(t, server.Restart("immediate"), nil)
			after := openPostgres(t, server.URL(), tenure.PostgresConfig{})
			got, err := after.Get(ctx, obj.Key)
			if (err == nil) != exists || exists && got.Version <= obj.Version {
				t.Errorf("lost by a crash: got %+v, %v", got, err)
			}
		})
	}
}

func TestOnPostgresALeaseDoesNotWaitForTheApplicationsPool(t *testing.T) {
	url := postgresURL(t)
	migrate(t, openPostgres(t, url, tenure.PostgresConfig{}))
	pool := postgresPool(t, url+"&pool_max_conns=2")
	busy, over := context.WithCancel(t.Context())
	done := make(chan struct{}, 2)
	for range 2 {
		go func() {
			pool.Exec(busy, `SELECT pg_sleep(600)`)
			done <- struct{}{}
		}()
	}
	defer func() { over(); <-done; <-done }()
	admin := postgresPool(t, url)
	awaitThat(t, "the pool is saturated", func() bool {
		var n int
		wantErr(t, admin.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event = 'PgSleep'`).Scan(&n), nil)
		return n == 2
	})

	store := must(tenure.NewPostgresStore(pool, tenure.PostgresConfig{Logger: quiet}))
	t.Cleanup(func() { store.Close() })
	lease := newLease(t, store, tenure.LeaseConfig{Holder: "a"})
	other := newLease(t, store, tenure.LeaseConfig{Holder: "b"})
	var term *tenure.Term
	for _, step := range []struct {
		what string
		do   func(ctx context.Context) error
		want error
	}{
		{"acquire", func(ctx context.Context) (err error) { term, err = lease.AcquireOrSteal(ctx); return err }, nil},
		{"renew", func(ctx context.Context) error { return lease.Renew(ctx, term) }, nil},
		{"acquire what another holds", func(ctx context.Context) error { _, err := other.TryAcquire(ctx); return err }, tenure.ErrHeld},
		{"steal what another holds", func(ctx context.Context) error { _, err := other.AcquireOrSteal(ctx); return err }, tenure.ErrHeld},
		{"read", func(ctx context.Context) error { _, err := other.Read(ctx); return err }, nil},
		{"release", func(ctx context.Context) error { return lease.Release(ctx, term) }, nil},
		{"acquire after another", func(ctx context.Context) (err error) { term, err = other.AcquireOrSteal(ctx); return err }, nil},
		{"release again", func(ctx context.Context) error { return other.Release(ctx, term) }, nil},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		if err := step.do(ctx); !errors.Is(err, step.want) {
			t.Fatalf("%s, while the pool is saturated: got error %v, want %v", step.what, err, step.want)
		}
		cancel()
	}
	liveWatch(t, store, watchedKey) // the listener needs no connection of the pool either

	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := store.Get(ctx, watchedKey); err == nil {
		t.Error("the application finds a connection; the test tests nothing")
	}
}

// onSQLite runs a test with a store in a file, its database, and another
// database on that file, as another process has.
func onSQLite(t *testing.T, conns int, test func(t *testing.T, store *tenure.SQLiteStore, db, other *sql.DB)) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "t.db")
	migrate(t, openSQLite(t, path))
	dsn := "file:" + path + "?_pragma=busy_timeout(5000)&_txlock=immediate"
	db, other := openSQL(t, "sqlite", dsn), openSQL(t, "sqlite", dsn)
	db.SetMaxOpenConns(conns)
	store := must(tenure.NewSQLiteStore(db, tenure.SQLiteConfig{Shared: true, Logger: quiet}))
	t.Cleanup(func() { store.Close() })
	test(t, store, db, other)
}

// Within the poll, of whoever it is.
func TestOnSQLiteADeletionByAnyProgramWakes(t *testing.T) {
	for _, conns := range []int{0, 3} {
		t.Run(fmt.Sprint("connections ", conns), func(t *testing.T) {
			onSQLite(t, conns, func(t *testing.T, store *tenure.SQLiteStore, _, other *sql.DB) {
				watch := liveWatch(t, store, watchedKey)
				for range 3 {
					put(t, store, tenure.Object{Key: watchedKey})
					takeHint(watch)
					if n := execSQL(t, other, `DELETE FROM objects WHERE id = $1`, watchedKey.ID); n != 1 {
						t.Fatalf("%d rows were deleted", n)
					}
					awaitHint(t, "deleted by another", watch)
				}
			})
		})
	}
}

func TestOnSQLiteCommitsThatLeaveTheObjectWakeNobody(t *testing.T) {
	onSQLite(t, 0, func(t *testing.T, store *tenure.SQLiteStore, _, other *sql.DB) {
		put(t, store, tenure.Object{Key: watchedKey})
		watch := liveWatch(t, store, watchedKey)
		takeHint(watch)
		for _, id := range []string{"one", "two", "three"} {
			mark := put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: id}})
			marked := liveWatch(t, store, mark.Key)
			takeHint(marked)
			execSQL(t, other, `UPDATE objects SET updated_at_ms = updated_at_ms + 1, resource_version = resource_version + 1`)
			execSQL(t, other, `DELETE FROM objects WHERE id = $1`, id)
			awaitHint(t, "another object was deleted", marked) // so the poll has looked
		}
		if takeHint(watch) {
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
			watches := []tenure.Subscription{liveWatch(t, store, watchedKey), liveWatch(t, store, leaseKey)}
			watches[0].Stop()
			watches[0].Stop() // does not count
			if n := inUse(); n != 1 || !watches[1].Live() {
				t.Errorf("%d connections are in use for one watch, live %v; want 1", n, watches[1].Live())
			}
			obj := put(t, store, tenure.Object{Key: leaseKey})
			takeHint(watches[1])
			deleteAndWake(t, store, obj)
			awaitHint(t, "deleted", watches[1])
			watches[1].Stop()
			awaitThat(t, "the connection is given back", func() bool { return inUse() == 0 })
			awaitThat(t, "no goroutine is left", func() bool { return goroutines() <= before })
		}
		// And where the next begins while the last poll ends.
		for range 50 {
			store.Watch(watchedKey).Stop()
		}
		watch := liveWatch(t, store, watchedKey)
		if n := inUse(); n > 1 {
			t.Errorf("%d connections are in use for one watch", n)
		}
		watch.Stop()
		awaitThat(t, "the connection is given back", func() bool { return inUse() == 0 })
	})
}

func TestOnSQLiteASmallPoolIsNotBlockedByWatching(t *testing.T) {
	for _, conns := range []int{1, 2} {
		t.Run(fmt.Sprint("connections ", conns), func(t *testing.T) {
			onSQLite(t, conns, func(t *testing.T, store *tenure.SQLiteStore, db, _ *sql.DB) {
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				watch := beginWatch(t, store, watchedKey)
				lease := newLease(t, store, tenure.LeaseConfig{})
				for range 10 {
					obj, err := store.PutIf(ctx, tenure.Object{Key: watchedKey}, tenure.MustCreate())
					wantErr(t, err, nil)
					term, err := lease.AcquireOrSteal(ctx)
					wantErr(t, err, nil)
					wantErr(t, store.Fenced(ctx, term, func(tx *sql.Tx) error {
						_, err := tx.ExecContext(ctx, `UPDATE objects SET name = name`)
						return err
					}), nil)
					wantErr(t, lease.Release(ctx, term), nil)
					wantErr(t, db.PingContext(ctx), nil)
					takeHint(watch)
					wantErr(t, store.DeleteAndWake(ctx, obj.Key, obj.Version), nil)
					awaitHint(t, "deleted", watch)
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
	store := openSQLite(t, ":memory:")
	migrate(t, store)
	watch := beginWatch(t, store, watchedKey)
	// For several times as long as a file takes to be live.
	for end := time.Now().Add(300 * time.Millisecond); time.Now().Before(end); {
		obj := put(t, store, tenure.Object{Key: watchedKey})
		deleteAndWake(t, store, obj)
		awaitHint(t, "deleted", watch)
		if watch.Live() {
			t.Fatal("live")
		}
	}
	before := goroutines()
	watch.Stop()
	awaitThat(t, "its goroutine has ended", func() bool { return goroutines() < before })
}

func TestOnPostgresAStoreThatIsClosedStartsNothing(t *testing.T) {
	url := pgtest.URL(t)
	pool := postgresPool(t, url)
	store := openPostgres(t, url, tenure.PostgresConfig{})
	migrate(t, store)
	lease := newLease(t, store, tenure.LeaseConfig{})
	term := mustAcquire(t, lease)
	store.Close()
	before := goroutines()
	store.Watch(leaseKey).Stop()
	if err := lease.Release(t.Context(), term); err == nil {
		t.Error("a closed store releases")
	}
	if n := goroutines(); n > before {
		t.Errorf("%d goroutines began", n-before)
	}
	awaitThat(t, "no connection is left", func() bool {
		var n int
		err := pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'tenure'`).Scan(&n)
		return err == nil && n == 0
	})
}

func TestOnPostgresALeaseIsReleasedAlsoWhereNobodyCanBeNotified(t *testing.T) {
	url := pgtest.URL(t)
	admin := postgresPool(t, url)
	store := openPostgres(t, url, tenure.PostgresConfig{})
	migrate(t, store)
	execPostgres(t, admin, `CREATE ROLE mute LOGIN`)
	execPostgres(t, admin, `GRANT ALL ON objects, objects_tombstones TO mute`)
	execPostgres(t, admin, `REVOKE EXECUTE ON FUNCTION pg_notify(text, text) FROM PUBLIC`)
	t.Cleanup(func() {
		execPostgres(t, store.Pool(), `DROP OWNED BY mute`)
		execPostgres(t, store.Pool(), `DROP ROLE mute`)
	})
	mute := openPostgres(t, strings.Replace(url, "postgres@", "mute@", 1), tenure.PostgresConfig{})
	lease := newLease(t, mute, tenure.LeaseConfig{})
	wantErr(t, lease.Release(t.Context(), mustAcquire(t, lease)), nil)
	_, err := lease.Read(t.Context())
	wantErr(t, err, tenure.ErrNotFound)
}

func TestOnPostgresLeasesOfALargePoolDoNotWaitForOnesWhoseRowsAreLocked(t *testing.T) {
	url := pgtest.URL(t)
	pool := postgresPool(t, url+"&pool_max_conns=20")
	store := must(tenure.NewPostgresStore(pool, tenure.PostgresConfig{Logger: quiet}))
	t.Cleanup(func() { store.Close() })
	migrate(t, store)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var leases []*tenure.Lease
	var terms []*tenure.Term
	for i := range 11 {
		leases = append(leases, newLease(t, store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: fmt.Sprint(i)}, Name: fmt.Sprint(i)}))
		terms = append(terms, mustAcquire(t, leases[i]))
	}
	tx, err := pool.Begin(ctx)
	wantErr(t, err, nil)
	defer tx.Rollback(context.Background())
	execPostgres(t, tx, `SELECT FROM objects WHERE id <> '10' FOR UPDATE`)
	var all sync.WaitGroup
	for i := range 10 {
		all.Go(func() {
			if err := leases[i].Renew(ctx, terms[i]); err != nil {
				t.Error(err)
			}
		})
	}
	awaitThat(t, "ten renewals wait", func() bool {
		var n int
		err := pool.QueryRow(ctx, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`).Scan(&n)
		if err != nil {
			t.Fatal(err)
		}
		return n == 10
	})
	wantErr(t, leases[10].Renew(ctx, terms[10]), nil)
	wantErr(t, tx.Rollback(ctx), nil)
	all.Wait()
}

// Its first hint may be the one that matters.
func TestOnPostgresAStoreThatHasOnlyReadHearsWhatItWatches(t *testing.T) {
	for name, read := range map[string]func(t *testing.T, lease *tenure.Lease){
		"nothing": func(*testing.T, *tenure.Lease) {},
		"a lease": func(t *testing.T, lease *tenure.Lease) {
			_, err := lease.Read(t.Context())
			wantErr(t, err, tenure.ErrNotFound)
		},
	} {
		t.Run(name, func(t *testing.T) {
			url := postgresURL(t)
			migrate(t, openPostgres(t, url, tenure.PostgresConfig{}))
			store := must(tenure.NewPostgresStore(postgresPool(t, url), tenure.PostgresConfig{Logger: quiet}))
			t.Cleanup(func() { store.Close() })
			read(t, newLease(t, store, tenure.LeaseConfig{}))
			watch := liveWatch(t, store, leaseKey)
			takeHint(watch)
			other := openPostgres(t, url, tenure.PostgresConfig{})
			deleteAndWake(t, other, put(t, other, tenure.Object{Key: leaseKey}))
			awaitHint(t, "released", watch)
		})
	}
}

func TestOnPostgresAWatchIsNotLiveBeforeThereIsATable(t *testing.T) {
	url := postgresURL(t)
	log := make(lines, 10)
	store := openPostgres(t, url, tenure.PostgresConfig{Logger: slog.New(slog.NewTextHandler(log, nil))})
	watch := beginWatch(t, store, leaseKey)
	select {
	case line := <-log:
		if !strings.Contains(line, "Migrate") || watch.Live() {
			t.Errorf("live %v; logged %s", watch.Live(), line)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("it does not say that there is no table")
	}
	other := openPostgres(t, url, tenure.PostgresConfig{})
	migrate(t, other)
	awaitThat(t, "the watch is live", watch.Live)
	takeHint(watch)
	deleteAndWake(t, other, put(t, other, tenure.Object{Key: leaseKey}))
	awaitHint(t, "released", watch)
}

// Tenants have the same table and the same lease, each in a schema of its own.
func TestOnPostgresAReleaseWakesNobodyInAnotherSchema(t *testing.T) {
	url := postgresURL(t)
	open := func(schema string) *tenure.PostgresStore {
		store := openPostgres(t, url, tenure.PostgresConfig{Schema: schema, Logger: quiet})
		migrate(t, store)
		return store
	}
	one, two := open("one"), open("two")
	found := openPostgres(t, url+"&search_path=one", tenure.PostgresConfig{Logger: quiet}) // the same as one
	ofOne, ofTwo, ofFound := liveWatch(t, one, watchedKey), liveWatch(t, two, watchedKey), liveWatch(t, found, watchedKey)
	otherKey := tenure.Key{Type: watchedKey.Type, ID: "another"}
	other := liveWatch(t, two, otherKey)
	for range 3 {
		for _, w := range []tenure.Subscription{ofOne, ofTwo, ofFound} {
			takeHint(w)
		}
		deleteAndWake(t, one, put(t, one, tenure.Object{Key: watchedKey}))
		awaitHint(t, "released in its schema", ofOne)
		awaitHint(t, "released in its schema, found by search_path", ofFound)
		takeHint(other)
		wantErr(t, two.Wake(t.Context(), otherKey), nil)
		awaitHint(t, "woken", other) // by then it has heard of the release, too
		if takeHint(ofTwo) {
			t.Error("woken by a release in another schema")
		}
	}
}
