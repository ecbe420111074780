package tenure

import (
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure/internal/objects"
)

// postgresTables are the quoted names of the tables.
type postgresTables struct {
	schema     string // not quoted; may be empty
	objects    string
	tombstones string
}

const pruneAtMost = 10000 // tombstones in one statement

func newPostgresTables(schema, table string) postgresTables {
	quote := func(name string) string {
		if schema == "" {
			return pgx.Identifier{name}.Sanitize()
		}
		return pgx.Identifier{schema, name}.Sanitize()
	}
	return postgresTables{
		schema:     schema,
		objects:    quote(table),
		tombstones: quote(table + objects.TombstonesSuffix),
	}
}

func (t postgresTables) in(sql string) string {
	limit := strconv.FormatInt(objects.VersionLimit, 10)
	return strings.NewReplacer(
		"{objects}", t.objects,
		"{tombstones}", t.tombstones,
		// floor: a cast alone rounds, up to half a millisecond into the future.
		"{now_ms}", "floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint",
		"{now_us}", "floor(extract(epoch FROM clock_timestamp()) * 1000000)::bigint",
		// What is no positive number is read as one above the limit: as a different one
		// for each value, almost always, so that a write can still name what was read.
		"{version}", "CASE WHEN resource_version > 0 THEN resource_version ELSE greatest("+limit+", 9223372036854775807 + resource_version) END",
		"{version_limit}", limit,
		"{prune_at_most}", strconv.Itoa(pruneAtMost),
		"{tombstone_age_us}", strconv.FormatInt(objects.TombstoneAge.Microseconds(), 10),
	).Replace(sql)
}

// postgresStatements are the statements of one table.
type postgresStatements struct {
	get, list, version, nameTaken, idTaken string
	setLockTimeout, setStatementTimeout    string
	insertNumbered, checkNumber            string
	insert, number, numberByClock          string
	replace, replaceInTime, fence          string
	remove                                 map[removeKind]removeStatements
	prune                                  string
}

// removeKind is what a delete does beside deleting. A role may lack the right to
// notify, so a statement that need not has no word of it.
type removeKind struct{ buries, wakes bool }

// removeStatements are a statement that relies on the lock_timeout of its
// session, and the same with its own.
type removeStatements struct{ plain, inTime string }

