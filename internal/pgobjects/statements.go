package pgobjects

import (
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure/internal/objects"
)

// names are the quoted names of the tables.
type names struct {
	objects    string
	tombstones string
	claims     string
	requests   string

	claimsBySession, claimsByAge string // indexes, whose names have no schema
}

const pruneAtMost = 10000 // tombstones in one statement

// newNames returns the names of the tables in their schemas. An empty one leaves it to search_path.
func newNames(table string, schemas [tableCount]string) names {
	quote := func(i int) string {
		name := pgx.Identifier{table + ownTables[i].suffix}
		if schemas[i] != "" {
			name = append(pgx.Identifier{schemas[i]}, name...)
		}
		return name.Sanitize()
	}
	return names{
		objects:    quote(tableOfObjects),
		tombstones: quote(tableOfTombstones),
		claims:     quote(tableOfClaims),
		requests:   quote(tableOfRequests),

		// No longer than the name of the tombstones, for which there is room.
		claimsBySession: pgx.Identifier{table + objects.ClaimsSuffix + "_idx"}.Sanitize(),
		claimsByAge:     pgx.Identifier{table + objects.ClaimsSuffix + "_age"}.Sanitize(),
	}
}

// table returns the name of a table by its place in [ownTables].
func (n names) table(i int) string {
	return [tableCount]string{n.objects, n.tombstones, n.claims, n.requests}[i]
}

func (n names) in(sql string) string {
	limit := strconv.FormatInt(objects.VersionLimit, 10)
	return strings.NewReplacer(
		"{objects}", n.objects,
		"{tombstones}", n.tombstones,
		"{claims}", n.claims,
		"{requests}", n.requests,
		"{claims_by_session}", n.claimsBySession,
		"{claims_by_age}", n.claimsByAge,
		// floor, because a cast rounds, up to half a millisecond into the future.
		"{now_ms}", "floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint",
		"{now_us}", "floor(extract(epoch FROM clock_timestamp()) * 1000000)::bigint",
		"{server}", "floor(extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint", // of another server, another one
		// A version that is not positive is read as one above the limit, almost always a
		// different one for each value, so that a write can still name what was read.
		"{version}", "CASE WHEN resource_version > 0 THEN resource_version ELSE greatest("+limit+", 9223372036854775807 + resource_version) END",
		"{version_limit}", limit,
		"{prune_at_most}", strconv.Itoa(pruneAtMost),
		"{tombstone_age_us}", strconv.FormatInt(objects.TombstoneAge.Microseconds(), 10),
	).Replace(sql)
}

// statements are the statements of one table.
type statements struct {
	get, list, version, nameTaken, idTaken string
	insertNumbered, checkNumber            string
	insert, number, numberByClock          string
	replace, resume, fence                 string
	locker, lockers                        string
	remove                                 map[removal]string
	prune                                  string
}

// removal is what a delete does besides deleting. A role may lack the right to notify, so a
// statement that need not notify does not mention pg_notify.
type removal struct{ buries, wakes bool }

const (
	replace = `
			UPDATE {objects} SET name = $3, labels = $4::jsonb, payload = $5, ` + stamp + `
			WHERE object_type = $1 AND id = $2`

	stamp = `updated_at_ms = {now_ms},
				resource_version = greatest(CASE WHEN resource_version < {version_limit} THEN resource_version + 1 END, {now_us})`
)

// recordFence fails unless the record stands. FOR SHARE waits for a takeover in progress and then
// sees it, and makes the next takeover wait for the commit. Without a lock, or with FOR KEY SHARE,
// stale writes would get through. Renewals wait for this lock too, so the check must come at the
// end of the transaction.
const recordFence = failUnlessOne + `(
			SELECT 1 FROM {objects} WHERE object_type = $1 AND id = $2 AND payload = $3 FOR SHARE) held`

// failUnlessOne fails unless there is one row, with a text that says why to those who read the
// server's log. The planner would cast a constant before the rows are counted; it can't cast this.
const failUnlessOne = `
			SELECT CASE count(*) WHEN 1 THEN 1 ELSE ('` + objects.FenceLost + `' || count(*))::int END FROM `

