package claims

import (
	"context"
	"slices"
	"time"

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

// telling is when calls were last told of rows of a source. It is in vain if a call has found none that it could take since:
// it may be that the application has locked them, or that the database refuses them.
type telling struct {
	source
	at   time.Time
	vain bool
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
	l := q.join(source{q, o.filter()}, call)
	select {
	case <-call:
	case <-ctx.Done():
	}
	q.leave(ctx, l, call)
	select {
	case <-call: // also if ctx is done: no other call has been told of the row
		return nil
	default:
		return q.opError("await", context.Cause(ctx))
	}
}

// join adds a call to the lookout of its source, which begins to look with its first call.
func (q *Queue) join(of source, call chan struct{}) *lookout {
	q.mu.Lock()
	defer q.mu.Unlock()
	i := slices.IndexFunc(q.lookouts, func(l *lookout) bool { return l.is(&of) })
	if i < 0 {
		looking, stop := context.WithCancel(context.Background())
		l := &lookout{source: of, stop: stop, ended: make(chan struct{})}
		i, q.lookouts = len(q.lookouts), append(q.lookouts, l)
		go func() { defer close(l.ended); q.lookOut(looking, l) }()
	}
	l := q.lookouts[i]
	l.calls = append(l.calls, call)
	return l
}

// leave removes a call from its lookout, and ends the lookout with its last call.
func (q *Queue) leave(ctx context.Context, l *lookout, call chan struct{}) {
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
		select {
		case <-l.ended:
		case <-ctx.Done(): // a hint that it sends may take longer
		}
	}
}

// lookOut looks until ctx is done, and tells as many calls as there are rows.
func (q *Queue) lookOut(ctx context.Context, l *lookout) {
	hints := tenure.Watch(q.store, keyOf(q.cfg.Table)) // before the first look, so that no hint is missed
	defer hints.Stop()
	waits := make(map[*Worker]func())
	defer func() {
		for _, done := range waits {
			done()
		}
	}()
	var spurious pace.Limiter
	pause, woken, found := q.pauseInVain(l), false, 0
	for {
		for _, w := range q.allWorkers() {
			if waits[w] == nil {
				waits[w] = w.s.sweeper.addWaiter(nil)
			}
		}
		if pause > 0 {
			inVain := woken && (found == 0 || q.pauseInVain(l) > 0)
			var ok bool
			if woken, ok = pace.Await(ctx, hints.C(), spurious.IgnoreFor(inVain, min(coalesce, pause)), pause); !ok {
				return
			}
		}
		var expired bool
		if found, expired = q.look(ctx, l); expired && q.freeExpired(ctx, true) > 0 {
			found, _ = q.look(ctx, l)
		}
		q.tell(l, found)
		pause = pace.Jitter(q.cfg.PollInterval)
	}
}

// look returns how many rows are ready, up to the number of calls that wait for them, and whether claims have expired.
func (q *Queue) look(ctx context.Context, l *lookout) (found int, expired bool) {
	q.mu.Lock()
	n := min(len(l.calls), perStatement)
	q.mu.Unlock()
	if n == 0 {
		return 0, false
	}
	var sight objects.Sight
	_, err := q.rows.groups.page(ctx, n, func(n int) (err error) {
		sight, err = q.table.Ready(ctx, objects.Taking{N: n, Filter: l.filter, Looking: true}, q.rows.limit)
		return err
	})
	if err != nil {
		return 1, false // the call that is told tries to take a row, and says why it can't
	}
	if !sight.Expired {
		q.mu.Lock()
		q.noneExpired = time.Now()
		q.mu.Unlock()
	}
	return len(sight.IDs), sight.Expired
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
	if n > 0 {
		q.tellings = append(slices.DeleteFunc(q.tellings, func(t telling) bool {
			return t.is(&l.source) || time.Since(t.at) > q.cfg.PollInterval
		}), telling{source: l.source, at: time.Now()})
	}
}

// pauseInVain returns how long a lookout waits for hints before it looks again after calls were told in vain.
func (q *Queue) pauseInVain(l *lookout) time.Duration {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, t := range q.tellings {
		if t.vain && t.is(&l.source) {
			return q.cfg.PollInterval - time.Since(t.at)
		}
	}
	return 0
}

// noteTried notes how many rows of a source a call has taken.
func (q *Queue) noteTried(of source, taken int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for i := range q.tellings {
		if t := &q.tellings[i]; t.is(&of) {
			t.vain = taken == 0
		}
	}
}