// The statements name every column, and no conflict target but in our own
// tombstones: the table may be another program's, with more columns and other
// keys.
func newPostgresStatements(tables postgresTables) postgresStatements {
	lockTimeout := func(sql, placeholder string) string {
		// For this transaction only, so also behind a pooler. NULL leaves it.
		return tables.in(strings.ReplaceAll(sql, "{lock_timeout}",
			"set_config('lock_timeout', coalesce("+placeholder+"::text, current_setting('lock_timeout')), true)"))
	}
	const numberRow = `
		UPDATE {objects} SET created_at_ms = {now_ms}, updated_at_ms = {now_ms}, resource_version = {number}
		WHERE object_type = $1 AND id = $2
			AND xmin = pg_current_xact_id_if_assigned()::xid -- the row that this transaction inserted
		RETURNING resource_version, created_at_ms, updated_at_ms`
	const replace = `
			UPDATE {objects} SET name = $3, labels = $4::jsonb, payload = $5, updated_at_ms = {now_ms},
				resource_version = greatest(CASE WHEN resource_version < {version_limit} THEN resource_version + 1 END, {now_us})
			{from_wait} WHERE object_type = $1 AND id = $2 AND ($6::bigint = 0 OR {version} = $6::bigint)
			RETURNING resource_version, created_at_ms, updated_at_ms`
	const gone = `
			WITH {wait_and} gone AS (
				DELETE FROM {objects} {using_wait} WHERE object_type = $1 AND id = $2 AND {version} = $3
				RETURNING resource_version)`
	const bury = `,
			buried AS (
				INSERT INTO {tombstones} AS t (object_type, id, resource_version)
				SELECT $1, $2, resource_version FROM gone WHERE resource_version < {version_limit}
				ON CONFLICT (object_type, id) DO UPDATE SET resource_version =
					greatest(CASE WHEN t.resource_version < {version_limit} THEN t.resource_version END, excluded.resource_version))`
	// A release need not be durable: if a crash undoes it, the lease expires. So it
	// does not wait for the disk, and holds up no other that notifies, for those
	// commit one after another. Whatever is written behind it is durable only with
	// it.
	const notify = `
			SELECT count(*), (SELECT pg_notify($4, $5) FROM gone)::text, set_config('synchronous_commit', 'off', true) FROM gone`
	const count = `
			SELECT count(*), NULL, NULL FROM gone`
	// Both forms of a statement that may wait for a lock.
	const wait = `wait AS MATERIALIZED (SELECT {lock_timeout})`
	plain := func(sql string) string {
		return tables.in(strings.NewReplacer("{from_wait}", "", "{using_wait}", "", "{wait_and}", "").Replace(sql))
	}
	inTime := func(sql, placeholder string) string {
		return lockTimeout(strings.NewReplacer("{from_wait}", "FROM wait", "{using_wait}", "USING wait", "{wait_and}", wait+",").Replace(sql), placeholder)
	}
	remove := func(sql, placeholder string) removeStatements {
		return removeStatements{plain: plain(sql), inTime: inTime(sql, placeholder)}
	}
	return postgresStatements{
		get: tables.in(`
			SELECT name, labels, payload, {version}, created_at_ms, updated_at_ms, {now_us}
			FROM {objects} WHERE object_type = $1 AND id = $2`),
		list: tables.in(`
			SELECT id, name, labels, payload, {version}, created_at_ms, updated_at_ms, {now_us}
			FROM {objects} WHERE object_type = $1 AND id > $2 ORDER BY id LIMIT $3`),
		version: tables.in(`
			SELECT {version} FROM {objects} WHERE object_type = $1 AND id = $2`),
		nameTaken: tables.in(`
			SELECT object_type, id FROM {objects} WHERE object_type = $1 AND id <> $2 AND name = $3`),
		idTaken: tables.in(`
			SELECT object_type, id FROM {objects} WHERE id = $2 AND object_type <> $1`),

		setLockTimeout:      lockTimeout(`SELECT {lock_timeout}`, "$1"),
		setStatementTimeout: `SELECT set_config('statement_timeout', $1, true)`,
		// DO NOTHING rather than an error: no aborted transaction, no line in
		// the server's log.
		insertNumbered: tables.in(`
			INSERT INTO {objects} (object_type, id, name, labels, payload, created_at_ms, updated_at_ms, resource_version)
			VALUES ($1, $2, $3, $4::jsonb, $5, {now_ms}, {now_ms}, greatest({now_us},
				(SELECT resource_version + 1 FROM {tombstones} WHERE object_type = $1 AND id = $2 AND resource_version < {version_limit})))
			ON CONFLICT DO NOTHING
			RETURNING resource_version, created_at_ms, updated_at_ms`),
		// The version of what stands there now. Fails where that is the object that was
		// just inserted, and is not above the one that was deleted while the insert
		// waited.
		checkNumber: tables.in(`
			SELECT {version}, 1 / (1 - (xmin = pg_current_xact_id_if_assigned()::xid AND EXISTS (
				SELECT FROM {tombstones} t WHERE t.object_type = $1 AND t.id = $2
					AND t.resource_version >= o.resource_version AND t.resource_version < {version_limit}))::int)
			FROM {objects} o WHERE object_type = $1 AND id = $2`),
		insert: tables.in(`
			INSERT INTO {objects} (object_type, id, name, labels, payload, resource_version, created_at_ms, updated_at_ms)
			VALUES ($1, $2, $3, $4::jsonb, $5, 1, 0, 0) ON CONFLICT DO NOTHING`),
		number: tables.in(strings.ReplaceAll(numberRow, "{number}", `greatest({now_us},
			(SELECT resource_version + 1 FROM {tombstones} WHERE object_type = $1 AND id = $2 AND resource_version < {version_limit}))`)),
		numberByClock: tables.in(strings.ReplaceAll(numberRow, "{number}", `{now_us}`)),

		// A version of 0 is no condition.
		replace:       plain(replace),
		replaceInTime: inTime(`WITH `+wait+replace, "$7"),

		// FOR SHARE, at the end: it waits for a takeover that is under way and then
		// sees it, and makes the next one wait for the commit. Without a lock, and
		// with FOR KEY SHARE, stale writes get through. Renewals wait for it too,
		// so it must not stand at the begin.
		fence: tables.in(`
			SELECT 1 / count(*) FROM (
				SELECT 1 FROM {objects} WHERE object_type = $1 AND id = $2 AND payload = $3 FOR SHARE) held`),

		remove: map[removeKind]removeStatements{
			{buries: true, wakes: true}: remove(gone+bury+notify, "$6"),
			{buries: true}:              remove(gone+bury+count, "$4"),
			{wakes: true}:               remove(gone+notify, "$6"),
			{}:                          remove(gone+count, "$4"),
		},

		prune: tables.in(`
			DELETE FROM {tombstones} WHERE ctid = ANY (ARRAY(
				SELECT ctid FROM {tombstones} WHERE resource_version < (SELECT {now_us} - {tombstone_age_us})
				LIMIT {prune_at_most} FOR UPDATE SKIP LOCKED))`),
	}
}
