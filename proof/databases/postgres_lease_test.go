package databases_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

// backends are the connections of that name, in order.
func backends(t *testing.T, admin *pgx.Conn, name string) (pids []int) {
	t.Helper()
	err := admin.QueryRow(t.Context(), `SELECT coalesce(array_agg(pid ORDER BY pid), '{}') FROM pg_stat_activity WHERE application_name = $1`, name).Scan(&pids)
	testkit.WantErr(t, err, nil)
	return pids
}

func connectPostgres(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	testkit.WantErr(t, err, nil)
	t.Cleanup(func() { conn.Close(context.Background()) })
	return conn
}

// fill takes all slots that a server has, and each that becomes free, until it is
// told to stop.
func fill(t *testing.T, url string) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	full := make(chan struct{})
	var filler sync.WaitGroup
	filler.Go(func() {
		told := sync.OnceFunc(func() { close(full) })
		for ctx.Err() == nil {
			conn, err := pgx.Connect(ctx, url+"&application_name=filler")
			if err == nil {
				defer conn.Close(context.Background())
				continue
			}
			told()
			time.Sleep(time.Millisecond)
		}
	})
	select {
	case <-full:
	case <-time.After(20 * time.Second):
		t.Error("the server has more slots than expected")
	}
	stop = sync.OnceFunc(func() { cancel(); filler.Wait() })
	t.Cleanup(stop)
	return stop
}

// leaseOnly returns a store whose leases' connections have that name, and live and
// idle for no longer than these.
func leaseOnly(t *testing.T, url, name string, lifetime, idle time.Duration) *tenure.PostgresStore {
	t.Helper()
	config, err := pgxpool.ParseConfig(url + "&application_name=" + name)
	testkit.WantErr(t, err, nil)
	config.MaxConnLifetime, config.MaxConnIdleTime, config.HealthCheckPeriod = lifetime, idle, 10*time.Millisecond
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	testkit.WantErr(t, err, nil)
	t.Cleanup(pool.Close)
	store := testkit.Must(tenure.NewPostgresStore(pool, tenure.PostgresConfig{PollOnly: true, Logger: testkit.Quiet}))
	t.Cleanup(func() { store.Close() })
	return store
}

func TestALeaseKeepsItsConnectionWhileTheServerHasNoOther(t *testing.T) {
	t.Parallel()
	server := testkit.StartPostgres(t, "max_connections=12", "superuser_reserved_connections=0", "autovacuum=off")
	testkit.Migrate(t, testkit.OpenPostgres(t, server.URL(), tenure.PostgresConfig{}))
	const short = 20 * time.Millisecond
	for name, limits := range map[string]struct{ lifetime, idle time.Duration }{
		"of a short life":       {short, time.Hour},
		"that may not idle":     {time.Hour, short},
		"that may do as it can": {short, short},
	} {
		t.Run(name, func(t *testing.T) {
			admin := connectPostgres(t, server.URL())
			store := leaseOnly(t, server.URL(), "leases", limits.lifetime, limits.idle)
			lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
			term := testkit.MustAcquire(t, lease)
			renew := func() {
				t.Helper()
				if err := lease.Renew(t.Context(), term); err != nil {
					t.Fatal(err)
				}
			}
			stop := fill(t, server.URL())
			before := backends(t, admin, "leases")
			if len(before) == 0 {
				t.Fatal("the lease has no connection; the test tests nothing")
			}
			for end := time.Now().Add(1500 * time.Millisecond); time.Now().Before(end); time.Sleep(2 * short) {
				renew()
			}
			// One that was just being replaced may be gone, and no other may have come.
			isNew := func(pid int) bool { return !slices.Contains(before, pid) }
			if now := backends(t, admin, "leases"); len(now) == 0 || slices.ContainsFunc(now, isNew) {
				t.Errorf("connections %v became %v, though there was no slot for them", before, now)
			}
			stop()
			if limits.lifetime == short {
				testkit.Await(t, "the connection is replaced when there is a slot", func() bool {
					renew()
					now := backends(t, admin, "leases")
					return len(now) > 0 && !slices.ContainsFunc(now, func(pid int) bool { return !isNew(pid) })
				})
			}
			testkit.WantErr(t, lease.Release(t.Context(), term), nil)
			testkit.WantErr(t, store.Close(), nil)
			testkit.Await(t, "no connection is left", func() bool { return len(backends(t, admin, "leases")) == 0 })
		})
	}
}

