package databases_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
)

// A version that is computed before its statement waits for a lock is an old
// one by the time the wait is over: an insert waits for a transaction that
// deletes a row whose version is greater than any the insert could have drawn.
func TestAVersionIsDrawnAfterTheWaitForALock(t *testing.T) {
	ctx, url := t.Context(), testkit.PostgresURL(t)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	pool := testkit.PostgresPool(t, url)
	key := tenure.Key{Type: "t", ID: "waited-for"}
	old := testkit.Put(t, store, tenure.Object{Key: key})

	tx, err := pool.Begin(ctx)
	testkit.WantErr(t, err, nil)
	defer tx.Rollback(ctx)
	// An update and a delete as the store does them, under one lock.
	testkit.ExecPostgres(t, tx, `UPDATE objects SET resource_version = resource_version + 1 WHERE id = $1`, key.ID)
	created := make(chan tenure.Object)
	go func() {
		obj, err := store.PutIf(ctx, tenure.Object{Key: key}, tenure.Unconditional())
		if err != nil {
			t.Error(err)
		}
		created <- obj
	}()
	testkit.AwaitLockWait(t, pool)
	// Far above the clock, so that only the tombstone can keep the version up.
	deleted := old.Version + int64(time.Hour/time.Microsecond)
	testkit.ExecPostgres(t, tx, `DELETE FROM objects WHERE id = $1`, key.ID)
	testkit.ExecPostgres(t, tx, `INSERT INTO objects_tombstones VALUES ($1, $2, $3)`, key.Type, key.ID, deleted)
	testkit.WantErr(t, tx.Commit(ctx), nil)
	if obj := <-created; obj.Version <= deleted {
		t.Errorf("version %d of the new object is not above %d of the deleted one", obj.Version, deleted)
	}

	// And an insert that waits for another insert of the same key, which is
	// deleted before it commits.
	tx, err = pool.Begin(ctx)
	testkit.WantErr(t, err, nil)
	defer tx.Rollback(ctx)
	key.ID = "inserted"
	testkit.ExecPostgres(t, tx, `INSERT INTO objects VALUES ($1, $2, NULL, '{}', '', 1, 0, 0)`, key.Type, key.ID)
	go func() {
		obj, err := store.PutIf(ctx, tenure.Object{Key: key}, tenure.IfAbsent())
		if err != nil {
			t.Error(err)
		}
		created <- obj
	}()
	testkit.AwaitLockWait(t, pool)
	testkit.ExecPostgres(t, tx, `DELETE FROM objects WHERE id = $1`, key.ID)
	testkit.ExecPostgres(t, tx, `INSERT INTO objects_tombstones VALUES ($1, $2, $3)`, key.Type, key.ID, deleted)
	testkit.WantErr(t, tx.Commit(ctx), nil)
	if obj := <-created; obj.Version <= deleted {
		t.Errorf("version %d of the new object is not above %d of the deleted one", obj.Version, deleted)
	}
}

// inTime makes a call with a limit that it is to end before, and again with a longer
// one where the machine was too slow for that.
func inTime(limit time.Duration, call func(context.Context) error) error {
	for ; ; limit *= 2 {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		err := call(ctx)
		late := ctx.Err() != nil
		cancel()
		if !late || limit > 10*time.Second {
			return err
		}
	}
}

