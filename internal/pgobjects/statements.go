package pgobjects

import (
	"strconv"
	"strings"

	"github.com/tenurelib/tenure/internal/objects"
)

const pruneAtMost = 10000 // tombstones in one statement

// names has the quoted names of the tables, and the texts that put them into statements.
type names struct {
	tables [objects.TableCount]string
	texts  *objects.Texts
}

// newNames returns the names of the tables in their schemas. An empty schema leaves it to
// search_path.
func newNames(table string, schemas [objects.TableCount]string) names {
	var n names
	for i, own := range objects.OwnTables {
		n.tables[i] = quoted(schemas[i], table+own.Suffix)
	}
	n.texts = objects.NewTexts(append(words(),
		"{objects}", n.tables[objects.TableOfObjects],
		"{tombstones}", n.tables[objects.TableOfTombstones],
		"{claims}", n.tables[objects.TableOfClaims],
		"{requests}", n.tables[objects.TableOfRequests],
		// Indexes, whose names have no schema. They are no longer than the name of the tombstones, for
		// which there is room.
		"{claims_by_session}", objects.Quoted(table+objects.ClaimsSuffix+"_idx"),
		"{claims_by_age}", objects.Quoted(table+objects.ClaimsSuffix+"_age"),
	)...)
	return n
}

func (n names) in(text string) string { return n.texts.In(text) }

func quoted(schema, table string) string {
	if schema == "" {
		return objects.Quoted(table)
	}
	return objects.Quoted(schema, table)
}

