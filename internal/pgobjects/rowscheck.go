package pgobjects

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure/internal/objects"
)

// RowsDDL returns what a table lacks for claims on its rows.
func RowsDDL(cfg objects.RowsConfig) string {
	var add []string
	for _, column := range []struct{ name, definition string }{
		{cfg.Session, "text"}, {cfg.Token, "bigint NOT NULL DEFAULT 0"}, {cfg.Attempts, "integer NOT NULL DEFAULT 0"}, {cfg.NotBefore, "timestamptz"},
		{cfg.Requested, "bigint"}, {cfg.Expires, "timestamptz"}, {cfg.Limit, "integer"},
	} {
		if column.name != "" {
			add = append(add, "\n\tADD COLUMN IF NOT EXISTS "+objects.Quoted(column.name)+" "+column.definition)
		}
	}
	bySession, ready := rowIndexes(cfg)
	return "ALTER TABLE " + quoted(cfg.Schema, cfg.Table) + strings.Join(add, ",") + ";\n" + bySession + ";\n" + ready + ";\n" +
		cfg.MoreIndexes(quoted(cfg.Schema, cfg.Table), func(suffix string) string { return rowIndex(cfg, suffix) })
}

func rowIndexes(cfg objects.RowsConfig) (bySession, ready string) {
	return cfg.Indexes(quoted(cfg.Schema, cfg.Table), func(suffix string) string { return rowIndex(cfg, suffix) })
}

// rowIndex returns the name of an index, short enough that Postgres does not truncate it.
func rowIndex(cfg objects.RowsConfig, suffix string) string {
	const longest = 63
	name := cfg.Table[:min(len(cfg.Table), longest-len(suffix))]
	for !utf8.ValidString(name) {
		name = name[:len(name)-1]
	}
	return objects.Quoted(name + suffix)
}

