package tenure_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	neturl "net/url"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/proof/kit"
)

// hashPartitioned is a table whose names can't be unique.
const hashPartitioned = `
	CREATE TABLE objects (object_type text, id text, name text, labels jsonb, payload bytea NOT NULL, resource_version bigint NOT NULL,
		created_at_ms bigint NOT NULL, updated_at_ms bigint NOT NULL, PRIMARY KEY (object_type, id)) PARTITION BY HASH (object_type, id);
	CREATE TABLE objects_0 PARTITION OF objects FOR VALUES WITH (MODULUS 2, REMAINDER 0);
	CREATE %s TABLE objects_1 PARTITION OF objects FOR VALUES WITH (MODULUS 2, REMAINDER 1)`

// oneConn returns a pool whose one connection begins with this statement.
func oneConn(t *testing.T, url, begins string) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(url)
	kit.WantErr(t, err, nil)
	config.MaxConns = 1
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, begins)
		return err
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	kit.WantErr(t, err, nil)
	t.Cleanup(pool.Close)
	return pool
}

func TestNoTwoTermsAreValidAtOnceThoughACrashEmptiesTables(t *testing.T) {
	testkit.Slow(t)
	server := kit.StartPostgres(t)
	admin := kit.PostgresPool(t, server.URL())
	for name, c := range map[string]struct{ ddl, begins, schema, refusal string }{
		"a table as Migrate makes it":     {},
		"an unlogged table":               {ddl: `ALTER TABLE objects SET UNLOGGED`, refusal: "UNLOGGED"},
		"a partition that is":             {ddl: `DROP TABLE objects;` + fmt.Sprintf(hashPartitioned, "UNLOGGED"), refusal: "UNLOGGED"},
		"a table that inherits":           {ddl: `CREATE UNLOGGED TABLE more () INHERITS (objects)`, refusal: "UNLOGGED"},
		"a temporary table before it":     {begins: `CREATE TEMPORARY TABLE objects (LIKE objects INCLUDING ALL)`},
		"a temporary table by its schema": {schema: "pg_temp", begins: `CREATE TEMPORARY TABLE IF NOT EXISTS objects (LIKE objects INCLUDING ALL)`, refusal: "TEMPORARY"},
		"a temporary table alone": {ddl: `ALTER TABLE objects RENAME TO elsewhere`,
			begins: `CREATE TEMPORARY TABLE IF NOT EXISTS objects (LIKE objects_tombstones)`, refusal: "does not exist"},
	} {
		t.Run(name, func(t *testing.T) {
			schema := strings.ToLower(strings.ReplaceAll(name, " ", "_"))
			kit.ExecPostgres(t, admin, `CREATE SCHEMA `+schema)
			url := server.URL() + "&search_path=" + schema
			kit.Migrate(t, kit.OpenPostgres(t, url, tenure.PostgresConfig{}))
			if c.ddl != "" {
				kit.ExecPostgres(t, kit.PostgresPool(t, url), c.ddl)
			}
			var terms []*tenure.Term
			for range 2 {
				store := kit.Must(tenure.NewPostgresStore(oneConn(t, url, c.begins), tenure.PostgresConfig{Schema: c.schema, Logger: kit.Quiet}))
				t.Cleanup(func() { store.Close() })
				term, err := kit.NewLease(t, store, tenure.LeaseConfig{}).AcquireOrSteal(t.Context())
				switch {
				case err == nil:
					terms = append(terms, term)
				case c.refusal == "":
					kit.WantErr(t, err, tenure.ErrHeld)
				case !errors.Is(err, tenure.ErrSetup) || !strings.Contains(err.Error(), c.refusal):
					t.Errorf("got %v, want ErrSetup that says %s", err, c.refusal)
				}
				kit.WantErr(t, server.Restart("immediate"), nil)
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
	testkit.Slow(t)
	server := kit.StartPostgres(t)
	kit.Migrate(t, kit.OpenPostgres(t, server.URL(), tenure.PostgresConfig{}))
	kit.ExecPostgres(t, kit.PostgresPool(t, server.URL()), `ALTER TABLE objects_tombstones SET UNLOGGED`)
	var log kit.SyncBuffer
	store := kit.OpenPostgres(t, server.URL(), tenure.PostgresConfig{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	kit.Await(t, "the warning", func() bool { return strings.Count(log.String(), "unlogged") == 1 })
	var last int64
	for range 2 {
		obj := kit.Put(t, store, tenure.Object{Key: kit.LeaseKey})
		if obj.Version <= last {
			t.Errorf("version %d follows %d", obj.Version, last)
		}
		kit.WantErr(t, store.DeleteIf(t.Context(), obj.Key, tenure.IfVersion(obj.Version)), nil)
		last = obj.Version
		kit.WantErr(t, server.Restart("immediate"), nil)
		store.Close()
		store = kit.OpenPostgres(t, server.URL(), tenure.PostgresConfig{})
	}
}

func TestALeaseIsReleasedAndAcquiredWhateverBecomesOfTheTombstones(t *testing.T) {
	testkit.Slow(t)
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
			url, owner := kit.AsWorker(t)
			ddl := strings.ReplaceAll(ddl, "{role}", "worker_"+owner.Config().ConnConfig.Database)
			var log kit.SyncBuffer
			running := kit.OpenPostgres(t, url, tenure.PostgresConfig{Logger: slog.New(slog.NewTextHandler(&log, nil))})
			grouped := kit.OpenPostgres(t, url, tenure.PostgresConfig{})
			lease := kit.NewLease(t, running, tenure.LeaseConfig{})
			other := kit.NewLease(t, groupedStore{grouped}, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "grouped"}})
			terms := []*tenure.Term{kit.MustAcquire(t, lease), kit.MustAcquire(t, other)}
			obj := kit.Put(t, running, tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}})
			if log.String() != "" {
				t.Fatalf("logged before there is a reason:\n%s", log.String())
			}

			kit.ExecPostgres(t, owner, ddl)
			fresh := kit.NewLease(t, kit.OpenPostgres(t, url, tenure.PostgresConfig{}), tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "fresh"}})
			kit.WantErr(t, fresh.Release(t.Context(), kit.MustAcquire(t, fresh)), nil)
			for i, lease := range []*tenure.Lease{lease, other} {
				kit.WantErr(t, lease.Renew(t.Context(), terms[i]), nil)
				kit.WantErr(t, lease.Release(t.Context(), terms[i]), nil)
				again := kit.MustAcquire(t, lease)
				if again.Token() <= terms[i].Token() {
					t.Errorf("token %d follows %d", again.Token(), terms[i].Token())
				}
				kit.WantErr(t, lease.Release(t.Context(), again), nil)
			}
			kit.WantErr(t, running.DeleteIf(t.Context(), obj.Key, tenure.IfVersion(obj.Version)), nil)
			if n := strings.Count(log.String(), "no table of tombstones"); n != 1 {
				t.Errorf("%d lines about it:\n%s", n, log.String())
			}
		})
	}
}

