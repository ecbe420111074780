package pgobjects

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure/internal/objects"
)

// tableState is what was found out about one of the library's tables. The fields have the names of
// the JSON.
type tableState struct {
	Schema      string // empty: there is no such table
	Ahead       string // schema of another table of that name that search_path finds now
	Kind        string // pg_class.relkind
	Persistence string // of the table, or the worst of its parts: see tableUnlogged
	Parts       bool   // it is partitioned, or others inherit from it
	Hidden      bool   // row-level security keeps commands from this role
	Denied      bool   // a privilege on the whole table is missing
	Lacks       string // privileges without which no statement works
	Columns     map[string]string
	Keys        []keyState
}

// keyState is a unique index.
type keyState struct {
	Columns []string
	Valid   bool
	Full    bool // it rejects every second row with the same values, and at once
}

// Values of pg_class.relpersistence for a table that does not survive a crash or a
// session.
const (
	tableUnlogged  = "u"
	tableTemporary = "t"
)

// inspectTables asks for the state of each table, and for the schema in which a table would be created. It
// looks in the schema $1, or in the one where the table was found last, or in the first one of search_path
// that has a table of that name. A table that was found stays in use, whatever a later session has in its
// search_path, because other replicas use it too. A temporary table does not count: it would be found
// before any other, and only by this session.
const inspectTables = `
	WITH RECURSIVE path AS MATERIALIZED (
		SELECT n.oid AS schema, nspname, at FROM unnest(current_schemas(true)) WITH ORDINALITY listed(name, at)
			JOIN pg_catalog.pg_namespace n ON nspname = name WHERE name::text !~ '^pg_temp_'),
	looked AS MATERIALIZED (
		SELECT number, first, CASE WHEN $1 <> '' THEN to_regclass(format('%I.%I', $1::text, name))::oid ELSE coalesce(
			(SELECT c.oid FROM pg_catalog.pg_namespace n JOIN pg_catalog.pg_class c ON relnamespace = n.oid AND relname = wanted.name
				WHERE nspname = last AND has_schema_privilege(n.oid, 'USAGE')), first) END AS rel
		FROM unnest($2::text[], $3::text[]) WITH ORDINALITY wanted(name, last, number) CROSS JOIN LATERAL (SELECT (
			SELECT c.oid FROM path JOIN pg_catalog.pg_class c ON relnamespace = schema AND relname = wanted.name ORDER BY at LIMIT 1) AS first) f),
	parts(root, part) AS (
		SELECT rel, rel FROM looked UNION SELECT root, inhrelid FROM parts JOIN pg_catalog.pg_inherits ON inhparent = part),
	-- Tables under row-level security without a policy for some command.
	closed(root) AS (
		SELECT DISTINCT root FROM parts, unnest(ARRAY['r', 'a', 'w', 'd']) command
		WHERE part = root AND row_security_active(root) AND NOT EXISTS (
			SELECT FROM pg_catalog.pg_policy WHERE polrelid = root AND polpermissive AND polcmd::text IN (command, '*')
				AND EXISTS (SELECT FROM unnest(polroles) member WHERE member = 0 OR pg_has_role(member, 'USAGE'))))
	SELECT (SELECT jsonb_agg(CASE WHEN c.oid IS NULL THEN '{}' ELSE jsonb_build_object(
			'Schema', nspname, 'Kind', relkind,
			'Ahead', CASE WHEN $1 = '' AND first <> rel THEN (SELECT relnamespace::regnamespace::text FROM pg_catalog.pg_class WHERE oid = first) END,
			'Persistence', (SELECT max(p.relpersistence::text) FROM parts JOIN pg_catalog.pg_class p ON p.oid = part WHERE root = rel),
			'Parts', relkind = 'p' OR EXISTS (SELECT FROM parts WHERE root = rel AND part <> rel),
			'Hidden', EXISTS (SELECT FROM closed WHERE root = rel),
			'Denied', EXISTS (SELECT FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) p WHERE NOT has_table_privilege(rel, p)),
			'Lacks', coalesce((SELECT string_agg(p, ', ') FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) p
				WHERE NOT has_table_privilege(rel, p) AND NOT (p <> 'DELETE' AND has_any_column_privilege(rel, CASE p WHEN 'DELETE' THEN 'SELECT' ELSE p END))), ''),
			'Columns', coalesce((SELECT jsonb_object_agg(attname, format_type(atttypid, NULL))
				FROM pg_catalog.pg_attribute WHERE attrelid = rel AND attnum > 0 AND NOT attisdropped), '{}'),
			'Keys', (SELECT jsonb_agg(jsonb_build_object('Valid', indisvalid,
				'Columns', ARRAY(SELECT attname FROM pg_catalog.pg_attribute
					WHERE attrelid = indrelid AND attnum = ANY ((indkey::int2[])[0:indnkeyatts - 1])),
				'Full', indisvalid AND indimmediate AND indpred IS NULL AND indexprs IS NULL))
				FROM pg_catalog.pg_index WHERE indrelid = rel AND indisunique)) END ORDER BY number)
		FROM looked LEFT JOIN (pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = relnamespace) ON c.oid = rel),
		coalesce(nullif($1, ''), (SELECT nspname::text FROM path WHERE nspname = ANY (current_schemas(false)) ORDER BY at LIMIT 1), ''),
		(SELECT setting::bigint FROM pg_catalog.pg_settings WHERE name = 'idle_in_transaction_session_timeout'),
		current_setting('default_transaction_isolation'),
		current_user::text,
		tables::text, ` + fingerprint + `
	FROM (SELECT ARRAY(SELECT DISTINCT part FROM parts WHERE part IS NOT NULL ORDER BY part) AS tables) t`

