package claims

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/logtext"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
	"github.com/tenurelib/tenure/internal/report"
)

// ErrOverdue is the cause with which a func's context ends at [QueueConfig.Deadline].
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
	claimer   *claimer
	registers *ledger // of the last term that has tried to register the queue; guarded by the kind's turn

	mu       sync.Mutex // guards lines and their fields, and failures; never held across I/O, nor together with the session's mu
	lines    []*line    // of calls of Take that have no rows yet
	failures map[string]failing
}

// failing is a row whose func keeps failing in this process.
type failing struct {
	times int
	told  time.Time // when a warning last said so
}

// NewWorker returns the worker of a session on a queue, which must be in the session's store. Each
// session has at most one worker per queue. Queues of a session on the same table share its claims, and must
// agree on Released, Canceled, LostBackoff, and on all columns except Limit. NewWorker does no I/O.
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
	s.joining.Lock()
	defer s.joining.Unlock()
	kind, err := kindOf(s, q)
	if err != nil {
		return nil, err
	}
	w := &Worker{s: s, q: q, kind: kind, taker: newTaker(q, s.limit, s.cfg.TTL)}
	w.deadlines = deadlines{k: kind, after: q.cfg.Deadline, grace: s.cfg.TTL / 3}
	w.claimer = &claimer{
		k: kind, poll: q.cfg.PollInterval, rows: true, keep: w.keep,
		send: func(ctx context.Context, l *ledger, free, _, _ []string) ([]objects.Claim, error) {
			return q.table.TakeReady(ctx, objects.Taking{Session: l.term.id, N: len(free), Only: free}, s.limit)
		},
		move: func(ctx context.Context, l *ledger, seen objects.Claim) ([]objects.Claim, error) {
			return q.table.Move(ctx, l.term.id, seen, s.limit)
		},
	}
	q.addWorker(w)
	return w, nil
}

// kindOf returns the kind of a queue's rows, which all queues of a session on the table share.
func kindOf(s *Session, q *Queue) (*kind, error) {
	s.mu.Lock()
	k := s.kinds[q.cfg.Table]
	s.mu.Unlock()
	switch {
	case k == nil || k.queue == nil:
		return newKind(s, &ownerTable{q.table, q.rows.groups, s.limit, q.cfg.Requested != "", q.cfg.Table}, q, q.cfg.Table)
	case slices.ContainsFunc(q.allWorkers(), func(w *Worker) bool { return w.s == s }):
		return nil, fmt.Errorf("%w: the session has a worker of this queue", tenure.ErrInvalid)
	case k.queue.cfg.statements().Freed() != q.cfg.statements().Freed():
		return nil, fmt.Errorf("%w: the session has a queue on table %q with another Schema, other columns, or another Released, Canceled or LostBackoff: make them the same, or use two sessions",
			tenure.ErrInvalid, q.cfg.Table)
	}
	return k, nil
}

// register registers the queue, once per process; if that fails, each session tries it once.
func (w *Worker) register(ctx context.Context) {
	ctx, cancel := w.s.untilEnd(ctx)
	defer cancel()
	ctx, cancelLimit := context.WithTimeout(ctx, w.s.limit)
	defer cancelLimit()
	w.q.registered.Store(w.q.register(ctx))
}

// TryClaim takes those of the given rows that are free and ready, in no particular order. It does not wait for
// rows, and may return none. It counts attempts as [Worker.Take] does, and does not return rows without
// attempts left. Otherwise TryClaim is like [Keys.TryClaim].
func (w *Worker) TryClaim(ctx context.Context, ids ...string) ([]Claim, error) {
	var got []Claim
	err := w.kind.table.validKeys(w.q.cfg.Table, ids)
	if err == nil {
		got, err = w.claimer.tryNow(ctx, ids)
	}
	return got, w.q.opError("try to claim", err)
}

// Claim is like [Worker.TryClaim], but waits until it gets at least one of the rows. Rows need not exist yet.
// Errors of the store do not end it, except [tenure.ErrSetup]. To take a row from its owner, call
// [Worker.Attach].
func (w *Worker) Claim(ctx context.Context, ids ...string) ([]Claim, error) {
	var got []Claim
	err := w.kind.table.validKeys(w.q.cfg.Table, ids)
	if err == nil {
		got, err = w.claimer.wait(ctx, func() []string { return ids })
	}
	return got, w.q.opError("claim", err)
}

