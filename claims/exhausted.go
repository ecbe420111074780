package claims

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/report"
)

// guarded calls a func of the user, and returns a panic or a runtime.Goexit as an error. It is for funcs that
// run in goroutines of this package, where a panic would end the process, and then one replica after the other.
func guarded(fn func() error) error {
	p, err := report.Call(fn)
	if p != nil {
		return p
	}
	return err
}

// backoff returns how long a row is held back after its func has failed.
func (q *Queue) backoff(c Claim) (d time.Duration) {
	if err := guarded(func() error { d = q.cfg.Backoff(c); return objects.ValidDuration("Backoff", d, "time.Second") }); err != nil {
		q.cfg.Logger.Error("Backoff has failed; using the default", "table", q.cfg.Table, "id", c.Key.ID, "error", err)
		return backoff(c)
	}
	return d
}

// split divides claims, by their rows, into those with attempts left and those without.
func split(claims []Claim, rows []objects.Claim) (kept, exhausted []Claim) {
	has := make(map[string]bool)
	for _, r := range rows {
		has[r.ID] = !r.Exhausted
	}
	for _, c := range claims {
		if has[c.Key.ID] {
			kept = append(kept, c)
		} else {
			exhausted = append(exhausted, c)
		}
	}
	return kept, exhausted
}

// onExhausted calls [QueueConfig.OnExhausted].
func (q *Queue) onExhausted(ctx context.Context, c Claim) error {
	err := guarded(func() error { return q.cfg.OnExhausted(ctx, c) })
	if err != nil {
		err = fmt.Errorf("OnExhausted: %w", err)
	}
	return err
}

// retire retires rows of this session that have no attempts left, as the config says.
func (w *Worker) retire(l *ledger, exhausted []Claim) {
	switch {
	case len(exhausted) == 0:
	case w.q.cfg.OnExhausted == nil:
		w.kind.background(l, func(ctx context.Context) {
			w.q.exhaust(ctx, exhausted, func(c Claim) { w.releaseAfter(c, w.q.backoff(c)) })
		})
	default:
		for _, c := range exhausted {
			w.kind.background(l, func(ctx context.Context) { w.runOne(ctx, c, w.q.onExhausted, nil) })
		}
	}
}

// retireFor is retire for rows that were taken for another session. The worker of that session does not
// learn of them, so only this process frees the rows that can't be retired.
func (q *Queue) retireFor(ctx context.Context, exhausted []Claim) {
	if q.cfg.OnExhausted == nil {
		q.exhaust(ctx, exhausted, func(c Claim) { q.giveBack(ctx, c) })
		return
	}
	for _, c := range exhausted {
		if err := q.onExhausted(ctx, c); err != nil {
			q.logUnretired(err, c)
		}
		q.giveBack(ctx, c) // unless it was finished
	}
}

// giveBack frees a row that was taken for another session, and holds it back for a while.
func (q *Queue) giveBack(ctx context.Context, c Claim) {
	d := q.backoff(c)
	if q.cfg.NotBefore != "" {
		if err := q.ReleaseAfter(ctx, d, c); err == nil || errors.Is(err, tenure.ErrLost) {
			return
		}
	}
	q.taker.skip(c.Session, c.Key.ID, d)
	freeing, cancel := context.WithTimeout(context.WithoutCancel(ctx), q.limit())
	defer cancel()
	_, _ = q.table.Free(freeing, c.Session, c.Key.Type, []string{c.Key.ID}, []int64{c.Token}, objects.Freeing{}, q.limit())
}

// exhaust sets [QueueConfig.Exhausted] in rows and frees them. It calls failed for each row for which this
// fails, and retires the others all the same.
func (q *Queue) exhaust(ctx context.Context, exhausted []Claim, failed func(Claim)) {
	answered := make(map[string]bool)
	fail := func(c Claim, err error) {
		answered[c.Key.ID] = true
		q.logUnretired(err, c)
		failed(c)
	}
	err := inGroups(q.rows.groups, exhausted, func(some []Claim) error {
		ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), q.limit())
		defer cancel()
		left, err := q.table.End(ending, objects.Ending{Exhausted: true, Unlocked: true}, rowsOf(some), q.limit())
		if err != nil {
			return err
		}
		lost, locked := q.left(ctx, left)
		_ = q.endedError(some, lost)
		isLocked := make(map[string]bool)
		for _, row := range locked {
			isLocked[row.ID] = true
		}
		for _, c := range some {
			if isLocked[c.Key.ID] {
				fail(c, errLocked)
				continue
			}
			answered[c.Key.ID] = true
			q.ended(nil, c)
		}
		return nil
	}, fail)
	q.madeRoom()
	for _, c := range exhausted {
		if err != nil && !answered[c.Key.ID] {
			fail(c, err)
		}
	}
}

func (q *Queue) logUnretired(err error, c Claim) {
	q.cfg.Logger.Warn("failed to retire a row without attempts left; retrying", "table", q.cfg.Table, "id", c.Key.ID, "error", err)
}
