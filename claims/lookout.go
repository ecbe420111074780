package claims

import (
	"context"
	"slices"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
)

// lookout looks for ready rows on behalf of all calls that wait for the same ones, so that a thousand waiting workers
// cost the database as much as one.
type lookout struct {
	source
	calls []chan struct{} // closed when there may be a row for the call; the one that has waited longest is the first
	stop  context.CancelFunc
	ended chan struct{}
}

// AwaitReady waits until there may be a row for a call of [Queue.TryTakeFor] with the same [TakeOptions.Where] and Args;
// another worker may be quicker. If ctx is done before that, it returns the reason. If the store fails, it does not wait,
// because the next call says why.
//
// The calls of a process that wait with the same condition share one look per [QueueConfig.PollInterval], and one for each
// [Queue.Wake]. As many calls return as there are rows. If this process has a [Worker] of the queue whose session runs,
// the rows of a session that expires meanwhile become free at once instead of within a TTL.
func (q *Queue) AwaitReady(ctx context.Context, where string, args ...any) error {
	o := TakeOptions{N: 1, Where: where, Args: args}
	if err := o.validate(); err != nil {
		return q.opError("await", err)
	}
	call := make(chan struct{})
	defer q.leave(q.join(ctx, source{q, o.filter()}, call), call)
	select {
	case <-call:
		return nil
	case <-ctx.Done():
		select {
		case <-call: // otherwise no other call would be told of the row
			return nil
		default:
			return q.opError("await", context.Cause(ctx))
		}
	}
}

// join adds a call to the lookout of its source, which begins to look with its first call.
func (q *Queue) join(ctx context.Context, of source, call chan struct{}) *lookout {
	q.mu.Lock()
	defer q.mu.Unlock()
	i := slices.IndexFunc(q.lookouts, func(l *lookout) bool { return l.is(&of) })
	if i < 0 {
		looking, stop := context.WithCancel(context.WithoutCancel(ctx))
		l := &lookout{source: of, stop: stop, ended: make(chan struct{})}
		i, q.lookouts = len(q.lookouts), append(q.lookouts, l)
		go func() { defer close(l.ended); q.lookOut(looking, l) }()
	}
	l := q.lookouts[i]
	l.calls = append(l.calls, call)
	return l
}

// leave removes a call from its lookout, and ends the lookout with its last call.
func (q *Queue) leave(l *lookout, call chan struct{}) {
	q.mu.Lock()
	l.calls = slices.DeleteFunc(l.calls, func(other chan struct{}) bool { return other == call })
	i := slices.Index(q.lookouts, l)
	last := len(l.calls) == 0 && i >= 0
	if last {
		q.lookouts = slices.Delete(q.lookouts, i, i+1)
	}
	q.mu.Unlock()
	if last {
		l.stop()
		<-l.ended
	}
}

// lookOut looks until ctx is done, and tells as many calls as there are rows.
func (q *Queue) lookOut(ctx context.Context, l *lookout) {
	hints := tenure.Watch(q.store, keyOf(q.cfg.Table)) // before the first look, so that no hint is missed
	defer hints.Stop()
	for _, w := range q.allWorkers() {
		defer w.s.sweeper.addWaiter(nil)()
	}
	var spurious pace.Limiter
	for woken := false; ctx.Err() == nil; {
		q.freeExpired(ctx)
		q.tell(l, q.anyReady(ctx, l))
		pause := pace.Jitter(q.cfg.PollInterval)
		woken, _ = pace.Await(ctx, hints.C(), spurious.IgnoreFor(woken, min(coalesce, pause)), pause)
	}
}

// anyReady returns how many rows are ready, up to the number of calls that wait for them.
func (q *Queue) anyReady(ctx context.Context, l *lookout) int {
	q.mu.Lock()
	n := min(len(l.calls), perStatement)
	q.mu.Unlock()
	var ids []string
	_, err := q.rows.groups.page(ctx, n, func(n int) (err error) {
		ids, err = q.table.Ready(ctx, objects.Taking{N: n, Filter: l.filter}, q.rows.limit)
		return err
	})
	if err != nil {
		return 1 // the call that is told tries to take a row, and says why it can't
	}
	return len(ids)
}

// tell tells the n calls that have waited longest.
func (q *Queue) tell(l *lookout, n int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	n = min(n, len(l.calls))
	for _, call := range l.calls[:n] {
		close(call)
	}
	l.calls = l.calls[n:]
}