func TestWhatWasFoundInTheDatabaseIsLookedAtAgainAfterAWhile(t *testing.T) {
	url := kit.PostgresURL(t)
	pool := kit.PostgresPool(t, url)
	store := kit.OpenPostgres(t, url, tenure.PostgresConfig{})
	kit.Migrate(t, store)
	kit.ExecPostgres(t, pool, `ALTER TABLE objects_tombstones RENAME TO elsewhere`)
	obj := kit.Put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: "1"}})
	kit.WantErr(t, store.DeleteIf(t.Context(), obj.Key, tenure.IfVersion(obj.Version)), nil)
	kit.ExecPostgres(t, pool, `ALTER TABLE elsewhere RENAME TO objects_tombstones`)
	store.LookAgain()
	obj = kit.Put(t, store, tenure.Object{Key: obj.Key})
	kit.WantErr(t, store.DeleteIf(t.Context(), obj.Key, tenure.IfVersion(obj.Version)), nil)
	var version int64
	kit.WantErr(t, pool.QueryRow(t.Context(), `SELECT max(resource_version) FROM objects_tombstones`).Scan(&version), nil)
	if version != obj.Version {
		t.Errorf("the last tombstone is of version %d, want %d", version, obj.Version)
	}

	// The table is another program's now.
	kit.ExecPostgres(t, pool, `DROP TABLE objects`)
	kit.ExecPostgres(t, pool, fmt.Sprintf(kit.ForeignTable, "BYTEA", "JSONB"))
	store.LookAgain()
	kit.Put(t, store, tenure.Object{Key: tenure.Key{Type: "other", ID: "1"}})
	_, err := store.PutIf(t.Context(), tenure.Object{Key: obj.Key}, tenure.IfAbsent())
	kit.WantErr(t, err, tenure.ErrTaken)

	kit.ExecPostgres(t, pool, `ALTER TABLE objects SET UNLOGGED`)
	store.LookAgain()
	_, err = store.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "t", ID: "2"}}, tenure.IfAbsent())
	kit.WantErr(t, err, tenure.ErrSetup)
	kit.ExecPostgres(t, pool, `ALTER TABLE objects SET LOGGED`)
	kit.Put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: "2"}})
}

