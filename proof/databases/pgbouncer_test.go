package databases_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

// What holds of Postgres holds through a PgBouncer in transaction mode too, where
// each transaction may meet another session, and sessions meet other clients.

// throughBouncer returns the URL by which a store reaches that database through
// a PgBouncer. pgx must not count on statements prepared in a session.
func throughBouncer(t *testing.T, direct string) (bounced string) {
	t.Helper()
	return testkit.StartBouncer(t, direct) + "&default_query_exec_mode=exec"
}

func TestThroughPgBouncerTheContractIsKept(t *testing.T) {
	t.Parallel()
	direct := testkit.PostgresURL(t)
	store := testkit.OpenPostgres(t, throughBouncer(t, direct), tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	pool := testkit.PostgresPool(t, direct)
	storetest.Run(t, func(t *testing.T) tenure.Store {
		testkit.ExecPostgres(t, pool, `TRUNCATE objects, objects_tombstones`)
		return store
	})
}

// silenceSQL makes a holder look silent for longer than its TTL.
const silenceSQL = `UPDATE objects SET updated_at_ms = updated_at_ms - 60000`

func TestThroughPgBouncerALeaseIsAcquiredRenewedStolenAndReleased(t *testing.T) {
	ctx, direct := t.Context(), testkit.PostgresURL(t)
	bounced := throughBouncer(t, direct)
	testkit.Migrate(t, testkit.OpenPostgres(t, bounced, tenure.PostgresConfig{}))
	a := testkit.NewLease(t, testkit.OpenPostgres(t, bounced, tenure.PostgresConfig{}), tenure.LeaseConfig{Holder: "a"})
	b := testkit.NewLease(t, testkit.OpenPostgres(t, bounced, tenure.PostgresConfig{}), tenure.LeaseConfig{Holder: "b"})

	first, err := a.TryAcquire(ctx)
	testkit.WantErr(t, err, nil)
	testkit.WantErr(t, a.Renew(ctx, first), nil)
	_, err = b.AcquireOrSteal(ctx)
	testkit.WantErr(t, err, tenure.ErrHeld)

	testkit.ExecPostgres(t, testkit.PostgresPool(t, direct), silenceSQL)
	second, err := b.StealExpired(ctx)
	testkit.WantErr(t, err, nil)
	if err := a.Renew(ctx, first); !errors.Is(err, tenure.ErrLost) || !strings.Contains(err.Error(), "is held by b") {
		t.Errorf("renewal of the stolen lease: got %v, want it lost to b", err)
	}
	testkit.WantErr(t, a.Release(ctx, first), tenure.ErrLost)

	testkit.WantErr(t, b.Renew(ctx, second), nil)
	testkit.WantErr(t, b.Release(ctx, second), nil)
	_, err = b.Read(ctx)
	testkit.WantErr(t, err, tenure.ErrNotFound)
	third := testkit.MustAcquire(t, a)
	if tokens := []int64{first.Token(), second.Token(), third.Token()}; tokens[0] >= tokens[1] || tokens[1] >= tokens[2] {
		t.Errorf("tokens do not increase: %v", tokens)
	}
}

func TestThroughPgBouncerAStolenLeaseFencesItsFormerHolderOut(t *testing.T) {
	ctx, direct := t.Context(), testkit.PostgresURL(t)
	bounced, pool := throughBouncer(t, direct), testkit.PostgresPool(t, direct)
	store := testkit.OpenPostgres(t, bounced, tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	testkit.ExecPostgres(t, pool, `CREATE TABLE ledger (note text)`)
	term := testkit.MustAcquire(t, testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "old"}))
	fenced, err := tenure.Fence(store, term)
	testkit.WantErr(t, err, nil)
	insert := func(tx pgx.Tx) error { _, err := tx.Exec(ctx, `INSERT INTO ledger VALUES ('x')`); return err }

	testkit.WantErr(t, store.Fenced(ctx, term, insert), nil)
	kept := testkit.Put(t, fenced, tenure.Object{Key: tenure.Key{Type: "t", ID: "kept"}})
	gone := testkit.Put(t, fenced, tenure.Object{Key: tenure.Key{Type: "t", ID: "gone"}})
	gone, err = fenced.PutIf(ctx, gone, tenure.IfVersion(gone.Version))
	testkit.WantErr(t, err, nil)
	testkit.WantErr(t, fenced.DeleteIf(ctx, gone.Key, tenure.IfVersion(gone.Version)), nil)

	testkit.ExecPostgres(t, pool, silenceSQL)
	testkit.MustAcquire(t, testkit.NewLease(t, testkit.OpenPostgres(t, bounced, tenure.PostgresConfig{}), tenure.LeaseConfig{Holder: "new"}))
	testkit.WantErr(t, store.Fenced(ctx, term, insert), tenure.ErrLost)
	_, err = fenced.PutIf(ctx, gone, tenure.IfAbsent())
	testkit.WantErr(t, err, tenure.ErrLost)
	_, err = fenced.PutIf(ctx, kept, tenure.IfVersion(kept.Version))
	testkit.WantErr(t, err, tenure.ErrLost)
	testkit.WantErr(t, fenced.DeleteIf(ctx, kept.Key, tenure.IfVersion(kept.Version)), tenure.ErrLost)

	var rows int
	testkit.WantErr(t, pool.QueryRow(ctx, `SELECT count(*) FROM ledger`).Scan(&rows), nil)
	if rows != 1 {
		t.Errorf("%d rows, want 1", rows)
	}
	_, err = store.Get(ctx, gone.Key)
	testkit.WantErr(t, err, tenure.ErrNotFound)
	if got, err := store.Get(ctx, kept.Key); err != nil || got.Version != kept.Version {
		t.Errorf("got version %d, %v; want %d", got.Version, err, kept.Version)
	}
}