func TestVersionsStayAheadThoughTheDatabasesClockIsSetBack(t *testing.T) {
	ctx, url := t.Context(), testkit.PostgresURL(t)
	pool := testkit.PostgresPool(t, url)
	// This clock hides the system's from statements that don't name a schema.
	testkit.ExecPostgres(t, pool, `CREATE SCHEMA fake`)
	testkit.ExecPostgres(t, pool, `CREATE TABLE fake.shift (by interval)`)
	testkit.ExecPostgres(t, pool, `INSERT INTO fake.shift VALUES ('0')`)
	testkit.ExecPostgres(t, pool, `CREATE FUNCTION fake.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE
		AS 'SELECT pg_catalog.clock_timestamp() + by FROM fake.shift'`)
	store := testkit.OpenPostgres(t, url+"&search_path=fake,pg_catalog,public", tenure.PostgresConfig{Schema: "public"})
	testkit.Migrate(t, store)

	key := tenure.Key{Type: "t", ID: "1"}
	first := testkit.Put(t, store, tenure.Object{Key: key})
	testkit.ExecPostgres(t, pool, `UPDATE fake.shift SET by = '-3 days'`)
	second := testkit.Put(t, store, tenure.Object{Key: key})
	if got := first.UpdatedAt.Sub(second.UpdatedAt); got < 71*time.Hour {
		t.Fatalf("the clock went back by %v only; the test tests nothing", got)
	}
	testkit.WantErr(t, store.DeleteIf(ctx, key, tenure.IfVersion(second.Version)), nil)
	third := testkit.Put(t, store, tenure.Object{Key: key})
	if !(first.Version < second.Version && second.Version < third.Version) {
		t.Errorf("versions %d, %d, %d do not increase", first.Version, second.Version, third.Version)
	}
}

func TestAFailedCreateLeavesNothingInTheServersLog(t *testing.T) {
	url := testkit.PostgresURL(t)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	obj := tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}}
	testkit.Put(t, store, obj)
	before := testkit.PostgresLog(t)
	for range 10 {
		_, err := store.PutIf(t.Context(), obj, tenure.IfAbsent())
		testkit.WantErr(t, err, tenure.ErrExists)
	}
	if got := strings.TrimPrefix(testkit.PostgresLog(t), before); strings.Contains(got, "duplicate key") {
		t.Errorf("the server logged:\n%s", got)
	}
}

func TestAWaitForALockEndsWithTheContextAndKeepsTheConnection(t *testing.T) {
	testkit.Slow(t)
	url := testkit.PostgresURL(t)
	store := testkit.OpenPostgres(t, url+"&pool_max_conns=1", tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	pool := testkit.PostgresPool(t, url)
	key := tenure.Key{Type: "t", ID: "1"}
	obj := testkit.Put(t, store, tenure.Object{Key: key})
	backend := func() (pids string) { // of the store's connections
		err := pool.QueryRow(t.Context(), `SELECT string_agg(pid::text, ' ' ORDER BY pid) FROM pg_stat_activity
			WHERE datname = current_database() AND application_name = 'tenure'`).Scan(&pids)
		testkit.WantErr(t, err, nil)
		return pids
	}

	tx, err := pool.Begin(t.Context())
	testkit.WantErr(t, err, nil)
	defer tx.Rollback(t.Context())
	testkit.ExecPostgres(t, tx, `SELECT 1 FROM objects FOR UPDATE`)
	testkit.ExecPostgres(t, tx, `INSERT INTO objects VALUES ('t', 'new', NULL, '{}', '', 1, 0, 0)`)
	for name, write := range map[string]func(context.Context) error{
		"replace": func(ctx context.Context) error {
			_, err := store.PutIf(ctx, obj, tenure.IfVersion(obj.Version))
			return err
		},
		"create": func(ctx context.Context) error {
			_, err := store.PutIf(ctx, tenure.Object{Key: tenure.Key{Type: "t", ID: "new"}}, tenure.IfAbsent())
			return err
		},
		"delete": func(ctx context.Context) error { return store.DeleteIf(ctx, key, tenure.IfVersion(obj.Version)) },
	} {
		var pid string
		err := inTime(2*time.Second, func(ctx context.Context) error { // the server ends the wait a tenth before
			if _, err := store.Get(ctx, key); err != nil { // connects
				return err
			}
			pid = backend()
			return write(ctx)
		})
		var pgErr *pgconn.PgError
		if !errors.As(err, &pgErr) || pgErr.Code != "55P03" {
			t.Errorf("%s: got %v, want the server's lock timeout", name, err)
		}
		if got := backend(); got != pid {
			t.Errorf("%s: a connection was lost: backends %s became %s", name, pid, got)
		}
	}
	testkit.WantErr(t, tx.Rollback(t.Context()), nil)
	testkit.WantErr(t, store.DeleteIf(t.Context(), key, tenure.IfVersion(obj.Version)), nil)
}

func TestRenewalsAreHOTUpdates(t *testing.T) {
	url := testkit.PostgresURL(t)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
	term := testkit.MustAcquire(t, lease)
	const renewals = 100
	for range renewals {
		testkit.WantErr(t, lease.Renew(t.Context(), term), nil)
	}
	store.Close() // a backend tells its figures when it exits
	pool := testkit.PostgresPool(t, url)
	var updates, hot int
	for end := time.Now().Add(10 * time.Second); updates < renewals && time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		err := pool.QueryRow(t.Context(), `SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'objects'`).Scan(&updates, &hot)
		testkit.WantErr(t, err, nil)
	}
	if updates < renewals || hot != updates {
		t.Errorf("%d of %d updates were HOT, want all", hot, updates)
	}
}

