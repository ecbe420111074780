package pgobjects

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pgconns"
)

// If only a limited number of rows with the same key may be claimed at once, taking rows needs two statements in one
// transaction, because a statement does not see what was claimed while it ran. The first statement locks keys. The
// second sees everything that was claimed under these locks before, and takes only rows with these keys.
const (
	// roomOfKey counts how many more rows with a key may be claimed. It reads at most as many index entries as rows may
	// be claimed.
	roomOfKey = `
				SELECT {key_limit} - count(*) AS tenure_room FROM (
					SELECT FROM {rows} WHERE {session} IS NOT NULL AND {key} = tenure_key LIMIT {key_limit}) tenure_claimed`
	// openRows finds the first rows of keys that have room. It considers the keys of the first ready rows. Only if these
	// are all full does it go through the keys of all ready rows, in their index: a key may have a million rows.
	openRows = `
			WITH RECURSIVE tenure_first AS MATERIALIZED (
				SELECT DISTINCT tenure_key FROM (SELECT {key} AS tenure_key ` + readyRows + onlyThese + ` ORDER BY {order} LIMIT 2 * $2::bigint + 20) tenure_f),
			tenure_some AS MATERIALIZED (
				SELECT tenure_key, tenure_room FROM tenure_first CROSS JOIN LATERAL (` + roomOfKey + `) tenure_r WHERE tenure_room > 0),
			tenure_keys(tenure_key) AS (
				(SELECT {key} ` + readyRows + ` AND $4::text[] IS NULL AND NOT EXISTS (SELECT FROM tenure_some) ORDER BY {key} LIMIT 1)
				UNION ALL
				SELECT (SELECT {key} ` + readyRows + ` AND {key} > tenure_key ORDER BY {key} LIMIT 1) FROM tenure_keys WHERE tenure_key IS NOT NULL),
			tenure_open AS (
				SELECT * FROM tenure_some
				UNION ALL
				SELECT tenure_key, tenure_room FROM tenure_keys CROSS JOIN LATERAL (` + roomOfKey + `) tenure_r WHERE tenure_key IS NOT NULL AND tenure_room > 0),
			tenure_picked AS MATERIALIZED (
				SELECT tenure_id FROM tenure_open CROSS JOIN LATERAL (
					SELECT {id} AS tenure_id ` + readyRows + onlyThese + ` AND {key} = tenure_key ORDER BY {order} LIMIT least(tenure_room, $2::bigint)) tenure_p),
			tenure_ordered AS MATERIALIZED (
				SELECT {id} AS tenure_id, {key} AS tenure_key FROM {rows} WHERE {id} = ANY(ARRAY(SELECT tenure_id FROM tenure_picked)) ORDER BY {order})`
	whichAreReadyPerKey = openRows + `
			SELECT tenure_id::text, $1::text, 0::bigint, 0 FROM tenure_ordered LIMIT $2::bigint`
	// lockKeys notes the keys that it has locked, once for each row to take. It returns whether it has found rows and, if
	// other transactions have locked all keys, the lock of the first key.
	lockKeys = openRows + `,
			tenure_locked AS MATERIALIZED (
				SELECT tenure_key FROM tenure_ordered WHERE pg_try_advisory_xact_lock(` + lockOfKey + `) LIMIT $2::bigint)
			SELECT EXISTS (SELECT FROM tenure_ordered) AND $1::text IS NOT NULL,
				(SELECT ` + lockOfKey + ` FROM tenure_ordered WHERE NOT EXISTS (SELECT FROM tenure_locked) LIMIT 1),
				set_config('tenure.keys', ARRAY(SELECT tenure_key FROM tenure_locked)::text, true)`
	lockOfKey      = `hashtextextended(tenure_key::text, {rows_literal}::regclass::oid::bigint)`
	takeRowsPerKey = `
			WITH tenure_locked AS MATERIALIZED (
				SELECT tenure_key, count(*) AS tenure_n FROM unnest(current_setting('tenure.keys')::{key_type}[]) tenure_key GROUP BY 1),
			tenure_found AS MATERIALIZED (
				SELECT tenure_id FROM tenure_locked CROSS JOIN LATERAL (` + roomOfKey + `) tenure_r CROSS JOIN LATERAL (
					SELECT {id} AS tenure_id ` + readyRows + onlyThese + ` AND {key} = tenure_key
					ORDER BY {order} LIMIT least(tenure_room, tenure_n) FOR NO KEY UPDATE SKIP LOCKED) tenure_f),
			tenure_ready AS MATERIALIZED (
				SELECT {id} AS tenure_id FROM {rows} WHERE {id} = ANY(ARRAY(SELECT tenure_id FROM tenure_found)) ORDER BY {order} LIMIT $2),` + takeReady
)

var takeRowsPerKeyFor = forRemote(takeRowsPerKey)

// takePerKey takes rows with a limit per key. If it gets none of the rows that it has found, because other sessions
// have taken them or a transaction of the application has locked them, it looks for twice as many. If other transactions have
// locked all keys, it waits for the lock of the first key while it holds none itself.
func (r *Rows) takePerKey(ctx context.Context, limit time.Duration, s *rowSetup, text, where string, args []any, take objects.Taking) ([]objects.Claim, error) {
	const (
		most     = 10 // then other callers get their turn
		mostRows = 1000
	)
	looking := takeArgs(take) // the statement that looks has no time at which claims expire
	lookWhere, err := take.In("$", len(looking))
	if err != nil {
		return nil, err
	}
	looking = append(looking, take.Args...)
	var await *int64
	for range most {
		var found bool
		var taken *int64
		lock := time.Duration(0)
		if await != nil {
			lock = lockWait(limit)
		}
		rows, err := r.sendWhere(ctx, limit, lock, s, text, where, args, func(s *rowSetup, batch *pgx.Batch) {
			if await != nil {
				batch.Queue(`SELECT pg_advisory_xact_lock($1)`, *await)
			}
			batch.Queue(s.texts.Where(lockKeys, lookWhere), looking...).QueryRow(func(row pgx.Row) error {
				return row.Scan(&found, &taken, nil)
			})
		})
		if await != nil && pgconns.SQLState(err) == pgconns.StateLockNotAvailable {
			return nil, nil
		}
		if err != nil || len(rows) > 0 || !found {
			return rows, err
		}
		await = taken
		looking[1] = min(2*looking[1].(int), max(mostRows, args[1].(int)))
	}
	return nil, nil
}