func TestThroughPgBouncerACoordinatorHandsOverToAnother(t *testing.T) {
	bounced, l := throughBouncer(t, testkit.PostgresURL(t)), testkit.NewJobLog(t)
	testkit.Migrate(t, testkit.OpenPostgres(t, bounced, tenure.PostgresConfig{}))
	cfg := tenure.CoordinatorConfig{RenewInterval: 50 * time.Millisecond, AcquireInterval: 50 * time.Millisecond}
	store := testkit.OpenPostgres(t, bounced, tenure.PostgresConfig{})
	a, stop := testkit.StartCoordinator(t, l, store, "a", cfg)
	testkit.Await(t, "a's job runs", func() bool { return l.Holder() == "a" })
	b, _ := testkit.StartCoordinator(t, l, testkit.OpenPostgres(t, bounced, tenure.PostgresConfig{}), "b", cfg)
	testkit.Await(t, "b knows that a holds the lease", func() bool { return b.Status().Holder == "a" })
	testkit.Await(t, "a has renewed it", func() bool {
		h, err := testkit.NewLease(t, store, tenure.LeaseConfig{}).Read(t.Context())
		testkit.WantErr(t, err, nil)
		return h.RenewedAt.After(h.AcquiredAt)
	})
	token := a.Status().Token

	stop()
	testkit.Await(t, "b's job runs", func() bool { return l.Holder() == "b" })
	if got := b.Status().Token; got <= token {
		t.Errorf("token %d follows %d", got, token)
	}
	if got := a.Status().Terms + b.Status().Terms; got != 2 {
		t.Errorf("%d terms, want 2:\n%s", got, l)
	}
}

// eachSession asks all sessions that the clients of a bouncer share.
func eachSession(t *testing.T, bounced, query string) (answers []string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	pool := testkit.PostgresPool(t, bounced+"&pool_max_conns=5")
	var pids []int
	for range 5 { // as many transactions at once as there are sessions
		tx, err := pool.Begin(ctx)
		testkit.WantErr(t, err, nil)
		defer tx.Rollback(ctx)
		var pid int
		var answer string
		testkit.WantErr(t, tx.QueryRow(ctx, `SELECT pg_backend_pid(), (`+query+`)::text`).Scan(&pid, &answer), nil)
		if slices.Contains(pids, pid) {
			t.Fatalf("session %d serves two transactions at once", pid)
		}
		pids, answers = append(pids, pid), append(answers, answer)
	}
	return answers
}