func TestATombstoneAheadOfTheClockIsKeptHoweverOld(t *testing.T) {
	url := testkit.PostgresURL(t)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	pool := testkit.PostgresPool(t, url)
	key := tenure.Key{Type: "t", ID: "1"}
	obj := testkit.Put(t, store, tenure.Object{Key: key})
	ahead := obj.Version + int64(72*time.Hour/time.Microsecond) // as if written while the clock was
	testkit.ExecPostgres(t, pool, `UPDATE objects SET resource_version = $1`, ahead)
	testkit.WantErr(t, store.DeleteIf(t.Context(), key, tenure.IfVersion(ahead)), nil)
	testkit.Migrate(t, store) // prunes
	if obj := testkit.Put(t, store, tenure.Object{Key: key}); obj.Version <= ahead {
		t.Errorf("version %d follows %d", obj.Version, ahead)
	}
}

func TestASessionThatIsolatesMoreThanReadCommittedIsRefusedByName(t *testing.T) {
	url := testkit.PostgresURL(t)
	testkit.Migrate(t, testkit.OpenPostgres(t, url, tenure.PostgresConfig{}))
	for _, level := range []string{"repeatable%20read", "serializable"} {
		_, err := tenure.OpenPostgres(t.Context(), url+"&default_transaction_isolation="+level, tenure.PostgresConfig{Logger: testkit.Quiet})
		if !errors.Is(err, tenure.ErrSetup) || !strings.Contains(err.Error(), "default_transaction_isolation") {
			t.Errorf("%s: got %v, want ErrSetup that names the setting", level, err)
		}
	}
}

func TestATableNameThatPostgresWouldCutOffIsRefused(t *testing.T) {
	_, err := tenure.OpenPostgres(t.Context(), testkit.PostgresURL(t), tenure.PostgresConfig{Table: strings.Repeat("x", 53), Logger: testkit.Quiet})
	if !errors.Is(err, tenure.ErrInvalid) || !strings.Contains(err.Error(), "too long by 1 ") {
		t.Errorf("got %v", err)
	}
	testkit.Migrate(t, testkit.OpenPostgres(t, testkit.PostgresURL(t), tenure.PostgresConfig{Table: strings.Repeat("x", 52)}))
}

func TestADeadlineThatIsFarAwayIsNoObstacle(t *testing.T) {
	url := testkit.PostgresURL(t)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	ctx, cancel := context.WithTimeout(t.Context(), 50*365*24*time.Hour)
	defer cancel()
	obj, err := store.PutIf(ctx, tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}}, tenure.Unconditional())
	testkit.WantErr(t, err, nil)
	testkit.WantErr(t, store.DeleteIf(ctx, obj.Key, tenure.IfVersion(obj.Version)), nil)
}