// inspectAgain asks for the fingerprint of the tables $1.
const inspectAgain = `SELECT ` + fingerprint + ` FROM (SELECT $1::text::oid[] AS tables) t`

// fingerprint is a text that changes when the session is another role's, has other settings or is on another
// server, and when one of the tables is altered or replaced, gets another column, index, policy, partition or
// inheriting table, or loses one: each such change writes a row of the catalogs, and xmin shows that. Only
// memberships of the role, and tables that search_path finds earlier, are found later, as [lookAgain] says.
//
// It costs a new session a small part of what inspectTables does, and little beyond what its first write of a
// lease would cost without it, because that needs the same entries of the catalogs.
const fingerprint = `concat_ws('|', ` + server + `, current_user, current_setting('search_path'),
		current_setting('default_transaction_isolation'), current_setting('idle_in_transaction_session_timeout'),
		(SELECT string_agg(concat_ws(' ', oid, xmin), ',' ORDER BY oid) FROM pg_catalog.pg_class WHERE oid = ANY (tables)),
		(SELECT string_agg(concat_ws(' ', attnum, xmin), ',' ORDER BY attrelid, attnum) FROM pg_catalog.pg_attribute WHERE attrelid = ANY (tables) AND attnum > 0),
		(SELECT string_agg(concat_ws(' ', indexrelid, xmin), ',' ORDER BY indexrelid) FROM pg_catalog.pg_index WHERE indrelid = ANY (tables)),
		(SELECT string_agg(concat_ws(' ', oid, xmin), ',' ORDER BY oid) FROM pg_catalog.pg_policy WHERE polrelid = ANY (tables)),
		(SELECT string_agg(concat_ws(' ', inhrelid, xmin), ',' ORDER BY inhrelid) FROM pg_catalog.pg_inherits WHERE inhparent = ANY (tables)))`

// exists reports whether there is such a table. Without columns, it was created while the statement
// ran.
func (is *tableState) exists() bool { return is.Schema != "" && len(is.Columns) > 0 }

// wrong returns why promises cannot be kept on an existing table, with the remedies.
func (is *tableState) wrong(want *objects.OwnTable, name string) []string {
	found := objects.FoundTable{Name: name, Columns: is.Columns, NoTable: is.Kind != "r" && is.Kind != "p"}
	for _, k := range is.Keys {
		if k.Full {
			found.Keys = append(found.Keys, k.Columns)
		}
	}
	say := func(format string) { found.Wrong = append(found.Wrong, fmt.Sprintf(format, name)) }
	switch is.Persistence {
	case tableUnlogged:
		say("table %s, or a partition of it, is UNLOGGED: a crash of the server empties it, and then {harm} (ALTER TABLE %[1]s SET LOGGED)")
	case tableTemporary:
		say("table %s is TEMPORARY: each connection has one of its own, and {harm}")
	}
	if want.Whole && is.Parts {
		say("table %s is partitioned, or other tables inherit from it: its rows could be taken for others (it must be one table)")
	}
	if is.Hidden {
		say("table %s is under row-level security, and there are no policies that let this role SELECT, INSERT, UPDATE and DELETE rows")
	}
	return want.Wrong(found, mustBe)
}