// Do calls fn with a context that ends when the claim does. When fn has returned, Do frees the row, unless fn
// has ended the claim itself. At [QueueConfig.Deadline] the context ends with the cause [ErrOverdue], which Do
// then returns too. Otherwise Do is like [Keys.Do].
func (w *Worker) Do(ctx context.Context, c Claim, fn func(context.Context) error) error {
	return w.kind.do(ctx, c, fn)
}

// Release gives rows back, as [Keys.Release] does: any session may take them at once. It does not ask
// the database whether the session still has the rows. If a row was freed or deleted behind the
// session's back, Release forgets the claim and returns no error. [Queue.Release] releases claims that
// were detached or are another session's.
func (w *Worker) Release(ctx context.Context, claims ...Claim) error {
	return w.kind.release(ctx, claims)
}

// Detach works like [Keys.Detach]. This process or another then finishes or releases the rows with the
// methods of [Queue].
func (w *Worker) Detach(claims ...Claim) error { return w.kind.detach(claims) }

// Holds reports whether this session holds the claim and may rely on it, see [tenure.Term.Valid]. It
// does no I/O.
func (w *Worker) Holds(c Claim) bool { return w.kind.holds(c) }

// errUnfinished is the reason why a row is released although its func has returned nil.
var errUnfinished = errors.New("the func returned nil, but did not end its claim, and QueueConfig.Done is not set")

