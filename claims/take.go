package claims

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
)

// TakeOptions says which rows a take may return.
type TakeOptions struct {
	N int // how many at most; a take never returns more than 1,000

	// Have is for TakeFor and TryTakeFor: the claims of which the session's worker knows. Rows that the session
	// owns beyond these were taken by a call whose answer was lost. They are returned first, and then
	// nothing is taken. An empty list means that the worker knows of none; with nil, nothing is looked up.
	Have []Claim
}

// takeCall is a call of Take.
type takeCall struct {
	n   int
	got chan []Claim // receives once
}

// Take takes up to n rows that are free and ready, in order, and never more than 1,000. It waits until
// there is at least one. It skips rows that another transaction has locked. Concurrent calls share a
// statement. While there is no session, Take waits for one; [ErrClosed] reports that there will be none.
// Errors of the store do not end it, except [tenure.ErrSetup].
//
// The caller works on each row, with [Worker.Do] or on its own, and ends the claim by a Finish
// method, Release or ReleaseAfter. An attempt is counted when a row is taken, even if the
// database's answer is lost. If rows were taken before ctx was done, Take returns them without an error.
func (w *Worker) Take(ctx context.Context, n int) ([]Claim, error) {
	if n < 1 {
		return nil, w.q.failed("take", fmt.Errorf("%w: %d rows are asked for", tenure.ErrInvalid, n))
	}
	t := &takeCall{n: min(n, perStatement), got: make(chan []Claim, 1)}
	w.mu.Lock()
	w.takes = append(w.takes, t)
	w.mu.Unlock()
	var err error
	select {
	case got := <-t.got:
		return got, nil
	case w.leads <- struct{}{}:
		err = w.takeAsLeader(ctx, t)
		<-w.leads
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	w.mu.Lock()
	if i := slices.Index(w.takes, t); i >= 0 {
		w.takes = slices.Delete(w.takes, i, i+1)
	}
	w.mu.Unlock()
	select {
	case got := <-t.got: // even if ctx ended at the same moment
		return got, nil
	default:
		return nil, w.q.failed("take", err)
	}
}

// takeAsLeader takes rows for all calls of Take, until its own call has some.
func (w *Worker) takeAsLeader(ctx context.Context, t *takeCall) error {
	s := w.s
	var hints tenure.Subscription
	var done func()
	defer func() {
		if done != nil {
			hints.Stop()
			done()
		}
	}()
	var spurious pace.Limiter
	for woken, failures := false, 0; len(t.got) == 0; {
		err := w.takeForWaiters(ctx)
		switch {
		case len(t.got) > 0:
			return nil
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case isRefused(err): // by the user's SQL, because of what a row contains now
		case errors.Is(err, ErrClosed), errors.Is(err, tenure.ErrSetup), errors.Is(err, tenure.ErrInvalid):
			return err
		}
		if done == nil { // subscribe, then look once more before waiting, so that no hint is missed
			hints, done = s.watch(keyOf(w.q.cfg.Table)), s.sweeper.addWaiter()
			continue
		}
		pause := pace.Jitter(w.q.cfg.PollInterval)
		if err != nil {
			pause = pace.Retry(s.cfg.RenewInterval, longestRetryPause, failures)
			s.retries.Log(s.cfg.Logger, slog.LevelWarn, "failed to take rows; retrying", err, "table", w.q.cfg.Table)
			failures++
		} else {
			failures = 0
		}
		waiting, cancel := s.untilEnd(ctx)
		woken, _ = pace.Await(waiting, hints.C(), spurious.IgnoreFor(woken, min(coalesce, pause)), pause)
		cancel()
	}
	return nil
}

// takeForWaiters takes as many rows as all calls of Take want together, and hands them to the calls
// that have waited longest.
func (w *Worker) takeForWaiters(ctx context.Context) error {
	wants := func() (n int) {
		w.mu.Lock()
		defer w.mu.Unlock()
		for _, t := range w.takes {
			n = min(n+t.n, perStatement)
		}
		return n
	}
	got, err := w.take(ctx, wants)
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(got) > 0 && len(w.takes) > 0 {
		t := w.takes[0]
		n := min(t.n, len(got))
		t.got <- got[:n:n]
		got, w.takes = got[n:], w.takes[1:]
	}
	if len(got) > 0 { // their callers have given up
		go func() { _ = w.kind.release(context.Background(), got) }()
	}
	return err
}

// take takes rows once.
func (w *Worker) take(ctx context.Context, wants func() int) ([]Claim, error) {
	k := w.kind
	l, done, err := k.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	n := wants()
	if err := k.over(l); err != nil || n == 0 {
		return nil, err
	}
	sent := time.Now()
	rows, err := k.adoptable(ctx, l, n)
	if err != nil {
		return nil, err
	}
	if len(rows) == 0 {
		rows, err = w.taker.take(ctx, l.term.id, n, k.strayIDs(), func(n int, skip, only []string) ([]objects.Claim, error) {
			if err := k.over(l); err != nil { // the statements before this one took long
				return nil, err
			}
			sending, cancel := w.s.writeContext(ctx)
			defer cancel()
			return w.q.table.TakeReady(sending, l.term.id, n, skip, only, w.s.limit)
		})
		if err != nil && !errors.Is(err, tenure.ErrSetup) && !wroteNothing(err) {
			k.lostAnswer(l)
		}
		if len(rows) == 0 {
			return nil, err
		}
	}
	kept, err := k.keep(l, rows)
	if err != nil {
		return nil, err
	}
	w.deadlines.add(l, kept, sent)
	kept, exhausted := w.q.split(kept)
	w.retire(l, exhausted)
	return kept, nil
}

// taker takes ready rows for sessions. When the database refuses to assign a row to a session, the
// taker skips that row for a while.
type taker struct {
	q       *Queue
	limit   time.Duration // of a statement
	longest time.Duration // for which a row is skipped

	mu      sync.Mutex
	refused map[refusal]span
}

// refusal is a row that the database has refused to assign to a session. The session's ID may be why.
type refusal struct{ session, id string }

// span is the time for which a row is skipped.
type span struct {
	until time.Time
	last  time.Duration
}

func newTaker(q *Queue, limit, longest time.Duration) *taker {
	return &taker{q: q, limit: limit, longest: longest, refused: make(map[refusal]span)}
}

// skip has a row skipped for a while when rows are taken for a session. Each time is longer than the
// last, up to a limit: the reason for the refusal may go away at any time, and meanwhile the rows
// behind this one must have their turn.
func (t *taker) skip(session, id string, atLeast time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	of := refusal{session, id}
	d := max(min(2*t.refused[of].last, t.longest), t.longest/32, atLeast)
	t.refused[of] = span{time.Now().Add(d), d}
}

// skipped returns the strays and the rows that are skipped now, for a session.
func (t *taker) skipped(session string, strays []string) []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	now, skipped := time.Now(), slices.Clone(strays)
	maps.DeleteFunc(t.refused, func(_ refusal, s span) bool { return now.Sub(s.until) > t.longest })
	for of, s := range t.refused {
		if of.session == session && now.Before(s.until) {
			skipped = append(skipped, of.id)
		}
	}
	return skipped
}

