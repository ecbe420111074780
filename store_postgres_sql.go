package tenure

import (
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
)

// postgresTables are the quoted names of the tables.
type postgresTables struct {
	schema          string // not quoted; may be empty
	objects         string
	tombstones      string
	tombstonesByAge string // an index: it has no schema of its own
}

const maxIdentifier = 63 // bytes; Postgres cuts off what is longer

func newPostgresTables(schema, table string) postgresTables {
	quote := func(name string) string {
		if schema == "" {
			return pgx.Identifier{name}.Sanitize()
		}
		return pgx.Identifier{schema, name}.Sanitize()
	}
	return postgresTables{
		schema:          schema,
		objects:         quote(table),
		tombstones:      quote(table + tombstonesSuffix),
		tombstonesByAge: pgx.Identifier{table + byAgeSuffix}.Sanitize(),
	}
}

func (t postgresTables) in(sql string) string {
	return strings.NewReplacer(
		"{objects}", t.objects,
		"{tombstones}", t.tombstones,
		"{tombstones_by_age}", t.tombstonesByAge,
		// floor: a cast alone rounds, up to half a millisecond into the future.
		"{now_ms}", "floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint",
		"{now_us}", "floor(extract(epoch FROM clock_timestamp()) * 1000000)::bigint",
		"{tombstone_age_us}", strconv.FormatInt(tombstoneAge.Microseconds(), 10),
		// For this transaction only, so also behind a pooler. NULL leaves it.
		"{lock_timeout}", "set_config('lock_timeout', coalesce({ms}, current_setting('lock_timeout')), true)",
	).Replace(sql)
}

// postgresStatements are the statements of one table.
type postgresStatements struct {
	get, list, version, nameTaken, idTaken string
	setLockTimeout, insert                 string
	number, numberByClock                  string
	replace, fence                         string
	remove, removeFenced, removeOnly       string
}

// The statements name every column, and no conflict target but in our own
// tombstones: the table may be another program's, with more columns and other
// keys.
func newPostgresStatements(tables postgresTables) postgresStatements {
	lockTimeout := func(sql, placeholder string) string {
		return strings.ReplaceAll(tables.in(sql), "{ms}", placeholder+"::text")
	}
	const numberRow = `
		UPDATE {objects} SET created_at_ms = {now_ms}, updated_at_ms = {now_ms}, resource_version = {version}
		WHERE object_type = $1 AND id = $2
			AND xmin = pg_current_xact_id_if_assigned()::xid -- the row that this transaction inserted
		RETURNING resource_version, created_at_ms, updated_at_ms`
	const bury = `
			WITH wait AS MATERIALIZED (SELECT {lock_timeout}),
			gone AS (
				DELETE FROM {objects} USING wait WHERE object_type = $1 AND id = $2 AND resource_version = $3
				RETURNING resource_version),
			buried AS (
				INSERT INTO {tombstones} AS t (object_type, id, resource_version)
				SELECT $1, $2, resource_version FROM gone
				ON CONFLICT (object_type, id) DO UPDATE
					SET resource_version = greatest(t.resource_version, excluded.resource_version)
				RETURNING 1)`
	return postgresStatements{
		get: tables.in(`
			SELECT name, labels, payload, resource_version, created_at_ms, updated_at_ms, {now_us}
			FROM {objects} WHERE object_type = $1 AND id = $2`),
		list: tables.in(`
			SELECT id, name, labels, payload, resource_version, created_at_ms, updated_at_ms, {now_us}
			FROM {objects} WHERE object_type = $1 AND id > $2 ORDER BY id LIMIT $3`),
		version: tables.in(`
			SELECT resource_version FROM {objects} WHERE object_type = $1 AND id = $2`),
		nameTaken: tables.in(`
			SELECT object_type, id FROM {objects} WHERE object_type = $1 AND id <> $2 AND name = $3`),
		idTaken: tables.in(`
			SELECT object_type, id FROM {objects} WHERE id = $2 AND object_type <> $1`),

		setLockTimeout: lockTimeout(`SELECT {lock_timeout}`, "$1"),
		// DO NOTHING rather than an error: no aborted transaction, no line in
		// the server's log.
		insert: tables.in(`
			INSERT INTO {objects} (object_type, id, name, labels, payload, resource_version, created_at_ms, updated_at_ms)
			VALUES ($1, $2, $3, $4::jsonb, $5, 1, 0, 0) ON CONFLICT DO NOTHING`),
		number: tables.in(strings.ReplaceAll(numberRow, "{version}", `greatest({now_us},
			(SELECT resource_version + 1 FROM {tombstones} WHERE object_type = $1 AND id = $2))`)),
		numberByClock: tables.in(strings.ReplaceAll(numberRow, "{version}", `{now_us}`)),

		// A version of 0 is no condition.
		replace: lockTimeout(`
			WITH wait AS MATERIALIZED (SELECT {lock_timeout})
			UPDATE {objects} SET name = $3, labels = $4::jsonb, payload = $5, updated_at_ms = {now_ms},
				resource_version = greatest(resource_version + 1, {now_us})
			FROM wait WHERE object_type = $1 AND id = $2 AND ($6::bigint = 0 OR resource_version = $6::bigint)
			RETURNING resource_version, created_at_ms, updated_at_ms`, "$7"),

		// FOR SHARE, at the end: it waits for a takeover that is under way and then
		// sees it, and makes the next one wait for the commit. Without a lock, and
		// with FOR KEY SHARE, stale writes get through. Renewals wait for it too,
		// so it must not stand at the begin.
		fence: tables.in(`
			SELECT 1 / count(*) FROM (
				SELECT 1 FROM {objects} WHERE object_type = $1 AND id = $2 AND payload = $3 FOR SHARE) held`),

		removeOnly: lockTimeout(`
			WITH wait AS MATERIALIZED (SELECT {lock_timeout}),
			gone AS (
				DELETE FROM {objects} USING wait WHERE object_type = $1 AND id = $2 AND resource_version = $3
				RETURNING 1)
			SELECT count(*) FROM gone`, "$4"),
		remove: lockTimeout(bury+`,
			pruned AS (
				DELETE FROM {tombstones} WHERE ctid = ANY (ARRAY(
					SELECT ctid FROM {tombstones}
					WHERE resource_version < (SELECT {now_us} - {tombstone_age_us}) -- the subselect lets the index be used
						AND (object_type, id) <> ($1, $2) -- a row can't be written twice by one statement
						-- Not before our own is locked: two deletes that prune each
						-- other's would deadlock.
						AND (SELECT count(*) FROM buried) >= 0
					ORDER BY resource_version LIMIT 10 FOR UPDATE SKIP LOCKED)))
			SELECT count(*) FROM gone`, "$4"),

		// It prunes nothing: it goes on to the lease's row, and could meet a release
		// that has that and wants a tombstone.
		removeFenced: lockTimeout(bury+`
			SELECT count(*) FROM gone`, "$4"),
	}
}