func TestThroughPgBouncerALockTimeoutEndsTheWaitOfItsClientAlone(t *testing.T) {
	direct := testkit.PostgresURL(t)
	bounced, pool := throughBouncer(t, direct), testkit.PostgresPool(t, direct)
	store := testkit.OpenPostgres(t, bounced, tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()

	// Each write sets a lock_timeout, as its context has a deadline.
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
	term, err := lease.TryAcquire(ctx)
	testkit.WantErr(t, err, nil)
	testkit.WantErr(t, lease.Renew(ctx, term), nil)
	fence, err := tenure.Fence(store, term)
	testkit.WantErr(t, err, nil)
	for _, store := range []tenure.Store{store, fence} {
		obj, err := store.PutIf(ctx, tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}}, tenure.IfAbsent())
		testkit.WantErr(t, err, nil)
		obj, err = store.PutIf(ctx, obj, tenure.IfVersion(obj.Version))
		testkit.WantErr(t, err, nil)
		testkit.WantErr(t, store.DeleteIf(ctx, obj.Key, tenure.IfVersion(obj.Version)), nil)
	}
	testkit.WantErr(t, store.Fenced(ctx, term, func(pgx.Tx) error { return nil }), nil)

	obj := testkit.Put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}})
	tx, err := pool.Begin(ctx)
	testkit.WantErr(t, err, nil)
	defer tx.Rollback(ctx)
	testkit.ExecPostgres(t, tx, `SELECT 1 FROM objects FOR UPDATE`)
	for name, write := range map[string]func(context.Context) error{
		"replace": func(ctx context.Context) error {
			_, err := store.PutIf(ctx, obj, tenure.IfVersion(obj.Version))
			return err
		},
		"renew": func(ctx context.Context) error { return lease.Renew(ctx, term) },
	} {
		err := inTime(500*time.Millisecond, write)
		var pgErr *pgconn.PgError
		if !errors.As(err, &pgErr) || pgErr.Code != "55P03" {
			t.Errorf("%s: got %v, want the server's lock timeout", name, err)
		}
	}
	testkit.WantErr(t, tx.Rollback(ctx), nil)
	testkit.WantErr(t, lease.Release(ctx, term), nil)

	const ask = `SELECT current_setting('lock_timeout')`
	if got, want := eachSession(t, bounced, ask), []string{"0", "0", "0", "0", "0"}; !slices.Equal(got, want) {
		t.Errorf("other clients meet lock_timeout %v, want %v", got, want)
	}
	testkit.ExecPostgres(t, testkit.PostgresPool(t, bounced), `SET lock_timeout = '123ms'`)
	if got := eachSession(t, bounced, ask); !slices.Contains(got, "123ms") {
		t.Errorf("the test does not catch a plain SET: other clients meet %v", got)
	}
}