func TestATableThatDoesNotExistSaysMigrate(t *testing.T) {
	ctx := t.Context()
	postgres := testkit.OpenPostgres(t, testkit.PostgresURL(t), tenure.PostgresConfig{})
	sqlite := testkit.OpenSQLite(t, ":memory:")
	for name, store := range map[string]tenure.Store{"postgres": postgres, "sqlite": sqlite} {
		key := tenure.Key{Type: "t", ID: "1"}
		_, getErr := store.Get(ctx, key)
		_, createErr := store.PutIf(ctx, tenure.Object{Key: key}, tenure.IfAbsent())
		_, replaceErr := store.PutIf(ctx, tenure.Object{Key: key}, tenure.IfVersion(1))
		for op, err := range map[string]error{
			"get": getErr, "put": createErr, "put ": replaceErr, "delete": store.DeleteIf(ctx, key, tenure.IfVersion(1)),
		} {
			if !errors.Is(err, tenure.ErrSetup) || !strings.Contains(err.Error(), "Migrate") ||
				!strings.Contains(err.Error(), strings.TrimSpace(op)+" t/1") || !strings.Contains(err.Error(), "objects") {
				t.Errorf("%s, %s: got %v, want ErrSetup that names the operation, the key, the table and Migrate", name, op, err)
			}
		}
	}
}

func TestAColumnOfTheWrongTypeIsNamed(t *testing.T) {
	testkit.Slow(t)
	for column, ddl := range map[string]string{
		"resource_version": `ALTER TABLE objects ALTER resource_version TYPE int`,
		"payload":          `ALTER TABLE objects ALTER payload TYPE text`,
		"labels":           `ALTER TABLE objects ALTER labels TYPE text`,
		"updated_at_ms":    `ALTER TABLE objects ALTER updated_at_ms TYPE timestamptz USING now()`,
		"name":             `ALTER TABLE objects DROP name`,
	} {
		t.Run(column, func(t *testing.T) {
			url := testkit.PostgresURL(t)
			testkit.Migrate(t, testkit.OpenPostgres(t, url, tenure.PostgresConfig{}))
			testkit.ExecPostgres(t, testkit.PostgresPool(t, url), ddl)
			_, err := tenure.OpenPostgres(t.Context(), url, tenure.PostgresConfig{Logger: testkit.Quiet})
			if !errors.Is(err, tenure.ErrSetup) || !strings.Contains(err.Error(), column) {
				t.Errorf("open: got %v, want ErrSetup that names %s", err, column)
			}
			store := testkit.Must(tenure.NewPostgresStore(testkit.PostgresPool(t, url), tenure.PostgresConfig{Logger: testkit.Quiet}))
			err = store.Migrate(t.Context())
			if !errors.Is(err, tenure.ErrSetup) || !strings.Contains(err.Error(), column) {
				t.Errorf("migrate: got %v, want ErrSetup that names %s", err, column)
			}
			_, err = testkit.NewLease(t, store, tenure.LeaseConfig{}).AcquireOrSteal(t.Context())
			if !errors.Is(err, tenure.ErrSetup) || !strings.Contains(err.Error(), column) {
				t.Errorf("acquire: got %v, want ErrSetup that names %s", err, column)
			}
		})
	}
}

func TestARoleThatIsRefusedIsToldAtOnce(t *testing.T) {
	url := testkit.PostgresURL(t)
	for name, bad := range map[string]string{
		"no such role":     strings.Replace(url, "postgres@", "nobody_here@", 1),
		"no such database": strings.Replace(url, "/test_", "/missing_", 1),
	} {
		_, err := tenure.OpenPostgres(t.Context(), bad, tenure.PostgresConfig{Logger: testkit.Quiet})
		if !errors.Is(err, tenure.ErrSetup) {
			t.Errorf("%s: open: got %v, want ErrSetup", name, err)
		}
		pool := testkit.PostgresPool(t, bad)
		err = testkit.Must(tenure.NewPostgresStore(pool, tenure.PostgresConfig{Logger: testkit.Quiet})).Migrate(t.Context())
		if !errors.Is(err, tenure.ErrSetup) {
			t.Errorf("%s: migrate: got %v, want ErrSetup", name, err)
		}
	}
}

func TestAURLThatCannotBeParsedIsRefusedWithoutItsPassword(t *testing.T) {
	_, err := tenure.OpenPostgres(t.Context(), "postgres://u:sEcrEt@host:port/db", tenure.PostgresConfig{})
	testkit.WantErr(t, err, tenure.ErrInvalid)
	if strings.Contains(err.Error(), "sEcrEt") {
		t.Errorf("%v tells the password", err)
	}
}

