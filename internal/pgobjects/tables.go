package pgobjects

import (
	"fmt"
	"slices"
	"strings"

	"github.com/tenurelib/tenure/internal/objects"
)

// The library's tables, by their places in [ownTables].
const (
	tableOfObjects = iota
	tableOfTombstones
	tableOfClaims
	tableOfRequests
	tableCount
)

// ownTable is what one of the library's tables must be like.
type ownTable struct {
	suffix  string
	columns []ownColumn
	keys    [][]string // one of them must be unique
	whole   bool       // statements find its rows by ctid, which is unique only in a table without parts
	harm    string     // what happens if it loses rows in a crash, or if its key is not unique
	other   string     // what to do if the table is another program's
}

type ownColumn struct {
	name  string
	types []string
}

var textTypes, bigintType = []string{"text", "character varying"}, []string{"bigint"}

// ownTables are the tables that the library keeps promises on. Whatever is asked of one is asked
// of each, so another table is another entry here.
var ownTables = [tableCount]ownTable{
	tableOfObjects: {
		columns: []ownColumn{
			{"object_type", textTypes}, {"id", textTypes}, {"name", textTypes}, {"labels", []string{"jsonb"}}, {"payload", []string{"bytea"}},
			{"resource_version", bigintType}, {"created_at_ms", bigintType}, {"updated_at_ms", bigintType},
		},
		keys:  [][]string{{"object_type", "id"}, {"id"}},
		harm:  "two can hold one lease",
		other: objects.OtherTable,
	},
	tableOfTombstones: {
		suffix:  objects.TombstonesSuffix,
		columns: []ownColumn{{"object_type", textTypes}, {"id", textTypes}, {"resource_version", bigintType}},
		keys:    [][]string{{"object_type", "id"}},
		whole:   true,
		harm:    "fencing tokens can repeat",
		other:   otherOwnTable,
	},
	tableOfClaims: {
		suffix:  objects.ClaimsSuffix,
		columns: []ownColumn{{"kind", textTypes}, {"id", textTypes}, {"session", textTypes}, {"token", bigintType}},
		keys:    [][]string{{"kind", "id"}},
		whole:   true,
		harm:    "two sessions can hold one key",
		other:   otherOwnTable,
	},
	tableOfRequests: {
		suffix:  objects.RequestsSuffix,
		columns: []ownColumn{{"session", textTypes}, {"kind", textTypes}, {"id", textTypes}, {"token", bigintType}},
		keys:    [][]string{{"session", "kind", "id", "token"}},
		whole:   true,
		harm:    "requests for keys can be forgotten",
		other:   otherOwnTable,
	},
}

const otherOwnTable = "drop or rename it, and call Migrate, which makes the right one"

// tableState is what was found out about one of the library's tables. The names are those of its
// JSON.
type tableState struct {
	Schema      string // empty: there is no such table
	Ahead       string // schema of another one that search_path finds now
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

// inspectTables asks for the state of each table: of $1, or of the schema in which it was found last, or
// of the first one in search_path that has one of that name, and for the schema where a table is
// created. A table that was found stays the one that is used, because other replicas use it, too,
// whatever a later session has in its search_path. A temporary table would be found before any other,
// and only by this session, so it does not count.
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
		current_setting('synchronous_commit'),
		current_setting('default_transaction_isolation')`

// exists reports whether there is such a table. Without columns, it was created while the statement
// ran.
func (is *tableState) exists() bool { return is.Schema != "" && len(is.Columns) > 0 }

// wrong returns why promises cannot be kept on an existing table, with the remedies.
func (want *ownTable) wrong(is *tableState, name string) (wrong []string) {
	say := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	if is.Kind != "r" && is.Kind != "p" {
		say("%s is a view, or something else that is no table (drop it, or name the table behind it with Schema or Table)", name)
		return wrong
	}
	switch is.Persistence {
	case tableUnlogged:
		say("table %s, or a partition of it, is UNLOGGED: a crash of the server empties it, and then %s (ALTER TABLE %[1]s SET LOGGED)", name, want.harm)
	case tableTemporary:
		say("table %s is TEMPORARY: each connection has one of its own, and %s", name, want.harm)
	}
	if want.whole && is.Parts {
		say("table %s is partitioned, or other tables inherit from it: its rows could be taken for others (it must be one table)", name)
	}
	if is.Hidden {
		say("table %s is under row-level security, and there are no policies that let this role SELECT, INSERT, UPDATE and DELETE rows", name)
	}
	var lacks, misfits []string
	for _, c := range want.columns {
		switch found, ok := is.Columns[c.name]; {
		case !ok:
			lacks = append(lacks, c.name)
		case !slices.Contains(c.types, found):
			misfits = append(misfits, fmt.Sprintf("its column %s is %s, not %s", c.name, found, strings.Join(c.types, " or ")))
		}
	}
	if len(lacks) > 0 {
		misfits = append(misfits, "it lacks the columns "+strings.Join(lacks, ", "))
	}
	if len(misfits) > 0 {
		say("table %s does not fit: %s (%s)", name, strings.Join(misfits, "; "), want.other)
	}
	unique := slices.ContainsFunc(is.Keys, func(k keyState) bool {
		return k.Full && slices.ContainsFunc(want.keys, k.isOf)
	})
	if len(wrong) == 0 && !unique {
		say("table %s has no unique key on %s: %s (it must be valid, not DEFERRABLE and without WHERE)", name, keyNames(want.keys), want.harm)
	}
	return wrong
}

// isOf reports whether the key is of these columns, in any order.
func (k *keyState) isOf(columns []string) bool {
	return len(k.Columns) == len(columns) && !slices.ContainsFunc(columns, func(c string) bool { return !slices.Contains(k.Columns, c) })
}

func keyNames(keys [][]string) string {
	var names []string
	for _, k := range keys {
		names = append(names, "("+strings.Join(k, ", ")+")")
	}
	return strings.Join(names, ", nor on ")
}