func TestThroughPgBouncerAnOperationIsOneRoundTrip(t *testing.T) {
	direct := testkit.PostgresURL(t)
	testkit.Migrate(t, testkit.OpenPostgres(t, direct, tenure.PostgresConfig{}))
	counted, trips := countRoundTrips(t, throughBouncer(t, direct))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	store := testkit.OpenPostgres(t, counted+"&pool_max_conns=1", tenure.PostgresConfig{})
	oneTrip := func(what string, do func() error) {
		t.Helper()
		before := trips()
		testkit.WantErr(t, do(), nil)
		if got := trips() - before; got != 1 {
			t.Errorf("%s took %d round trips, want 1", what, got)
		}
	}

	_, err := store.Get(ctx, testkit.LeaseKey) // connects
	testkit.WantErr(t, err, tenure.ErrNotFound)
	_, err = store.Lineage(ctx) // as a process does once
	testkit.WantErr(t, err, nil)

	lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
	var term *tenure.Term
	oneTrip("acquire", func() (err error) { term, err = lease.TryAcquire(ctx); return err })
	oneTrip("a create that is refused", func() error {
		if _, err := store.PutIf(ctx, tenure.Object{Key: testkit.LeaseKey}, tenure.IfAbsent()); !errors.Is(err, tenure.ErrExists) {
			return fmt.Errorf("got %w", err)
		}
		return nil
	})
	oneTrip("renew", func() error { return lease.Renew(ctx, term) })
	oneTrip("read", func() error { _, err := lease.Read(ctx); return err })
	fence, err := tenure.Fence(store, term)
	testkit.WantErr(t, err, nil)
	for name, store := range map[string]tenure.Store{"": store, "fenced ": fence} {
		obj := tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}}
		write := func(cond tenure.WriteCondition) func() error {
			return func() (err error) { obj, err = store.PutIf(ctx, obj, cond); return err }
		}
		oneTrip(name+"create", write(tenure.IfAbsent()))
		oneTrip(name+"compare and swap", write(tenure.IfVersion(obj.Version)))
		oneTrip(name+"replace", write(tenure.Unconditional()))
		oneTrip(name+"get", func() error { _, err := store.Get(ctx, obj.Key); return err })
		oneTrip(name+"list", func() error { _, err := store.(tenure.Lister).List(ctx, "t", "", 10); return err })
		oneTrip(name+"delete", func() error { return store.DeleteIf(ctx, obj.Key, tenure.IfVersion(obj.Version)) })
	}
	oneTrip("release", func() error { return lease.Release(ctx, term) })
}

// lines is where a log's lines can be waited for.
type lines chan string

func (l lines) Write(p []byte) (int, error) {
	select {
	case l <- string(p):
	default:
	}
	return len(p), nil
}

// openDeaf opens a store that listens through the bouncer, and returns when it
// has found out that it hears nothing.
func openDeaf(t *testing.T, bounced string) *tenure.PostgresStore {
	t.Helper()
	log := make(lines, 10)
	store := testkit.OpenPostgres(t, bounced, tenure.PostgresConfig{Logger: slog.New(slog.NewTextHandler(log, nil))})
	watch := store.Watch(testkit.LeaseKey)
	t.Cleanup(watch.Stop)
	for timeout, said := time.After(testkit.Patience), false; !said; {
		select {
		case line := <-log:
			said = strings.Contains(line, "did not arrive")
		case <-timeout:
			t.Fatal("a store that hears nothing does not say so")
		}
	}
	if watch.Live() {
		t.Fatal("a store that hears nothing takes its watches for live")
	}
	return store
}

func TestThroughPgBouncerAStandbyThatHearsNothingPolls(t *testing.T) {
	bounced, l := throughBouncer(t, testkit.PostgresURL(t)), testkit.NewJobLog(t)
	testkit.Migrate(t, testkit.OpenPostgres(t, bounced, tenure.PostgresConfig{}))
	_, stop := testkit.StartCoordinator(t, l, testkit.OpenPostgres(t, bounced, tenure.PostgresConfig{}), "a", tenure.CoordinatorConfig{})
	testkit.Await(t, "a's job runs", func() bool { return l.Holder() == "a" })
	b, _ := testkit.StartCoordinator(t, l, openDeaf(t, bounced), "b", tenure.CoordinatorConfig{AcquireInterval: 100 * time.Millisecond})
	testkit.Await(t, "b knows that a holds the lease", func() bool { return b.Status().Holder == "a" })

	stop()
	released := time.Now()
	testkit.Await(t, "b's job runs", func() bool { return l.Holder() == "b" })
	if took := time.Since(released); took > 20*time.Second { // and not the TTL
		t.Errorf("the handover took %v, with an AcquireInterval of 100ms", took)
	}
}