func TestOpeningWaitsForADatabaseThatIsDown(t *testing.T) {
	server := testkit.StartPostgres(t)
	testkit.WantErr(t, server.Stop("fast"), nil)
	var log bytes.Buffer
	logger := slog.New(slog.NewTextHandler(&log, nil))

	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, err := tenure.OpenPostgres(ctx, server.URL(), tenure.PostgresConfig{Logger: logger})
	testkit.WantErr(t, err, context.DeadlineExceeded)
	var connect *pgconn.ConnectError
	if !errors.As(err, &connect) {
		t.Errorf("got %v, want the driver's error within", err)
	}
	if !strings.Contains(log.String(), "waiting for the database") {
		t.Errorf("logged:\n%s", &log)
	}

	opened := make(chan error, 1)
	go func() {
		store, err := tenure.OpenPostgres(t.Context(), server.URL(), tenure.PostgresConfig{Logger: testkit.Quiet})
		if err == nil {
			err = store.Migrate(t.Context())
			store.Close()
		}
		opened <- err
	}()
	testkit.WantErr(t, server.Start(), nil)
	testkit.WantErr(t, <-opened, nil)
}

// A role that may use the table, and do nothing else.
func TestARoleWithoutDDLWorksAndMissesOnlyTheTombstones(t *testing.T) {
	url := testkit.PostgresURL(t)
	pool := testkit.PostgresPool(t, url)
	testkit.ExecPostgres(t, pool, `DROP ROLE IF EXISTS modest`)
	testkit.ExecPostgres(t, pool, `CREATE ROLE modest LOGIN`)
	testkit.ExecPostgres(t, pool, `REVOKE CREATE ON SCHEMA public FROM PUBLIC`) // as since version 15
	t.Cleanup(func() {
		testkit.ExecPostgres(t, pool, `DROP OWNED BY modest`)
		testkit.ExecPostgres(t, pool, `DROP ROLE modest`)
	})
	modestURL := strings.Replace(url, "postgres@", "modest@", 1)

	var log bytes.Buffer
	logger := slog.New(slog.NewTextHandler(&log, nil))
	store := testkit.OpenPostgres(t, modestURL, tenure.PostgresConfig{Logger: logger})
	err := store.Migrate(t.Context())
	testkit.WantErr(t, err, tenure.ErrSetup) // may not create the table

	testkit.Migrate(t, testkit.OpenPostgres(t, url, tenure.PostgresConfig{}))
	testkit.ExecPostgres(t, pool, `DROP TABLE objects_tombstones`)
	testkit.ExecPostgres(t, pool, `GRANT SELECT, INSERT, UPDATE, DELETE ON objects TO modest`)
	store = testkit.OpenPostgres(t, modestURL, tenure.PostgresConfig{Logger: logger})
	testkit.Migrate(t, store)
	if got := strings.Count(log.String(), "objects_tombstones"); got == 0 {
		t.Errorf("opening did not log what is missing:\n%s", &log)
	}
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
	first := testkit.MustAcquire(t, lease)
	testkit.WantErr(t, lease.Renew(t.Context(), first), nil)
	testkit.WantErr(t, lease.Release(t.Context(), first), nil)
	if second := testkit.MustAcquire(t, lease); second.Token() <= first.Token() {
		t.Errorf("token %d follows %d", second.Token(), first.Token())
	}
}

