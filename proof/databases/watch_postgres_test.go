package databases_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

// listeners counts the connections to this database that listen.
func listeners(t *testing.T, pool *pgxpool.Pool) (n int) {
	t.Helper()
	err := pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity
		WHERE datname = current_database() AND pid <> pg_backend_pid() AND query LIKE 'LISTEN%'`).Scan(&n)
	testkit.WantErr(t, err, nil)
	return n
}

func TestOnPostgresAStoreThatOnlyPollsHoldsNoConnectionToListenOn(t *testing.T) {
	url := testkit.PostgresURL(t)
	polls := testkit.OpenPostgres(t, url, tenure.PostgresConfig{PollOnly: true})
	testkit.Migrate(t, polls)
	pool := testkit.PostgresPool(t, url)
	deaf := testkit.BeginWatch(t, polls, watchedKey)
	other := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	if n := listeners(t, pool); n != 0 {
		t.Errorf("before anybody watches otherwise, %d connections listen", n)
	}
	live := testkit.LiveWatch(t, other, watchedKey)
	if n := listeners(t, pool); n != 1 {
		t.Errorf("%d connections listen, want that of the other store only", n)
	}
	testkit.TakeHint(live)
	testkit.DeleteAndWake(t, polls, testkit.Put(t, polls, tenure.Object{Key: watchedKey}))
	testkit.AwaitHint(t, "deleted by a store that only polls", live)
	if deaf.Live() || testkit.TakeHint(deaf) {
		t.Error("a watch of a store that only polls is live, or was woken")
	}
	deaf.Stop()
}

func TestOnPostgresOneConnectionListensForAllWatchesOfAStore(t *testing.T) {
	url := testkit.PostgresURL(t)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	pool := testkit.PostgresPool(t, url)
	if n := listeners(t, pool); n != 0 {
		t.Errorf("%d connections listen before anybody watches", n)
	}
	for i := range 20 {
		testkit.LiveWatch(t, store, tenure.Key{Type: "t", ID: fmt.Sprint(i)})
	}
	if n := listeners(t, pool); n != 1 {
		t.Errorf("%d connections listen, want 1", n)
	}
	testkit.WantErr(t, store.Close(), nil)
	testkit.Await(t, "the connection is closed", func() bool { return listeners(t, pool) == 0 })
}

func TestOnPostgresAListenURLThatCannotBeParsedIsRefusedWithoutItsPassword(t *testing.T) {
	_, err := tenure.OpenPostgres(t.Context(), testkit.PostgresURL(t), tenure.PostgresConfig{ListenURL: "postgres://u:sEcrEt@host:port/db"})
	testkit.WantErr(t, err, tenure.ErrInvalid)
	if strings.Contains(err.Error(), "sEcrEt") || !strings.Contains(err.Error(), "ListenURL") {
		t.Errorf("got error %q, want one that names ListenURL and tells no password", err)
	}
}

func TestOnPostgresAKeyTooLongForANotificationWakesNevertheless(t *testing.T) {
	url := testkit.PostgresURL(t)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	for shift := range 3 { // so that it is cut within a character of three bytes, too
		key := tenure.Key{Type: "t", ID: strings.Repeat("x", shift) + strings.Repeat("長", 5000)}
		watch := testkit.LiveWatch(t, store, key)
		testkit.TakeHint(watch)
		testkit.DeleteAndWake(t, store, testkit.Put(t, store, tenure.Object{Key: key}))
		testkit.AwaitHint(t, fmt.Sprintf("a key of %d bytes", len(key.ID)), watch)
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
	ctx, url := t.Context(), testkit.PostgresURL(t)
	config, err := pgxpool.ParseConfig(url)
	testkit.WantErr(t, err, nil)
	heard := make(chan string, 100)
	trace := &tracer{}
	config.ConnConfig.OnNotification = func(_ *pgconn.PgConn, n *pgconn.Notification) { heard <- n.Channel + " " + n.Payload }
	config.ConnConfig.Tracer = trace
	config.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(ctx, config)
	testkit.WantErr(t, err, nil)
	t.Cleanup(pool.Close)
	store := testkit.Must(tenure.NewPostgresStore(pool, tenure.PostgresConfig{Logger: testkit.Quiet}))
	t.Cleanup(func() { store.Close() })
	testkit.Migrate(t, store)
	testkit.ExecPostgres(t, pool, `LISTEN callers`)

	watch := testkit.LiveWatch(t, store, watchedKey)
	for range 3 {
		obj := testkit.Put(t, store, tenure.Object{Key: watchedKey})
		testkit.TakeHint(watch)
		testkit.DeleteAndWake(t, store, obj)
		testkit.AwaitHint(t, "deleted", watch)
	}
	// The caller's connections are still as the caller wants them.
	testkit.ExecPostgres(t, pool, `NOTIFY callers, 'theirs'`)
	select {
	case got := <-heard:
		if got != "callers theirs" {
			t.Errorf("the caller's handler was given %q", got)
		}
	case <-time.After(testkit.Patience):
		t.Error("the caller's handler is not called any more")
	}
	if len(heard) != 0 {
		t.Errorf("the caller's handler was given %q", <-heard)
	}
	if trace.connects.Load() == 0 || trace.queries.Load() == 0 {
		t.Error("the tracer was not asked; the test tests nothing")
	}
}

// As where a password, or here the role, is fetched for each new connection.
func TestOnPostgresTheListenerAsksTheCallersPoolWhichRoleToConnectAs(t *testing.T) {
	ctx, url := t.Context(), testkit.PostgresURL(t)
	admin := testkit.PostgresPool(t, url)
	testkit.Migrate(t, testkit.OpenPostgres(t, url, tenure.PostgresConfig{}))
	for _, role := range []string{"watch_before", "watch_after"} {
		testkit.ExecPostgres(t, admin, `DROP ROLE IF EXISTS `+role)
		testkit.ExecPostgres(t, admin, `CREATE ROLE `+role+` LOGIN`)
		testkit.ExecPostgres(t, admin, `GRANT ALL ON objects, objects_tombstones TO `+role)
		t.Cleanup(func() {
			testkit.ExecPostgres(t, admin, `DROP OWNED BY `+role)
			testkit.ExecPostgres(t, admin, `DROP ROLE `+role)
		})
	}
	config, err := pgxpool.ParseConfig(strings.Replace(url, "postgres@", "nobody_here@", 1))
	testkit.WantErr(t, err, nil)
	var role atomic.Value
	role.Store("watch_before")
	config.BeforeConnect = func(_ context.Context, conn *pgx.ConnConfig) error {
		conn.User = role.Load().(string)
		return nil
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	testkit.WantErr(t, err, nil)
	t.Cleanup(pool.Close)
	store := testkit.Must(tenure.NewPostgresStore(pool, tenure.PostgresConfig{Logger: testkit.Quiet}))
	t.Cleanup(func() { store.Close() })

	listensAs := func() (user string) {
		err := admin.QueryRow(ctx, `SELECT coalesce(string_agg(usename, ','), '') FROM pg_stat_activity
			WHERE datname = current_database() AND query LIKE 'LISTEN%'`).Scan(&user)
		testkit.WantErr(t, err, nil)
		return user
	}
	watch := testkit.LiveWatch(t, store, watchedKey)
	if got := listensAs(); got != "watch_before" {
		t.Errorf("%q listens", got)
	}
	role.Store("watch_after")
	testkit.ExecPostgres(t, admin, `ALTER ROLE watch_before NOLOGIN`)
	testkit.ExecPostgres(t, admin, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'watch_before'`)
	testkit.Await(t, "it listens as the other role", func() bool { return watch.Live() && listensAs() == "watch_after" })
	testkit.TakeHint(watch)
	testkit.DeleteAndWake(t, store, testkit.Put(t, store, tenure.Object{Key: watchedKey}))
	testkit.AwaitHint(t, "deleted", watch)
}

