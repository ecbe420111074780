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
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/verify/pgtest"
)

// hashPartitioned is a table of which the names cannot be unique.
const hashPartitioned = `
	CREATE TABLE objects (object_type text, id text, name text, labels jsonb, payload bytea NOT NULL, resource_version bigint NOT NULL,
		created_at_ms bigint NOT NULL, updated_at_ms bigint NOT NULL, PRIMARY KEY (object_type, id)) PARTITION BY HASH (object_type, id);
	CREATE TABLE objects_0 PARTITION OF objects FOR VALUES WITH (MODULUS 2, REMAINDER 0);
	CREATE %s TABLE objects_1 PARTITION OF objects FOR VALUES WITH (MODULUS 2, REMAINDER 1)`

// oneConn returns a pool whose one connection does this when it connects.
func oneConn(t *testing.T, url, begins string) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(url)
	wantErr(t, err, nil)
	config.MaxConns = 1
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, begins)
		return err
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	wantErr(t, err, nil)
	t.Cleanup(pool.Close)
	return pool
}

func TestNoTwoTermsAreValidAtOnceThoughACrashEmptiesTables(t *testing.T) {
	server := pgtest.Cluster(t)
	admin := postgresPool(t, server.URL())
	for name, c := range map[string]struct{ ddl, begins, refusal string }{
		"a table as Migrate makes it": {},
		"an unlogged table":           {ddl: `ALTER TABLE objects SET UNLOGGED`, refusal: "UNLOGGED"},
		"a partition that is":         {ddl: `DROP TABLE objects;` + fmt.Sprintf(hashPartitioned, "UNLOGGED"), refusal: "UNLOGGED"},
		"a table that inherits":       {ddl: `CREATE UNLOGGED TABLE more () INHERITS (objects)`, refusal: "UNLOGGED"},
		"a temporary table":           {begins: `CREATE TEMPORARY TABLE objects (LIKE objects INCLUDING ALL)`, refusal: "TEMPORARY"},
	} {
		t.Run(name, func(t *testing.T) {
			schema := strings.ToLower(strings.ReplaceAll(name, " ", "_"))
			execPostgres(t, admin, `CREATE SCHEMA `+schema)
			url := server.URL() + "&search_path=" + schema
			migrate(t, openPostgres(t, url, tenure.PostgresConfig{}))
			if c.ddl != "" {
				execPostgres(t, postgresPool(t, url), c.ddl)
			}
			var terms []*tenure.Term
			for range 2 {
				store := must(tenure.NewPostgresStore(oneConn(t, url, c.begins), tenure.PostgresConfig{Logger: quiet}))
				t.Cleanup(func() { store.Close() })
				term, err := newLease(t, store, tenure.LeaseConfig{}).AcquireOrSteal(t.Context())
				switch {
				case err == nil:
					terms = append(terms, term)
				case c.refusal == "":
					wantErr(t, err, tenure.ErrHeld)
				case !errors.Is(err, tenure.ErrSetup) || !strings.Contains(err.Error(), c.refusal):
					t.Errorf("got %v, want ErrSetup that says %s", err, c.refusal)
				}
				wantErr(t, server.Restart("immediate"), nil)
				admin.Reset()
			}
			if len(terms) == 2 && terms[0].Valid() && terms[1].Valid() {
				t.Error("two terms are valid at once")
			}
			if len(terms) > 0 != (c.refusal == "") {
				t.Errorf("%d terms", len(terms))
			}
		})
	}
}

