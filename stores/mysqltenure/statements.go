package mysqltenure

import "strings"

// statements are the texts of a store's statements. All are right under any isolation level and time zone, and under any
// sql_mode and character set that [server.fit] accepts.
type statements struct {
	create, get, list, types, state, replace, revive, insert, remove, wake, fence, put, watch string
	fencedReplace, fencedRemove                                                               string
}

// An object that was deleted leaves its row, with a payload that is NULL: the row has the version above
// which the key goes on. So there is no DELETE, and with it no lock on a gap that a later INSERT could
// wait for. Nothing removes these rows.
//
// MySQL has no RETURNING. The version of a write comes back as the ID that the server says it has inserted
// last, and is 0 if there was no such row, whatever clientFoundRows says. Assignments are made from left to
// right.
//
// The keys are bytes, because the collations of text fold case, or ignore spaces at the end.
const (
	createTable = `CREATE TABLE IF NOT EXISTS {table} (
  object_type VARBINARY(255) NOT NULL,
  id VARBINARY(1024) NOT NULL,
  name VARBINARY(1024) NULL,
  labels MEDIUMBLOB NULL COMMENT 'JSON',
  payload MEDIUMBLOB NULL COMMENT 'NULL: deleted, and the row has only the last version',
  resource_version BIGINT NOT NULL COMMENT 'time of the last write in microseconds, or one more than before',
  created_at_us BIGINT NOT NULL,
  written_at_us BIGINT NOT NULL COMMENT 'by the clock of the server, for ages',
  fences BIGINT NOT NULL DEFAULT 0 COMMENT 'how many fences have passed',
  wakes BIGINT NOT NULL DEFAULT 0 COMMENT 'how often watches were woken',
  PRIMARY KEY (object_type, id),
  UNIQUE KEY name (object_type, name)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC`

	getObject = `SELECT name, labels, payload, resource_version, created_at_us, ` + age + `
		FROM {table} WHERE object_type = ? AND id = ? AND payload IS NOT NULL`
	listObjects = `SELECT id, name, labels, payload, resource_version, created_at_us, ` + age + `
		FROM {table} WHERE object_type = ? AND id > ? AND payload IS NOT NULL ORDER BY id LIMIT ?`
	listTypes = `SELECT DISTINCT object_type FROM {table} WHERE payload IS NOT NULL ORDER BY object_type LIMIT ?`
	getState  = `SELECT IF(payload IS NULL, 0, resource_version), created_at_us FROM {table} WHERE object_type = ? AND id = ?`

	replaceObject = `UPDATE {table} SET name = ?, labels = ?, payload = ?, written_at_us = {now},
		resource_version = LAST_INSERT_ID(GREATEST(resource_version + 1, {now}))
		WHERE object_type = ? AND id = ? AND resource_version = ? AND payload IS NOT NULL`
	reviveObject = `UPDATE {table} SET name = ?, labels = ?, payload = ?, written_at_us = {now},
		resource_version = LAST_INSERT_ID(GREATEST(resource_version + 1, {now})), created_at_us = resource_version
		WHERE object_type = ? AND id = ? AND payload IS NULL`
	insertObject = `INSERT INTO {table} (name, labels, payload, object_type, id, written_at_us, resource_version, created_at_us)
		SELECT ?, ?, ?, ?, ?, n.v, LAST_INSERT_ID(n.v), n.v FROM (SELECT {now} AS v) n`
	removeObject = `UPDATE {table} SET name = NULL, labels = NULL, payload = NULL
		WHERE object_type = ? AND id = ? AND resource_version = ? AND payload IS NOT NULL`

	// The same, fenced: it writes to the object and to the term's record, or to neither.
	fencedReplace = `UPDATE {table} o JOIN {table} l ON l.object_type = ? AND l.id = ? AND l.payload = ?
		SET l.fences = l.fences + 1, o.name = ?, o.labels = ?, o.payload = ?, o.written_at_us = {now},
		o.resource_version = LAST_INSERT_ID(GREATEST(o.resource_version + 1, {now}))
		WHERE o.object_type = ? AND o.id = ? AND o.resource_version = ? AND o.payload IS NOT NULL`
	fencedRemove = `UPDATE {table} o JOIN {table} l ON l.object_type = ? AND l.id = ? AND l.payload = ?
		SET l.fences = l.fences + 1, o.name = NULL, o.labels = NULL, o.payload = NULL
		WHERE o.object_type = ? AND o.id = ? AND o.resource_version = ? AND o.payload IS NOT NULL`

	// The name is NULL, so only the primary key can be there already.
	wakeWatches = `INSERT INTO {table} (object_type, id, resource_version, created_at_us, written_at_us, wakes)
		VALUES (?, ?, 0, 0, 0, 1) ON DUPLICATE KEY UPDATE wakes = wakes + 1`
	readWatched = `SELECT labels, payload, wakes, IF(payload IS NULL, resource_version, 0), @@global.read_only FROM {table} WHERE object_type = ? AND id = ?`

	// A fence fails, under any sql_mode, if the record on which it depends does not stand: a number is then too great, and
	// the server's error quotes the expression. It also fails where there is no such row, as in another database.
	//
	// On one server it locks the record, and a takeover waits for the transaction.
	lockTerm = `SET @tenure_fence = (SELECT IF(f.stands <> 1, {max} + LENGTH(CONCAT('{lost}', f.stands)), IF({alone}, 1, {max} + LENGTH(CONCAT('{cluster}', f.stands))))
		FROM (SELECT COUNT(*) AS stands FROM {table} WHERE object_type = ? AND id = ? AND payload = ? LOCK IN SHARE MODE) f)`

	// In a cluster locks are those of one node. There it writes to the record: a takeover on another node writes to it too, and
	// one of the two is refused. The version stays, so a renewal is only delayed.
	writeTerm = `INSERT INTO {table} (object_type, id, resource_version, created_at_us, written_at_us)
		SELECT f.object_type, f.id, IF(f.stands = 1, 0, {max} + LENGTH(CONCAT('{lost}', f.stands))), 0, 0
		FROM (SELECT COUNT(*) AS stands, COALESCE(MAX(object_type), '') AS object_type, COALESCE(MAX(id), '') AS id
			FROM {table} WHERE object_type = ? AND id = ? AND payload = ? FOR UPDATE) f
		ON DUPLICATE KEY UPDATE fences = fences + 1`

	// The same for a version, in a transaction of the program's own.
	putObject = `INSERT INTO {table} (object_type, id, resource_version, created_at_us, written_at_us)
		SELECT f.object_type, f.id, IF(f.stands = 1, 0, {max} + LENGTH(CONCAT('{conflict}', f.stands))), 0, 0
		FROM (SELECT COUNT(*) AS stands, COALESCE(MAX(object_type), '') AS object_type, COALESCE(MAX(id), '') AS id
			FROM {table} WHERE object_type = ? AND id = ? AND resource_version = ? AND payload IS NOT NULL FOR UPDATE) f
		ON DUPLICATE KEY UPDATE name = ?, labels = ?, payload = ?, written_at_us = {now},
			resource_version = GREATEST(resource_version + 1, {now})`
)

