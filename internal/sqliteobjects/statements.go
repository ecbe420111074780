package sqliteobjects

import (
	"strconv"
	"strings"

	"github.com/tenurelib/tenure/internal/objects"
)

// statements are the statements of one table.
type statements struct {
	migrate, get, list, version, content, insert, number, replace, taken, remove, bury, prune, lock, fence, fenceStatement, putStatement string
}

// newNames returns what puts the quoted names of the tables into a statement. They are those of the
// main database: without its name, a table or view of the connection's temporary one would be
// taken for ours.
func newNames(table string) *strings.Replacer { return namesIn("main.", table) }

func namesIn(schema, table string) *strings.Replacer {
	quote := func(name string) string { return schema + quoted(name) }
	return strings.NewReplacer(
		"{objects}", quote(table),
		"{tombstones}", quote(table+objects.TombstonesSuffix),
		"{tombstones_table}", quoted(table+objects.TombstonesSuffix), // an index can't name its table's schema
		"{tombstones_by_age}", quote(table+objects.TombstonesSuffix+"_by_age"),
		"{claims}", quote(table+objects.ClaimsSuffix),
		"{claims_table}", quoted(table+objects.ClaimsSuffix),
		"{claims_by_session}", quote(table+objects.ClaimsSuffix+"_idx"),
		"{claims_by_age}", quote(table+objects.ClaimsSuffix+"_age"),
		"{requests}", quote(table+objects.RequestsSuffix),
		"{version_limit}", strconv.FormatInt(objects.VersionLimit, 10),
	)
}

// The statements name every column, and no conflict target except in the tombstones, which
// are ours: the table of objects may be another program's, with more columns and other keys.
// The + before a column hides its declared type, by which the driver would convert the value.
func newStatements(table string) statements {
	names := newNames(table)
	return statements{
		migrate: names.Replace(objects.SQLite),
		get: names.Replace(`
			SELECT name, labels, payload, +resource_version, +created_at_ms, +updated_at_ms
			FROM {objects} WHERE object_type = ?1 AND id = ?2`),
		list: names.Replace(`
			SELECT id, name, labels, payload, +resource_version, +created_at_ms, +updated_at_ms
			FROM {objects} WHERE object_type = ?1 AND id > ?2 AND typeof(id) = 'text' ORDER BY id`),
		version: names.Replace(`
			SELECT +resource_version FROM {objects} WHERE object_type = ?1 AND id = ?2`),
		content: names.Replace(`
			SELECT coalesce(labels, '') || CAST(payload AS TEXT) FROM {objects} WHERE object_type = ?1 AND id = ?2`),
		insert: names.Replace(`
			INSERT INTO {objects} (object_type, id, name, labels, payload, resource_version, created_at_ms, updated_at_ms)
			VALUES (?1, ?2, ?3, ?4, ?5, 1, 0, 0) ON CONFLICT DO NOTHING`),
		number: names.Replace(`
			UPDATE {objects} SET created_at_ms = ?3, updated_at_ms = ?3, resource_version = max(?4, coalesce(
				(SELECT CAST(resource_version AS INTEGER) + 1 FROM {tombstones}
				WHERE object_type = ?1 AND id = ?2 AND resource_version < {version_limit}), 1))
			WHERE object_type = ?1 AND id = ?2
			RETURNING +resource_version`),
		// A version of 0 means no condition, here and in remove.
		replace: names.Replace(`
			UPDATE {objects} SET name = ?3, labels = ?4, payload = ?5, updated_at_ms = ?6, resource_version = ?7
			WHERE object_type = ?1 AND id = ?2 AND (?8 = 0 OR resource_version = ?8)
			RETURNING +resource_version, +created_at_ms`),
		taken: names.Replace(`
			SELECT object_type, id FROM {objects} WHERE object_type = ?1 AND name = ?3 OR object_type <> ?1 AND id = ?2
			ORDER BY object_type <> ?1 LIMIT 1`),
		remove: names.Replace(`
			DELETE FROM {objects} WHERE object_type = ?1 AND id = ?2 AND (?3 = 0 OR resource_version = ?3)`),
		bury: names.Replace(`
			INSERT INTO {tombstones} (object_type, id, resource_version) SELECT ?1, ?2, ?3 WHERE ?3 < {version_limit}
			ON CONFLICT (object_type, id) DO UPDATE SET resource_version =
				CASE WHEN resource_version < {version_limit} THEN max(resource_version, excluded.resource_version) ELSE excluded.resource_version END`),
		lock: names.Replace(`
			DELETE FROM {tombstones} WHERE false`),
		fence: names.Replace(`
			SELECT 1 FROM {objects} WHERE object_type = ?1 AND id = ?2 AND payload = ?3`),
		// The column rejects NULL, so this writes nothing or fails. Because it is a write, it
		// takes the write lock before it reads.
		fenceStatement: names.Replace(`
			INSERT INTO {tombstones} (object_type, id, resource_version) SELECT ?1, ?2, NULL
			WHERE NOT EXISTS (SELECT 1 FROM {objects} WHERE object_type = ?1 AND id = ?2 AND payload = ?3)`),
		// abs of the smallest integer is an error. The search for the row needs the value, so
		// the statement fails even if there is no row.
		putStatement: names.Replace(`
			UPDATE {objects} SET name = ?3, labels = ?4, payload = ?5, updated_at_ms = ?6, resource_version = ?7
			WHERE object_type = ?1 AND id = (SELECT CASE
				WHEN EXISTS (SELECT 1 FROM {objects} WHERE object_type = ?1 AND id = ?2 AND resource_version = ?8) THEN ?2
				ELSE abs(min(-9223372036854775808, ?8)) END)`),
		prune: names.Replace(`
			DELETE FROM {tombstones} WHERE rowid IN
				(SELECT rowid FROM {tombstones} WHERE resource_version < ?1 ORDER BY resource_version LIMIT 10)`),
	}
}
