package tenure_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/verify/pgtest"
)

// A version that is computed before its statement waits for a lock is an old
// one by the time the wait is over: an insert waits for a transaction that
// deletes a row whose version is greater than any the insert could have drawn.
func TestAVersionIsDrawnAfterTheWaitForALock(t *testing.T) {
	ctx, url := t.Context(), postgresURL(t)
	store := openPostgres(t, url, tenure.PostgresConfig{})
	migrate(t, store)
	pool := postgresPool(t, url)
	key := tenure.Key{Type: "t", ID: "waited-for"}
	old := put(t, store, tenure.Object{Key: key})

	tx, err := pool.Begin(ctx)
	wantErr(t, err, nil)
	defer tx.Rollback(ctx)
	// An update and a delete as the store does them, under one lock.
	execPostgres(t, tx, `UPDATE objects SET resource_version = resource_version + 1 WHERE id = $1`, key.ID)
	created := make(chan tenure.Object)
	go func() {
		obj, err := store.PutIf(ctx, tenure.Object{Key: key}, tenure.Unconditional())
		if err != nil {
			t.Error(err)
		}
		created <- obj
	}()
	awaitLockWait(t, pool)
	// Far above the clock, so that only the tombstone can keep the version up.
	deleted := old.Version + int64(time.Hour/time.Microsecond)
	execPostgres(t, tx, `DELETE FROM objects WHERE id = $1`, key.ID)
	execPostgres(t, tx, `INSERT INTO objects_tombstones VALUES ($1, $2, $3)`, key.Type, key.ID, deleted)
	wantErr(t, tx.Commit(ctx), nil)
	if obj := <-created; obj.Version <= deleted {
		t.Errorf("version %d of the new object is not above %d of the deleted one", obj.Version, deleted)
	}

	// And an insert that waits for another insert of the same key, which is
	// deleted before it commits.
	tx, err = pool.Begin(ctx)
	wantErr(t, err, nil)
	defer tx.Rollback(ctx)
	key.ID = "inserted"
	execPostgres(t, tx, `INSERT INTO objects VALUES ($1, $2, NULL, '{}', '', 1, 0, 0)`, key.Type, key.ID)
	go func() {
		obj, err := store.PutIf(ctx, tenure.Object{Key: key}, tenure.MustCreate())
		if err != nil {
			t.Error(err)
		}
		created <- obj
	}()
	awaitLockWait(t, pool)
	execPostgres(t, tx, `DELETE FROM objects WHERE id = $1`, key.ID)
	execPostgres(t, tx, `INSERT INTO objects_tombstones VALUES ($1, $2, $3)`, key.Type, key.ID, deleted)
	wantErr(t, tx.Commit(ctx), nil)
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
	ctx, url := t.Context(), postgresURL(t)
	pool := postgresPool(t, url)
	// This clock hides the system's from statements that don't name a schema.
	execPostgres(t, pool, `CREATE SCHEMA fake`)
	execPostgres(t, pool, `CREATE TABLE fake.shift (by interval)`)
	execPostgres(t, pool, `INSERT INTO fake.shift VALUES ('0')`)
	execPostgres(t, pool, `CREATE FUNCTION fake.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE
		AS 'SELECT pg_catalog.clock_timestamp() + by FROM fake.shift'`)
	store := openPostgres(t, url+"&search_path=fake,pg_catalog,public", tenure.PostgresConfig{Schema: "public"})
	migrate(t, store)

	key := tenure.Key{Type: "t", ID: "1"}
	first := put(t, store, tenure.Object{Key: key})
	execPostgres(t, pool, `UPDATE fake.shift SET by = '-3 days'`)
	second := put(t, store, tenure.Object{Key: key})
	if got := first.UpdatedAt.Sub(second.UpdatedAt); got < 71*time.Hour {
		t.Fatalf("the clock went back by %v only; the test tests nothing", got)
	}
	wantErr(t, store.DeleteIf(ctx, key, second.Version), nil)
	third := put(t, store, tenure.Object{Key: key})
	if !(first.Version < second.Version && second.Version < third.Version) {
		t.Errorf("versions %d, %d, %d do not increase", first.Version, second.Version, third.Version)
	}
}

