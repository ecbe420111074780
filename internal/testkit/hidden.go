package testkit

import (
	"context"
	"database/sql"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
)

// OwnTables has the tables that MigrateClaims creates.
var OwnTables = []string{"objects", "objects_tombstones", "objects_claims", "objects_requests"}

// Hidden is a database in which older copies of tables can hide the real ones from a session.
type Hidden struct {
	*testing.T
	Store tenure.Database
	SQL   *sql.DB // the application's, with one connection, which the store uses as well

	tables []string
	schema string // where the real tables are
	copies string // the prefix of a copy's name
	hide   string // the statement that makes {copy} hide {table}
}

// EachHiding runs a test for each way in which a table may be hidden from a session. The store's
// tables exist already.
func EachHiding(t *testing.T, tables []string, test func(h *Hidden)) {
	for name, hide := range map[string]string{
		"a schema":          `SET search_path = hidden, public`,
		"a view":            `SET search_path = views, public`,
		"a temporary table": `DROP TABLE IF EXISTS pg_temp.{table}; CREATE TEMPORARY TABLE {table} (LIKE public.{table} INCLUDING ALL); INSERT INTO pg_temp.{table} SELECT * FROM {copy}`,
		"a temporary view":  `CREATE OR REPLACE TEMPORARY VIEW {table} AS SELECT * FROM {copy}`,
	} {
		t.Run("Postgres, "+name, func(t *testing.T) {
			config, err := pgxpool.ParseConfig(PostgresURL(t))
			require.NoError(t, err)
			config.MaxConns = 1
			pool, err := pgxpool.NewWithConfig(t.Context(), config)
			require.NoError(t, err)
			t.Cleanup(pool.Close)
			store := Must(tenure.NewPostgresStore(pool, tenure.PostgresConfig{Logger: Quiet}))
			t.Cleanup(func() { store.Close() })
			MigrateClaims(t, store)
			test(&Hidden{T: t, Store: store, SQL: stdlib.OpenDBFromPool(pool), tables: tables, schema: "public", copies: "hidden.", hide: hide})
		})
	}
	for name, hide := range map[string]string{
		"a temporary table": `DROP TABLE IF EXISTS temp.{table}; CREATE TEMPORARY TABLE {table} AS SELECT * FROM {copy}`,
		"a temporary view":  `DROP VIEW IF EXISTS temp.{table}; CREATE TEMPORARY VIEW {table} AS SELECT * FROM {copy}`,
	} {
		t.Run("SQLite, "+name, func(t *testing.T) {
			db := OpenSQL(t, "sqlite", "file:"+t.TempDir()+"/t.db?_txlock=immediate")
			db.SetMaxOpenConns(1)
			store := Must(tenure.NewSQLiteStore(db, tenure.SQLiteConfig{Shared: true, Logger: Quiet}))
			t.Cleanup(func() { store.Close() })
			MigrateClaims(t, store)
			test(&Hidden{T: t, Store: store, SQL: db, tables: tables, schema: "main", copies: "main.hidden_", hide: hide})
		})
	}
}

// Copy creates the copies.
func (h *Hidden) Copy() {
	h.Helper()
	if h.IsPostgres() {
		ExecSQL(h.T, h.SQL, `CREATE SCHEMA hidden; CREATE SCHEMA views`)
	}
	for _, table := range h.tables {
		ddl := `CREATE TABLE {copy} AS SELECT * FROM main.{table}`
		if h.IsPostgres() {
			ddl = `CREATE TABLE {copy} (LIKE public.{table} INCLUDING ALL); INSERT INTO {copy} SELECT * FROM public.{table};
				CREATE VIEW views.{table} AS SELECT * FROM {copy}`
		}
		ExecSQL(h.T, h.SQL, h.of(table, ddl))
	}
}

// IsPostgres reports whether the database is on Postgres.
func (h *Hidden) IsPostgres() bool { return h.schema == "public" }

// Real returns a name of a table that nothing can hide.
func (h *Hidden) Real(table string) string { return h.schema + "." + table }

func (h *Hidden) of(table, sql string) string {
	return strings.NewReplacer("{table}", table, "{copy}", h.copies+table).Replace(sql)
}

// Hide hides the tables from the session, or only within "a transaction".
func (h *Hidden) Hide(exec func(query string) error, within string) {
	h.Helper()
	for _, table := range h.tables {
		query := h.of(table, h.hide)
		if within == "a transaction" {
			query = strings.ReplaceAll(query, "SET search_path", "SET LOCAL search_path")
		}
		require.NoError(h, exec(query), query)
	}
}

// HideFromSession hides the tables from the application's session.
func (h *Hidden) HideFromSession() {
	h.Helper()
	h.Hide(func(query string) error { _, err := h.SQL.Exec(query); return err }, "the session")
}

// Copies returns the contents of the copies, as the session sees them.
func (h *Hidden) Copies() string {
	h.Helper()
	var all strings.Builder
	tx, err := h.SQL.Begin() // one connection
	require.NoError(h, err)
	defer tx.Rollback()
	for _, table := range h.tables {
		for _, name := range []string{h.copies + table, table} {
			if name == table && !strings.Contains(h.hide, "TEMPORARY TABLE") {
				continue
			}
			rows, err := tx.Query(`SELECT * FROM ` + name + ` ORDER BY 1, 2`)
			require.NoError(h, err)
			columns, err := rows.Columns()
			require.NoError(h, err)
			for rows.Next() {
				values := make([]sql.RawBytes, len(columns))
				into := make([]any, len(columns))
				for i := range values {
					into[i] = &values[i]
				}
				require.NoError(h, rows.Scan(into...))
				for _, v := range values {
					all.Write(v)
					all.WriteByte('|')
				}
				all.WriteByte('\n')
			}
			require.NoError(h, rows.Err())
		}
	}
	return all.String()
}

// ExecIn returns a func that runs a statement in a transaction of pgx.
func ExecIn(tx pgx.Tx) func(query string) error {
	return func(query string) error {
		_, err := tx.Exec(context.Background(), query)
		return err
	}
}

// ExecInSQL is ExecIn for database/sql.
func ExecInSQL(tx *sql.Tx) func(query string) error {
	return func(query string) error {
		_, err := tx.Exec(query)
		return err
	}
}
