package sqliteobjects

import (
	"strconv"

	"github.com/tenurelib/tenure/internal/objects"
)

// tableWords returns the quoted names of the tables of a schema: "main.", without which a temporary
// table or view of the connection would be taken for ours, or "" for statements that operators run.
func tableWords(schema, table string) []string {
	in := func(suffix string) string { return schema + objects.Quoted(table+suffix) }
	return []string{
		"{objects}", in(""),
		"{tombstones}", in(objects.TombstonesSuffix),
		"{tombstones_table}", objects.Quoted(table + objects.TombstonesSuffix), // an index can't name its table's schema
		"{tombstones_by_age}", in(objects.TombstonesSuffix + "_by_age"),
		"{claims}", in(objects.ClaimsSuffix),
		"{claims_table}", objects.Quoted(table + objects.ClaimsSuffix),
		"{claims_by_session}", in(objects.ClaimsSuffix + "_idx"),
		"{claims_by_age}", in(objects.ClaimsSuffix + "_age"),
		"{requests}", in(objects.RequestsSuffix),
		"{version_limit}", strconv.FormatInt(objects.VersionLimit, 10),
	}
}

// The statements name every column, and no conflict target except in the tombstones, which
// are ours: the table of objects may be another program's, with more columns and other keys. The +
// before a column hides its declared type, which the driver would use to convert the value.
const (
	getObject = `
			SELECT name, labels, payload, +resource_version, +created_at_ms, +updated_at_ms
			FROM {objects} WHERE object_type = ?1 AND id = ?2`
	listObjects = `
			SELECT id, name, labels, payload, +resource_version, +created_at_ms, +updated_at_ms
			FROM {objects} WHERE object_type = ?1 AND id > ?2 AND typeof(id) = 'text' ORDER BY id`
	objectVersion = `
			SELECT +resource_version FROM {objects} WHERE object_type = ?1 AND id = ?2`
	objectContent = `
			SELECT coalesce(labels, '') || CAST(payload AS TEXT) FROM {objects} WHERE object_type = ?1 AND id = ?2`
	insertObject = `
			INSERT INTO {objects} (object_type, id, name, labels, payload, resource_version, created_at_ms, updated_at_ms)
			VALUES (?1, ?2, ?3, ?4, ?5, 1, 0, 0) ON CONFLICT DO NOTHING`
	numberObject = `
			UPDATE {objects} SET created_at_ms = ?3, updated_at_ms = ?3, resource_version = max(?4, coalesce(
				(SELECT CAST(resource_version AS INTEGER) + 1 FROM {tombstones}
				WHERE object_type = ?1 AND id = ?2 AND resource_version < {version_limit}), 1))
			WHERE object_type = ?1 AND id = ?2
			RETURNING +resource_version`
	// A version of 0 means no condition, here and in remove.
	replaceObject = `
			UPDATE {objects} SET name = ?3, labels = ?4, payload = ?5, updated_at_ms = ?6, resource_version = ?7
			WHERE object_type = ?1 AND id = ?2 AND (?8 = 0 OR resource_version = ?8)
			RETURNING +resource_version, +created_at_ms`
	whoIsInTheWay = `
			SELECT object_type, id FROM {objects} WHERE object_type = ?1 AND name = ?3 OR object_type <> ?1 AND id = ?2
			ORDER BY object_type <> ?1 LIMIT 1`
	removeObject = `
			DELETE FROM {objects} WHERE object_type = ?1 AND id = ?2 AND (?3 = 0 OR resource_version = ?3)`
	putTombstone = `
			INSERT INTO {tombstones} (object_type, id, resource_version) SELECT ?1, ?2, ?3 WHERE ?3 < {version_limit}
			ON CONFLICT (object_type, id) DO UPDATE SET resource_version =
				CASE WHEN resource_version < {version_limit} THEN max(resource_version, excluded.resource_version) ELSE excluded.resource_version END`
	takeWriteLock = `
			DELETE FROM {tombstones} WHERE false`
	recordFence = `
			SELECT 1 FROM {objects} WHERE object_type = ?1 AND id = ?2 AND payload = ?3`
	// A JSON path must begin with $, so this fails, with a text that says why. Were it constant, it would be evaluated first.
	refuse = `json_extract('{}', '` + objects.FenceLost + `0` + objects.Remedy + `' || substr(random(), 1, 0))`
	// It writes nothing or fails. Because it is a write, it takes the write lock before it reads.
	recordFenceStatement = `
			INSERT INTO {tombstones} (object_type, id, resource_version) SELECT ?1, ?2, ` + refuse + `
			WHERE NOT EXISTS (SELECT 1 FROM {objects} WHERE object_type = ?1 AND id = ?2 AND payload = ?3)`
	// abs of the smallest integer is an error. The search for the row needs the value, so
	// the statement fails even if there is no row.
	putStatement = `
			UPDATE {objects} SET name = ?3, labels = ?4, payload = ?5, updated_at_ms = ?6, resource_version = ?7
			WHERE object_type = ?1 AND id = (SELECT CASE
				WHEN EXISTS (SELECT 1 FROM {objects} WHERE object_type = ?1 AND id = ?2 AND resource_version = ?8) THEN ?2
				ELSE abs(min(-9223372036854775808, ?8)) END)`
	pruneTombstones = `
			DELETE FROM {tombstones} WHERE rowid IN
				(SELECT rowid FROM {tombstones} WHERE resource_version < ?1 AND (object_type <> '` + objects.SessionType + `' OR resource_version < ?2)
				ORDER BY resource_version LIMIT 10)`
)