func TestTombstonesThatACrashEmptiesAreUsedAndWarnedOf(t *testing.T) {
	server := pgtest.Cluster(t)
	migrate(t, openPostgres(t, server.URL(), tenure.PostgresConfig{}))
	execPostgres(t, postgresPool(t, server.URL()), `ALTER TABLE objects_tombstones SET UNLOGGED`)
	var log syncBuffer
	store := openPostgres(t, server.URL(), tenure.PostgresConfig{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	if n := strings.Count(log.String(), "unlogged"); n != 1 {
		t.Errorf("%d lines:\n%s", n, log.String())
	}
	var last int64
	for range 2 {
		obj := put(t, store, tenure.Object{Key: leaseKey})
		if obj.Version <= last {
			t.Errorf("version %d follows %d", obj.Version, last)
		}
		wantErr(t, store.DeleteIf(t.Context(), obj.Key, obj.Version), nil)
		last = obj.Version
		wantErr(t, server.Restart("immediate"), nil)
		store.Close()
		store = openPostgres(t, server.URL(), tenure.PostgresConfig{})
	}
}

// syncBuffer is a log that a store writes while the test reads it.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// asWorker returns the URL by which a role that owns nothing reaches the database,
// and the owner's pool.
func asWorker(t *testing.T) (url string, owner *pgxpool.Pool) {
	t.Helper()
	url = postgresURL(t)
	migrate(t, openPostgres(t, url, tenure.PostgresConfig{}))
	owner = postgresPool(t, url)
	role := "worker_" + owner.Config().ConnConfig.Database
	execPostgres(t, owner, `CREATE ROLE `+role+` LOGIN`)
	t.Cleanup(func() {
		execPostgres(t, owner, `DROP OWNED BY `+role)
		execPostgres(t, owner, `DROP ROLE `+role)
	})
	execPostgres(t, owner, `GRANT ALL ON objects, objects_tombstones TO `+role)
	return strings.Replace(url, "postgres@", role+"@", 1), owner
}

func TestALeaseIsReleasedAndAcquiredWhateverBecomesOfTheTombstones(t *testing.T) {
	for name, ddl := range map[string]string{
		"dropped":                  `DROP TABLE objects_tombstones`,
		"renamed":                  `ALTER TABLE objects_tombstones RENAME TO elsewhere`,
		"revoked":                  `REVOKE INSERT ON objects_tombstones FROM {role}`,
		"revoked to read":          `REVOKE SELECT ON objects_tombstones FROM {role}`,
		"under row-level security": `ALTER TABLE objects_tombstones ENABLE ROW LEVEL SECURITY`,
		"under a policy that admits reading": `ALTER TABLE objects_tombstones ENABLE ROW LEVEL SECURITY;
			CREATE POLICY p ON objects_tombstones FOR SELECT USING (true)`,
		"under a policy that admits nothing": `ALTER TABLE objects_tombstones ENABLE ROW LEVEL SECURITY;
			CREATE POLICY p ON objects_tombstones USING (true) WITH CHECK (false)`,
		"of another layout": `ALTER TABLE objects_tombstones RENAME COLUMN resource_version TO v`,
		"without a key":     `ALTER TABLE objects_tombstones DROP CONSTRAINT objects_tombstones_pkey`,
	} {
		t.Run(name, func(t *testing.T) {
			url, owner := asWorker(t)
			ddl := strings.ReplaceAll(ddl, "{role}", "worker_"+owner.Config().ConnConfig.Database)
			var log syncBuffer
			running := openPostgres(t, url, tenure.PostgresConfig{Logger: slog.New(slog.NewTextHandler(&log, nil))})
			grouped := openPostgres(t, url, tenure.PostgresConfig{})
			lease := newLease(t, running, tenure.LeaseConfig{})
			other := newLease(t, groupedStore{grouped}, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "grouped"}})
			terms := []*tenure.Term{mustAcquire(t, lease), mustAcquire(t, other)}
			obj := put(t, running, tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}})
			if log.String() != "" {
				t.Fatalf("logged before there is a reason:\n%s", log.String())
			}

			execPostgres(t, owner, ddl)
			fresh := newLease(t, openPostgres(t, url, tenure.PostgresConfig{}), tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "fresh"}})
			wantErr(t, fresh.Release(t.Context(), mustAcquire(t, fresh)), nil)
			for i, lease := range []*tenure.Lease{lease, other} {
				wantErr(t, lease.Renew(t.Context(), terms[i]), nil)
				wantErr(t, lease.Release(t.Context(), terms[i]), nil)
				again := mustAcquire(t, lease)
				if again.Token() <= terms[i].Token() {
					t.Errorf("token %d follows %d", again.Token(), terms[i].Token())
				}
				wantErr(t, lease.Release(t.Context(), again), nil)
			}
			wantErr(t, running.DeleteIf(t.Context(), obj.Key, obj.Version), nil)
			if n := strings.Count(log.String(), "no table of tombstones"); n != 1 {
				t.Errorf("%d lines that tell of it:\n%s", n, log.String())
			}
		})
	}
}