func TestAFailedCreateLeavesNothingInTheServersLog(t *testing.T) {
	url := postgresURL(t)
	store := openPostgres(t, url, tenure.PostgresConfig{})
	migrate(t, store)
	obj := tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}}
	put(t, store, obj)
	before := pgtest.Log(t)
	for range 10 {
		_, err := store.PutIf(t.Context(), obj, tenure.MustCreate())
		wantErr(t, err, tenure.ErrExists)
	}
	if got := strings.TrimPrefix(pgtest.Log(t), before); strings.Contains(got, "duplicate key") {
		t.Errorf("the server logged:\n%s", got)
	}
}

func TestAWaitForALockEndsWithTheContextAndKeepsTheConnection(t *testing.T) {
	url := postgresURL(t)
	store := openPostgres(t, url+"&pool_max_conns=1", tenure.PostgresConfig{})
	migrate(t, store)
	pool := postgresPool(t, url)
	key := tenure.Key{Type: "t", ID: "1"}
	obj := put(t, store, tenure.Object{Key: key})
	backend := func() (pids string) { // of the store's connections
		err := pool.QueryRow(t.Context(), `SELECT string_agg(pid::text, ' ' ORDER BY pid) FROM pg_stat_activity
			WHERE datname = current_database() AND application_name = 'tenure'`).Scan(&pids)
		wantErr(t, err, nil)
		return pids
	}

	tx, err := pool.Begin(t.Context())
	wantErr(t, err, nil)
	defer tx.Rollback(t.Context())
	execPostgres(t, tx, `SELECT 1 FROM objects FOR UPDATE`)
	execPostgres(t, tx, `INSERT INTO objects VALUES ('t', 'new', NULL, '{}', '', 1, 0, 0)`)
	for name, write := range map[string]func(context.Context) error{
		"replace": func(ctx context.Context) error {
			_, err := store.PutIf(ctx, obj, tenure.MatchVersion(obj.Version))
			return err
		},
		"create": func(ctx context.Context) error {
			_, err := store.PutIf(ctx, tenure.Object{Key: tenure.Key{Type: "t", ID: "new"}}, tenure.MustCreate())
			return err
		},
		"delete": func(ctx context.Context) error { return store.DeleteIf(ctx, key, obj.Version) },
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
	wantErr(t, tx.Rollback(t.Context()), nil)
	wantErr(t, store.DeleteIf(t.Context(), key, obj.Version), nil)
}

func TestRenewalsAreHOTUpdates(t *testing.T) {
	url := postgresURL(t)
	store := openPostgres(t, url, tenure.PostgresConfig{})
	migrate(t, store)
	lease := newLease(t, store, tenure.LeaseConfig{})
	term := mustAcquire(t, lease)
	const renewals = 100
	for range renewals {
		wantErr(t, lease.Renew(t.Context(), term), nil)
	}
	store.Close() // a backend tells its figures when it exits
	pool := postgresPool(t, url)
	var updates, hot int
	for end := time.Now().Add(10 * time.Second); updates < renewals && time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		err := pool.QueryRow(t.Context(), `SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'objects'`).Scan(&updates, &hot)
		wantErr(t, err, nil)
	}
	if updates < renewals || hot != updates {
		t.Errorf("%d of %d updates were HOT, want all", hot, updates)
	}
}

