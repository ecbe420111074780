package pgobjects

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure/internal/objects"
)

// RowsDDL returns what a table lacks for claims on its rows.
func RowsDDL(cfg objects.RowsConfig) string {
	var b strings.Builder
	n := rowNames(cfg, "", "", names{})
	b.WriteString(n.Replace("ALTER TABLE {rows}\n\tADD COLUMN IF NOT EXISTS {session} text,\n\tADD COLUMN IF NOT EXISTS {token} bigint NOT NULL DEFAULT 0"))
	if cfg.Attempts != "" {
		b.WriteString(",\n\tADD COLUMN IF NOT EXISTS " + pgx.Identifier{cfg.Attempts}.Sanitize() + " integer NOT NULL DEFAULT 0")
	}
	if cfg.NotBefore != "" {
		b.WriteString(n.Replace(",\n\tADD COLUMN IF NOT EXISTS {not_before} timestamptz"))
	}
	b.WriteString(";\n" + bySession(cfg) + ";\n")
	b.WriteString("-- If Ready depends on the time, leave that part of it out here.\n")
	ready := ""
	if cfg.Ready != "" {
		ready = " AND (" + objects.Commented(cfg.Ready) + ")"
	}
	b.WriteString(n.Replace("CREATE INDEX IF NOT EXISTS "+rowIndex(cfg, "_ready")+" ON {rows} (") +
		objects.Commented(strings.TrimSuffix(n.Replace("{order}"), "\n")) + n.Replace(") WHERE {session} IS NULL") + ready + ";\n")
	return b.String()
}

func bySession(cfg objects.RowsConfig) string {
	return rowNames(cfg, "", "", names{}).Replace(
		"CREATE INDEX IF NOT EXISTS " + rowIndex(cfg, "_by_session") + " ON {rows} ({session}, {id}) WHERE {session} IS NOT NULL")
}

// rowIndex is the name of an index, which Postgres must not cut off.
func rowIndex(cfg objects.RowsConfig, suffix string) string {
	const longest = 63
	name := cfg.Table[:min(len(cfg.Table), longest-len(suffix))]
	for !utf8.ValidString(name) {
		name = name[:len(name)-1]
	}
	return pgx.Identifier{name + suffix}.Sanitize()
}

// rowTable is what was found out about a table of the user.
type rowTable struct {
	schema                    string // empty: it does not exist
	hidden, unique, bySession bool
	kind, persistence, lacks  string
	types                     map[string]string
	notNull, keyed            []string // columns that are NOT NULL, that are in a unique key
	triggers                  []string
	sessionLength             int // of the session's column, in characters; 0: any
}

