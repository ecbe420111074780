package claims

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/logtext"
	"github.com/tenurelib/tenure/internal/pace"
	"github.com/tenurelib/tenure/internal/report"
)

// ErrOverdue is why a func's context ends at [QueueConfig.Deadline].
var ErrOverdue = errors.New("the claim's deadline has passed")

// Worker takes rows of a [Queue] for a session of this process.
//
// All methods are safe for concurrent use.
type Worker struct {
	s         *Session
	q         *Queue
	kind      *kind
	taker     *taker
	deadlines deadlines

	leads chan struct{} // held by the call of Take that takes for all others
	mu    sync.Mutex    // guards takes; never held across I/O, nor with the session's
	takes []*takeCall   // calls of Take that have got nothing yet, the longest waiting first
}

// NewWorker returns the worker of a session on a queue, which must be in the session's store. There is
// one for each session and queue. It does no I/O.
func NewWorker(s *Session, q *Queue) (*Worker, error) {
	w, err := newWorker(s, q)
	return w, opError("new worker", err)
}

func newWorker(s *Session, q *Queue) (*Worker, error) {
	switch {
	case s == nil || q == nil:
		return nil, fmt.Errorf("%w: session or queue is nil", tenure.ErrInvalid)
	case s.store != q.store:
		return nil, fmt.Errorf("%w: the queue of %s is not in the session's store", tenure.ErrInvalid, q.cfg.Table)
	}
	kinds, err := newKinds(s, &ownerTable{q.table, q.rows.groups, s.limit}, q.cfg.Table)
	if err != nil {
		return nil, err
	}
	kind := kinds[0]
	w := &Worker{s: s, q: q, kind: kind, taker: newTaker(q, s.limit, s.cfg.TTL), leads: make(chan struct{}, 1)}
	w.deadlines = deadlines{k: kind, after: q.cfg.Deadline, grace: cmp.Or(q.cfg.Grace, s.cfg.TTL/3)}
	q.addWorker(w)
	return w, nil
}

// Do calls fn with a context that ends when the claim does, and frees the row when fn has
// returned, unless fn has ended the claim itself. Otherwise it is as [Keys.Do]. At
// [QueueConfig.Deadline] the cause is [ErrOverdue], which is then an error of Do as well.
func (w *Worker) Do(ctx context.Context, c Claim, fn func(context.Context) error) error {
	return w.kind.do(ctx, c, fn)
}

// Release gives rows back, as [Keys.Release] does: any session may take them at once. It does not ask
// the database whether the session still has the rows: one that was freed or deleted behind its back it
// forgets, without an error. [Queue.Release] releases what was detached, or is another session's.
func (w *Worker) Release(ctx context.Context, claims ...Claim) error {
	return w.kind.release(ctx, claims)
}

// Detach is [Keys.Detach]: the rows are then finished or released by value, by this process or another.
func (w *Worker) Detach(claims ...Claim) error { return w.kind.detach(claims) }

// Holds reports whether this session holds the claim, and may rely on it: see
// [tenure.Term.Valid]. It does no I/O.
func (w *Worker) Holds(c Claim) bool { return w.kind.holds(c) }

// Len returns how many claims the session holds.
func (w *Worker) Len() int { return w.kind.size() }

// errUnfinished is why a row is released whose func has returned nil.
var errUnfinished = errors.New("the func returned nil, but did not end its claim, and QueueConfig.Done is not set")

// Serve takes rows and calls fn for each, for at most so many at once, until ctx is done or the
// session closes. Then it takes no more, waits until all funcs have returned, and returns nil.
// fn's context is that of [Worker.Do]; it does not end with ctx, but when the session closes.
//
// fn ends the claim by a Finish method of the queue, Release or ReleaseAfter. If it returns nil without
// that, the row is finished as by [Queue.Finish], if [QueueConfig.Done] is set, also while the
// session closes: a func that stops before it is done returns an error. The error is logged, and
// others may take the row after [QueueConfig.Backoff]; the same if fn calls runtime.Goexit.
//
// A panic of fn releases the row and is passed on, without waiting for the other funcs. An
// [tenure.ErrSetup] is returned.
func (w *Worker) Serve(ctx context.Context, workers int, fn func(context.Context, Claim) error) error {
	switch {
	case workers < 1:
		return w.q.failed("serve", fmt.Errorf("%w: %d workers", tenure.ErrInvalid, workers))
	case fn == nil:
		return w.q.failed("serve", fmt.Errorf("%w: fn is nil", tenure.ErrInvalid))
	}
	defer report.Flush(w.q.cfg.Logger)
	taking, cancel := context.WithCancel(ctx)
	defer cancel()
	var running sync.WaitGroup
	idle, panics := make(chan struct{}, workers), make(chan any, 1)
	for range workers {
		idle <- struct{}{}
	}
	work := func(c Claim) {
		defer running.Done()
		defer func() {
			if p := recover(); p != nil {
				select {
				case panics <- p:
				default: // one is enough
				}
				cancel()
				return
			}
			idle <- struct{}{}
		}()
		w.runOne(context.WithoutCancel(ctx), c, fn, w.finishDone)
	}
	err := w.serve(taking, idle, func(c Claim) {
		running.Add(1)
		go work(c)
	})
	returned := make(chan struct{})
	go func() {
		running.Wait()
		close(returned)
	}()
	select {
	case p := <-panics:
		panic(p)
	case <-returned:
	}
	select {
	case p := <-panics:
		panic(p)
	default:
	}
	if ctx.Err() != nil || errors.Is(err, ErrClosed) {
		return nil
	}
	return err
}

