package claims

import (
	"context"
	"log/slog"
	"slices"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
)

// standing divides the claims that a statement has not ended, as [ownerTable.standing] does. It frees those whose rows
// are canceled, and returns them as ended.
func (q *Queue) standing(ctx context.Context, left []objects.Claim) (ended, stand []objects.Claim, err error) {
	var canceled []objects.Claim
	if q.cfg.Canceled != "" {
		err = inGroups(q.rows.groups, left, func(left []objects.Claim) error {
			freed, err := q.table.FreeCanceled(ctx, left, q.limit())
			canceled = append(canceled, freed...)
			return err
		}, nil)
	}
	if err == nil {
		ended, stand, err = q.rows.standing(ctx, q.cfg.Table, left)
	}
	if len(canceled) > 0 {
		q.madeRoom()
	}
	for i, row := range ended {
		ended[i].Canceled = slices.ContainsFunc(canceled, func(c objects.Claim) bool { return c.ID == row.ID && c.Token == row.Token })
	}
	return ended, stand, err
}

// canceledOf returns the canceled rows that a session owns.
func (q *Queue) canceledOf(ctx context.Context, session string) (canceled []objects.Claim, err error) {
	for after, more := "", q.cfg.Canceled != ""; more; {
		var rows []objects.Claim
		n, err := q.rows.groups.page(ctx, perStatement, func(n int) (err error) {
			rows, err = q.table.Canceled(ctx, session, after, n, q.limit())
			return err
		})
		if err != nil {
			return nil, err
		}
		canceled, more = append(canceled, rows...), len(rows) == n
		if more {
			after = rows[n-1].ID
		}
	}
	return canceled, nil
}

// tellCanceled tells the funcs whose rows are canceled to return, until the term is over. The rows are freed when the
// funcs have returned.
func (k *kind) tellCanceled(l *ledger) {
	for {
		select {
		case <-l.term.ended:
			return
		case <-time.After(k.queue.cfg.PollInterval):
		}
		if err := k.readCanceled(l); err != nil && l.term.ctx.Err() == nil {
			k.s.retries.Log(k.s.cfg.Logger, slog.LevelWarn, "failed to read which rows are canceled; retrying", err, "table", k.name)
		}
	}
}

func (k *kind) readCanceled(l *ledger) error {
	k.s.mu.Lock()
	holds := l.size()
	k.s.mu.Unlock()
	if holds == 0 {
		return nil
	}
	rows, err := k.queue.canceledOf(l.term.ctx, l.term.id)
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	for _, r := range rows {
		if call := k.running[r.ID]; call.isFor(l.term.id, r.Token) {
			call.cancel(ErrCanceled)
		}
	}
	return err
}