func TestOnPostgresADeletionThatWakesIsWhollyThereAfterACrashOrNotAtAll(t *testing.T) {
	ctx := t.Context()
	// What is not flushed by a commit is not flushed at all before the crash.
	server := testkit.StartPostgres(t, testkit.OnDisk, "wal_writer_delay=10s", "autovacuum=off")
	testkit.Migrate(t, testkit.OpenPostgres(t, server.URL(), tenure.PostgresConfig{}))
	var gone, back int
	for round := range 4 {
		key := tenure.Key{Type: "t", ID: fmt.Sprint("round ", round)}
		store := testkit.OpenPostgres(t, server.URL()+"&pool_max_conns=1", tenure.PostgresConfig{})
		old := testkit.Put(t, store, tenure.Object{Key: key, Name: key.ID, Labels: map[string]string{"a": "b"}, Payload: []byte("payload")})
		testkit.DeleteAndWake(t, store, old)
		durable := round%2 == 1
		if durable { // and so all before it
			testkit.Put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: "other"}, Payload: []byte(key.ID)})
		}
		testkit.WantErr(t, server.Restart("immediate"), nil)
		store.Close()

		store = testkit.OpenPostgres(t, server.URL(), tenure.PostgresConfig{})
		got, err := store.Get(ctx, key)
		var tombstone int64
		pool := testkit.PostgresPool(t, server.URL())
		testkit.WantErr(t, pool.QueryRow(ctx, `SELECT coalesce(max(resource_version), 0) FROM objects_tombstones WHERE id = $1`, key.ID).Scan(&tombstone), nil)
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
			testkit.DeleteAndWake(t, store, got)
		default:
			gone++
			testkit.WantErr(t, err, tenure.ErrNotFound)
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
		testkit.ExecPostgres(t, pool, `UPDATE objects_tombstones SET resource_version = $1 WHERE id = $2`, ahead, key.ID)
		if again, err := store.PutIf(ctx, tenure.Object{Key: key}, tenure.IfAbsent()); err != nil || again.Version <= ahead {
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
	server := testkit.StartPostgres(t, testkit.OnDisk, "wal_writer_delay=10s", "autovacuum=off")
	testkit.Migrate(t, testkit.OpenPostgres(t, server.URL(), tenure.PostgresConfig{}))
	for what, write := range map[string]func(store tenure.Store, obj tenure.Object) (exists bool){
		"a write": func(store tenure.Store, obj tenure.Object) bool {
			testkit.Put(t, store, obj)
			return true
		},
		"a deletion that wakes nobody": func(store tenure.Store, obj tenure.Object) bool {
			testkit.WantErr(t, store.DeleteIf(ctx, obj.Key, tenure.IfVersion(obj.Version)), nil)
			return false
		},
	} {
		t.Run(what, func(t *testing.T) {
			store := testkit.OpenPostgres(t, server.URL()+"&pool_max_conns=1", tenure.PostgresConfig{}) // one session does it all
			obj := testkit.Put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}})
			testkit.DeleteAndWake(t, store, testkit.Put(t, store, tenure.Object{Key: watchedKey}))
			exists := write(store, obj)
			testkit.WantErr(t, server.Restart("immediate"), nil)
			after := testkit.OpenPostgres(t, server.URL(), tenure.PostgresConfig{})
			got, err := after.Get(ctx, obj.Key)
			if (err == nil) != exists || exists && got.Version <= obj.Version {
				t.Errorf("lost by a crash: got %+v, %v", got, err)
			}
		})
	}
}