func TestALeasesCallWaitsForALockAsLongAsItsContextAllows(t *testing.T) {
	testkit.Slow(t)
	const longer = 1200 * time.Millisecond // than one statement of a lease waits
	url := testkit.PostgresURL(t)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
	term := testkit.MustAcquire(t, lease)
	pool := testkit.PostgresPool(t, url)
	for name, timeout := range map[string]time.Duration{"a deadline": time.Minute, "no deadline": 0} {
		ctx := context.Background()
		if timeout > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, timeout)
			defer cancel()
		}
		tx, err := pool.Begin(t.Context())
		testkit.WantErr(t, err, nil)
		testkit.ExecPostgres(t, tx, `SELECT FROM objects FOR UPDATE`)
		time.AfterFunc(longer, func() { tx.Rollback(context.Background()) })
		if err := lease.Renew(ctx, term); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	tx, err := pool.Begin(t.Context())
	testkit.WantErr(t, err, nil)
	testkit.ExecPostgres(t, tx, `LOCK TABLE objects`)
	time.AfterFunc(longer, func() { tx.Rollback(context.Background()) })
	if _, err := lease.Read(t.Context()); err != nil {
		t.Errorf("read: %v", err)
	}
	tx, err = pool.Begin(t.Context())
	testkit.WantErr(t, err, nil)
	testkit.ExecPostgres(t, tx, `SELECT FROM objects FOR UPDATE`)
	err = inTime(900*time.Millisecond, func(ctx context.Context) error { return lease.Renew(ctx, term) })
	if err == nil || errors.Is(err, context.DeadlineExceeded) { // the server ends the wait a tenth before
		t.Errorf("got %v, want an error before the context ends", err)
	}
	testkit.WantErr(t, tx.Rollback(t.Context()), nil)
	testkit.WantErr(t, lease.Renew(t.Context(), term), nil)
}

// After a failover what was the primary is a standby, and connections to it stay
// good: they can be pinned there for an hour.
func TestAServerThatHasBecomeReadOnlyIsLeft(t *testing.T) {
	url := testkit.PostgresURL(t)
	admin, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Close(context.Background())
	var database string
	if err := admin.QueryRow(t.Context(), "SELECT current_database()").Scan(&database); err != nil {
		t.Fatal(err)
	}
	readOnly := func(is bool) { // for connections to come
		_, err := admin.Exec(t.Context(), fmt.Sprintf("ALTER DATABASE %s SET default_transaction_read_only = %v", pgx.Identifier{database}.Sanitize(), is))
		if err != nil {
			t.Fatal(err)
		}
	}
	migrated := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	if err := migrated.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	makeTasks(t, testkit.PostgresPool(t, url), 1)
	testkit.MustAcquire(t, testkit.NewLease(t, migrated, tenure.LeaseConfig{Key: claims.SessionKey("s"), TTL: time.Hour}))
	task, err := testkit.Must(claims.NewQueue(migrated, tasks)).TryTakeFor(t.Context(), "s", claims.TakeOptions{N: 1})
	if err != nil {
		t.Fatal(err)
	}
	for name, write := range map[string]func(*tenure.PostgresStore) error{
		"a finish": func(store *tenure.PostgresStore) error {
			return testkit.Must(claims.NewQueue(store, tasks)).FinishPostgres(t.Context(), task, func(pgx.Tx) error { return nil })
		},
		"a lease": func(store *tenure.PostgresStore) error {
			_, err := testkit.NewLease(t, store, tenure.LeaseConfig{}).AcquireOrSteal(t.Context())
			return err
		},
		"an object": func(store *tenure.PostgresStore) error {
			_, err := store.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "o", ID: "o"}, Name: "o"}, tenure.Unconditional())
			return err
		},
		"a transaction": func(store *tenure.PostgresStore) error {
			lease := testkit.NewLease(t, migrated, tenure.LeaseConfig{Key: tenure.Key{Type: "fence", ID: "fence"}})
			term := testkit.MustAcquire(t, lease)
			defer lease.Release(t.Context(), term)
			return store.Fenced(t.Context(), term, func(tx pgx.Tx) error {
				_, err := tx.Exec(t.Context(), "CREATE TABLE written (n int)")
				return err
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			readOnly(true)
			store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
			var pgErr *pgconn.PgError
			err := write(store)
			if !errors.As(err, &pgErr) || pgErr.Code != "25006" {
				t.Fatalf("got %v, want that it is read-only", err)
			}
			readOnly(false)
			for range 3 { // one is told by the connection that was there
				if err = write(store); err == nil {
					return
				}
			}
			t.Errorf("it still writes to the server that is read-only: %v", err)
		})
	}
}

