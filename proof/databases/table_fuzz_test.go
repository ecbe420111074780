package databases_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
)

// tableNames are what a table's name may do to SQL that is put together around it.
var tableNames = []string{
	"objects", "leases", "Objects", "my objects", "main.objects", "public.objects", " ", "'", `"`, `""`, `a"b`, `a""b`, `\`, "`", "[a]",
	"select", "order", "1", "-- ", "/*", "*/", ";", ";\n", "a;\nb", "\n", "\t", "\r\n", "?", "?1", "$1", ":a", "@a", "%s", "%!",
	`x"; DROP TABLE objects; --`, `objects" WHERE true --`, `objects"; DELETE FROM bystander; SELECT "`,
	"{objects}", "{tombstones}", "{tombstones_by_age}", "{claims}", "{claims_by_session}", "{claims_by_age}", "{requests}", "{ms}", "{now_ms}", "{now_us}", "{version}", "{lock_timeout}", "{from_wait}", "{wait_and}", "{prune_at_most}",
	"a\x00", "\x00", "objects\x00x", "bystander\x00", "\xff", "a\xc3", "é", "e\u0301", "表", "\U0001f512", "\u202e", "\ufeff", "\u0130",
	"sqlite_master", "sqlite_x", "SQLITE_X", "sqlite_sequence", "pragma_table_info", "json_each", "rowid", "pg_class", "pg_x", "information_schema", "temp", "temp.a",
	"objects_tombstones", "bystander", "Bystander", "bystander_tombstones", "a_tombstones", "A_TOMBSTONES", "_tombstones", "tombstones", "a_tombstones_by_age",
	strings.Repeat("a", 51), strings.Repeat("a", 52), strings.Repeat("a", 53), strings.Repeat("a", 63), strings.Repeat("a", 64), strings.Repeat("é", 26), strings.Repeat("é", 27),
	strings.Repeat("a", 10_000),
}

// useTable does with a table, by way of its store, all that this module does
// with one. What it cannot do it returns.
func useTable(ctx context.Context, store tenure.Store) error {
	key := tenure.Key{Type: "t", ID: "1"}
	created, err := store.PutIf(ctx, tenure.Object{Key: key, Name: "n", Payload: []byte("1")}, tenure.IfAbsent())
	if err != nil {
		return err
	}
	if _, err := store.PutIf(ctx, tenure.Object{Key: key, Name: "n"}, tenure.IfAbsent()); !errors.Is(err, tenure.ErrExists) {
		return fmt.Errorf("a second create: got %v, want ErrExists", err)
	}
	if _, err := store.PutIf(ctx, tenure.Object{Key: tenure.Key{Type: "t", ID: "2"}, Name: "n"}, tenure.IfAbsent()); !errors.Is(err, tenure.ErrTaken) {
		return fmt.Errorf("a second object of the name: got %v, want ErrTaken", err)
	}
	second, err := store.PutIf(ctx, tenure.Object{Key: key, Payload: []byte("2")}, tenure.IfVersion(created.Version))
	if err != nil {
		return err
	}
	if got, err := store.Get(ctx, key); err != nil || got.Version != second.Version || string(got.Payload) != "2" {
		return fmt.Errorf("get: got %+v, %v; want %+v", got, err, second)
	}
	if list, err := store.(tenure.Lister).List(ctx, "t", "", 10); err != nil || len(list) != 1 {
		return fmt.Errorf("list: got %v, %v; want one object", list, err)
	}
	if err := store.DeleteIf(ctx, key, tenure.IfVersion(second.Version)); err != nil {
		return err
	}
	again, err := store.PutIf(ctx, tenure.Object{Key: key}, tenure.Unconditional())
	if err != nil {
		return err
	}
	if again.Version <= second.Version {
		return fmt.Errorf("version %d follows %d", again.Version, second.Version)
	}

	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: testkit.LeaseKey, Logger: testkit.Quiet})
	if err != nil {
		return err
	}
	term, err := lease.AcquireOrSteal(ctx)
	if err != nil {
		return err
	}
	if err := lease.Renew(ctx, term); err != nil {
		return err
	}
	fenced, err := tenure.Fence(store, term)
	if err != nil {
		return err
	}
	if _, err := fenced.PutIf(ctx, tenure.Object{Key: key}, tenure.Unconditional()); err != nil {
		return err
	}
	if err := lease.Release(ctx, term); err != nil {
		return err
	}
	if _, err := fenced.PutIf(ctx, tenure.Object{Key: key}, tenure.Unconditional()); !errors.Is(err, tenure.ErrLost) {
		return fmt.Errorf("a fenced write after the release: got %v, want ErrLost", err)
	}
	return nil
}

