package sqliteobjects

import (
	"context"
	"database/sql"
	"slices"

	"github.com/tenurelib/tenure/internal/objects"
)

// Only a limited number of rows with the same key may be claimed at once.
const (
	roomOfKey = `{key_limit} - (SELECT count(*) FROM (SELECT 1 FROM {rows} WHERE {session} IS NOT NULL AND {key} = tenure_key LIMIT {key_limit}))`
	// openRows returns those of the given rows whose keys have room for them.
	openRows = `
			SELECT tenure_id FROM (
				SELECT tenure_id, tenure_at, tenure_key, row_number() OVER (PARTITION BY tenure_key ORDER BY tenure_at) AS tenure_n
				FROM (SELECT key AS tenure_at, value AS tenure_id FROM json_each(?1))
				CROSS JOIN (SELECT {id} AS tenure_row, {key} AS tenure_key FROM {rows}) ON tenure_row = tenure_id)
			WHERE tenure_n <= ` + roomOfKey + ` ORDER BY tenure_at LIMIT ?2`
	// openRowsOfAll finds the first rows of all keys that have room. It goes through the keys in their index, because each
	// may have a million rows. It begins at the least number and the least text, because the planner would read the whole
	// table to find the first key.
	openRowsOfAll = `
			WITH RECURSIVE tenure_keys(tenure_key) AS (
				VALUES (-9e999), ('')
				UNION
				SELECT (SELECT {key} ` + whichAreReady + ` AND {key} > tenure_key ORDER BY {key} LIMIT 1) FROM tenure_keys WHERE tenure_key IS NOT NULL),
			tenure_open(tenure_key, tenure_room) AS MATERIALIZED (
				SELECT tenure_key, ` + roomOfKey + ` AS tenure_room FROM tenure_keys WHERE tenure_key IS NOT NULL AND tenure_room > 0),
			tenure_picked(tenure_id, tenure_n, tenure_room) AS MATERIALIZED (
				SELECT r.{id}, row_number() OVER (PARTITION BY tenure_key ORDER BY {order}), tenure_room FROM tenure_open CROSS JOIN {rows} r
				WHERE r.{id} IN (SELECT {id} ` + whichAreReady + ` AND {key} = tenure_key ORDER BY {order} LIMIT min(?1, {key_limit})))
			SELECT CAST({id} AS TEXT) FROM {rows} WHERE {id} IN (SELECT tenure_id FROM tenure_picked WHERE tenure_n <= tenure_room)
			ORDER BY {order} LIMIT ?1`
)

// openIDs is readyIDs for rows with a limit per key. It considers the first ready rows. Only if the keys of all of these
// are full does it consider the others.
func (r *Rows) openIDs(ctx context.Context, db reader, n int, take objects.Taking) ([]string, error) {
	first := 2*n + 20
	ids, err := r.readyIDs(ctx, db, readyRows, first, take)
	if err != nil || len(ids) == 0 {
		return nil, err
	}
	valid := slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return objects.ValidText("ID", id) != nil })
	open, err := all(ctx, db, func(rows *sql.Rows) (id string, err error) { return id, rows.Scan(&id) }, r.texts.In(openRows), list(valid), n)
	if err == nil && len(open) == 0 && len(ids) == first && take.Only == nil {
		return r.readyIDs(ctx, db, openRowsOfAll, n, take)
	}
	return open, err
}
