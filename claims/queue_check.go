package claims

import (
	"cmp"
	"context"
	"math"

	"github.com/tenurelib/tenure/internal/report"
)

// Check returns a [tenure.ErrSetup] if the table can't be used as a queue. The text says what is missing, with
// the DDL that adds it. The first statement checks this too. If the queue has a [Worker], Check also returns an
// ErrSetup if [Migrate] has not made the tables that the worker's session needs. Use Check to fail at startup.
//
// Check logs a warning if rows name owners that are no sessions of the store, such as workers of another system.
// Nobody takes these rows; the page docs/queues.md says how to move such a table.
func (q *Queue) Check(ctx context.Context) error {
	err := q.table.Check(ctx, q.rows.limit)
	if err != nil {
		return q.opError("check", err)
	}
	if workers := q.allWorkers(); len(workers) > 0 {
		if _, err = workers[0].s.claims.Look(ctx, q.cfg.Table, []string{"*"}, q.rows.limit); err != nil {
			return q.opError("check", err)
		}
	}
	q.tellUnknown(ctx)
	return nil
}

const noSessions = "rows name owners that are no sessions of this store, and are not taken: set their session to NULL if nobody works on them"

// tellUnknown logs how many rows name owners that are no sessions of the store. It is no error if that can't be found out: a
// queue passes [Queue.Check] before the tables of claims are there.
func (q *Queue) tellUnknown(ctx context.Context) {
	defer report.Flush(q.cfg.Logger)
	sessions, err := q.table.Sessions(ctx, q.rows.limit)
	unknown, first := make(map[string]bool), ""
	for _, s := range sessions {
		if s.Record == nil && !s.Gone {
			unknown[s.ID], first = true, cmp.Or(first, s.ID)
		}
	}
	if err != nil || len(unknown) == 0 {
		return
	}
	told := []any{"table", q.cfg.Table, "owners", len(unknown), "first", first}
	if counts, err := q.table.Counts(ctx, math.MaxInt32, q.rows.limit); err == nil { // of a large table it may take too long
		rows := 0
		for _, c := range counts {
			if unknown[c.Session] {
				rows += c.Claims
			}
		}
		told = append(told, "rows", rows)
	}
	q.cfg.Logger.Warn(noSessions, told...)
}