func TestThroughPgBouncerAStoreThatHearsNothingLeavesNoListenBehind(t *testing.T) {
	bounced := throughBouncer(t, testkit.PostgresURL(t))
	testkit.Migrate(t, testkit.OpenPostgres(t, bounced, tenure.PostgresConfig{}))
	openDeaf(t, bounced)
	const ask = `SELECT count(*) FROM pg_listening_channels()`
	if got, want := eachSession(t, bounced, ask), []string{"0", "0", "0", "0", "0"}; !slices.Equal(got, want) {
		t.Errorf("sessions listen to %v channels, want %v", got, want)
	}
}

func TestBesidePgBouncerAListenURLWakesTheStandby(t *testing.T) {
	direct := testkit.PostgresURL(t)
	bounced, l := throughBouncer(t, direct), testkit.NewJobLog(t)
	cfg := tenure.PostgresConfig{ListenURL: direct}
	testkit.Migrate(t, testkit.OpenPostgres(t, bounced, cfg))
	_, stop := testkit.StartCoordinator(t, l, testkit.OpenPostgres(t, bounced, cfg), "a", tenure.CoordinatorConfig{})
	testkit.Await(t, "a's job runs", func() bool { return l.Holder() == "a" })
	store := testkit.OpenPostgres(t, bounced, cfg)
	watch := store.Watch(testkit.LeaseKey)
	defer watch.Stop()
	b, _ := testkit.StartCoordinator(t, l, store, "b", tenure.CoordinatorConfig{AcquireInterval: time.Hour})
	testkit.Await(t, "b knows that a holds the lease", func() bool { return b.Status().Holder == "a" })
	testkit.Await(t, "b listens", watch.Live)

	stop()
	released := time.Now()
	testkit.Await(t, "b's job runs", func() bool { return l.Holder() == "b" })
	if took := time.Since(released); took > 20*time.Second { // and not the TTL
		t.Errorf("the handover took %v", took)
	}
}

// A standby only reads, and a lease of a short TTL leaves its writes little time.
func TestAPoolerThatComesInBetweenIsFoundOut(t *testing.T) {
	for name, call := range map[string]func(context.Context, *tenure.Lease, *tenure.Term) error{
		"by a read": func(ctx context.Context, lease *tenure.Lease, _ *tenure.Term) error {
			_, err := lease.Read(ctx)
			return err
		},
		"by a write": func(ctx context.Context, lease *tenure.Lease, term *tenure.Term) error {
			return inTime(900*time.Millisecond, func(ctx context.Context) error { return lease.Renew(ctx, term) })
		},
	} {
		t.Run(name, func(t *testing.T) {
			direct := testkit.PostgresURL(t)
			config, err := pgxpool.ParseConfig(throughBouncer(t, direct))
			testkit.WantErr(t, err, nil)
			server, err := pgx.ParseConfig(direct)
			testkit.WantErr(t, err, nil)
			dial := config.ConnConfig.DialFunc
			var between atomic.Bool
			config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
				if !between.Load() {
					address = net.JoinHostPort(server.Host, fmt.Sprint(server.Port))
				}
				return dial(ctx, network, address)
			}
			pool, err := pgxpool.NewWithConfig(t.Context(), config)
			testkit.WantErr(t, err, nil)
			t.Cleanup(pool.Close)
			store := testkit.Must(tenure.NewPostgresStore(pool, tenure.PostgresConfig{PollOnly: true}))
			t.Cleanup(func() { store.Close() })
			testkit.Migrate(t, store)
			lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
			term := testkit.MustAcquire(t, lease)

			between.Store(true)
			testkit.ExecPostgres(t, testkit.PostgresPool(t, direct), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
				WHERE datname = current_database() AND pid <> pg_backend_pid()`)
			for range testkit.LeaseConns + 1 { // as many may be told by a connection that was there
				if err = call(t.Context(), lease, term); err == nil {
					return
				}
			}
			t.Error(err)
		})
	}
}