func TestTombstonesArePrunedWhenTheClockIsADayPastThem(t *testing.T) {
	url := postgresURL(t)
	store := openPostgres(t, url, tenure.PostgresConfig{})
	migrate(t, store)
	pool := postgresPool(t, url)
	prune := map[string]func(){
		"by Migrate": func() { migrate(t, store) },
		"by a delete, an hour after": func() {
			store.PrunedAt(time.Now().Add(-time.Hour))
			obj := put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: "other"}})
			wantErr(t, store.DeleteIf(t.Context(), obj.Key, obj.Version), nil)
			execPostgres(t, pool, `DELETE FROM objects_tombstones WHERE id = 'other'`)
		},
	}
	for name, prune := range prune {
		obj := put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: "new"}})
		wantErr(t, store.DeleteIf(t.Context(), obj.Key, obj.Version), nil)
		execPostgres(t, pool, `INSERT INTO objects_tombstones SELECT 't', 'old' || i, 1 FROM generate_series(1, 10001) i`)
		prune() // most of them
		obj = put(t, store, tenure.Object{Key: obj.Key})
		wantErr(t, store.DeleteIf(t.Context(), obj.Key, obj.Version), nil) // and the rest
		var ids string
		err := pool.QueryRow(t.Context(), `SELECT string_agg(id, ',') FROM objects_tombstones`).Scan(&ids)
		if err != nil || ids != "new" {
			t.Errorf("%s: got tombstones of %s, %v; want only new", name, ids, err)
		}
	}
}