// rowTable is what was found out about a user's table.
type rowTable struct {
	schema                    string // empty: it does not exist
	hidden, unique, bySession bool
	perKey, due               bool
	kind, persistence, lacks  string
	role                      string // current_user
	types                     map[string]string
	notNull, keyed            []string // columns that are NOT NULL; columns that are in a unique key
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
		coalesce((SELECT atttypmod - 4 FROM pg_catalog.pg_attribute WHERE attrelid = rel AND attname = $4 AND atttypid = 'pg_catalog.varchar'::regtype AND atttypmod > 4), 0),
		current_user::text,
		EXISTS (SELECT FROM keys WHERE columns[1] = $6)
	FROM looked`

const hasPerKeyIndex = `
	SELECT EXISTS (SELECT FROM pg_catalog.pg_index JOIN pg_catalog.pg_attribute ON attrelid = indrelid AND attnum = indkey[0]
		WHERE indrelid = to_regclass($1) AND indisvalid AND indisready AND attname = $2 AND pg_get_expr(indpred, indrelid) = format('(%I IS NOT NULL)', $3::text))`

// rowTypes are spelled as Postgres spells them.
var rowTypes = objects.RowsTypes{
	ID:        []string{"text", "character varying", "uuid", "bigint", "integer", "smallint"},
	Session:   []string{"text", "character varying"},
	Token:     []string{"bigint"},
	Attempts:  []string{"integer", "bigint", "smallint"},
	NotBefore: []string{"timestamp with time zone"},
}

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

// check returns the statements for the table as it is now. If own is nil, it does not remember
// them.
func (r *Rows) check(ctx context.Context, own *setup) (*rowSetup, error) {
	t, cfg := r.claims.table, r.cfg
	ctx = objects.WithClaimCall(ctx) // a table that is locked must not keep a lease waiting
	done, err := r.claims.other(ctx, time.Minute)
	if err != nil {
		return nil, err
	}
	defer done()
	var found rowTable
	err = t.conns.QueryRow(ctx, inspectRows, []any{cfg.Schema, cfg.Table, cfg.ID, cfg.Session, r.placed.Load(), cfg.NotBefore},
		&found.schema, &found.hidden, &found.unique, &found.bySession, &found.kind, &found.persistence, &found.lacks,
		&found.types, &found.notNull, &found.keyed, &found.triggers, &found.sessionLength, &found.role, &found.due)
	if err == nil && cfg.PerKey != "" {
		err = t.conns.QueryRow(ctx, hasPerKeyIndex, []any{quoted(found.schema, cfg.Table), cfg.PerKey, cfg.Session}, &found.perKey)
	}
	if err != nil {
		return nil, t.setups.explain(err)
	}
	for column, declared := range found.types {
		found.types[column] = unquoted(declared)
	}
	before := r.found.Load()
	if err := objects.RefusedRows(quoted(cfg.Schema, cfg.Table), found.wrong(cfg)); err != nil {
		r.found.CompareAndSwap(before, nil)
		return nil, err
	}
	names := t.setups.names
	if own != nil {
		names = own.placed
	}
	now := &rowSetup{own: own, rowFacts: rowFacts{
		schema: found.schema, objects: names.tables[objects.TableOfObjects], id: found.types[cfg.ID], attempts: found.types[cfg.Attempts], sessionLength: found.sessionLength,
		key: found.types[cfg.PerKey],
	}}
	if own != nil && own.tombstones && !own.unlogged {
		now.tombstones = names.tables[objects.TableOfTombstones]
	}
	if now.id == "character varying" {
		now.id = "text"
	}
	now.texts = newRowTexts(cfg, now.rowFacts)
	if before == nil || before.rowFacts != now.rowFacts {
		if err := r.parse(ctx, now); err != nil {
			return nil, err
		}
	}
	if len(found.triggers) > 0 && before == nil {
		r.logger.Warn("triggers run before each update of a row, also when it is claimed and freed", "table", cfg.Table, "triggers", found.triggers)
	}
	if due := cfg.DueIndex(quoted(cfg.Schema, cfg.Table), func(suffix string) string { return rowIndex(cfg, suffix) }); due != "" && !found.due && before == nil {
		r.logger.Warn(objects.NoDueIndex, "table", cfg.Table, "ddl", due)
	}
	r.placed.Store(&found.schema)
	if own != nil {
		r.found.Store(now)
	}
	return now, nil
}

func (found *rowTable) wrong(cfg objects.RowsConfig) (wrong []string) {
	switch {
	case found.schema == "":
		return []string{"it does not exist (set Schema if search_path does not find it)"}
	case found.kind != "r" && found.kind != "p":
		return []string{"it is a view or a foreign table (name the table behind it)"}
	case found.persistence == tableTemporary:
		return []string{"it is TEMPORARY: each connection has one of its own"}
	}
	say := func(is bool, format string, args ...any) {
		if is {
			wrong = append(wrong, fmt.Sprintf(format, args...))
		}
	}
	say(found.sessionLength > 0 && found.sessionLength < objects.SessionLength,
		"column %q holds only %d characters, and the ID of a session has %d (ALTER TABLE … ALTER COLUMN … TYPE text)", cfg.Session, found.sessionLength, objects.SessionLength)
	for _, name := range []string{cfg.Session, cfg.Token} {
		say(slices.Contains(found.keyed, name), "column %q is part of a unique key (then a claim waits for foreign keys to its row: make it a plain index)", name)
	}
	say(found.hidden, "row-level security is active for this role, which would not see all rows (use a role with BYPASSRLS, or the owner)")
	say(found.lacks != "" && (!cfg.ReadOnly || found.lacks != "UPDATE"), "this role lacks privileges (as the owner: GRANT %s ON %s TO %s)",
		found.lacks, quoted(found.schema, cfg.Table), objects.Quoted(found.role))
	bySession, _ := rowIndexes(cfg)
	return cfg.Wrong(objects.FoundRows{
		Types: found.types, NotNull: found.notNull, Unique: found.unique && slices.Contains(found.notNull, cfg.ID), BySession: found.bySession, PerKey: found.perKey, Wrong: wrong,
	}, rowTypes, RowsDDL(cfg), bySession, cfg.PerKeyIndex(quoted(cfg.Schema, cfg.Table), func(suffix string) string { return rowIndex(cfg, suffix) }))
}

// parse makes the server parse the statements that contain the user's SQL.
func (r *Rows) parse(ctx context.Context, s *rowSetup) error {
	done, _ := endingSQL(objects.Ending{Done: true}, nil)
	exhausted, _ := endingSQL(objects.Ending{Exhausted: true}, nil)
	parts := []struct{ what, text string }{{"Ready and OrderBy", takeRows}, {"Done", done}, {"Exhausted", exhausted}}
	if r.cfg.Taken != "" {
		parts[0].what = "Ready, OrderBy and Taken"
	}
	if r.cfg.Released != "" {
		parts = append(parts, struct{ what, text string }{"Released", setting(freeRows, objects.Freeing{Lost: true}.Set())})
	}
	if r.cfg.Canceled != "" {
		for _, text := range []string{canceledRows, objects.OfCanceled(freeRows), objects.OfCanceled(endUnlockedRows)} {
			parts = slices.Insert(parts, 0, struct{ what, text string }{"Canceled", text}) // first: the others contain it
		}
	}
	if r.cfg.PerKey != "" {
		parts = append(parts, struct{ what, text string }{"PerKey", lockKeys}, struct{ what, text string }{"PerKey", takeRowsPerKey})
	}
	for _, part := range parts {
		err := r.claims.table.conns.Call(ctx, func(pool *pgxpool.Pool, _ bool) error {
			return pool.AcquireFunc(ctx, func(conn *pgxpool.Conn) error {
				// An unnamed statement need not be closed, and passes through poolers.
				_, err := conn.Conn().PgConn().Prepare(ctx, "", s.texts.Where(part.text, ""), nil)
				return err
			})
		})
		if err = r.claims.table.setups.explain(err); errors.Is(err, objects.ErrSetup) {
			err = fmt.Errorf("the statement with the SQL of %s: %w", part.what, err)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
