package claims

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
)

// TakeOptions says which rows a call takes.
type TakeOptions struct {
	// N is the largest number of rows to take. No call takes more than 1,000.
	N int

	// Where is another SQL condition on the rows, in which $1, $2, … outside of quotes stand for Args on either
	// database. Callers that wait with different conditions take rows separately, each with statements of its
	// own. Where must not come from user input, but Args may. Optional.
	Where string
	Args  []any

	// Have is for TryTakeFor: the claims that the session's worker knows. Any other rows of the
	// session were taken by a call whose answer was lost. They are returned first, whatever Where says, and
	// then nothing is taken. An empty list means that the worker knows of none; with nil, nothing is looked up.
	Have []Claim

	// Lasts is for TryTakeFor: how long the claims stand unless they are extended. It needs [QueueConfig.Expires].
	// Default: [QueueConfig.Deadline].
	Lasts time.Duration
}

// filter returns the filter with arguments of its own, because other callers may share it.
func (o TakeOptions) filter() objects.Filter {
	return objects.Filter{Where: o.Where, Args: slices.Clone(o.Args)}
}

func (o TakeOptions) validate() error {
	if o.N < 1 {
		return fmt.Errorf("%w: %d rows are asked for", tenure.ErrInvalid, o.N)
	}
	_, err := o.filter().In("$", 0)
	return err
}

// source is where a statement takes rows from: a queue, with a filter.
type source struct {
	q      *Queue
	filter objects.Filter
}

// is reports whether two sources are the same.
func (s *source) is(other *source) bool {
	return s.q == other.q && s.filter.Where == other.filter.Where &&
		(len(s.filter.Args) == 0 || reflect.DeepEqual(s.filter.Args, other.filter.Args))
}