func TestOnPostgresALeaseDoesNotWaitForTheApplicationsPool(t *testing.T) {
	url := testkit.PostgresURL(t)
	testkit.Migrate(t, testkit.OpenPostgres(t, url, tenure.PostgresConfig{}))
	pool := testkit.PostgresPool(t, url+"&pool_max_conns=2")
	busy, over := context.WithCancel(t.Context())
	done := make(chan struct{}, 2)
	for range 2 {
		go func() {
			pool.Exec(busy, `SELECT pg_sleep(600)`)
			done <- struct{}{}
		}()
	}
	defer func() { over(); <-done; <-done }()
	admin := testkit.PostgresPool(t, url)
	testkit.Await(t, "the pool is saturated", func() bool {
		var n int
		testkit.WantErr(t, admin.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event = 'PgSleep'`).Scan(&n), nil)
		return n == 2
	})

	store := testkit.Must(tenure.NewPostgresStore(pool, tenure.PostgresConfig{Logger: testkit.Quiet}))
	t.Cleanup(func() { store.Close() })
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "a"})
	other := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "b"})
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
	testkit.LiveWatch(t, store, watchedKey) // the listener needs no connection of the pool either

	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := store.Get(ctx, watchedKey); err == nil {
		t.Error("the application finds a connection; the test tests nothing")
	}
}

func TestOnPostgresAStoreThatIsClosedStartsNothing(t *testing.T) {
	url := testkit.PostgresURL(t)
	pool := testkit.PostgresPool(t, url)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
	term := testkit.MustAcquire(t, lease)
	store.Close()
	before := goroutines()
	store.Watch(testkit.LeaseKey).Stop()
	if err := lease.Release(t.Context(), term); err == nil {
		t.Error("a closed store releases")
	}
	if n := goroutines(); n > before {
		t.Errorf("%d goroutines began", n-before)
	}
	testkit.Await(t, "no connection is left", func() bool {
		var n int
		err := pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'tenure'`).Scan(&n)
		return err == nil && n == 0
	})
}

