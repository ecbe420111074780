package pgobjects

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pgconns"
)

const (
	// lockerAgain is how long an answer about who has locked a record is reused.
	lockerAgain = 10 * time.Second

	// whoLocks is the answer if no transaction was found, or if time ran out.
	whoLocks = "a transaction keeps the record locked: see pg_prepared_xacts, and pg_locks with pg_stat_activity"
)

// locker is the transaction that was last found to have locked a record.
type locker struct {
	of   objects.ID
	at   time.Time
	text string
}

// explainLocked adds the lock's owner to the error of a write that did not get the lock in time. It asks
// the server only once in a while, in the time that the call has left.
func (t *Table) explainLocked(ctx context.Context, id objects.ID, err error) error {
	if pgconns.SQLState(err) != pgconns.StateLockNotAvailable {
		return err
	}
	last := t.locker.Load()
	if last == nil || last.of != id || time.Since(last.at) >= lockerAgain {
		now := &locker{of: id, at: time.Now(), text: whoLocks}
		if t.locker.CompareAndSwap(last, now) { // so that other calls say this meanwhile
			now = &locker{of: id, at: now.at, text: cmp.Or(t.findLockers(ctx, id), whoLocks)}
			t.locker.Store(now)
		}
		last = now
	}
	return fmt.Errorf("%w (%s)", err, last.text)
}

// findLockers returns which transactions keep a record locked, or "".
func (t *Table) findLockers(ctx context.Context, id objects.ID) string {
	tables := t.setups.found.Load()
	if tables == nil {
		return ""
	}
	for _, query := range []string{oneLocks, someLock} { // the second fails unless there are several
		limit := time.Second
		if deadline, ok := ctx.Deadline(); ok {
			limit = min(limit, time.Until(deadline)/2)
		}
		if limit < time.Millisecond {
			return ""
		}
		var found []string
		err := t.conns.Call(ctx, func(pool *pgxpool.Pool, _ bool) error {
			batch := &pgx.Batch{} // the server ends it, so that the connection survives
			batch.Queue(`SELECT set_config('statement_timeout', $1, true)`, strconv.FormatInt(limit.Milliseconds(), 10))
			batch.Queue(tables.in(query), id.Type, id.ID).Query(func(rows pgx.Rows) (err error) {
				found, err = pgx.CollectRows(rows, pgx.RowTo[string])
				return err
			})
			return pool.SendBatch(ctx, batch).Close()
		})
		if err == nil && len(found) > 0 {
			return "the record is locked by " + strings.Join(found, " and ")
		}
	}
	return ""
}

// A row's xmax is the transaction that has locked it, or the set of transactions that share the
// lock.
const (
	oneLocks = lockedBy + `SELECT xmax AS xid FROM {objects} WHERE object_type = $1 AND id = $2` + lockedSince
	someLock = lockedBy + `
			SELECT m.xid FROM {objects} o, pg_get_multixact_members(o.xmax) m WHERE o.object_type = $1 AND o.id = $2` + lockedSince
)

// lockedBy and lockedSince, around a query of some IDs, describe the transactions with these IDs; each
// transaction locks its own ID. A subtransaction that has ended is not found.
const (
	lockedBy = `
		SELECT DISTINCT CASE
			WHEN p.gid IS NOT NULL THEN format('the prepared transaction %L of %s since %s, until ROLLBACK PREPARED or COMMIT PREPARED ends it',
				p.gid, p.owner, date_trunc('second', p.prepared))
			ELSE format('process %s of %s (%s), which pg_terminate_backend(%1$s) ends', l.pid, a.usename, nullif(a.application_name, ''))
		END
		FROM (`
	lockedSince = `) x JOIN pg_locks l ON l.locktype = 'transactionid' AND l.transactionid = x.xid AND l.mode = 'ExclusiveLock' AND l.granted
		LEFT JOIN pg_prepared_xacts p ON p.transaction = l.transactionid
		LEFT JOIN pg_stat_activity a ON a.pid = l.pid
		WHERE p.gid IS NOT NULL OR l.pid IS NOT NULL`
)