// A standby that only reads hears of releases where the table has moved.
func TestAStandbyFollowsATableIntoAnotherSchema(t *testing.T) {
	url := kit.PostgresURL(t) + "&search_path=one,two"
	pool := kit.PostgresPool(t, url)
	kit.ExecPostgres(t, pool, `CREATE SCHEMA one`)
	kit.ExecPostgres(t, pool, `CREATE SCHEMA two`)
	store := kit.OpenPostgres(t, url, tenure.PostgresConfig{})
	kit.Migrate(t, store)
	lease := kit.NewLease(t, store, tenure.LeaseConfig{})
	watch := kit.LiveWatch(t, store, kit.LeaseKey)
	kit.ExecPostgres(t, pool, `ALTER TABLE objects SET SCHEMA two; ALTER TABLE objects_tombstones SET SCHEMA two`)
	store.LookAgain()
	_, err := lease.Read(t.Context())
	kit.WantErr(t, err, tenure.ErrNotFound)
	other := kit.OpenPostgres(t, url, tenure.PostgresConfig{})
	kit.TakeHint(watch)
	kit.DeleteAndWake(t, other, kit.Put(t, other, tenure.Object{Key: kit.LeaseKey}))
	kit.AwaitHint(t, "released", watch)
}

func TestATableUnderRowLevelSecurityIsRefusedUnlessPoliciesLetItBeWritten(t *testing.T) {
	url, owner := kit.AsWorker(t)
	running := kit.OpenPostgres(t, url, tenure.PostgresConfig{})
	lease := kit.NewLease(t, running, tenure.LeaseConfig{})
	kit.WantErr(t, lease.Release(t.Context(), kit.MustAcquire(t, lease)), nil)
	kit.ExecPostgres(t, owner, `ALTER TABLE objects ENABLE ROW LEVEL SECURITY`)
	for _, policy := range []string{
		``, `CREATE POLICY r ON objects FOR SELECT USING (true)`, `CREATE POLICY w ON objects FOR UPDATE USING (true)`, `CREATE POLICY a ON objects FOR INSERT WITH CHECK (true)`,
		`CREATE POLICY others ON objects TO pg_monitor USING (true)`, `CREATE POLICY restrictive ON objects AS RESTRICTIVE USING (true)`,
	} {
		if policy != "" {
			kit.ExecPostgres(t, owner, policy)
		}
		_, err := tenure.OpenPostgres(t.Context(), url, tenure.PostgresConfig{Logger: kit.Quiet})
		if !errors.Is(err, tenure.ErrSetup) || !strings.Contains(err.Error(), "row-level security") {
			t.Errorf("%s: open: got %v, want ErrSetup that says so", policy, err)
		}
		running.LookAgain()
		if _, err := lease.AcquireOrSteal(t.Context()); !errors.Is(err, tenure.ErrSetup) || !strings.Contains(err.Error(), "row-level security") {
			t.Errorf("%s: acquire: got %v, want ErrSetup that says so", policy, err)
		}
	}
	kit.ExecPostgres(t, owner, `CREATE POLICY d ON objects FOR DELETE USING (true)`)
	for _, store := range []*tenure.PostgresStore{running, kit.OpenPostgres(t, url, tenure.PostgresConfig{})} {
		lease := kit.NewLease(t, store, tenure.LeaseConfig{})
		kit.WantErr(t, lease.Release(t.Context(), kit.MustAcquire(t, lease)), nil)
	}
}