// inspectRows looks for the table as [inspectTables] does.
const inspectRows = `
	WITH looked AS MATERIALIZED (
		SELECT CASE WHEN $1 <> '' THEN to_regclass(format('%I.%I', $1::text, $2::text))::oid ELSE coalesce(
			(SELECT c.oid FROM pg_catalog.pg_namespace n JOIN pg_catalog.pg_class c ON relnamespace = n.oid AND relname = $2
				WHERE nspname = $5 AND has_schema_privilege(n.oid, 'USAGE')),
			(SELECT c.oid FROM unnest(current_schemas(true)) WITH ORDINALITY listed(name, at)
				JOIN pg_catalog.pg_namespace n ON nspname = name JOIN pg_catalog.pg_class c ON relnamespace = n.oid AND relname = $2
				WHERE name::text !~ '^pg_temp_' ORDER BY at LIMIT 1)) END AS rel),
	keys AS MATERIALIZED (
		SELECT i.*, ARRAY(SELECT attname::text FROM unnest((indkey::int2[])[0:indnkeyatts - 1]) WITH ORDINALITY k(num, at)
			JOIN pg_catalog.pg_attribute ON attrelid = indrelid AND attnum = num ORDER BY at) AS columns,
			coalesce(pg_get_expr(indpred, indrelid), '') AS predicate
		FROM looked JOIN pg_catalog.pg_index i ON indrelid = rel WHERE indisvalid AND indisready)
	SELECT coalesce((SELECT nspname::text FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = relnamespace WHERE c.oid = rel), ''),
		coalesce(row_security_active(rel), false),
		EXISTS (SELECT FROM keys WHERE indisunique AND indimmediate AND predicate = '' AND indexprs IS NULL AND columns = ARRAY[$3]),
		EXISTS (SELECT FROM keys WHERE columns[1:2] = ARRAY[$4, $3] AND predicate IN ('', format('(%I IS NOT NULL)', $4))),
		coalesce((SELECT relkind::text FROM pg_catalog.pg_class WHERE oid = rel), ''),
		coalesce((SELECT relpersistence::text FROM pg_catalog.pg_class WHERE oid = rel), ''),
		coalesce((SELECT string_agg(p, ', ') FROM unnest(ARRAY['SELECT', 'UPDATE']) p WHERE NOT has_any_column_privilege(rel, p)), ''),
		coalesce((SELECT jsonb_object_agg(attname, format_type(atttypid, NULL)) FROM pg_catalog.pg_attribute WHERE attrelid = rel AND attnum > 0 AND NOT attisdropped), '{}'),
		ARRAY(SELECT attname::text FROM pg_catalog.pg_attribute WHERE attrelid = rel AND attnum > 0 AND attnotnull),
		ARRAY(SELECT DISTINCT unnest(columns) FROM keys WHERE indisunique),
		ARRAY(SELECT tgname::text FROM pg_catalog.pg_trigger WHERE tgrelid = rel AND NOT tgisinternal AND tgenabled <> 'D' AND tgtype & 2 <> 0 AND tgtype & 16 <> 0),
		coalesce((SELECT atttypmod - 4 FROM pg_catalog.pg_attribute WHERE attrelid = rel AND attname = $4 AND atttypid = 'pg_catalog.varchar'::regtype AND atttypmod > 4), 0)
	FROM looked`

// idTypes are the types that an ID may have, as Postgres writes them.
var idTypes = []string{"text", "character varying", "uuid", "bigint", "integer", "smallint"}

// Check returns an [objects.ErrSetup] that names everything that is wrong with the table. It does
// not need the library's own tables.
func (r *Rows) Check(ctx context.Context, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	own, err := r.claims.table.setups.get(ctx)
	if err != nil && !errors.Is(err, errNoTable) {
		return r.claims.table.setups.explain(err)
	}
	_, err = r.check(ctx, own)
	return err
}

// check returns the statements for the table as it is. Without own it does not remember them.
func (r *Rows) check(ctx context.Context, own *setup) (*rowStatements, error) {
	t, cfg := r.claims.table, r.cfg
	ctx = objects.WithClaimCall(ctx) // a table that is locked must not keep a lease waiting
	done, err := r.claims.other(ctx, time.Minute)
	if err != nil {
		return nil, err
	}
	defer done()
	var found rowTable
	err = t.conns.QueryRow(ctx, inspectRows, []any{cfg.Schema, cfg.Table, cfg.ID, cfg.Session, r.placed.Load()},
		&found.schema, &found.hidden, &found.unique, &found.bySession, &found.kind, &found.persistence, &found.lacks,
		&found.types, &found.notNull, &found.keyed, &found.triggers, &found.sessionLength)
	if err != nil {
		return nil, t.setups.explain(err)
	}
	before := r.found.Load()
	if wrong := found.wrong(cfg); len(wrong) > 0 {
		r.found.CompareAndSwap(before, nil)
		return nil, objects.SetupError(fmt.Errorf("%w: table %s can't have claims on its rows: %s", objects.ErrSetup, rowsName(cfg), strings.Join(wrong, "; ")))
	}
	idType := found.types[cfg.ID]
	if idType == "character varying" {
		idType = "text"
	}
	cfg.Schema = found.schema
	names := t.setups.names
	if own != nil {
		names = own.placed
	}
	statements := newRowStatements(cfg, idType, found.types[cfg.Attempts], names)
	statements.sessionLength = found.sessionLength
	if before == nil || !before.equal(statements) {
		if err := r.parse(ctx, &statements); err != nil {
			return nil, err
		}
	}
	if len(found.triggers) > 0 && before == nil {
		r.logger.Warn("triggers run before each update of a row, also when it is claimed and freed", "table", cfg.Table, "triggers", found.triggers)
	}
	r.placed.Store(&cfg.Schema)
	if statements.own = own; own != nil {
		r.found.Store(&statements)
	}
	return &statements, nil
}

