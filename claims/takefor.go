package claims

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
)

// TryTakeFor takes rows that are free and ready, for the session with that ID. It does not wait, and may return
// none. Use it in a server for workers that cannot reach the database, see [tenure.Lease.Resume] and package
// queuehttp. The claims are the worker's, and this process does not hold them. The session must not be one that
// a process runs with [Session.Run], which would free rows that it does not know. If the session has no record,
// because it has ended or never began, the error is [tenure.ErrLost] and nothing is taken.
//
// If the answer to a call is lost, the rows that it took are the session's, and their attempts are counted. The
// next call returns them if it has [TakeOptions.Have]. Calls for one session must not overlap: each would
// regard as lost the rows that the other is about to return.
func (q *Queue) TryTakeFor(ctx context.Context, session string, o TakeOptions) ([]Claim, error) {
	err := errors.Join(objects.ValidText("session", session), q.rows.fits(objects.SessionType, session), o.validate())
	if session == "" {
		err = fmt.Errorf("%w: session is empty", tenure.ErrInvalid)
	}
	if err != nil {
		return nil, q.opError("take", err)
	}
	q.freeExpired(ctx)
	var got []Claim
	err = againIfMoved(func() (err error) {
		got, err = q.takeFor(ctx, session, o)
		return err
	})
	if settlesIn(err) > 0 {
		return nil, nil
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
	take := objects.Taking{Session: session, N: min(o.N, perStatement), Filter: o.filter(), Remote: true}
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
	return kept[:min(len(kept), o.N)], nil
}

// TakeFor is like [Queue.TryTakeFor], but waits until a row is ready. If ctx is done before that, it returns no
// claims and no error. If this process has a [Worker] of the queue whose session runs, the rows of a session
// that expires while TakeFor waits become free at once instead of within a TTL.
func (q *Queue) TakeFor(ctx context.Context, session string, o TakeOptions) ([]Claim, error) {
	take := func() ([]Claim, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), q.rows.limit) // a statement that is cut off may still take rows
		defer cancel()
		return q.TryTakeFor(ctx, session, o)
	}
	got, err := take()
	if err != nil || len(got) > 0 {
		return got, err
	}
	// Rows that an earlier statement, whose answer was lost, takes only now are returned by the next call.
	o.Have = nil
	hints := tenure.Watch(q.store, keyOf(q.cfg.Table)) // before the next look, so that no hint is missed
	defer hints.Stop()
	for _, w := range q.allWorkers() {
		defer w.s.sweeper.addWaiter(nil)()
	}
	var spurious pace.Limiter
	for woken := false; ctx.Err() == nil; {
		if got, err := take(); err != nil || len(got) > 0 {
			return got, err
		}
		pause := pace.Jitter(q.cfg.PollInterval)
		woken, _ = pace.Await(ctx, hints.C(), spurious.IgnoreFor(woken, min(coalesce, pause)), pause)
	}
	return nil, nil
}