func TestOnPostgresALeaseIsReleasedEvenIfNobodyCanBeNotified(t *testing.T) {
	url := testkit.PostgresURL(t)
	admin := testkit.PostgresPool(t, url)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	testkit.ExecPostgres(t, admin, `CREATE ROLE mute LOGIN`)
	testkit.ExecPostgres(t, admin, `GRANT ALL ON objects, objects_tombstones TO mute`)
	testkit.ExecPostgres(t, admin, `REVOKE EXECUTE ON FUNCTION pg_notify(text, text) FROM PUBLIC`)
	t.Cleanup(func() {
		testkit.ExecPostgres(t, store.Pool(), `DROP OWNED BY mute`)
		testkit.ExecPostgres(t, store.Pool(), `DROP ROLE mute`)
	})
	mute := testkit.OpenPostgres(t, strings.Replace(url, "postgres@", "mute@", 1), tenure.PostgresConfig{})
	lease := testkit.NewLease(t, mute, tenure.LeaseConfig{})
	testkit.WantErr(t, lease.Release(t.Context(), testkit.MustAcquire(t, lease)), nil)
	_, err := lease.Read(t.Context())
	testkit.WantErr(t, err, tenure.ErrNotFound)
}

func TestOnPostgresLeasesOfALargePoolDoNotWaitForOnesWhoseRowsAreLocked(t *testing.T) {
	url := testkit.PostgresURL(t)
	pool := testkit.PostgresPool(t, url+"&pool_max_conns=20")
	store := testkit.Must(tenure.NewPostgresStore(pool, tenure.PostgresConfig{Logger: testkit.Quiet}))
	t.Cleanup(func() { store.Close() })
	testkit.Migrate(t, store)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var leases []*tenure.Lease
	var terms []*tenure.Term
	for i := range 11 {
		leases = append(leases, testkit.NewLease(t, store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: fmt.Sprint(i)}, Name: fmt.Sprint(i)}))
		terms = append(terms, testkit.MustAcquire(t, leases[i]))
	}
	tx, err := pool.Begin(ctx)
	testkit.WantErr(t, err, nil)
	defer tx.Rollback(context.Background())
	testkit.ExecPostgres(t, tx, `SELECT FROM objects WHERE id <> '10' FOR UPDATE`)
	var all sync.WaitGroup
	for i := range 10 {
		all.Go(func() {
			if err := leases[i].Renew(ctx, terms[i]); err != nil {
				t.Error(err)
			}
		})
	}
	testkit.Await(t, "ten renewals wait", func() bool {
		var n int
		err := pool.QueryRow(ctx, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`).Scan(&n)
		if err != nil {
			t.Fatal(err)
		}
		return n == 10
	})
	testkit.WantErr(t, leases[10].Renew(ctx, terms[10]), nil)
	testkit.WantErr(t, tx.Rollback(ctx), nil)
	all.Wait()
}

// Its first hint may be the one that matters.
func TestOnPostgresAStoreThatHasOnlyReadHearsWhatItWatches(t *testing.T) {
	testkit.Slow(t)
	for name, read := range map[string]func(t *testing.T, lease *tenure.Lease){
		"nothing": func(*testing.T, *tenure.Lease) {},
		"a lease": func(t *testing.T, lease *tenure.Lease) {
			_, err := lease.Read(t.Context())
			testkit.WantErr(t, err, tenure.ErrNotFound)
		},
	} {
		t.Run(name, func(t *testing.T) {
			url := testkit.PostgresURL(t)
			testkit.Migrate(t, testkit.OpenPostgres(t, url, tenure.PostgresConfig{}))
			store := testkit.Must(tenure.NewPostgresStore(testkit.PostgresPool(t, url), tenure.PostgresConfig{Logger: testkit.Quiet}))
			t.Cleanup(func() { store.Close() })
			read(t, testkit.NewLease(t, store, tenure.LeaseConfig{}))
			watch := testkit.LiveWatch(t, store, testkit.LeaseKey)
			testkit.TakeHint(watch)
			other := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
			testkit.DeleteAndWake(t, other, testkit.Put(t, other, tenure.Object{Key: testkit.LeaseKey}))
			testkit.AwaitHint(t, "released", watch)
		})
	}
}

func TestOnPostgresAWatchIsNotLiveBeforeThereIsATable(t *testing.T) {
	url := testkit.PostgresURL(t)
	log := make(lines, 10)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{Logger: slog.New(slog.NewTextHandler(log, nil))})
	watch := testkit.BeginWatch(t, store, testkit.LeaseKey)
	select {
	case line := <-log:
		if !strings.Contains(line, "Migrate") || watch.Live() {
			t.Errorf("live %v; logged %s", watch.Live(), line)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("it does not say that there is no table")
	}
	other := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.Migrate(t, other)
	testkit.Await(t, "the watch is live", watch.Live)
	testkit.TakeHint(watch)
	testkit.DeleteAndWake(t, other, testkit.Put(t, other, tenure.Object{Key: testkit.LeaseKey}))
	testkit.AwaitHint(t, "released", watch)
}

// Tenants have the same table and the same lease, each in a schema of its own.
func TestOnPostgresAReleaseWakesNobodyInAnotherSchema(t *testing.T) {
	url := testkit.PostgresURL(t)
	open := func(schema string) *tenure.PostgresStore {
		store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{Schema: schema, Logger: testkit.Quiet})
		testkit.Migrate(t, store)
		return store
	}
	one, two := open("one"), open("two")
	found := testkit.OpenPostgres(t, url+"&search_path=one", tenure.PostgresConfig{Logger: testkit.Quiet}) // the same as one
	ofOne, ofTwo, ofFound := testkit.LiveWatch(t, one, watchedKey), testkit.LiveWatch(t, two, watchedKey), testkit.LiveWatch(t, found, watchedKey)
	otherKey := tenure.Key{Type: watchedKey.Type, ID: "another"}
	other := testkit.LiveWatch(t, two, otherKey)
	for range 3 {
		for _, w := range []tenure.Subscription{ofOne, ofTwo, ofFound} {
			testkit.TakeHint(w)
		}
		testkit.DeleteAndWake(t, one, testkit.Put(t, one, tenure.Object{Key: watchedKey}))
		testkit.AwaitHint(t, "released in its schema", ofOne)
		testkit.AwaitHint(t, "released in its schema, found by search_path", ofFound)
		testkit.TakeHint(other)
		testkit.WantErr(t, two.Wake(t.Context(), otherKey), nil)
		testkit.AwaitHint(t, "woken", other) // by then it has heard of the release, too
		if testkit.TakeHint(ofTwo) {
			t.Error("woken by a release in another schema")
		}
	}
}

func TestOnPostgresALogThatBlocksKeepsNoListenerFromListeningAgain(t *testing.T) {
	url := testkit.PostgresURL(t)
	release := make(chan struct{})
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{Logger: slog.New(testkit.BlockedLog(release))})
	t.Cleanup(func() { close(release) }) // before the store is closed
	testkit.Migrate(t, store)
	pool := testkit.PostgresPool(t, url)
	watch := testkit.LiveWatch(t, store, watchedKey)
	for range 3 {
		testkit.ExecPostgres(t, pool, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
			WHERE datname = current_database() AND pid <> pg_backend_pid() AND query LIKE 'LISTEN%'`)
		testkit.AwaitHint(t, "the connection broke", watch)
		testkit.Await(t, "it listens again", func() bool { return watch.Live() && listeners(t, pool) == 1 })
		testkit.TakeHint(watch)
		testkit.DeleteAndWake(t, store, testkit.Put(t, store, tenure.Object{Key: watchedKey}))
		testkit.AwaitHint(t, "deleted", watch)
	}
}