// equal reports whether two tables have the same statements.
func (s *rowStatements) equal(other rowStatements) bool {
	other.own = s.own
	return *s == other
}

// rowsName is the quoted name of the table, as configured.
func rowsName(cfg objects.RowsConfig) string {
	return rowNames(cfg, "", "", names{}).Replace("{rows}")
}

func (found *rowTable) wrong(cfg objects.RowsConfig) (wrong []string) {
	say := func(is bool, format string, args ...any) {
		if is {
			wrong = append(wrong, fmt.Sprintf(format, args...))
		}
	}
	if found.schema == "" {
		return []string{"it does not exist (set Schema if search_path does not find it)"}
	}
	if found.kind != "r" && found.kind != "p" {
		return []string{"it is a view or a foreign table (name the table behind it)"}
	}
	if found.persistence == tableTemporary {
		return []string{"it is TEMPORARY: each connection has one of its own"}
	}
	missing := false
	column := func(name, what string, types ...string) {
		if name == "" {
			return
		}
		is, exists := found.types[name]
		missing = missing || !exists
		say(!exists, "column %q for the %s is missing", name, what)
		say(exists && !slices.Contains(types, is), "column %q for the %s is of type %s (it must be %s)", name, what, is, strings.Join(types, " or "))
	}
	column(cfg.ID, "ID", idTypes...)
	column(cfg.Session, "session", "text", "character varying")
	column(cfg.Token, "token", "bigint")
	column(cfg.Attempts, "attempts", "integer", "bigint", "smallint")
	column(cfg.NotBefore, "time before which a row is not ready", "timestamp with time zone")
	if !missing {
		say(!found.unique || !slices.Contains(found.notNull, cfg.ID), "column %q does not identify a row (it must be NOT NULL and alone in a unique index)", cfg.ID)
		say(found.sessionLength > 0 && found.sessionLength < objects.SessionLength,
			"column %q holds only %d characters, and the ID of a session has %d (ALTER TABLE … ALTER COLUMN … TYPE text)", cfg.Session, found.sessionLength, objects.SessionLength)
		say(slices.Contains(found.notNull, cfg.Session), "column %q is NOT NULL (NULL is a free row: ALTER TABLE … ALTER COLUMN … DROP NOT NULL)", cfg.Session)
		for _, name := range []string{cfg.Session, cfg.Token} {
			say(slices.Contains(found.keyed, name), "column %q is part of a unique key (then a claim waits for foreign keys to its row: make it a plain index)", name)
		}
	}
	say(!missing && !found.bySession, "no index finds the rows of a session (%s)", bySession(cfg))
	say(found.hidden, "row-level security is active for this role, which would not see all rows (use a role with BYPASSRLS, or the owner)")
	say(found.lacks != "", "this role lacks privileges (GRANT %s ON %s)", found.lacks, cfg.Table)
	if missing {
		wrong = append(wrong, "this adds what is missing:\n"+RowsDDL(cfg))
	}
	return wrong
}

// parse has the server read the statements that contain the user's SQL.
func (r *Rows) parse(ctx context.Context, s *rowStatements) error {
	pool, _, done, err := r.claims.table.conns.For(ctx)
	if err != nil {
		return r.claims.table.setups.explain(err)
	}
	defer done()
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return r.claims.table.setups.explain(err)
	}
	defer conn.Release()
	for _, part := range []struct{ what, sql string }{{"Ready and OrderBy", s.take}, {"Done", s.done.any}, {"Exhausted", s.exhausted.any}} {
		// Without a name, it needs no closing, and passes through poolers.
		if _, err := conn.Conn().PgConn().Prepare(ctx, "", part.sql, nil); err != nil {
			err = r.claims.table.setups.explain(err)
			if errors.Is(err, objects.ErrSetup) {
				err = fmt.Errorf("the statement with the SQL of %s: %w", part.what, err)
			}
			return err
		}
	}
	return nil
}
