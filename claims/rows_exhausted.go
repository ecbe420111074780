package claims

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
)

// errGoexit is the error of a func that has called runtime.Goexit.
var errGoexit = errors.New("the func has ended by runtime.Goexit")

// guarded calls a func of the user where no caller of the user's would get its panic, which would end
// the process, and each replica in turn. The panic is its error, and so is a runtime.Goexit.
func guarded(fn func() error) error {
	err, done := errGoexit, make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			if p := recover(); p != nil {
				err = &tenure.JobPanic{Value: p, Stack: debug.Stack()}
			}
		}()
		err = fn()
	}()
	<-done
	return err
}

// backoff returns how long a row is left whose func has failed.
func (r *Rows) backoff(c Claim) (d time.Duration) {
	if err := guarded(func() error { d = r.cfg.Backoff(c); return nil }); err != nil {
		r.s.cfg.Logger.Error("Backoff has failed; using the default", "table", r.cfg.Table, "id", c.Key.ID, "error", err)
		return backoff(c)
	}
	return d
}

// split returns the claims that still have an attempt, and those that have had all.
func (r *Rows) split(claims []Claim) (kept, exhausted []Claim) {
	for _, c := range claims {
		if r.cfg.MaxAttempts > 0 && c.Attempt > r.cfg.MaxAttempts {
			exhausted = append(exhausted, c)
		} else {
			kept = append(kept, c)
		}
	}
	return kept, exhausted
}

// onExhausted calls what the config says.
func (r *Rows) onExhausted(ctx context.Context, c Claim) error {
	err := guarded(func() error { return r.cfg.OnExhausted(ctx, c) })
	if err != nil {
		err = fmt.Errorf("OnExhausted: %w", err)
	}
	return err
}

// giveUp does with rows of this session that have had all their attempts what the config says.
func (r *Rows) giveUp(h *holdings, exhausted []Claim) {
	s := r.s
	if len(exhausted) == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if h.term.over != nil { // then all rows are freed
		return
	}
	if r.cfg.OnExhausted == nil {
		h.term.busy.Go(func() {
			r.exhaust(h.term.ctx, exhausted, func(c Claim) { r.later(c, r.backoff(c)) })
		})
		return
	}
	for _, c := range exhausted {
		h.term.busy.Go(func() { r.work(h.term.ctx, c, r.onExhausted, nil) })
	}
}

// giveUpFor is giveUp for rows that were taken for another session. Its worker does not hear of them,
// so nobody else would free those that are not given up.
func (r *Rows) giveUpFor(ctx context.Context, exhausted []Claim) {
	if r.cfg.OnExhausted == nil {
		r.exhaust(ctx, exhausted, func(c Claim) { r.giveBack(ctx, c) })
		return
	}
	for _, c := range exhausted {
		if err := r.onExhausted(ctx, c); err != nil {
			r.notGivenUp(err, c)
		}
		r.giveBack(ctx, c) // unless it was finished
	}
}

// giveBack frees a row that was taken for another session, and leaves it for a while.
func (r *Rows) giveBack(ctx context.Context, c Claim) {
	d := r.backoff(c)
	if r.cfg.NotBefore != "" {
		if err := r.ReleaseAfter(ctx, d, c); err == nil || errors.Is(err, tenure.ErrLost) {
			return
		}
	}
	r.leave(c.Session, c.Key.ID, d)
	freeing, cancel := r.s.uncut(ctx)
	defer cancel()
	_, _ = r.table.Free(freeing, c.Session, c.Key.Type, []string{c.Key.ID}, []int64{c.Token}, r.s.limit)
}

// exhaust sets what the config says in rows that have had all their attempts, and frees them. If that
// fails for one, it tells failed, and the others are given up all the same.
func (r *Rows) exhaust(ctx context.Context, exhausted []Claim, failed func(Claim)) {
	answered := make(map[string]bool)
	fail := func(c Claim, err error) {
		answered[c.Key.ID] = true
		r.notGivenUp(err, c)
		failed(c)
	}
	err := inGroups(r.keys.groups, exhausted, func(some []Claim) error {
		ending, cancel := r.s.uncut(ctx)
		defer cancel()
		left, err := r.table.End(ending, objects.Ending{Exhausted: true, Unlocked: true}, rowsOf(some), r.s.limit)
		if err != nil {
			return err
		}
		lost, locked := r.left(ctx, left)
		_ = r.lost(some, lost)
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
			r.ended(nil, c)
		}
		return nil
	}, fail)
	for _, c := range exhausted {
		if err != nil && !answered[c.Key.ID] {
			fail(c, err)
		}
	}
}

func (r *Rows) notGivenUp(err error, c Claim) {
	r.s.cfg.Logger.Warn("a row without attempts left is not given up, trying again", "table", r.cfg.Table, "id", c.Key.ID, "error", err)
}
