package claims

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
)

// takeCall is a call of Take.
type takeCall struct {
	n   int
	got chan []Claim // receives once
}

// Take takes at most n rows that are free and ready, in order, and at most 1,000. It waits until
// there is one. Rows that another transaction has locked are passed over. Calls at the same time share
// a statement. Take waits while there is no session; [ErrClosed] says that there will be none.
// Errors of the store do not end it, except [tenure.ErrSetup].
//
// The caller works on each row, by [Worker.Do] or on its own, and ends its claim by a Finish
// method, Release or ReleaseAfter. An attempt is counted when a row is taken, even if the
// database's answer is lost. What was taken before ctx was done is returned without an error.
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
	case got := <-t.got: // also if ctx ended at the same moment
		return got, nil
	default:
		return nil, w.q.failed("take", err)
	}
}

// takeAsLeader takes rows for all calls of Take, until this one has got some.
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
		case isRefused(err): // by the user's SQL, for a row as it is now
		case errors.Is(err, ErrClosed), errors.Is(err, tenure.ErrSetup), errors.Is(err, tenure.ErrInvalid):
			return err
		}
		if done == nil { // subscribe, and look again before waiting, so that no hint is missed
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

// takeForWaiters takes as many rows as all calls of Take want, and gives them to those that have
// waited longest.
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
	if len(got) > 0 { // the callers that wanted them have given up
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
			if err := k.over(l); err != nil { // it took long
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