func TestPruningAndDeletesDoNotDeadlock(t *testing.T) {
	url := postgresURL(t)
	store := openPostgres(t, url+"&pool_max_conns=8", tenure.PostgresConfig{})
	migrate(t, store)
	pool := postgresPool(t, url)
	for range 40 {
		var objects []tenure.Object
		for i := range 8 {
			key := tenure.Key{Type: "t", ID: fmt.Sprint(i)}
			objects = append(objects, put(t, store, tenure.Object{Key: key}))
			execPostgres(t, pool, `INSERT INTO objects_tombstones VALUES ($1, $2, 1)
				ON CONFLICT (object_type, id) DO UPDATE SET resource_version = 1`, key.Type, key.ID)
		}
		var wg sync.WaitGroup
		for _, obj := range objects {
			wg.Go(func() {
				store.PrunedAt(time.Time{})
				if err := store.DeleteIf(context.Background(), obj.Key, obj.Version); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	}
}

func TestATombstoneAheadOfTheClockIsKeptHoweverOld(t *testing.T) {
	url := postgresURL(t)
	store := openPostgres(t, url, tenure.PostgresConfig{})
	migrate(t, store)
	pool := postgresPool(t, url)
	key := tenure.Key{Type: "t", ID: "1"}
	obj := put(t, store, tenure.Object{Key: key})
	ahead := obj.Version + int64(72*time.Hour/time.Microsecond) // as if written while the clock was
	execPostgres(t, pool, `UPDATE objects SET resource_version = $1`, ahead)
	wantErr(t, store.DeleteIf(t.Context(), key, ahead), nil)
	migrate(t, store) // prunes
	if obj := put(t, store, tenure.Object{Key: key}); obj.Version <= ahead {
		t.Errorf("version %d follows %d", obj.Version, ahead)
	}
}

func TestASessionThatIsolatesMoreThanReadCommittedIsRefusedByName(t *testing.T) {
	url := postgresURL(t)
	migrate(t, openPostgres(t, url, tenure.PostgresConfig{}))
	for _, level := range []string{"repeatable%20read", "serializable"} {
		_, err := tenure.OpenPostgres(t.Context(), url+"&default_transaction_isolation="+level, tenure.PostgresConfig{Logger: quiet})
		if !errors.Is(err, tenure.ErrSetup) || !strings.Contains(err.Error(), "default_transaction_isolation") {
			t.Errorf("%s: got %v, want ErrSetup that names the setting", level, err)
		}
	}
}

func TestATableNameThatPostgresWouldCutOffIsRefused(t *testing.T) {
	_, err := tenure.OpenPostgres(t.Context(), postgresURL(t), tenure.PostgresConfig{Table: strings.Repeat("x", 53), Logger: quiet})
	if !errors.Is(err, tenure.ErrInvalid) || !strings.Contains(err.Error(), "too long by 1 ") {
		t.Errorf("got %v", err)
	}
	migrate(t, openPostgres(t, postgresURL(t), tenure.PostgresConfig{Table: strings.Repeat("x", 52)}))
}

func TestADeadlineThatIsFarAwayIsNoObstacle(t *testing.T) {
	url := postgresURL(t)
	store := openPostgres(t, url, tenure.PostgresConfig{})
	migrate(t, store)
	ctx, cancel := context.WithTimeout(t.Context(), 50*365*24*time.Hour)
	defer cancel()
	obj, err := store.PutIf(ctx, tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}}, tenure.Unconditional())
	wantErr(t, err, nil)
	wantErr(t, store.DeleteIf(ctx, obj.Key, obj.Version), nil)
}

func TestATableThatDoesNotExistSaysMigrate(t *testing.T) {
	ctx := t.Context()
	postgres := openPostgres(t, postgresURL(t), tenure.PostgresConfig{})
	sqlite := openSQLite(t, ":memory:")
	for name, store := range map[string]tenure.Store{"postgres": postgres, "sqlite": sqlite} {
		key := tenure.Key{Type: "t", ID: "1"}
		_, getErr := store.Get(ctx, key)
		_, createErr := store.PutIf(ctx, tenure.Object{Key: key}, tenure.MustCreate())
		_, replaceErr := store.PutIf(ctx, tenure.Object{Key: key}, tenure.MatchVersion(1))
		for op, err := range map[string]error{
			"get": getErr, "put": createErr, "put ": replaceErr, "delete": store.DeleteIf(ctx, key, 1),
		} {
			if !errors.Is(err, tenure.ErrSetup) || !strings.Contains(err.Error(), "Migrate") ||
				!strings.Contains(err.Error(), strings.TrimSpace(op)+" t/1") || !strings.Contains(err.Error(), "objects") {
				t.Errorf("%s, %s: got %v, want ErrSetup that names the operation, the key, the table and Migrate", name, op, err)
			}
		}
	}
}

func TestAColumnOfTheWrongTypeIsNamed(t *testing.T) {
	for column, ddl := range map[string]string{
		"resource_version": `ALTER TABLE objects ALTER resource_version TYPE int`,
		"payload":          `ALTER TABLE objects ALTER payload TYPE text`,
		"labels":           `ALTER TABLE objects ALTER labels TYPE text`,
		"updated_at_ms":    `ALTER TABLE objects ALTER updated_at_ms TYPE timestamptz USING now()`,
		"name":             `ALTER TABLE objects DROP name`,
	} {
		t.Run(column, func(t *testing.T) {
			url := postgresURL(t)
			migrate(t, openPostgres(t, url, tenure.PostgresConfig{}))
			execPostgres(t, postgresPool(t, url), ddl)
			_, err := tenure.OpenPostgres(t.Context(), url, tenure.PostgresConfig{Logger: quiet})
			if !errors.Is(err, tenure.ErrSetup) || !strings.Contains(err.Error(), column) {
				t.Errorf("open: got %v, want ErrSetup that names %s", err, column)
			}
			store := must(tenure.NewPostgresStore(postgresPool(t, url), tenure.PostgresConfig{Logger: quiet}))
			err = store.Migrate(t.Context())
			if !errors.Is(err, tenure.ErrSetup) || !strings.Contains(err.Error(), column) {
				t.Errorf("migrate: got %v, want ErrSetup that names %s", err, column)
			}
			_, err = newLease(t, store, tenure.LeaseConfig{}).AcquireOrSteal(t.Context())
			if !errors.Is(err, tenure.ErrSetup) || !strings.Contains(err.Error(), column) {
				t.Errorf("acquire: got %v, want ErrSetup that names %s", err, column)
			}
		})
	}
}

func TestARoleThatIsRefusedIsToldAtOnce(t *testing.T) {
	url := postgresURL(t)
	for name, bad := range map[string]string{
		"no such role":     strings.Replace(url, "postgres@", "nobody_here@", 1),
		"no such database": strings.Replace(url, "/test_", "/missing_", 1),
	} {
		_, err := tenure.OpenPostgres(t.Context(), bad, tenure.PostgresConfig{Logger: quiet})
		if !errors.Is(err, tenure.ErrSetup) {
			t.Errorf("%s: open: got %v, want ErrSetup", name, err)
		}
		pool := postgresPool(t, bad)
		err = must(tenure.NewPostgresStore(pool, tenure.PostgresConfig{Logger: quiet})).Migrate(t.Context())
		if !errors.Is(err, tenure.ErrSetup) {
			t.Errorf("%s: migrate: got %v, want ErrSetup", name, err)
		}
	}
}

func TestAURLThatCannotBeParsedIsRefusedWithoutItsPassword(t *testing.T) {
	_, err := tenure.OpenPostgres(t.Context(), "postgres://u:sEcrEt@host:port/db", tenure.PostgresConfig{})
	wantErr(t, err, tenure.ErrInvalid)
	if strings.Contains(err.Error(), "sEcrEt") {
		t.Errorf("%v tells the password", err)
	}
}

func TestOpeningWaitsForADatabaseThatIsDown(t *testing.T) {
	server := pgtest.Cluster(t)
	wantErr(t, server.Stop("fast"), nil)
	var log bytes.Buffer
	logger := slog.New(slog.NewTextHandler(&log, nil))

	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, err := tenure.OpenPostgres(ctx, server.URL(), tenure.PostgresConfig{Logger: logger})
	wantErr(t, err, context.DeadlineExceeded)
	var connect *pgconn.ConnectError
	if !errors.As(err, &connect) {
		t.Errorf("got %v, want the driver's error within", err)
	}
	if !strings.Contains(log.String(), "waiting for the database") {
		t.Errorf("logged:\n%s", &log)
	}

	opened := make(chan error, 1)
	go func() {
		store, err := tenure.OpenPostgres(t.Context(), server.URL(), tenure.PostgresConfig{Logger: quiet})
		if err == nil {
			err = store.Migrate(t.Context())
			store.Close()
		}
		opened <- err
	}()
	wantErr(t, server.Start(), nil)
	wantErr(t, <-opened, nil)
}

// A role that may use the table, and do nothing else.
func TestARoleWithoutDDLWorksAndMissesOnlyTheTombstones(t *testing.T) {
	url := postgresURL(t)
	pool := postgresPool(t, url)
	execPostgres(t, pool, `DROP ROLE IF EXISTS modest`)
	execPostgres(t, pool, `CREATE ROLE modest LOGIN`)
	t.Cleanup(func() {
		execPostgres(t, pool, `DROP OWNED BY modest`)
		execPostgres(t, pool, `DROP ROLE modest`)
	})
	modestURL := strings.Replace(url, "postgres@", "modest@", 1)

	var log bytes.Buffer
	logger := slog.New(slog.NewTextHandler(&log, nil))
	store := openPostgres(t, modestURL, tenure.PostgresConfig{Logger: logger})
	err := store.Migrate(t.Context())
	wantErr(t, err, tenure.ErrSetup) // may not create the table

	migrate(t, openPostgres(t, url, tenure.PostgresConfig{}))
	execPostgres(t, pool, `DROP TABLE objects_tombstones`)
	execPostgres(t, pool, `GRANT SELECT, INSERT, UPDATE, DELETE ON objects TO modest`)
	store = openPostgres(t, modestURL, tenure.PostgresConfig{Logger: logger})
	migrate(t, store)
	if got := strings.Count(log.String(), "objects_tombstones"); got == 0 {
		t.Errorf("opening did not log what is missing:\n%s", &log)
	}
	lease := newLease(t, store, tenure.LeaseConfig{})
	first := mustAcquire(t, lease)
	wantErr(t, lease.Renew(t.Context(), first), nil)
	wantErr(t, lease.Release(t.Context(), first), nil)
	if second := mustAcquire(t, lease); second.Token() <= first.Token() {
		t.Errorf("token %d follows %d", second.Token(), first.Token())
	}
}

func TestALeasesCallWaitsForALockAsLongAsItsContextAllows(t *testing.T) {
	const longer = 1200 * time.Millisecond // than one statement of a lease waits
	url := postgresURL(t)
	store := openPostgres(t, url, tenure.PostgresConfig{})
	migrate(t, store)
	lease := newLease(t, store, tenure.LeaseConfig{})
	term := mustAcquire(t, lease)
	pool := postgresPool(t, url)
	for name, timeout := range map[string]time.Duration{"a deadline": time.Minute, "no deadline": 0} {
		ctx := context.Background()
		if timeout > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, timeout)
			defer cancel()
		}
		tx, err := pool.Begin(t.Context())
		wantErr(t, err, nil)
		execPostgres(t, tx, `SELECT FROM objects FOR UPDATE`)
		time.AfterFunc(longer, func() { tx.Rollback(context.Background()) })
		if err := lease.Renew(ctx, term); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	tx, err := pool.Begin(t.Context())
	wantErr(t, err, nil)
	execPostgres(t, tx, `LOCK TABLE objects`)
	time.AfterFunc(longer, func() { tx.Rollback(context.Background()) })
	if _, err := lease.Read(t.Context()); err != nil {
		t.Errorf("read: %v", err)
	}
	tx, err = pool.Begin(t.Context())
	wantErr(t, err, nil)
	execPostgres(t, tx, `SELECT FROM objects FOR UPDATE`)
	err = inTime(900*time.Millisecond, func(ctx context.Context) error { return lease.Renew(ctx, term) })
	if err == nil || errors.Is(err, context.DeadlineExceeded) { // the server ends the wait a tenth before
		t.Errorf("got %v, want an error before the context ends", err)
	}
	wantErr(t, tx.Rollback(t.Context()), nil)
	wantErr(t, lease.Renew(t.Context(), term), nil)
}