func TestATableWithoutUniqueNamesIsWarnedOfOnce(t *testing.T) {
	for name, c := range map[string]struct {
		ddl   string
		warns int
	}{
		"partitioned by hash": {fmt.Sprintf(hashPartitioned, ""), 1},
		"a foreign one":       {fmt.Sprintf(kit.ForeignTable, "BYTEA", "JSONB"), 0},
		"a foreign one without": {fmt.Sprintf(kit.ForeignTable, "BYTEA", "JSONB") + `; DROP INDEX objects_names;
			CREATE UNIQUE INDEX i ON objects (object_type, id, name)`, 1},
		"ours": {`SELECT`, 0},
	} {
		t.Run(name, func(t *testing.T) {
			url := kit.PostgresURL(t)
			kit.ExecPostgres(t, kit.PostgresPool(t, url), c.ddl)
			var log kit.SyncBuffer
			store := kit.Must(tenure.NewPostgresStore(kit.PostgresPool(t, url), tenure.PostgresConfig{Logger: slog.New(slog.NewTextHandler(&log, nil))}))
			t.Cleanup(func() { store.Close() })
			kit.Migrate(t, store)
			for range 3 {
				store.LookAgain()
				kit.Put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: fmt.Sprint(time.Now().UnixNano())}})
			}
			if n := strings.Count(log.String(), "unique index"); n != c.warns {
				t.Errorf("%d lines, want %d:\n%s", n, c.warns, log.String())
			}
		})
	}
}