func TestWhatWasFoundInTheDatabaseIsLookedAtAgainAfterAWhile(t *testing.T) {
	url := postgresURL(t)
	pool := postgresPool(t, url)
	store := openPostgres(t, url, tenure.PostgresConfig{})
	migrate(t, store)
	execPostgres(t, pool, `ALTER TABLE objects_tombstones RENAME TO elsewhere`)
	obj := put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}})
	wantErr(t, store.DeleteIf(t.Context(), obj.Key, obj.Version), nil)
	execPostgres(t, pool, `ALTER TABLE elsewhere RENAME TO objects_tombstones`)
	store.LookAgain()
	obj = put(t, store, tenure.Object{Key: obj.Key})
	wantErr(t, store.DeleteIf(t.Context(), obj.Key, obj.Version), nil)
	var version int64
	wantErr(t, pool.QueryRow(t.Context(), `SELECT max(resource_version) FROM objects_tombstones`).Scan(&version), nil)
	if version != obj.Version {
		t.Errorf("the last tombstone is of version %d, want %d", version, obj.Version)
	}

	// The table is another program's now.
	execPostgres(t, pool, `DROP TABLE objects`)
	execPostgres(t, pool, fmt.Sprintf(foreignTable, "BYTEA", "JSONB"))
	store.LookAgain()
	put(t, store, tenure.Object{Key: tenure.Key{Type: "other", ID: "1"}})
	_, err := store.PutIf(t.Context(), tenure.Object{Key: obj.Key}, tenure.MustCreate())
	wantErr(t, err, tenure.ErrTaken)

	execPostgres(t, pool, `ALTER TABLE objects SET UNLOGGED`)
	store.LookAgain()
	_, err = store.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "t", ID: "2"}}, tenure.MustCreate())
	wantErr(t, err, tenure.ErrSetup)
	execPostgres(t, pool, `ALTER TABLE objects SET LOGGED`)
	put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: "2"}})
}

// A standby that only reads hears of releases where the table has moved.
func TestAStandbyFollowsATableIntoAnotherSchema(t *testing.T) {
	url := postgresURL(t) + "&search_path=one,two"
	pool := postgresPool(t, url)
	execPostgres(t, pool, `CREATE SCHEMA one`)
	execPostgres(t, pool, `CREATE SCHEMA two`)
	store := openPostgres(t, url, tenure.PostgresConfig{})
	migrate(t, store)
	lease := newLease(t, store, tenure.LeaseConfig{})
	watch := liveWatch(t, store, leaseKey)
	execPostgres(t, pool, `ALTER TABLE objects SET SCHEMA two; ALTER TABLE objects_tombstones SET SCHEMA two`)
	store.LookAgain()
	_, err := lease.Read(t.Context())
	wantErr(t, err, tenure.ErrNotFound)
	other := openPostgres(t, url, tenure.PostgresConfig{})
	takeHint(watch)
	deleteAndWake(t, other, put(t, other, tenure.Object{Key: leaseKey}))
	awaitHint(t, "released", watch)
}

func TestATableUnderRowLevelSecurityIsRefusedUnlessPoliciesLetItBeWritten(t *testing.T) {
	url, owner := asWorker(t)
	running := openPostgres(t, url, tenure.PostgresConfig{})
	lease := newLease(t, running, tenure.LeaseConfig{})
	wantErr(t, lease.Release(t.Context(), mustAcquire(t, lease)), nil)
	execPostgres(t, owner, `ALTER TABLE objects ENABLE ROW LEVEL SECURITY`)
	for _, policy := range []string{
		``, `CREATE POLICY r ON objects FOR SELECT USING (true)`, `CREATE POLICY w ON objects FOR UPDATE USING (true)`, `CREATE POLICY a ON objects FOR INSERT WITH CHECK (true)`,
		`CREATE POLICY others ON objects TO pg_monitor USING (true)`, `CREATE POLICY restrictive ON objects AS RESTRICTIVE USING (true)`,
	} {
		if policy != "" {
			execPostgres(t, owner, policy)
		}
		_, err := tenure.OpenPostgres(t.Context(), url, tenure.PostgresConfig{Logger: quiet})
		if !errors.Is(err, tenure.ErrSetup) || !strings.Contains(err.Error(), "row-level security") {
			t.Errorf("%s: open: got %v, want ErrSetup that says so", policy, err)
		}
		running.LookAgain()
		if _, err := lease.AcquireOrSteal(t.Context()); !errors.Is(err, tenure.ErrSetup) || !strings.Contains(err.Error(), "row-level security") {
			t.Errorf("%s: acquire: got %v, want ErrSetup that says so", policy, err)
		}
	}
	execPostgres(t, owner, `CREATE POLICY d ON objects FOR DELETE USING (true)`)
	for _, store := range []*tenure.PostgresStore{running, openPostgres(t, url, tenure.PostgresConfig{})} {
		lease := newLease(t, store, tenure.LeaseConfig{})
		wantErr(t, lease.Release(t.Context(), mustAcquire(t, lease)), nil)
	}
}