// line holds the calls of Take with the same filter.
type line struct {
	source
	leads chan struct{} // held by the call that takes for all others
	takes []*takeCall   // that have no rows yet, the longest waiting first
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
// The caller works on each row, with [Worker.Do] or on its own, and ends the claim with a Finish method,
// Release or ReleaseAfter. An attempt is counted when a row is taken,
// and may be taken back, see [QueueConfig.MaxAttempts]. If the database's answer is lost, the rows that it names are free
// again within a TTL; their attempts are taken back unless the session has claimed other rows since. If rows were
// taken before ctx was done, Take returns them without an error.
func (w *Worker) Take(ctx context.Context, n int) ([]Claim, error) {
	return w.TakeWith(ctx, TakeOptions{N: n})
}

// TakeWith is Take with options.
func (w *Worker) TakeWith(ctx context.Context, o TakeOptions) ([]Claim, error) {
	err := o.validate()
	if o.Have != nil || o.Lasts != 0 {
		err = fmt.Errorf("%w: Have and Lasts are for TryTakeFor: a session knows its own claims, and they end with it", tenure.ErrInvalid)
	}
	if err != nil {
		return nil, w.q.opError("take", err)
	}
	t := &takeCall{n: min(o.N, perStatement), got: make(chan []Claim, 1)}
	l := w.join(source{w.q, o.filter()}, t)
	select {
	case got := <-t.got:
		return got, nil
	case l.leads <- struct{}{}:
		err = w.takeAsLeader(ctx, l, t)
		<-l.leads
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	w.leave(l, t)
	select {
	case got := <-t.got: // even if ctx ended at the same moment
		return got, nil
	default:
		return nil, w.q.opError("take", err)
	}
}

// join adds a call to the line of its source.
func (w *Worker) join(of source, t *takeCall) *line {
	w.mu.Lock()
	defer w.mu.Unlock()
	i := slices.IndexFunc(w.lines, func(l *line) bool { return l.is(&of) })
	if i < 0 {
		i, w.lines = len(w.lines), append(w.lines, &line{source: of, leads: make(chan struct{}, 1)})
	}
	l := w.lines[i]
	l.takes = append(l.takes, t)
	return l
}

// leave removes a call from its line, and the line if it was the last.
func (w *Worker) leave(l *line, t *takeCall) {
	w.mu.Lock()
	defer w.mu.Unlock()
	l.takes = slices.DeleteFunc(l.takes, func(other *takeCall) bool { return other == t })
	if len(l.takes) == 0 {
		w.lines = slices.DeleteFunc(w.lines, func(other *line) bool { return other == l })
	}
}

// takeAsLeader takes rows for all calls of a line, until its own call has some.
func (w *Worker) takeAsLeader(ctx context.Context, l *line, t *takeCall) error {
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
		err := w.takeForWaiters(ctx, l)
		switch {
		case len(t.got) > 0:
			return nil
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case isRefused(err): // by the user's SQL, because of what a row contains now
		case errors.Is(err, ErrClosed), errors.Is(err, tenure.ErrSetup), errors.Is(err, tenure.ErrInvalid):
			return err
		case errors.Is(err, objects.ErrDrained):
			if err := s.untilUndrained(ctx); err != nil {
				return err
			}
			continue
		}
		if done == nil { // subscribe, then look once more before waiting, so that no hint is missed
			hints, done = s.watch(keyOf(w.q.cfg.Table)), s.sweeper.addWaiter(nil)
			continue
		}
		pause := pace.Jitter(w.q.cfg.PollInterval)
		if in := settlesIn(err); in > 0 {
			pause = in
		} else if err != nil {
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

// takeForWaiters takes as many rows as all calls of a line want together, and hands them to the calls
// that have waited longest.
func (w *Worker) takeForWaiters(ctx context.Context, l *line) error {
	wants := func() (n int) {
		w.mu.Lock()
		defer w.mu.Unlock()
		for _, t := range l.takes {
			n = min(n+t.n, perStatement)
		}
		return n
	}
	got, err := w.take(ctx, &l.source, wants)
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(got) > 0 && len(l.takes) > 0 {
		t := l.takes[0]
		n := min(t.n, len(got))
		t.got <- got[:n:n]
		got, l.takes = got[n:], l.takes[1:]
	}
	if len(got) > 0 { // the calls that wanted them have returned
		go func() { _ = w.kind.release(context.Background(), got) }()
	}
	return err
}

// take takes rows once.
func (w *Worker) take(ctx context.Context, of *source, wants func() int) (got []Claim, err error) {
	err = w.kind.claiming(ctx, func(ctx context.Context, l *ledger) (err error) {
		got, err = w.takeAs(ctx, l, of, wants)
		return err
	})
	return got, err
}

func (w *Worker) takeAs(ctx context.Context, l *ledger, of *source, wants func() int) ([]Claim, error) {
	k := w.kind
	n := wants()
	if err := k.over(l); err != nil || n == 0 {
		return nil, err
	}
	sent := time.Now()
	take := objects.Taking{Session: l.term.id, N: n, Filter: of.filter}
	rows, err := w.taker.take(ctx, take, k.strayIDs(), func(take objects.Taking) ([]objects.Claim, error) {
		if err := k.over(l); err != nil { // the statements before this one took long
			return nil, err
		}
		sending, cancel := w.s.writeContext(ctx)
		defer cancel()
		return w.q.table.TakeReady(sending, take, w.s.limit)
	})
	if err != nil && !errors.Is(err, tenure.ErrSetup) && !wroteNothing(err) {
		k.lostAnswer(l)
	}
	if len(rows) == 0 {
		return nil, err
	}
	return w.keep(l, rows, sent)
}

// keep turns rows that were taken by a statement into claims, and retires those without attempts left.
func (w *Worker) keep(l *ledger, rows []objects.Claim, sent time.Time) ([]Claim, error) {
	kept, err := w.kind.keep(l, rows)
	if err != nil {
		return nil, err
	}
	w.deadlines.add(l, kept, sent)
	kept, exhausted := split(kept, rows)
	w.retire(l, exhausted)
	if len(rows) > 0 && w.registers != l && !w.q.registered.Load() {
		w.registers = l
		w.kind.background(l, w.register)
	}
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

// skip makes take skip a row for a while, for one session. Each time is longer than the last, up to a limit:
// the reason for the refusal may go away at any time, and meanwhile the rows behind this one must have their
// turn.
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

// take takes rows, except strays. If the database refuses some of them, take tries each by itself, and skips those that
// are refused for a while. It may return rows together with an error.
func (t *taker) take(ctx context.Context, take objects.Taking, strays []string, send func(objects.Taking) ([]objects.Claim, error)) (rows []objects.Claim, err error) {
	groups := t.q.rows.groups
	n, err := groups.page(ctx, take.N, func(n int) (err error) {
		take.N, take.Skip = n, t.skipped(take.Session, strays)
		rows, err = send(take)
		return err
	})
	if err == nil {
		groups.finished(len(rows))
	}
	if !isRefused(err) {
		return rows, err
	}
	// It reads many, because many refused rows may stand before one that can be taken.
	take.N = groups.size()
	sight, readErr := t.q.table.Ready(ctx, take, t.limit)
	if readErr != nil || len(sight.IDs) == 0 { // the condition Ready itself may fail, for any row
		return nil, cmp.Or(readErr, err)
	}
	return t.takeEach(ctx, take, min(n, mostAlone), sight.IDs, send)
}

// mostAlone is how many rows a call takes one by one, because each has a commit of its own.
const mostAlone = 100

// takeEach tries rows one by one, until it has taken n. If the database refuses several and accepts none, that is an error:
// the reason may be the session.
func (t *taker) takeEach(ctx context.Context, take objects.Taking, n int, ids []string, send func(objects.Taking) ([]objects.Claim, error)) (rows []objects.Claim, err error) {
	var refused error
	refusals, first := 0, ""
	take.N = 1
	for _, id := range ids {
		if len(rows) >= n || ctx.Err() != nil {
			break
		}
		take.Only = []string{id}
		row, failed := send(take)
		switch rows = append(rows, row...); {
		case isRefused(failed):
			t.skip(take.Session, id, 0)
			if refusals++; refusals == 1 {
				refused, first = failed, id
			}
		case failed != nil:
			return rows, failed
		}
	}
	if len(rows) == 0 && refusals > 1 {
		return nil, fmt.Errorf("the database refuses to have any of %d rows taken for session %q: %w", refusals, take.Session, refused)
	}
	if refusals > 0 { // one line, however many there are
		t.q.cfg.Logger.Warn("the database refuses to have a row taken; leaving it for a while",
			"table", t.q.cfg.Table, "session", take.Session, "id", first, "rows", refusals, "error", refused)
	}
	return rows, nil
}
