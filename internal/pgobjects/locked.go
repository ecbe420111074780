package pgobjects

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pgconns"
)

const (
	// lockerAgain is how long the answer to who has locked a record is used again.
	lockerAgain = 10 * time.Second

	// whoLocks is said where nobody was found, or time was short.
	whoLocks = "a transaction keeps the record locked: see pg_prepared_xacts, and pg_locks with pg_stat_activity"
)

// lockers knows who was last found to have locked a record.
type lockers struct {
	mu   sync.Mutex // never held across I/O
	of   objects.ID
	at   time.Time
	text string
}

// explainLocked adds to the error of a write that has waited for a lock in vain who holds it. It asks
// once in a while, in what is left of the call's time.
func (t *Table) explainLocked(ctx context.Context, id objects.ID, err error) error {
	if pgconns.SQLState(err) != pgconns.StateLockNotAvailable {
		return err
	}
	l := &t.lockers
	l.mu.Lock()
	text, known := l.text, l.of == id && time.Since(l.at) < lockerAgain
	if !known {
		l.of, l.at, l.text, text = id, time.Now(), whoLocks, whoLocks
	}
	l.mu.Unlock()
	if !known {
		if found := t.findLockers(ctx, id); found != "" {
			text = found
			l.mu.Lock()
			if l.of == id {
				l.text = found
			}
			l.mu.Unlock()
		}
	}
	return fmt.Errorf("%w (%s)", err, text)
}

// findLockers returns which transactions keep a record locked, or "".
func (t *Table) findLockers(ctx context.Context, id objects.ID) string {
	tables := t.setups.found.Load()
	if tables == nil {
		return ""
	}
	pool, _, done, err := t.conns.For(ctx)
	if err != nil {
		return ""
	}
	defer done()
	var found []string
	for _, query := range []string{tables.sql.locker, tables.sql.lockers} { // the second fails unless there are several
		limit := time.Second
		if deadline, ok := ctx.Deadline(); ok {
			limit = min(limit, time.Until(deadline)/2)
		}
		if limit < time.Millisecond {
			return ""
		}
		batch := &pgx.Batch{} // the server ends it, so that the connection survives
		batch.Queue(`SELECT set_config('statement_timeout', $1, true)`, strconv.FormatInt(limit.Milliseconds(), 10))
		batch.Queue(query, id.Type, id.ID).Query(func(rows pgx.Rows) error {
			found, err = pgx.CollectRows(rows, pgx.RowTo[string])
			return err
		})
		if err := pool.SendBatch(ctx, batch).Close(); err == nil && len(found) > 0 {
			return "the record is locked by " + strings.Join(found, " and ")
		}
	}
	return ""
}

// lockedBy returns a statement that describes the transactions with some IDs, which each of them
// locks. A subtransaction that has ended is not found.
func lockedBy(xids string) string {
	return `
		SELECT DISTINCT CASE
			WHEN p.gid IS NOT NULL THEN format('the prepared transaction %L of %s since %s, until ROLLBACK PREPARED or COMMIT PREPARED ends it',
				p.gid, p.owner, date_trunc('second', p.prepared))
			ELSE format('process %s of %s (%s), which pg_terminate_backend(%1$s) ends', l.pid, a.usename, nullif(a.application_name, ''))
		END
		FROM (` + xids + `) x JOIN pg_locks l ON l.locktype = 'transactionid' AND l.transactionid = x.xid AND l.mode = 'ExclusiveLock' AND l.granted
		LEFT JOIN pg_prepared_xacts p ON p.transaction = l.transactionid
		LEFT JOIN pg_stat_activity a ON a.pid = l.pid
		WHERE p.gid IS NOT NULL OR l.pid IS NOT NULL`
}
