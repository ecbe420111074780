package queuehttp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/clock"
	"github.com/tenurelib/tenure/internal/logtext"
	"github.com/tenurelib/tenure/internal/pace"
	"github.com/tenurelib/tenure/internal/report"
	"github.com/tenurelib/tenure/internal/seconds"
)

// work is what a client does under one session.
type work struct {
	c       *Client
	n       int
	fn      func(context.Context, Task) (any, error)
	session session
	ttl     time.Duration

	running sync.WaitGroup
	dropped chan struct{} // receives when a claim was dropped

	again    bool          // whether the last take was answered with no task; this and searched are take's
	searched clock.Reading // when the last take was sent that was answered and had the server search for lost tasks

	mu       sync.Mutex // guards the fields below
	has      map[claims.Claim]*begun
	deadline clock.Reading // of the trust in the session
}

// begun is a task whose func runs.
type begun struct {
	end      context.CancelCauseFunc // ends the context of the func
	deadline clock.Reading           // of the task's lease, if it has one; guarded by the work's mu
}

// trust trusts the session from when a request that was answered was sent.
func (w *work) trust(sent clock.Reading) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.deadline = sent.Add(trusted(w.ttl))
}

// trusted returns for how long a TTL or a lease is trusted, because clocks run at different rates.
func trusted(d time.Duration) time.Duration { return d - d/30 }

// left returns for how long the session may still be trusted.
func (w *work) left(ctx context.Context) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.deadline.Until(clock.From(ctx)())
}

// run works until ctx is done, the session is lost, or there is nothing to do, and returns once all funcs have.
func (w *work) run(ctx context.Context) {
	live, lose := context.WithCancelCause(context.WithoutCancel(ctx))
	var beside sync.WaitGroup
	defer beside.Wait()
	defer lose(nil)
	beside.Go(func() { w.watch(live, lose) })
	beside.Go(func() { w.renew(live, lose) })
	working, stop := context.WithCancelCause(live)
	defer context.AfterFunc(ctx, func() { stop(tenure.ErrShutdown) })()
	for working.Err() == nil && !w.take(working, lose) {
	}
	w.running.Wait()
	if live.Err() != nil {
		w.c.cfg.Logger.Warn("lost session", "session", w.session.ID, "error", context.Cause(live))
		return
	}
	if _, err := w.send(ctx, "goodbye", request{Session: &w.session}); err != nil && !errors.Is(err, tenure.ErrLost) {
		w.c.cfg.Logger.Warn("failed to end a session; it will expire", "session", w.session.ID, "error", err)
	}
}

// watch ends the trust in the session in time. It looks more often than a timer would fire, because a machine
// that is suspended stops its timers.
func (w *work) watch(ctx context.Context, lose context.CancelCauseFunc) {
	for {
		left := w.left(ctx)
		if left <= 0 {
			lose(tenure.ErrDeadline)
			return
		}
		if !pace.Sleep(ctx, min(left, w.ttl/12)) {
			return
		}
	}
}

// renew sends heartbeats, and ends the contexts of claims that have ended.
func (w *work) renew(ctx context.Context, lose context.CancelCauseFunc) {
	for pace.Sleep(ctx, w.ttl/3) {
		out, sent, err := w.c.send(ctx, w.ttl/6, "heartbeat", request{Session: &w.session, Have: w.have()})
		switch {
		case errors.Is(err, tenure.ErrLost):
			lose(tenure.ErrLost)
			return
		case err != nil:
			w.c.logRefused(ctx, "failed to renew a session; retrying", err)
			continue
		}
		w.trust(sent)
		w.mu.Lock()
		for _, c := range out.Ended {
			if r := w.has[c]; r != nil { // it may have been finished meanwhile
				r.end(tenure.ErrLost)
			}
		}
		w.mu.Unlock()
	}
}

// take takes as many tasks as fit, and begins work on them. It waits for a func to return if none fits. It reports whether
// there is nothing to do.
func (w *work) take(ctx context.Context, lose context.CancelCauseFunc) (idle bool) {
	have := w.have()
	if len(have) >= w.n {
		select {
		case <-w.dropped:
		case <-ctx.Done():
		}
		return false
	}
	again := w.again && w.knowsAll()
	in := request{Session: &w.session, N: w.n - len(have), Have: have, Again: again, Filter: w.c.cfg.Filter}
	if w.c.cfg.Lease > 0 {
		in.Lease = (*seconds.Duration)(&w.c.cfg.Lease)
	}
	out, sent, err := w.c.send(ctx, w.ttl/3, "take", in)
	if w.again = err == nil && len(out.Tasks) == 0; err == nil && !again {
		w.searched = sent
	}
	switch {
	case errors.Is(err, tenure.ErrLost):
		lose(tenure.ErrLost)
	case err != nil:
		w.c.logRefused(ctx, "failed to take tasks; retrying", err)
		pace.Sleep(ctx, retryPause)
	}
	for _, t := range out.Tasks {
		if w.left(ctx) <= 0 { // the answer came late, and others may have the task by now
			lose(tenure.ErrDeadline)
		}
		if ctx.Err() != nil {
			return false
		}
		w.begin(ctx, t, sent, out.Lease)
	}
	return w.again && len(have) == 0
}