// As where a password is fetched for each new connection.
func TestALeasesConnectionIsReplacedWhenItsLifetimeIsOver(t *testing.T) {
	testkit.Slow(t)
	url := testkit.PostgresURL(t)
	testkit.Migrate(t, testkit.OpenPostgres(t, url, tenure.PostgresConfig{}))
	admin := connectPostgres(t, url)
	before := goroutines()
	store := leaseOnly(t, url, "replaced", 10*time.Millisecond, time.Hour)
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
	term := testkit.MustAcquire(t, lease)
	var all, most int
	var seen []int
	testkit.Await(t, "it is replaced twice", func() bool {
		testkit.WantErr(t, lease.Renew(t.Context(), term), nil)
		now := backends(t, admin, "replaced")
		most = max(most, len(now))
		for _, pid := range now {
			if !slices.Contains(seen, pid) {
				seen = append(seen, pid)
			}
		}
		all = len(seen)
		return all >= 3
	})
	if most > 3 { // the old, the new, and one that is about to be gone
		t.Errorf("%d connections at once", most)
	}
	testkit.WantErr(t, store.Close(), nil)
	store.Pool().Close()
	testkit.Await(t, "no goroutine is left", func() bool { return goroutines() <= before })
	testkit.Await(t, "no connection is left", func() bool { return len(backends(t, admin, "replaced")) == 0 })
}

// hung begins a renewal of a lease that the server does not answer.
func hung(ctx context.Context, t *testing.T, store *tenure.PostgresStore, pool *pgxpool.Pool) (done chan error) {
	t.Helper()
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "hung"}})
	term := testkit.MustAcquire(t, lease)
	testkit.ExecPostgres(t, pool, `CREATE OR REPLACE FUNCTION hang() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN PERFORM pg_sleep(3600); RETURN NEW; END$$`)
	testkit.ExecPostgres(t, pool, `DROP TRIGGER IF EXISTS hang ON objects`)
	testkit.ExecPostgres(t, pool, `CREATE TRIGGER hang BEFORE UPDATE ON objects FOR EACH ROW WHEN (NEW.id = 'hung') EXECUTE FUNCTION hang()`)
	done = make(chan error, 1)
	go func() { done <- lease.Renew(ctx, term) }()
	testkit.AwaitHung(t, pool, 1)
	return done
}

func TestACallThatItsCallerCancelsLeavesTheConnectionsOfOtherLeases(t *testing.T) {
	testkit.Slow(t)
	url := testkit.PostgresURL(t)
	pool, admin := testkit.PostgresPool(t, url), connectPostgres(t, url)
	testkit.Migrate(t, testkit.OpenPostgres(t, url, tenure.PostgresConfig{}))
	store := leaseOnly(t, url, "cancelled", 0, time.Hour)
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
	term := testkit.MustAcquire(t, lease)
	var before []int
	for inTime := false; !inTime; { // a call that has waited for a second casts doubt on the server
		openThree(t, lease, pool)
		began := time.Now()
		ctx, cancel := context.WithCancel(t.Context())
		done := hung(ctx, t, store, pool) // after it no call is answered, which would clear the server
		before = backends(t, admin, "cancelled")
		cancel()
		testkit.WantErr(t, <-done, context.Canceled)
		inTime = time.Since(began) < time.Second
	}
	testkit.Await(t, "the connection of the call is closed", func() bool { return len(backends(t, admin, "cancelled")) == len(before)-1 })
	for range 100 { // other connections would be opened meanwhile
		testkit.WantErr(t, lease.Renew(t.Context(), term), nil)
	}
	for _, pid := range backends(t, admin, "cancelled") {
		if !slices.Contains(before, pid) {
			t.Errorf("connection %d is new, beside %v", pid, before)
		}
	}
}

// openThree makes the leases open three connections.
func openThree(t *testing.T, lease *tenure.Lease, pool *pgxpool.Pool) {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	testkit.WantErr(t, err, nil)
	_, err = tx.Exec(t.Context(), `LOCK TABLE objects IN ACCESS EXCLUSIVE MODE`)
	testkit.WantErr(t, err, nil)
	var reads sync.WaitGroup
	for range 3 {
		reads.Go(func() {
			for {
				_, err := lease.AcquireOrSteal(t.Context())
				if err == nil || !strings.Contains(err.Error(), "55P03") { // on a busy machine the first gives up before the last waits
					testkit.WantErr(t, err, tenure.ErrHeld)
					return
				}
			}
		})
	}
	testkit.Await(t, "all wait", func() bool { return testkit.LockWaits(t, pool) == 3 })
	testkit.WantErr(t, tx.Rollback(t.Context()), nil)
	reads.Wait()
}