// mustBe returns the types that a column may have, or "" if it has one of them. The server's own
// errors come late or don't name the column.
func mustBe(kind objects.ColumnKind, declared string) string {
	types := []string{"bigint"}
	switch kind {
	case objects.KeyText, objects.Text:
		types = []string{"text", "character varying"}
	case objects.JSON:
		types = []string{"jsonb"}
	case objects.Bytes:
		types = []string{"bytea"}
	}
	if slices.Contains(types, unquoted(declared)) {
		return ""
	}
	return strings.Join(types, " or ")
}

// unquoted returns the name of a type as it is without quote_all_identifiers.
func unquoted(declared string) string { return strings.Trim(declared, `"`) }

// queryRow sends a query that returns one row.
type queryRow func(ctx context.Context, sql string, args []any, dest ...any) error

// inspect checks whether the tables are suitable. It also returns what it found together with an
// [objects.ErrSetup].
func (s *setups) inspect(ctx context.Context, query queryRow) (*setup, error) {
	found := &setup{at: time.Now()}
	var tables []tableState
	var creates, isolation string
	var idleMS int64
	wanted, last := make([]string, 0, objects.TableCount), []string{}
	for _, own := range objects.OwnTables {
		wanted = append(wanted, s.cfg.Table+own.Suffix)
	}
	if told := s.told.Load(); told != nil {
		last = told.schemas[:]
	}
	err := query(ctx, inspectTables, []any{s.cfg.Schema, wanted, last}, &tables, &creates, &idleMS, &isolation, &found.role, &found.parts, &found.print)
	if err != nil {
		return nil, err
	}
	found.idleTimeout = time.Duration(idleMS) * time.Millisecond
	own, tombstones := &tables[objects.TableOfObjects], &tables[objects.TableOfTombstones]
	// As long as there is no crash, unlogged tombstones are better than none.
	unlogged := tombstones.Persistence == tableUnlogged
	if unlogged {
		tombstones.Persistence = ""
	}
	var wrong [objects.TableCount][]string
	for i := range tables {
		found.schemas[i] = cmp.Or(tables[i].Schema, creates)
		if found.exists[i] = tables[i].exists(); found.exists[i] {
			wrong[i] = tables[i].wrong(&objects.OwnTables[i], s.names.tables[i])
			found.wrong[i] = strings.Join(wrong[i], "; ")
			found.lacks[i] = tables[i].Lacks
		}
	}
	if last := s.found.Load(); last != nil && last.schemas == found.schemas { // nothing has moved
		found.placed = last.placed
	} else {
		found.placed = newNames(s.cfg.Table, found.schemas)
	}
	found.ahead = own.Ahead
	found.idAlone = slices.ContainsFunc(own.Keys, func(k keyState) bool { return slices.Equal(k.Columns, []string{"id"}) })
	found.uniqueNames = slices.ContainsFunc(own.Keys, func(k keyState) bool {
		return k.Valid && slices.Contains(k.Columns, "name") && !slices.Contains(k.Columns, "id")
	})
	found.tombstones = found.exists[objects.TableOfTombstones] && len(wrong[objects.TableOfTombstones]) == 0 && !tombstones.Denied
	found.unlogged = unlogged && found.tombstones
	return found, s.unfit(found, isolation, wrong[objects.TableOfObjects])
}

// isUnchanged reports whether a session finds what was found before; nil: nothing.
func (s *setup) isUnchanged(ctx context.Context, query queryRow) (bool, error) {
	if s == nil {
		return false, nil
	}
	var now string
	err := query(ctx, inspectAgain, []any{pgx.QueryExecModeExec, s.parts}, &now) // in one round trip, because it is sent once
	return now == s.print, err
}

// unfit returns why no lease can be kept.
func (s *setups) unfit(found *setup, isolation string, wrong []string) error {
	if !found.exists[objects.TableOfObjects] {
		return &objects.NoTable{Cause: fmt.Errorf("%s: %w", s.names.tables[objects.TableOfObjects], errNoTable)}
	}
	var errs []error
	if isolation != "read committed" {
		// A snapshot from before the wait for a lock hides the change that was waited for.
		errs = append(errs, fmt.Errorf("%w: default_transaction_isolation is %q, which must be \"read committed\" for the store's connections: set it in their URL, or for the role",
			objects.ErrSetup, isolation))
	}
	for _, what := range wrong {
		errs = append(errs, fmt.Errorf("%w: %s", objects.ErrSetup, what))
	}
	return errors.Join(errs...)
}