// A standby need not wait for an operator because its role is refused while the password is
// being rotated.
func TestARoleThatIsRefusedForAWhileNeedsNoPerson(t *testing.T) {
	url, owner := kit.AsWorker(t)
	role := "worker_" + owner.Config().ConnConfig.Database
	store := kit.OpenPostgres(t, url, tenure.PostgresConfig{})
	lease := kit.NewLease(t, store, tenure.LeaseConfig{})
	term := kit.MustAcquire(t, lease)
	kit.ExecPostgres(t, owner, `ALTER ROLE `+role+` NOLOGIN`)
	kit.ExecPostgres(t, owner, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '`+role+`'`)
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
	_, err := tenure.OpenPostgres(t.Context(), url, tenure.PostgresConfig{Logger: kit.Quiet})
	kit.WantErr(t, err, tenure.ErrSetup)
	kit.ExecPostgres(t, owner, `ALTER ROLE `+role+` LOGIN`)
	kit.WantErr(t, lease.Renew(t.Context(), term), nil)
}

func TestARoleThatCouldNotRenewALeaseDoesNotAcquireIt(t *testing.T) {
	url, owner := kit.AsWorker(t)
	role := "worker_" + owner.Config().ConnConfig.Database
	store := kit.OpenPostgres(t, url, tenure.PostgresConfig{})
	lease := kit.NewLease(t, store, tenure.LeaseConfig{})
	term := kit.MustAcquire(t, lease)
	kit.ExecPostgres(t, owner, `REVOKE UPDATE ON objects FROM `+role)
	kit.WantErr(t, lease.Renew(t.Context(), term), tenure.ErrSetup)
	kit.WantErr(t, lease.Release(t.Context(), term), nil)
	_, err := lease.TryAcquire(t.Context())
	kit.WantErr(t, err, tenure.ErrSetup)
	if !strings.Contains(err.Error(), `GRANT UPDATE ON "public"."objects"`) {
		t.Errorf("the error does not name the remedy: %v", err)
	}
	kit.ExecPostgres(t, owner, `REVOKE DELETE ON objects FROM `+role)
	store.LookAgain()
	if _, err = lease.TryAcquire(t.Context()); !strings.Contains(err.Error(), `GRANT UPDATE, DELETE ON "public"."objects"`) {
		t.Errorf("the error does not name the remedy: %v", err)
	}
	kit.ExecPostgres(t, owner, `GRANT DELETE ON objects TO `+role)
	kit.ExecPostgres(t, owner, `GRANT UPDATE (object_type, id, name, labels, payload, resource_version, created_at_ms, updated_at_ms) ON objects TO `+role)
	kit.WantErr(t, lease.Release(t.Context(), kit.MustAcquire(t, lease)), nil)
}

// The error of each step has the statements that lead to the next one.
func TestTheErrorOfADeniedRoleHasTheStatementsThatHelp(t *testing.T) {
	for name, cfg := range map[string]tenure.PostgresConfig{
		"in the search_path": {}, "in a schema": {Schema: "Else where", Table: "Leases"},
	} {
		t.Run(name, func(t *testing.T) {
			url := kit.PostgresURL(t)
			owner := kit.PostgresPool(t, url)
			role := "Bob " + owner.Config().ConnConfig.Database
			kit.ExecPostgres(t, owner, fmt.Sprintf(`CREATE ROLE %q LOGIN; REVOKE CREATE ON SCHEMA public FROM PUBLIC`, role)) // the default since PostgreSQL 15
			t.Cleanup(func() { kit.ExecPostgres(t, owner, fmt.Sprintf(`DROP OWNED BY %[1]q; DROP ROLE %[1]q`, role)) })
			store := kit.OpenPostgres(t, strings.Replace(url, "postgres@", neturl.PathEscape(role)+"@", 1), cfg)
			help := func(what string, err error) {
				t.Helper()
				kit.WantErr(t, err, tenure.ErrSetup)
				grants := regexp.MustCompile(`GRANT [^)]*`).FindString(err.Error())
				if !strings.Contains(grants, fmt.Sprintf("TO %q", role)) {
					t.Fatalf("%s: the error has no whole GRANT: %v", what, err)
				}
				kit.ExecPostgres(t, owner, grants)
				store.LookAgain()
			}
			session := kit.Must(claims.NewSession(store, claims.SessionConfig{Logger: kit.Quiet}))
			keys := kit.Must(claims.NewKeys(session, "tenant"))
			denied := store.Migrate(t.Context())
			kit.MigrateClaims(t, kit.OpenPostgres(t, url, cfg))
			if cfg.Schema != "" {
				help("a look", errOf(store.Get(t.Context(), tenure.Key{Type: "t", ID: "1"})))
			}
			lease := kit.NewLease(t, store, tenure.LeaseConfig{})
			help("an acquire", errOf(lease.TryAcquire(t.Context())))
			kit.WantErr(t, lease.Release(t.Context(), kit.MustAcquire(t, lease)), nil)
			kit.WantErr(t, keys.Forget(t.Context()), nil)

			kit.ExecPostgres(t, owner, fmt.Sprintf(`DROP OWNED BY %q`, role)) // all that was granted
			store.LookAgain()
			help("Migrate", denied)
			kit.WantErr(t, store.Migrate(t.Context()), nil)
			kit.WantErr(t, lease.Release(t.Context(), kit.MustAcquire(t, lease)), nil)
			kit.WantErr(t, keys.Forget(t.Context()), nil)

			table := cmp.Or(cfg.Table, "objects") + "_claims"
			if cfg.Schema != "" {
				table = fmt.Sprintf("%q.%q", cfg.Schema, table)
			}
			kit.ExecPostgres(t, owner, fmt.Sprintf(`REVOKE DELETE ON %s FROM %q`, table, role))
			store.LookAgain()
			help("a claim", keys.Forget(t.Context()))
			kit.WantErr(t, keys.Forget(t.Context()), nil)
		})
	}
}

func TestTombstonesArePrunedWhenTheClockIsADayPastThem(t *testing.T) {
	url := kit.PostgresURL(t)
	store := kit.OpenPostgres(t, url, tenure.PostgresConfig{})
	kit.Migrate(t, store)
	pool := kit.PostgresPool(t, url)
	prune := map[string]func(){
		"by Migrate": func() { kit.Migrate(t, store) },
		"by a delete, an hour after": func() {
			store.PrunedAt(time.Now().Add(-time.Hour))
			obj := kit.Put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: "other"}})
			kit.WantErr(t, store.DeleteIf(t.Context(), obj.Key, tenure.IfVersion(obj.Version)), nil)
			kit.ExecPostgres(t, pool, `DELETE FROM objects_tombstones WHERE id = 'other'`)
		},
	}
	for name, prune := range prune {
		obj := kit.Put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: "new"}})
		kit.WantErr(t, store.DeleteIf(t.Context(), obj.Key, tenure.IfVersion(obj.Version)), nil)
		kit.ExecPostgres(t, pool, `INSERT INTO objects_tombstones SELECT 't', 'old' || i, 1 FROM generate_series(1, 10001) i`)
		prune() // most of them
		obj = kit.Put(t, store, tenure.Object{Key: obj.Key})
		kit.WantErr(t, store.DeleteIf(t.Context(), obj.Key, tenure.IfVersion(obj.Version)), nil) // and the rest
		var ids string
		err := pool.QueryRow(t.Context(), `SELECT string_agg(id, ',') FROM objects_tombstones`).Scan(&ids)
		if err != nil || ids != "new" {
			t.Errorf("%s: got tombstones of %s, %v; want only new", name, ids, err)
		}
	}
}

func TestPruningAndDeletesDoNotDeadlock(t *testing.T) {
	url := kit.PostgresURL(t)
	store := kit.OpenPostgres(t, url+"&pool_max_conns=8", tenure.PostgresConfig{})
	kit.Migrate(t, store)
	pool := kit.PostgresPool(t, url)
	for range 40 {
		var objects []tenure.Object
		for i := range 8 {
			key := tenure.Key{Type: "t", ID: fmt.Sprint(i)}
			objects = append(objects, kit.Put(t, store, tenure.Object{Key: key}))
			kit.ExecPostgres(t, pool, `INSERT INTO objects_tombstones VALUES ($1, $2, 1)
				ON CONFLICT (object_type, id) DO UPDATE SET resource_version = 1`, key.Type, key.ID)
		}
		var wg sync.WaitGroup
		for _, obj := range objects {
			wg.Go(func() {
				store.PrunedAt(time.Time{})
				if err := store.DeleteIf(context.Background(), obj.Key, tenure.IfVersion(obj.Version)); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	}
}

// The set-up's queries of the catalogs, and the error of a refused role, on other versions.
func TestEveryVersionOfPostgresIsInspected(t *testing.T) {
	kit.OnEachPostgres(t, `^Test(Tombstones|ALeaseIsReleasedAndAcquired|WhatWasFound|AStandbyFollows|ATable|ARole|TheErrorOfADenied)`)
}