func TestACallThatIsNotAnsweredHasTheOtherConnectionsReplacedWhereTheServerHasSome(t *testing.T) {
	testkit.Slow(t)
	for name, slots := range map[string]int{"no slot": 0, "any": -1} {
		t.Run(name, func(t *testing.T) {
			url, owner := testkit.AsWorker(t)
			admin := connectPostgres(t, owner.Config().ConnString())
			store := leaseOnly(t, url, "unanswered", 0, time.Hour)
			lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
			term := testkit.MustAcquire(t, lease)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			openThree(t, lease, owner)
			done := hung(ctx, t, store, owner) // after it no call is answered
			before := backends(t, admin, "unanswered")
			testkit.ExecPostgres(t, owner, fmt.Sprintf(`ALTER ROLE worker_%s CONNECTION LIMIT %d`, owner.Config().ConnConfig.Database, slots))
			testkit.Sleep(t.Context(), 1100*time.Millisecond) // long enough to blame the server
			cancel()
			testkit.WantErr(t, <-done, context.Canceled)
			for range 20 {
				testkit.WantErr(t, lease.Renew(t.Context(), term), nil)
			}
			if slots != 0 {
				testkit.Await(t, "all are replaced", func() bool {
					testkit.WantErr(t, lease.Renew(t.Context(), term), nil)
					return !slices.ContainsFunc(backends(t, admin, "unanswered"), func(pid int) bool { return slices.Contains(before, pid) })
				})
			}
			testkit.WantErr(t, lease.Release(t.Context(), term), nil)
		})
	}
}

func TestARoleWhoseSessionsMayNotIdleKeepsALeasesConnection(t *testing.T) {
	testkit.Slow(t)
	url, owner := testkit.AsWorker(t)
	admin := connectPostgres(t, owner.Config().ConnString())
	var version int
	testkit.WantErr(t, admin.QueryRow(t.Context(), `SELECT current_setting('server_version_num')::int`).Scan(&version), nil)
	if version < 140000 {
		t.Skip("the server has no idle_session_timeout")
	}
	testkit.ExecPostgres(t, owner, `ALTER ROLE worker_`+owner.Config().ConnConfig.Database+` SET idle_session_timeout = '3s'`)
	var log testkit.SyncBuffer
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
	term := testkit.MustAcquire(t, lease)
	testkit.LiveWatch(t, store, testkit.LeaseKey)
	before := backends(t, admin, "tenure")
	testkit.Await(t, "each has idled for longer than that", func() bool {
		var idle bool
		err := admin.QueryRow(t.Context(), `SELECT coalesce(bool_and(clock_timestamp() - state_change > '3500 ms'), true) FROM pg_stat_activity WHERE application_name = 'tenure' AND datname = current_database()`).Scan(&idle)
		testkit.WantErr(t, err, nil)
		return idle
	})
	testkit.WantErr(t, lease.Renew(t.Context(), term), nil)
	if now := backends(t, admin, "tenure"); len(before) < 2 || !slices.Equal(now, before) {
		t.Errorf("connections %v became %v", before, now)
	}
	if log.String() != "" {
		t.Errorf("logged:\n%s", log.String())
	}
}

// Each of many hooks of a caller's pool may refuse a connection, or be slow.
func TestAConnectionThatAHookRefusesIsNotPutInThePlaceOfAnother(t *testing.T) {
	url := testkit.PostgresURL(t)
	testkit.Migrate(t, testkit.OpenPostgres(t, url, tenure.PostgresConfig{}))
	config, err := pgxpool.ParseConfig(url + "&application_name=hooked")
	testkit.WantErr(t, err, nil)
	config.MaxConnLifetime = 10 * time.Millisecond
	var mu sync.Mutex
	refuses, refused := false, 0
	config.BeforeConnect = func(context.Context, *pgx.ConnConfig) error {
		mu.Lock()
		defer mu.Unlock()
		if refuses {
			refused++
			return errors.New("there is no password")
		}
		return nil
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	testkit.WantErr(t, err, nil)
	t.Cleanup(pool.Close)
	store := testkit.Must(tenure.NewPostgresStore(pool, tenure.PostgresConfig{PollOnly: true, Logger: testkit.Quiet}))
	t.Cleanup(func() { store.Close() })
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
	term := testkit.MustAcquire(t, lease)
	mu.Lock()
	refuses = true
	mu.Unlock()
	testkit.Await(t, "a connection is refused", func() bool {
		testkit.WantErr(t, lease.Renew(t.Context(), term), nil)
		mu.Lock()
		defer mu.Unlock()
		return refused > 0
	})
	for range 10 {
		testkit.WantErr(t, lease.Renew(t.Context(), term), nil)
	}
}
