package claims

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
)

// TryTakeFor takes rows that are free and ready, for the session with that ID. It does not wait, and may return
// none. Use it in a server for workers that cannot reach the database, see [tenure.Lease.Resume] and package
// queuehttp. The claims are the worker's, and this process does not hold them. The session must not be one that
// a process runs with [Session.Run], which would free rows that it does not know. If the session has no record,
// because it has ended or never began, the error is [tenure.ErrLost] and nothing is taken.
//
// If the answer to a call is lost, the rows that it took are the session's, and their attempts are counted. The
// next call returns them if it has [TakeOptions.Have]. Calls for one session must not overlap: each would
// regard as lost the rows that the other is about to return. A ctx that ends while the statement runs loses its answer.
//
// To wait for rows, call [Queue.AwaitReady] before the next call.
func (q *Queue) TryTakeFor(ctx context.Context, session string, o TakeOptions) ([]Claim, error) {
	if err := q.validTake(session, o); err != nil {
		return nil, q.opError("take", err)
	}
	q.freeExpired(ctx, false)
	var got []Claim
	err := againIfMoved(func() (err error) {
		got, err = q.takeFor(ctx, session, o)
		return err
	})
	if settlesIn(err) > 0 {
		err = nil
	}
	if err == nil {
		q.noteTried(source{q, o.filter()}, len(got))
	}
	return got, q.opError("take", err)
}

func (q *Queue) takeFor(ctx context.Context, session string, o TakeOptions) ([]Claim, error) {
	ctx, err := q.settling.on(ctx)
	if err != nil {
		return nil, err
	}
	if o.Have != nil {
		if got, err := q.missing(ctx, session, o); err != nil || len(got) > 0 {
			return got, err
		}
	}
	take := objects.Taking{Session: session, N: min(o.N, perStatement), Filter: o.filter(), Remote: true, Lasts: q.lasts(o)}
	rows, err := q.taker.take(ctx, take, nil, func(take objects.Taking) ([]objects.Claim, error) {
		return q.table.TakeReady(ctx, take, q.rows.limit)
	})
	if errors.Is(err, objects.ErrEnded) {
		err = fmt.Errorf("%w: session %q has no record: it has ended, or never began", tenure.ErrLost, session)
	}
	if len(rows) == 0 && err != nil {
		return nil, err
	}
	// There may be no worker that registers the queue. After one failure, only workers try again.
	if len(rows) > 0 && !q.registered.Load() && !q.tried.Swap(true) {
		q.registered.Store(q.register(ctx))
	}
	kept, exhausted := split(q.claimsOf(rows), rows)
	q.retireFor(ctx, exhausted)
	return kept, nil
}

// missing returns up to o.N rows that a session owns and its worker does not know of. It retires those
// without attempts left: the process that took them may have died before it did.
func (q *Queue) missing(ctx context.Context, session string, o TakeOptions) ([]Claim, error) {
	canceled, err := q.canceledOf(ctx, session)
	if len(canceled) > 0 {
		_, err = q.table.FreeCanceled(ctx, canceled, q.rows.limit)
	}
	if err != nil {
		return nil, err
	}
	rows, err := q.ownedBy(ctx, session)
	if err != nil {
		return nil, err
	}
	known := make(map[objects.Claim]bool, len(o.Have))
	for _, c := range o.Have {
		known[c.row()] = true
	}
	rows = slices.DeleteFunc(rows, func(r objects.Claim) bool { return known[claimOf(q.cfg.Table, r.Session, r, true).row()] })
	kept, exhausted := split(q.claimsOf(rows), rows)
	q.retireFor(ctx, exhausted)
	kept = kept[:min(len(kept), o.N)]
	if q.cfg.Expires == "" {
		return kept, nil
	}
	// They were taken some time ago, and are to last as long as the caller has asked for.
	for len(kept) > 0 {
		lost, err := q.endAll(ctx, objects.Ending{Extend: true, After: q.lasts(o)}, rowsOf(kept))
		if err != nil {
			return nil, err
		}
		if len(lost) == 0 {
			break
		}
		kept = slices.DeleteFunc(kept, func(c Claim) bool { return slices.Contains(lost, c.row()) })
	}
	return kept, nil
}

// lasts returns how long the claims of a call stand, if they expire.
func (q *Queue) lasts(o TakeOptions) time.Duration { return cmp.Or(o.Lasts, q.cfg.Deadline) }

// validTake returns a [tenure.ErrInvalid] that names everything that is wrong with a call.
func (q *Queue) validTake(session string, o TakeOptions) error {
	var problems objects.Problems
	problems.If(session == "", "session is empty")
	problems.Add(objects.ValidText("session", session))
	problems.Add(q.rows.fits(objects.SessionType, session))
	problems.Add(o.validate())
	problems.Duration("Lasts", o.Lasts)
	problems.If(o.Lasts != 0 && q.cfg.Expires == "", "Lasts needs a column that keeps the time: set Expires")
	return problems.Err()
}