// take takes up to n rows for a session. If the database refuses some of them, it takes the others,
// and has the refused ones skipped. It may return rows together with an error.
func (t *taker) take(ctx context.Context, session string, n int, strays []string, send func(n int, skip, only []string) ([]objects.Claim, error)) (rows []objects.Claim, err error) {
	const most = 10 // then other callers have their turn
	groups, all := t.q.rows.groups, error(nil)
	for tries := 0; ; {
		var skip []string
		n, err := groups.page(ctx, n, func(n int) (err error) {
			skip = t.skipped(session, strays)
			rows, err = send(n, skip, nil)
			return err
		})
		if err == nil {
			groups.finished(len(rows))
		}
		if !isRefused(err) || tries == most {
			if len(rows) == 0 && err == nil {
				err = all
			}
			return rows, err
		}
		tries++
		// It reads more rows each time, because many refused rows may stand before one that can be taken.
		ids, readErr := t.q.table.Ready(ctx, min(n<<tries, groups.size()), skip, t.limit)
		if readErr != nil || len(ids) == 0 { // the condition Ready itself may fail, for any row
			return nil, cmp.Or(readErr, err)
		}
		var refused error
		rows, refused, err = t.takeOf(session, n, ids, func(only []string) ([]objects.Claim, error) { return send(len(only), skip, only) })
		if err != nil || len(rows) > 0 {
			return rows, err
		}
		all = cmp.Or(all, refused)
	}
}

// takeOf goes through rows n at a time, and takes those that the database does not refuse from the
// first n of which it accepts any. If it refuses several rows and accepts none, takeOf returns that as
// all: the reason may be the session.
func (t *taker) takeOf(session string, n int, ids []string, send func(only []string) ([]objects.Claim, error)) (rows []objects.Claim, all, err error) {
	refused := make(map[string]error)
	for some := range slices.Chunk(ids, n) {
		err = inGroups(t.q.rows.groups, some, func(ids []string) error {
			more, err := send(ids)
			rows = append(rows, more...)
			return err
		}, func(id string, err error) {
			refused[id] = err
			t.skip(session, id, 0)
		})
		if err != nil || len(rows) > 0 {
			break
		}
	}
	logger := t.q.cfg.Logger.With("table", t.q.cfg.Table, "session", session)
	if len(refused) == len(ids) && len(ids) > 1 {
		all = fmt.Errorf("the database refuses to have any of %d rows taken for session %q: %w", len(ids), session, refused[ids[0]])
		logger.Warn("failed to take rows: the database refuses all of them, maybe because of the session; retrying", "rows", len(ids), "error", refused[ids[0]])
		return rows, all, err
	}
	for id, err := range refused { // one line, however many there are
		logger.Warn("the database refuses to have a row taken; leaving it for a while", "id", id, "rows", len(refused), "error", err)
		break
	}
	return rows, nil, err
}