func TestATableWithoutUniqueNamesIsWarnedOfOnce(t *testing.T) {
	for name, c := range map[string]struct {
		ddl   string
		warns int
	}{
		"partitioned by hash": {fmt.Sprintf(hashPartitioned, ""), 1},
		"a foreign one":       {fmt.Sprintf(foreignTable, "BYTEA", "JSONB"), 0},
		"a foreign one without": {fmt.Sprintf(foreignTable, "BYTEA", "JSONB") + `; DROP INDEX objects_names;
			CREATE UNIQUE INDEX i ON objects (object_type, id, name)`, 1},
		"ours": {`SELECT`, 0},
	} {
		t.Run(name, func(t *testing.T) {
			url := postgresURL(t)
			execPostgres(t, postgresPool(t, url), c.ddl)
			var log syncBuffer
			store := must(tenure.NewPostgresStore(postgresPool(t, url), tenure.PostgresConfig{Logger: slog.New(slog.NewTextHandler(&log, nil))}))
			t.Cleanup(func() { store.Close() })
			migrate(t, store)
			for range 3 {
				store.LookAgain()
				put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: fmt.Sprint(time.Now().UnixNano())}})
			}
			if n := strings.Count(log.String(), "unique index"); n != c.warns {
				t.Errorf("%d lines, want %d:\n%s", n, c.warns, log.String())
			}
		})
	}
}

// A role that is refused while its password is being rotated is no reason for a
// standby to wait for a person.
func TestARoleThatIsRefusedForAWhileNeedsNoPerson(t *testing.T) {
	url, owner := asWorker(t)
	role := "worker_" + owner.Config().ConnConfig.Database
	store := openPostgres(t, url, tenure.PostgresConfig{})
	lease := newLease(t, store, tenure.LeaseConfig{})
	term := mustAcquire(t, lease)
	execPostgres(t, owner, `ALTER ROLE `+role+` NOLOGIN`)
	execPostgres(t, owner, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '`+role+`'`)
	refused := func() error {
		for end := time.Now().Add(20 * time.Second); time.Now().Before(end); {
			if _, err := lease.Read(t.Context()); err != nil && strings.Contains(err.Error(), "28000") {
				return err
			}
		}
		return nil
	}
	if err := refused(); err == nil || errors.Is(err, tenure.ErrSetup) {
		t.Errorf("got %v, want what the server says and not ErrSetup", err)
	}
	_, err := tenure.OpenPostgres(t.Context(), url, tenure.PostgresConfig{Logger: quiet})
	wantErr(t, err, tenure.ErrSetup)
	execPostgres(t, owner, `ALTER ROLE `+role+` LOGIN`)
	wantErr(t, lease.Renew(t.Context(), term), nil)
}

func TestARoleThatCouldNotRenewALeaseDoesNotAcquireIt(t *testing.T) {
	url, owner := asWorker(t)
	role := "worker_" + owner.Config().ConnConfig.Database
	store := openPostgres(t, url, tenure.PostgresConfig{})
	lease := newLease(t, store, tenure.LeaseConfig{})
	term := mustAcquire(t, lease)
	execPostgres(t, owner, `REVOKE UPDATE ON objects FROM `+role)
	wantErr(t, lease.Renew(t.Context(), term), tenure.ErrSetup)
	wantErr(t, lease.Release(t.Context(), term), nil)
	_, err := lease.TryAcquire(t.Context())
	wantErr(t, err, tenure.ErrSetup)
	if !strings.Contains(err.Error(), `GRANT UPDATE ON "objects"`) {
		t.Errorf("the error does not name the remedy: %v", err)
	}
	execPostgres(t, owner, `REVOKE DELETE ON objects FROM `+role)
	store.LookAgain()
	if _, err = lease.TryAcquire(t.Context()); !strings.Contains(err.Error(), `GRANT UPDATE, DELETE ON "objects"`) {
		t.Errorf("the error does not name the remedy: %v", err)
	}
	execPostgres(t, owner, `GRANT DELETE ON objects TO `+role)
	execPostgres(t, owner, `GRANT UPDATE (object_type, id, name, labels, payload, resource_version, created_at_ms, updated_at_ms) ON objects TO `+role)
	wantErr(t, lease.Release(t.Context(), mustAcquire(t, lease)), nil)
}