// now is the server's time in microseconds since 1970 at the start of the statement. UNIX_TIMESTAMP would be
// wrong for an hour when summer time ends. A write that waits for a lock is stamped early, which makes its
// object look older by no more than the call took.
const now = `TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))`

// age is for the clock of one server. On another it fails, as the fence does, if several accept writes by now.
const age = `IF({alone}, {now} - written_at_us, {max} + LENGTH(CONCAT('{cluster}', written_at_us)))`

const greatest = `9223372036854775807`

// These texts are part of the errors of statements that have failed. tenure.FenceError looks for the first.
const (
	lost     = "tenure: the term is over; records that stand: "
	conflict = "tenure: the object has another version; records that have this one: "
	cluster  = "tenure: several servers accept writes now, and the fence is for one: open the store again; records: "
)

// newStatements returns the statements on a table whose name is quoted. The fence is the one for that server. On one
// that may become a node of a cluster while the store is open, it fails from then on, unless MySQL loads group replication only then.
func newStatements(table string, is server) statements {
	fence, alone := lockTerm, "1"
	if is.hasManyWriters() {
		fence = writeTerm
	} else if _, ok := is.variables["wsrep_on"]; ok {
		alone = "NOT @@wsrep_on"
	} else if _, ok := is.variables["group_replication_single_primary_mode"]; ok {
		alone = "@@group_replication_single_primary_mode"
	}
	in := strings.NewReplacer("{table}", table, "{now}", now, "{max}", greatest, "{lost}", lost, "{conflict}", conflict, "{cluster}", cluster, "{alone}", alone).Replace
	return statements{
		create: in(createTable), get: in(getObject), list: in(listObjects), types: in(listTypes), state: in(getState),
		replace: in(replaceObject), revive: in(reviveObject), insert: in(insertObject), remove: in(removeObject),
		fencedReplace: in(fencedReplace), fencedRemove: in(fencedRemove), wake: in(wakeWatches), watch: in(readWatched), fence: in(fence), put: in(putObject),
	}
}