// Else a plan that was made for a small table may read all of a large one. A plan of
// something else, as of a trigger, that cannot but read all must not seem dear for that:
// such a one is compiled first, which can take longer than a lease has.
func TestLeasesLookForTheirRowsByTheIndexWhateverTheSizeOfTheTable(t *testing.T) {
	for name, test := range map[string]struct{ setting, want string }{
		"by themselves":    {"", "Index Scan, Seq Scan"},
		"unless forbidden": {"&random_page_cost=4", "Seq Scan, Seq Scan"},
	} {
		t.Run(name, func(t *testing.T) {
			url := testkit.PostgresURL(t)
			store := testkit.OpenPostgres(t, url+test.setting, tenure.PostgresConfig{})
			testkit.Migrate(t, store)
			pool := testkit.PostgresPool(t, url)
			_, err := store.Lineage(t.Context()) // marks the table, by an insert of its own
			testkit.WantErr(t, err, nil)
			testkit.Put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: "there"}})
			testkit.ExecPostgres(t, pool, `CREATE TABLE plans (objects json, compiled bool)`)
			testkit.ExecPostgres(t, pool, `CREATE FUNCTION plan() RETURNS trigger LANGUAGE plpgsql AS $$
				DECLARE own json; other json;
				BEGIN
					EXECUTE 'EXPLAIN (FORMAT JSON) SELECT FROM objects WHERE object_type = $1 AND id = $2' INTO own USING NEW.object_type, NEW.id;
					EXECUTE 'EXPLAIN (FORMAT JSON) SELECT FROM plans WHERE compiled' INTO other;
					INSERT INTO plans VALUES (own->0->'Plan', other::text LIKE '%"JIT"%');
					RETURN NEW;
				END $$`)
			testkit.ExecPostgres(t, pool, `CREATE TRIGGER plan BEFORE INSERT ON objects FOR EACH ROW EXECUTE FUNCTION plan()`)
			testkit.ExecPostgres(t, pool, `ANALYZE objects`)
			testkit.MustAcquire(t, testkit.NewLease(t, store, tenure.LeaseConfig{}))
			testkit.Put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: "the application's own"}})
			var seen string
			testkit.WantErr(t, pool.QueryRow(t.Context(), `SELECT string_agg((objects->>'Node Type') || CASE WHEN compiled THEN ', compiled' ELSE '' END, ', ') FROM plans`).Scan(&seen), nil)
			if seen != test.want {
				t.Errorf("the plans are %s, want %s", seen, test.want)
			}
		})
	}
}

func TestOnPostgresAWriteFindsItsRowByTheIndexWhateverElseItCompares(t *testing.T) {
	url := testkit.PostgresURL(t)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	pool := testkit.PostgresPool(t, url)
	testkit.ExecPostgres(t, pool, `INSERT INTO objects SELECT 't', n::text, NULL, '{}', '', n, 0, 0 FROM generate_series(1, 20000) n`)
	testkit.ExecPostgres(t, pool, `ANALYZE objects`)
	const rounds = 20 // the server chooses a plan for good after some
	for n := range int64(rounds) {
		obj, err := store.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "t", ID: fmt.Sprint(n + 1)}}, tenure.IfVersion(n+1))
		testkit.WantErr(t, err, nil)
		obj, err = store.PutIf(t.Context(), obj, tenure.Unconditional())
		testkit.WantErr(t, err, nil)
		testkit.WantErr(t, store.DeleteIf(t.Context(), obj.Key, tenure.IfVersion(obj.Version)), nil)
		_, err = store.PutIf(t.Context(), obj, tenure.IfAbsent())
		testkit.WantErr(t, err, nil)
	}
	store.Close() // a backend tells its figures when it exits
	var byIndex, whole int
	for end := time.Now().Add(10 * time.Second); byIndex < 4*rounds && time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		err := pool.QueryRow(t.Context(), `SELECT idx_scan, seq_scan FROM pg_stat_user_tables WHERE relname = 'objects'`).Scan(&byIndex, &whole)
		testkit.WantErr(t, err, nil)
	}
	if byIndex < 4*rounds || whole >= rounds { // CREATE and ANALYZE look at all
		t.Errorf("%d scans were by the index, %d of the whole table", byIndex, whole)
	}
}