// begin begins work on a task that a take has brought, which was sent at that time.
func (w *work) begin(ctx context.Context, t Task, sent clock.Reading, lease *seconds.Duration) {
	one, end := context.WithCancelCause(ctx)
	r := &begun{end: end}
	w.mu.Lock()
	w.has[t.Claim] = r
	if lease != nil {
		r.deadline = sent.Add(trusted(time.Duration(*lease)))
	}
	w.mu.Unlock()
	if lease != nil && w.leaseLeft(ctx, r) <= 0 { // others may have the task by now
		logger := w.c.cfg.Logger.With("task", t.Claim.String(), "attempt", t.Claim.Attempt)
		logger.Warn("the lease of a task had run out; giving it back")
		w.running.Go(func() { defer w.drop(t.Claim); w.giveBack(ctx, logger, "nack", t.Claim) })
		return
	}
	works, returned := context.WithCancel(one)
	if lease != nil {
		w.running.Go(func() { w.untilOverdue(works, t.Claim, r) })
	}
	t.extend = func(ctx context.Context, d time.Duration) error { return w.extend(ctx, t.Claim, r, d) }
	w.running.Go(func() {
		defer w.drop(t.Claim)
		var result any
		err := report.ErrGoexit
		defer func() { // also if fn ends by runtime.Goexit: the next take would bring the task again at once
			if p := recover(); p != nil {
				panic(p)
			}
			returned()
			w.finishOrGiveBack(ctx, one, t, result, logtext.Sound(err))
		}()
		result, err = w.fn(one, t)
	})
}

// leaseLeft returns for how long the lease of a task may still be trusted.
func (w *work) leaseLeft(ctx context.Context, r *begun) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return r.deadline.Until(clock.From(ctx)())
}

// untilOverdue ends the context of a func when the lease of its task has run out. As watch does, it looks more often than
// a timer would fire.
func (w *work) untilOverdue(works context.Context, c claims.Claim, r *begun) {
	for {
		left := w.leaseLeft(works, r)
		if left <= 0 {
			w.c.cfg.Logger.Warn("the lease of a task has run out; its func should return", "task", c.String(), "attempt", c.Attempt)
			r.end(claims.ErrOverdue)
			return
		}
		if !pace.Sleep(works, min(left, w.ttl/12)) {
			return
		}
	}
}

// extend extends the lease of a task.
func (w *work) extend(ctx context.Context, c claims.Claim, r *begun, d time.Duration) error {
	_, sent, err := w.c.send(ctx, w.ttl/6, "extend", request{Claims: []claims.Claim{c}, Lease: (*seconds.Duration)(&d)})
	if errors.Is(err, tenure.ErrLost) {
		r.end(tenure.ErrLost)
	}
	if err != nil {
		return fmt.Errorf("queuehttp: extend %s: %w", c, err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if until := sent.Add(trusted(d)); until.Mono.After(r.deadline.Mono) { // the server shortens none
		r.deadline = until
	}
	return nil
}

// knowsAll reports whether the session can't own tasks whose answer was lost: the server has searched for them since no
// take can arrive any more that was not answered.
func (w *work) knowsAll() bool {
	failed := w.c.lostTake.Load()
	return failed == nil || w.searched.Mono.Sub(failed.Mono) >= w.ttl
}

func (w *work) have() []claims.Claim {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Collect(maps.Keys(w.has))
}

func (w *work) drop(c claims.Claim) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.has[c].end(nil)
	delete(w.has, c)
	select {
	case w.dropped <- struct{}{}:
	default:
	}
}

// finishOrGiveBack finishes a task, or gives it back. The database decides whether that comes too late. one is the context
// of the task's func, and ctx that of all takes.
func (w *work) finishOrGiveBack(ctx, one context.Context, t Task, result any, err error) {
	logger := w.c.cfg.Logger.With("task", t.Claim.String(), "attempt", t.Claim.Attempt)
	if overdue := errors.Is(context.Cause(one), claims.ErrOverdue); err != nil && one.Err() != nil && !overdue {
		w.giveBack(ctx, logger, "abandon", t.Claim)
		return
	}
	if err == nil {
		var text []byte
		if text, err = json.Marshal(result); err == nil {
			_, err = w.send(ctx, "finish", request{Results: []Result{{t.Claim, text}}})
			if errors.Is(err, tenure.ErrLost) { // or an earlier try has finished the task, and its answer was lost
				logger.Warn("the result of a task was refused", "error", err)
				return
			}
		}
	}
	if err == nil {
		return
	}
	logger.Warn("failed to finish a task; giving it back", "error", err)
	w.giveBack(ctx, logger, "nack", t.Claim)
}

// giveBack gives a task back. It sends the request until it is answered: if the claim were dropped before that, the
// next take would bring it again, and a request that arrives late would free the row beside its new func. Once ctx
// is done, there are no takes, so giveBack goes on for up to a TTL.
func (w *work) giveBack(ctx context.Context, logger *slog.Logger, name string, c claims.Claim) {
	sending, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(ctx, func() { pace.Sleep(sending, w.ttl); cancel() })()
	if _, _, err := w.c.send(sending, w.ttl/6, name, request{Claims: []claims.Claim{c}}); err != nil && !errors.Is(err, tenure.ErrLost) {
		logger.Warn("failed to give a task back", "error", err)
	}
}

// send sends a request that ends something, for up to a TTL, even if ctx is done.
func (w *work) send(ctx context.Context, name string, in request) (answer, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), w.ttl)
	defer cancel()
	out, _, err := w.c.send(ctx, w.ttl/6, name, in)
	return out, err
}