// literal returns a text as a constant in a statement, whatever standard_conforming_strings is.
func literal(text string) string {
	constant := "'" + strings.ReplaceAll(text, "'", "''") + "'"
	if strings.Contains(text, `\`) {
		return "E" + strings.ReplaceAll(constant, `\`, `\\`)
	}
	return constant
}

// server is a number that identifies one start of one server.
const server = "floor(extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint"

// words have the same meaning in all statements.
func words() []string {
	limit := strconv.FormatInt(objects.VersionLimit, 10)
	return []string{
		// floor, because a cast rounds, up to half a millisecond into the future.
		"{now_ms}", "floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint",
		"{now_us}", "floor(extract(epoch FROM clock_timestamp()) * 1000000)::bigint",
		"{server}", server,
		// A version that is not positive is read as a version above the limit, almost always a
		// different one for each value, so that a write can still name what was read.
		"{version}", "CASE WHEN resource_version > 0 THEN resource_version ELSE greatest(" + limit + ", 9223372036854775807 + resource_version) END",
		"{version_limit}", limit,
		"{prune_at_most}", strconv.Itoa(pruneAtMost),
		"{tombstone_age_us}", strconv.FormatInt(objects.TombstoneAge.Microseconds(), 10),
		"{session_tombstone_age_us}", strconv.FormatInt(objects.SessionTombstoneAge.Microseconds(), 10),
	}
}

// recordFence fails unless the record stands. FOR SHARE waits for a takeover in progress and then
// sees it, and makes the next takeover wait for the commit. Without a lock, or with FOR KEY SHARE,
// stale writes would get through. Renewals wait for this lock too, so the check must come at the
// end of the transaction.
const recordFence = failUnlessHere + `(
			SELECT $4::bigint = 0 OR {server} = $4::bigint AS here FROM {objects} WHERE object_type = $1 AND id = $2 AND payload = $3 FOR SHARE) held`

// recordFenceArgs returns the arguments of recordFence. The last one is the server of the term's last answered write: a
// failover brings back records of terms that others have followed, and what such a term writes on the new primary would be
// late.
func recordFenceArgs(fence *objects.Fence) []any {
	return []any{fence.ID.Type, fence.ID.ID, fence.Record, serverOf(fence.Server())}
}

// isHere reports whether the last write of a session to its record o was on this start of this server, as the record says:
// any process may write under a claim. A record that names no server is of a version of this library that named none, or
// in a database that loses nothing.
const isHere = `(strpos(coalesce(o.labels->>'tenure.lineage', ''), '"server":') = 0 OR strpos(o.labels->>'tenure.lineage', '"server":"' || {server} || '"') > 0)`

// sessionIsHere is the same for the session that the parameter which follows names; NULL: it has no record. The record needs no
// lock: on one server it ceases to name the server only when another session may take the row, which is locked.
const sessionIsHere = `(SELECT ` + isHere + ` FROM {objects} o WHERE o.object_type = '` + objects.SessionType + `' AND o.id = `

// failUnlessHere fails unless there is one row, and the right was renewed on this server, with a text that explains the failure
// in the server's log. The planner would cast a constant before the rows are counted; it can't cast this text.
const failUnlessHere = `
			SELECT CASE WHEN count(here) <> 1 THEN ('` + objects.FenceLost + `' || count(here) || '` + objects.Remedy + `')::int
				WHEN bool_and(here) THEN 1 ELSE ('` + objects.Moved + `' || {server} || '` + objects.Remedy + `')::int END FROM `

// The statements name every column, and a conflict target only of our own tombstones: the
// table may be another program's, with more columns and other keys.
const (
	setObject = `
			UPDATE {objects} SET name = $3, labels = $4::jsonb, payload = $5, ` + stamp
	ofKey = `)
			WHERE object_type = $1 AND id = $2`
	replace = setObject + ofKey

	stamp = `updated_at_ms = {now_ms},
				resource_version = greatest(CASE WHEN resource_version < {version_limit} THEN resource_version + 1 END, {now_us}`

	// Returns a row even if there is no object, because the caller always needs the server. The version
	// of an object is never NULL.
	getObject = `
			SELECT {server}, {now_us}, o.name, o.labels, o.payload, o.version, o.created_at_ms, o.updated_at_ms FROM (VALUES (1)) one LEFT JOIN (
				SELECT name, labels, payload, {version} AS version, created_at_ms, updated_at_ms
				FROM {objects} WHERE object_type = $1 AND id = $2) o ON true`
	listObjects = `
			SELECT id, name, labels, payload, {version}, created_at_ms, updated_at_ms, {now_us}
			FROM {objects} WHERE object_type = $1 AND id > $2 ORDER BY id LIMIT $3`
	objectVersion = `
			SELECT {server}, (SELECT {version} FROM {objects} WHERE object_type = $1 AND id = $2)`
	whoHasName = `
			SELECT object_type, id FROM {objects} WHERE object_type = $1 AND id <> $2 AND name = $3`
	whoHasID = `
			SELECT object_type, id FROM {objects} WHERE id = $2 AND object_type <> $1`

	// DO NOTHING instead of an error, which would abort the transaction and add a line to
	// the server's log.
	insertNumbered = `
			INSERT INTO {objects} (object_type, id, name, labels, payload, created_at_ms, updated_at_ms, resource_version)
			SELECT $1, $2, $3, $4::jsonb, $5, {now_ms}, {now_ms}, greatest({now_us}, $7::bigint + 1,
				(SELECT resource_version + 1 FROM {tombstones} WHERE object_type = $1 AND id = $2 AND resource_version < {version_limit}))
			WHERE ` + onServer6 + ` AND NOT ($8::boolean AND EXISTS (
				SELECT FROM {tombstones} WHERE object_type = $1 AND id = $2 AND resource_version > $7::bigint))
			ON CONFLICT DO NOTHING
			RETURNING resource_version, created_at_ms, updated_at_ms`
	// Returns the version of the stored object, or 0 if there is none. Fails if that is the object
	// just inserted and its version is not above that of the object deleted while the insert
	// waited.
	checkNumber = `
			SELECT coalesce(max({version}), 0), max(1 / (1 - (xmin = pg_current_xact_id_if_assigned()::xid AND EXISTS (
				SELECT FROM {tombstones} t WHERE t.object_type = $1 AND t.id = $2
					AND t.resource_version >= o.resource_version AND t.resource_version < {version_limit}))::int))
			FROM {objects} o WHERE object_type = $1 AND id = $2`
	insertObject = `
			INSERT INTO {objects} (object_type, id, name, labels, payload, resource_version, created_at_ms, updated_at_ms)
			SELECT $1, $2, $3, $4::jsonb, $5, 1, 0, 0 WHERE ` + onServer6 + ` ON CONFLICT DO NOTHING`
	numberRow = `
		UPDATE {objects} SET created_at_ms = {now_ms}, updated_at_ms = {now_ms}, resource_version = `
	ofThisInsert = `
		WHERE object_type = $1 AND id = $2
			AND xmin = pg_current_xact_id_if_assigned()::xid -- the row that this transaction inserted
		RETURNING resource_version, created_at_ms, updated_at_ms`
	numberObject = numberRow + `greatest({now_us}, $3::bigint + 1,
			(SELECT resource_version + 1 FROM {tombstones} WHERE object_type = $1 AND id = $2 AND resource_version < {version_limit}))` + ofThisInsert
	numberByClock = numberRow + `greatest({now_us}, $3::bigint + 1)` + ofThisInsert

	// A version of 0 means no condition, and so does a server of 0.
	replaceObject = setObject + `, $8::bigint + 1` + ofKey + ` AND ($6::bigint = 0 OR {version} = $6::bigint) AND ($7::bigint = 0 OR {server} = $7::bigint)
			RETURNING resource_version, created_at_ms, updated_at_ms`
	onServer6 = `($6::bigint = 0 OR {server} = $6::bigint)`

	resumeObject = `
			UPDATE {objects} SET ` + stamp + `)
			WHERE object_type = $1 AND id = $2 AND position($3::bytea IN payload) > 0 AND labels ? $4 AND NOT labels ?| $5
				AND ($6 = '' OR position($6 IN labels->>$7) > 0) AND ($8::bigint = 0 OR {server} = $8::bigint)
			RETURNING name, labels, payload, resource_version, created_at_ms, updated_at_ms`

	// A deletion consists of the first of these, then the second if there are tombstones, and one of the
	// others. A role may lack the right to notify, so a statement that need not notify does not mention
	// pg_notify.
	removeObject = `
			WITH gone AS (
				DELETE FROM {objects} WHERE object_type = $1 AND id = $2 AND {version} = $3 AND ($4::bigint = 0 OR {server} = $4::bigint)
				RETURNING resource_version)`
	andTombstone = `,
			tombstone AS (
				INSERT INTO {tombstones} AS t (object_type, id, resource_version)
				SELECT $1, $2, CASE WHEN $1 = '` + objects.SessionType + `' THEN greatest(resource_version, {now_us}) ELSE resource_version END
				FROM gone WHERE resource_version < {version_limit}
				ON CONFLICT (object_type, id) DO UPDATE SET resource_version =
					greatest(CASE WHEN t.resource_version < {version_limit} THEN t.resource_version END, excluded.resource_version))`
	// A release need not be durable: if a crash undoes it, the lease expires. It therefore
	// does not wait for the disk, and does not delay others, because transactions that notify
	// commit one after another. A later write is durable only if this one is.
	andNotify = `
			SELECT count(*), (SELECT pg_notify($5, $6) FROM gone)::text, set_config('synchronous_commit', 'off', true) FROM gone`
	andCount = `
			SELECT count(*), NULL, NULL FROM gone`

	pruneTombstones = `
			DELETE FROM {tombstones} WHERE ctid = ANY (ARRAY(
				SELECT ctid FROM {tombstones} WHERE resource_version < (SELECT {now_us} - {tombstone_age_us})
					AND (object_type <> '` + objects.SessionType + `' OR resource_version < (SELECT {now_us} - {session_tombstone_age_us}))
				LIMIT {prune_at_most} FOR UPDATE SKIP LOCKED))`
)