// refused reports a table's name that was refused without need, or in another way
// than it should be: by the config, or because the table is another program's, or
// the database keeps the name for itself.
func refused(t *testing.T, err error) {
	t.Helper()
	foreign := func(why string) bool { return strings.Contains(err.Error(), why) }
	if !errors.Is(err, tenure.ErrInvalid) && !(errors.Is(err, tenure.ErrSetup) &&
		slices.ContainsFunc([]string{"lacks the column", "no such column", "unacceptable schema name", "permission denied"}, foreign)) {
		t.Errorf("got %v, want ErrInvalid, or ErrSetup that tells what is in the way", err)
	}
}

func FuzzASQLiteTableOfAnyNameIsTheOnlyOneTouched(f *testing.F) {
	for _, name := range tableNames {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, table string) {
		ctx := t.Context()
		db := testkit.OpenSQL(t, "sqlite", ":memory:")
		db.SetMaxOpenConns(1)
		testkit.ExecSQL(t, db, `
			CREATE TABLE bystander (object_type TEXT, id TEXT, resource_version INTEGER);
			INSERT INTO bystander VALUES ('t', '1', 1);
			CREATE TABLE objects_tombstones (object_type TEXT, id TEXT, resource_version INTEGER, PRIMARY KEY (object_type, id));
			INSERT INTO objects_tombstones VALUES ('x', 'old', 1), ('t', '1', 1)`)
		before := sqliteTables(t, db)
		store, err := tenure.NewSQLiteStore(db, tenure.SQLiteConfig{Table: table, Shared: true, Logger: testkit.Quiet})
		if err != nil {
			refused(t, err)
			return
		}
		defer store.Close()
		if table == "" || strings.EqualFold(table, "objects") { // whose tombstones those are
			testkit.WantErr(t, store.Migrate(ctx), nil)
			testkit.WantErr(t, useTable(ctx, store), nil)
			return
		}
		want := maps.Clone(before)
		if err := store.Migrate(ctx); err != nil {
			refused(t, err)
			if err := useTable(ctx, store); err == nil {
				t.Error("it was refused, and can be used all the same")
			}
		} else {
			if err := useTable(ctx, store); err != nil {
				t.Errorf("table %q was made, and cannot be used: %v", table, err)
			}
			want[table], want[table+"_tombstones"] = 1, 2
			if err := claims.Migrate(ctx, store); err != nil {
				refused(t, err)
			} else {
				want[table+"_claims"], want[table+"_requests"] = 0, 0
			}
		}
		if got := sqliteTables(t, db); !maps.Equal(got, want) {
			t.Errorf("the tables have as many rows: %v; want %v", got, want)
		}
	})
}

// sqliteTables returns the number of rows of each table.
func sqliteTables(t *testing.T, db *sql.DB) map[string]int {
	t.Helper()
	rows, err := db.Query(`SELECT name FROM sqlite_master WHERE type = 'table'`)
	testkit.WantErr(t, err, nil)
	var names []string
	for rows.Next() {
		var name string
		testkit.WantErr(t, rows.Scan(&name), nil)
		names = append(names, name)
	}
	testkit.WantErr(t, rows.Err(), nil)
	tables := map[string]int{}
	for _, name := range names {
		var n int
		quoted := `"` + strings.ReplaceAll(name, `"`, `""`) + `"`
		testkit.WantErr(t, db.QueryRow(`SELECT count(*) FROM `+quoted).Scan(&n), nil)
		tables[name] = n
	}
	return tables
}