// After a failover what was the primary is a standby, and connections to it stay
// good: they can be pinned there for an hour.
func TestAServerThatHasBecomeReadOnlyIsLeft(t *testing.T) {
	url := pgtest.URL(t)
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
	migrated := openPostgres(t, url, tenure.PostgresConfig{})
	if err := migrated.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	for name, write := range map[string]func(*tenure.PostgresStore) error{
		"a lease": func(store *tenure.PostgresStore) error {
			_, err := newLease(t, store, tenure.LeaseConfig{}).AcquireOrSteal(t.Context())
			return err
		},
		"an object": func(store *tenure.PostgresStore) error {
			_, err := store.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "o", ID: "o"}, Name: "o"}, tenure.Unconditional())
			return err
		},
		"a transaction": func(store *tenure.PostgresStore) error {
			lease := newLease(t, migrated, tenure.LeaseConfig{Key: tenure.Key{Type: "fence", ID: "fence"}})
			term := mustAcquire(t, lease)
			defer lease.Release(t.Context(), term)
			return store.Fenced(t.Context(), term, func(tx pgx.Tx) error {
				_, err := tx.Exec(t.Context(), "CREATE TABLE written (n int)")
				return err
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			readOnly(true)
			store := openPostgres(t, url, tenure.PostgresConfig{})
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
			url := postgresURL(t)
			store := openPostgres(t, url+test.setting, tenure.PostgresConfig{})
			migrate(t, store)
			pool := postgresPool(t, url)
			put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: "there"}})
			execPostgres(t, pool, `CREATE TABLE plans (objects json, compiled bool)`)
			execPostgres(t, pool, `CREATE FUNCTION plan() RETURNS trigger LANGUAGE plpgsql AS $$
				DECLARE own json; other json;
				BEGIN
					EXECUTE 'EXPLAIN (FORMAT JSON) SELECT FROM objects WHERE object_type = $1 AND id = $2' INTO own USING NEW.object_type, NEW.id;
					EXECUTE 'EXPLAIN (FORMAT JSON) SELECT FROM plans WHERE compiled' INTO other;
					INSERT INTO plans VALUES (own->0->'Plan', other::text LIKE '%"JIT"%');
					RETURN NEW;
				END $$`)
			execPostgres(t, pool, `CREATE TRIGGER plan BEFORE INSERT ON objects FOR EACH ROW EXECUTE FUNCTION plan()`)
			execPostgres(t, pool, `ANALYZE objects`)
			mustAcquire(t, newLease(t, store, tenure.LeaseConfig{}))
			put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: "the application's own"}})
			var seen string
			wantErr(t, pool.QueryRow(t.Context(), `SELECT string_agg((objects->>'Node Type') || CASE WHEN compiled THEN ', compiled' ELSE '' END, ', ') FROM plans`).Scan(&seen), nil)
			if seen != test.want {
				t.Errorf("the plans are %s, want %s", seen, test.want)
			}
		})
	}
}