// newStatements names every column, and a conflict target only of our own tombstones: the
// table may be another program's, with more columns and other keys.
func newStatements(n names) *statements {
	const numberRow = `
		UPDATE {objects} SET created_at_ms = {now_ms}, updated_at_ms = {now_ms}, resource_version = {number}
		WHERE object_type = $1 AND id = $2
			AND xmin = pg_current_xact_id_if_assigned()::xid -- the row that this transaction inserted
		RETURNING resource_version, created_at_ms, updated_at_ms`
	const gone = `
			WITH gone AS (
				DELETE FROM {objects} WHERE object_type = $1 AND id = $2 AND {version} = $3
				RETURNING resource_version)`
	const bury = `,
			buried AS (
				INSERT INTO {tombstones} AS t (object_type, id, resource_version)
				SELECT $1, $2, resource_version FROM gone WHERE resource_version < {version_limit}
				ON CONFLICT (object_type, id) DO UPDATE SET resource_version =
					greatest(CASE WHEN t.resource_version < {version_limit} THEN t.resource_version END, excluded.resource_version))`
	// A release need not be durable: if a crash undoes it, the lease expires. So it does
	// not wait for the disk, nor hold up others, because transactions that notify commit
	// one after another. Whatever is written after it is durable only with it.
	const notify = `
			SELECT count(*), (SELECT pg_notify($4, $5) FROM gone)::text, set_config('synchronous_commit', 'off', true) FROM gone`
	const count = `
			SELECT count(*), NULL, NULL FROM gone`
	return &statements{
		get: n.in(`
			SELECT name, labels, payload, {version}, created_at_ms, updated_at_ms, {now_us}
			FROM {objects} WHERE object_type = $1 AND id = $2`),
		list: n.in(`
			SELECT id, name, labels, payload, {version}, created_at_ms, updated_at_ms, {now_us}
			FROM {objects} WHERE object_type = $1 AND id > $2 ORDER BY id LIMIT $3`),
		version: n.in(`
			SELECT {version} FROM {objects} WHERE object_type = $1 AND id = $2`),
		nameTaken: n.in(`
			SELECT object_type, id FROM {objects} WHERE object_type = $1 AND id <> $2 AND name = $3`),
		idTaken: n.in(`
			SELECT object_type, id FROM {objects} WHERE id = $2 AND object_type <> $1`),

		// DO NOTHING instead of an error, which would abort the transaction and add a line to
		// the server's log.
		insertNumbered: n.in(`
			INSERT INTO {objects} (object_type, id, name, labels, payload, created_at_ms, updated_at_ms, resource_version)
			VALUES ($1, $2, $3, $4::jsonb, $5, {now_ms}, {now_ms}, greatest({now_us},
				(SELECT resource_version + 1 FROM {tombstones} WHERE object_type = $1 AND id = $2 AND resource_version < {version_limit})))
			ON CONFLICT DO NOTHING
			RETURNING resource_version, created_at_ms, updated_at_ms`),
		// Returns the version of the stored object, or 0 if there is none. Fails if that is the
		// object that was just inserted, and its version is not above that of the one that was
		// deleted while the insert waited.
		checkNumber: n.in(`
			SELECT coalesce(max({version}), 0), max(1 / (1 - (xmin = pg_current_xact_id_if_assigned()::xid AND EXISTS (
				SELECT FROM {tombstones} t WHERE t.object_type = $1 AND t.id = $2
					AND t.resource_version >= o.resource_version AND t.resource_version < {version_limit}))::int))
			FROM {objects} o WHERE object_type = $1 AND id = $2`),
		insert: n.in(`
			INSERT INTO {objects} (object_type, id, name, labels, payload, resource_version, created_at_ms, updated_at_ms)
			VALUES ($1, $2, $3, $4::jsonb, $5, 1, 0, 0) ON CONFLICT DO NOTHING`),
		number: n.in(strings.ReplaceAll(numberRow, "{number}", `greatest({now_us},
			(SELECT resource_version + 1 FROM {tombstones} WHERE object_type = $1 AND id = $2 AND resource_version < {version_limit}))`)),
		numberByClock: n.in(strings.ReplaceAll(numberRow, "{number}", `{now_us}`)),

		// A version of 0 means no condition.
		replace: n.in(replace + ` AND ($6::bigint = 0 OR {version} = $6::bigint)
			RETURNING resource_version, created_at_ms, updated_at_ms`),

		resume: n.in(`
			UPDATE {objects} SET ` + stamp + `
			WHERE object_type = $1 AND id = $2 AND position($3::bytea IN payload) > 0 AND labels ? $4 AND NOT labels ?| $5
			RETURNING name, labels, payload, resource_version, created_at_ms, updated_at_ms`),

		fence: n.in(recordFence),

		// Who locks a row alone is in its xmax, and those who share it are the members of that.
		locker: n.in(lockedBy(`SELECT xmax AS xid FROM {objects} WHERE object_type = $1 AND id = $2`)),
		lockers: n.in(lockedBy(`
			SELECT m.xid FROM {objects} o, pg_get_multixact_members(o.xmax) m WHERE o.object_type = $1 AND o.id = $2`)),

		remove: map[removal]string{
			{buries: true, wakes: true}: n.in(gone + bury + notify),
			{buries: true}:              n.in(gone + bury + count),
			{wakes: true}:               n.in(gone + notify),
			{}:                          n.in(gone + count),
		},

		prune: n.in(`
			DELETE FROM {tombstones} WHERE ctid = ANY (ARRAY(
				SELECT ctid FROM {tombstones} WHERE resource_version < (SELECT {now_us} - {tombstone_age_us})
				LIMIT {prune_at_most} FOR UPDATE SKIP LOCKED))`),
	}
}