func FuzzAPostgresTableOfAnyNameIsTheOnlyOneTouched(f *testing.F) {
	for _, name := range tableNames {
		f.Add("", name)
		f.Add(name, name)
	}
	url := testkit.PostgresURL(f)
	pool := testkit.PostgresPool(f, url)
	testkit.ExecPostgres(f, pool, `
		CREATE TABLE bystander (object_type text, id text, resource_version bigint);
		INSERT INTO bystander VALUES ('t', '1', 1);
		CREATE TABLE objects_tombstones (object_type text, id text, resource_version bigint, PRIMARY KEY (object_type, id));
		INSERT INTO objects_tombstones VALUES ('x', 'old', 1), ('t', '1', 1)`)
	before := postgresTables(f, pool)
	f.Fuzz(func(t *testing.T, schema, table string) {
		if (schema == "" || schema == "public") && (table == "" || table == "objects") {
			t.Skip("whose tombstones those are")
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		store, err := tenure.NewPostgresStore(pool, tenure.PostgresConfig{Schema: schema, Table: table, Logger: testkit.Quiet})
		if err != nil {
			refused(t, err)
			return
		}
		defer store.Close()
		want := maps.Clone(before)
		err = store.Migrate(ctx)
		if err != nil {
			refused(t, err)
			if err := useTable(ctx, store); err == nil {
				t.Error("it was refused, and can be used all the same")
			}
		} else {
			if err := useTable(ctx, store); err != nil {
				t.Errorf("table %q of schema %q was made, and cannot be used: %v", table, schema, err)
			}
			in := schema
			if in == "" {
				in = "public"
			}
			if table == "" {
				table = "objects"
			}
			want[[2]string{in, table}], want[[2]string{in, table + "_tombstones"}] = 2, 2 // with the mark of the lineage
			if err := claims.Migrate(ctx, store); err != nil {
				refused(t, err)
			} else {
				want[[2]string{in, table + "_claims"}], want[[2]string{in, table + "_requests"}] = 0, 0
			}
		}
		after := postgresTables(t, pool)
		if !maps.Equal(after, want) {
			t.Errorf("the tables have as many rows: %v; want %v", after, want)
		}
		for name := range after { // for the next
			if _, was := before[name]; !was {
				testkit.ExecPostgres(t, pool, `DROP TABLE `+pgx.Identifier(name[:]).Sanitize())
			}
		}
		if err == nil && !slices.Contains([]string{"", "public", "information_schema"}, schema) {
			testkit.ExecPostgres(t, pool, `DROP SCHEMA `+pgx.Identifier{schema}.Sanitize())
		}
	})
}

// postgresTables returns the number of rows of each table that is not the
// system's.
func postgresTables(t testing.TB, pool *pgxpool.Pool) map[[2]string]int {
	t.Helper()
	rows, err := pool.Query(context.Background(), `
		SELECT nspname, relname FROM pg_class JOIN pg_namespace n ON n.oid = relnamespace
		WHERE relkind = 'r' AND pg_class.oid >= 16384`)
	testkit.WantErr(t, err, nil)
	names, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (name [2]string, err error) {
		return name, row.Scan(&name[0], &name[1])
	})
	testkit.WantErr(t, err, nil)
	tables := map[[2]string]int{}
	for _, name := range names {
		var n int
		testkit.WantErr(t, pool.QueryRow(context.Background(), `SELECT count(*) FROM `+pgx.Identifier(name[:]).Sanitize()).Scan(&n), nil)
		tables[name] = n
	}
	return tables
}