// A row that a write returns comes before its commit, which may still fail.
func TestAWriteOnPostgresWhoseCommitFailsIsNotReportedAsDone(t *testing.T) {
	for _, mode := range []string{"cache_statement", "cache_describe", "exec", "simple_protocol"} {
		t.Run(mode, func(t *testing.T) {
			ctx, url := t.Context(), postgresURL(t)
			store := openPostgres(t, url+"&default_query_exec_mode="+mode, tenure.PostgresConfig{})
			migrate(t, store)
			obj := put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}})
			execPostgres(t, postgresPool(t, url), `
				CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'refused at the commit'; END $$;
				CREATE CONSTRAINT TRIGGER refuse AFTER INSERT OR UPDATE OR DELETE ON objects DEFERRABLE INITIALLY DEFERRED
					FOR EACH ROW EXECUTE FUNCTION refuse()`)
			for name, store := range map[string]tenure.Store{"alone": store, "in a group": groupedStore{store}} {
				_, replaced := store.PutIf(ctx, obj, tenure.MatchVersion(obj.Version))
				_, put := store.PutIf(ctx, obj, tenure.Unconditional())
				_, created := store.PutIf(ctx, tenure.Object{Key: tenure.Key{Type: "t", ID: "2"}}, tenure.MustCreate())
				deleted := store.DeleteIf(ctx, obj.Key, obj.Version)
				for what, err := range map[string]error{"replace": replaced, "put": put, "create": created, "delete": deleted} {
					if err == nil || !strings.Contains(err.Error(), "refused at the commit") {
						t.Errorf("%s %s: got %v, want that the commit was refused", what, name, err)
					}
				}
			}
		})
	}
}