// Serve takes rows and calls fn for each, up to workers rows at a time, until ctx is done or the session
// closes. Then it takes no more rows, waits until every fn has returned, and returns nil. The context of fn is
// that of [Worker.Do]. It does not end with ctx, but when the session closes.
//
// fn ends the claim with a Finish method of the queue, Release or ReleaseAfter. If fn returns nil and
// has not ended the claim, Serve finishes the row as [Queue.Finish] does, provided that
// [QueueConfig.Done] is set. It does so even while the session closes, so a func that stops before its
// work is done must return an error. If fn returns an error or calls runtime.Goexit, Serve logs that,
// and other sessions may take the row after [QueueConfig.Backoff].
//
// If fn panics, Serve releases the row and panics with the same value, without waiting for the other
// funcs. If a [tenure.ErrSetup] occurs, Serve takes no more rows, waits for the funcs, and returns it.
func (w *Worker) Serve(ctx context.Context, workers int, fn func(context.Context, Claim) error) error {
	switch {
	case workers < 1:
		return w.q.opError("serve", fmt.Errorf("%w: %d workers", tenure.ErrInvalid, workers))
	case fn == nil:
		return w.q.opError("serve", fmt.Errorf("%w: fn is nil", tenure.ErrInvalid))
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
	go func() {
		running.Wait()
		close(panics)
	}()
	if p, panicked := <-panics; panicked {
		panic(p)
	}
	if ctx.Err() != nil || errors.Is(err, ErrClosed) {
		return nil
	}
	return err
}

// serve takes as many rows as there are idle workers, and begins work on them. If it took more and
// the process ended, rows whose func never began would lose an attempt.
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

// runOne runs fn for a row, and then finishes or releases the row. done finishes it; if done is nil, fn does.
func (w *Worker) runOne(ctx context.Context, c Claim, fn, done func(context.Context, Claim) error) {
	givenBack := false // fn returned an error because it was told to return
	log := func(err error) {
		attrs := []any{"table", w.q.cfg.Table, "id", c.Key.ID, "attempt", c.Attempt, "error", logtext.OneLine(err)}
		switch {
		case err == nil:
			w.succeeded(c)
		case errors.Is(err, ErrCanceled):
			w.s.cfg.Logger.Info("row was canceled while its func ran", attrs...)
		case givenBack:
			w.s.cfg.Logger.Info("row was given back before it was done", attrs...)
		default:
			w.s.cfg.Logger.Log(ctx, w.failed(c), "row failed", attrs...)
		}
	}
	log(w.Do(ctx, c, func(ctx context.Context) error {
		returned := false
		defer func() {
			if returned {
				return
			}
			if p := recover(); p != nil { // it releases the row at once
				panic(p)
			}
			log(w.finishOrRelease(ctx, c, report.ErrGoexit, done))
		}()
		err := logtext.Sound(fn(ctx, c))
		returned = true
		cause := context.Cause(ctx)
		givenBack = err != nil && (errors.Is(cause, tenure.ErrShutdown) || errors.Is(cause, tenure.ErrResigned) || errors.Is(cause, ErrCanceled))
		return w.finishOrRelease(ctx, c, err, done)
	}))
}

// finishOrRelease finishes or releases a row whose func has returned err, unless its claim has ended. It returns
// why the row is not finished.
func (w *Worker) finishOrRelease(ctx context.Context, c Claim, err error, done func(context.Context, Claim) error) error {
	held := w.Holds(c)
	cause := context.Cause(ctx) // after Holds, so that it is set if it is why the claim is not held
	// A session that closes holds nothing any more, but what its funcs have done still counts.
	closing := errors.Is(cause, tenure.ErrShutdown) && err == nil && done != nil && w.kind.unended(c)
	if !held && !closing || err != nil && cause != nil && !errors.Is(cause, ErrOverdue) { // the claim has ended, or others may have the row at once
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
	switch {
	case err == nil || !w.Holds(c) || errors.Is(cause, ErrCanceled):
	case cause == nil && done != nil && w.q.isLast(c):
		w.s.cfg.Logger.Warn("row has failed for the last time", "table", w.q.cfg.Table, "id", c.Key.ID, "attempts", c.Attempt, "error", logtext.OneLine(err))
		w.retireNow(ctx, c)
	default:
		counted := c
		if w.q.cfg.Attempts == "" { // otherwise each pause would be that of a first failure
			counted.Attempt = w.timesFailed(c) + 1
		}
		w.releaseAfter(c, w.q.backoff(counted))
	}
	return err
}

// isLast reports whether a row has no attempts left if this one fails. If it can't tell, the next take retires the row.
func (q *Queue) isLast(c Claim) bool {
	return q.cfg.MaxAttempts > 0 && q.cfg.Limit == "" && c.Attempt >= q.cfg.MaxAttempts
}

// retireNow retires a row whose last attempt has failed, as the config says.
func (w *Worker) retireNow(ctx context.Context, c Claim) {
	held := func(c Claim) { w.releaseAfter(c, w.q.backoff(c)) }
	if w.q.cfg.OnExhausted == nil {
		w.q.exhaust(ctx, []Claim{c}, held)
		return
	}
	if err := w.q.onExhausted(ctx, c); err != nil {
		w.q.logUnretired(err, c)
	}
	if w.Holds(c) { // it was not finished
		held(c)
	}
}

// failed notes that a row has failed. It returns the level at which that is logged: a row that keeps failing is told
// about once an hour.
func (w *Worker) failed(c Claim) slog.Level {
	const most = 10_000
	w.mu.Lock()
	defer w.mu.Unlock()
	f := w.failures[c.Key.ID]
	if w.failures == nil || len(w.failures) >= most && f.times == 0 {
		w.failures = make(map[string]failing)
	}
	level := slog.LevelDebug
	if f.times++; time.Since(f.told) >= time.Hour {
		f.told, level = time.Now(), slog.LevelWarn
	}
	w.failures[c.Key.ID] = f
	return level
}

func (w *Worker) timesFailed(c Claim) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.failures[c.Key.ID].times
}

func (w *Worker) succeeded(c Claim) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.failures, c.Key.ID)
}

// finishDone finishes a row whose func has returned nil. It repeats a statement whose answer was lost.
func (w *Worker) finishDone(ctx context.Context, c Claim) error {
	stated := w.kind.hasStatement(c)
	if w.q.cfg.Done == "" && !stated {
		return errUnfinished
	}
	for failures := 0; ; failures++ {
		lost, err := w.q.endOne(ctx, c)
		if len(lost) > 0 && !lost[0].Canceled && (stated || failures > 0) { // an earlier statement ended it, unless the session was lost meanwhile
			lost = nil
		}
		err = w.q.finished([]Claim{c}, lost, nil, err)
		switch {
		case err == nil:
			return nil
		case (errors.Is(err, errLocked) || isTooSlow(err)) && ctx.Err() == nil: // endOne has waited, and has written nothing
			failures--
		case errors.Is(err, tenure.ErrLost), errors.Is(err, tenure.ErrInvalid), errors.Is(err, tenure.ErrSetup), isRefused(err):
			return err
		case !pace.Sleep(ctx, pace.Retry(w.s.cfg.RenewInterval, longestRetryPause, failures)):
			return err
		}
	}
}

// releaseAfter releases a row so that no session takes it for a while. If the table has no column for
// that, the session keeps the row meanwhile, which costs nothing and ends with the session.
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