// serve takes as many rows as there are idle workers, and begins them. More would be attempts that
// are not made if the process ends.
func (w *Worker) serve(ctx context.Context, idle chan struct{}, begin func(Claim)) error {
	for {
		select {
		case <-idle:
		case <-ctx.Done():
			return nil
		}
		n := 1 + len(idle)
		for range n - 1 {
			<-idle
		}
		got, err := w.Take(ctx, n)
		for _, c := range got {
			begin(c)
		}
		for range n - len(got) {
			idle <- struct{}{}
		}
		if err != nil {
			return err
		}
	}
}

// runOne runs fn for a row, and finishes or releases it.
func (w *Worker) runOne(ctx context.Context, c Claim, fn func(context.Context, Claim) error, done func(context.Context, Claim) error) {
	ended := func(ctx context.Context, err error) error {
		held := w.Holds(c)
		cause := context.Cause(ctx) // is set by now if that is why the claim is not held
		// A session that closes holds nothing any more, but what its funcs have done still counts.
		closing := errors.Is(cause, tenure.ErrShutdown) && err == nil && done != nil && w.kind.unended(c)
		if !held && !closing || err != nil && cause != nil && !errors.Is(cause, ErrOverdue) { // it has ended, or others may go on at once
			return err
		}
		if err == nil && done != nil {
			if closing { // the session is renewed until this func returns
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), w.s.cfg.TTL)
				defer cancel()
			}
			err = done(ctx, c)
		} else if err == nil {
			err = errUnfinished
		}
		if err != nil && w.Holds(c) {
			w.releaseAfter(c, w.q.backoff(c))
		}
		return err
	}
	told := func(err error) {
		if err != nil {
			w.s.cfg.Logger.Warn("failed to finish a row", "table", w.q.cfg.Table, "id", c.Key.ID, "attempt", c.Attempt, "error", err)
		}
	}
	told(w.Do(ctx, c, func(ctx context.Context) error {
		over := false
		defer func() {
			if over {
				return
			}
			if p := recover(); p != nil { // it releases the row at once
				panic(p)
			}
			told(ended(ctx, errGoexit))
		}()
		err := logtext.Sound(fn(ctx, c))
		over = true
		return ended(ctx, err)
	}))
}

// finishDone finishes a row whose func has returned nil. A statement whose answer was lost is repeated.
func (w *Worker) finishDone(ctx context.Context, c Claim) error {
	if w.q.cfg.Done == "" {
		return errUnfinished
	}
	for failures := 0; ; failures++ {
		lost, err := w.q.endOne(ctx, c)
		if len(lost) > 0 && failures > 0 { // to an earlier statement, unless the session was lost meanwhile
			lost = nil
		}
		err = w.q.finished([]Claim{c}, lost, nil, err)
		switch {
		case err == nil:
			return nil
		case (errors.Is(err, errLocked) || isTooSlow(err)) && ctx.Err() == nil: // it has waited, and nothing is written
			failures--
		case errors.Is(err, tenure.ErrLost), errors.Is(err, tenure.ErrInvalid), errors.Is(err, tenure.ErrSetup), isRefused(err):
			return err
		case !pace.Sleep(ctx, pace.Retry(w.s.cfg.RenewInterval, longestRetryPause, failures)):
			return err
		}
	}
}

// releaseAfter releases a row so that no session takes it for a while. Without a column for that, the session
// keeps it meanwhile: that costs nothing, and ends if the session does.
func (w *Worker) releaseAfter(c Claim, d time.Duration) {
	if w.q.cfg.NotBefore != "" {
		ctx, cancel := w.s.writeContext(context.Background())
		defer cancel()
		err := w.q.ReleaseAfter(ctx, d, c)
		if err == nil || errors.Is(err, tenure.ErrLost) {
			return
		}
		w.s.cfg.Logger.Warn("failed to release a row; keeping it meanwhile", "table", w.q.cfg.Table, "id", c.Key.ID, "error", err)
	}
	w.kind.freeAfter(d, c)
}