func TestOnPostgresAWriteFindsItsRowByTheIndexWhateverElseItCompares(t *testing.T) {
	url := postgresURL(t)
	store := openPostgres(t, url, tenure.PostgresConfig{})
	migrate(t, store)
	pool := postgresPool(t, url)
	execPostgres(t, pool, `INSERT INTO objects SELECT 't', n::text, NULL, '{}', '', n, 0, 0 FROM generate_series(1, 20000) n`)
	execPostgres(t, pool, `ANALYZE objects`)
	const rounds = 20 // the server chooses a plan for good after some
	for n := range int64(rounds) {
		obj, err := store.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "t", ID: fmt.Sprint(n + 1)}}, tenure.MatchVersion(n+1))
		wantErr(t, err, nil)
		obj, err = store.PutIf(t.Context(), obj, tenure.Unconditional())
		wantErr(t, err, nil)
		wantErr(t, store.DeleteIf(t.Context(), obj.Key, obj.Version), nil)
		_, err = store.PutIf(t.Context(), obj, tenure.MustCreate())
		wantErr(t, err, nil)
	}
	store.Close() // a backend tells its figures when it exits
	var byIndex, whole int
	for end := time.Now().Add(10 * time.Second); byIndex < 4*rounds && time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		err := pool.QueryRow(t.Context(), `SELECT idx_scan, seq_scan FROM pg_stat_user_tables WHERE relname = 'objects'`).Scan(&byIndex, &whole)
		wantErr(t, err, nil)
	}
	if byIndex < 4*rounds || whole >= rounds { // CREATE and ANALYZE look at all
		t.Errorf("%d scans were by the index, %d of the whole table", byIndex, whole)
	}
}
