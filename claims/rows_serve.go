package claims

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
)

// errUnfinished is why a row is released whose func has returned nil.
var errUnfinished = errors.New("the func returned nil, but did not end its claim, and RowsConfig.Done is not set")

// Serve takes rows and calls fn for each, for at most so many at once, until ctx is done or the
// session closes. Then it takes no more, waits until all funcs have returned, and returns nil.
// fn's context is that of [Rows.Do]; it does not end with ctx, but when the session closes.
//
// fn ends the claim by a Finish method, Release or ReleaseAfter. If it returns nil without
// that, the row is finished as by [Rows.Finish], if [RowsConfig.Done] is set. If it returns an
// error, which is logged, others may take the row after [RowsConfig.Backoff].
//
// A panic of fn releases the row and is passed on, without waiting for the other funcs. An
// [tenure.ErrSetup] is returned.
func (r *Rows) Serve(ctx context.Context, workers int, fn func(context.Context, Claim) error) error {
	switch {
	case workers < 1:
		return r.failed("serve", fmt.Errorf("%w: %d workers", tenure.ErrInvalid, workers))
	case fn == nil:
		return r.failed("serve", fmt.Errorf("%w: fn is nil", tenure.ErrInvalid))
	}
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
		r.work(context.WithoutCancel(ctx), c, fn, r.finishDone)
	}
	err := r.serve(taking, idle, func(c Claim) {
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
// nobody makes if the process ends.
func (r *Rows) serve(ctx context.Context, idle chan struct{}, begin func(Claim)) error {
	for {
		n := 0
		select {
		case <-idle:
			n++
		case <-ctx.Done():
			return nil
		}
		for more := true; more; {
			select {
			case <-idle:
				n++
			default:
				more = false
			}
		}
		got, err := r.Take(ctx, n)
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

// work runs fn for a row, and finishes or releases it.
func (r *Rows) work(ctx context.Context, c Claim, fn func(context.Context, Claim) error, done func(context.Context, Claim) error) {
	err := r.Do(ctx, c, func(ctx context.Context) error {
		err := fn(ctx, c)
		cause := context.Cause(ctx)
		if !r.Holds(c) || err != nil && cause != nil && !errors.Is(cause, ErrOverdue) { // it has ended, or others may go on at once
			return err
		}
		if err == nil && done != nil {
			err = done(ctx, c)
		} else if err == nil {
			err = errUnfinished
		}
		if err != nil && r.Holds(c) {
			r.later(c, r.cfg.Backoff(c))
		}
		return err
	})
	if err != nil {
		r.s.cfg.Logger.Warn("a row is not finished", "table", r.cfg.Table, "id", c.Key.ID, "attempt", c.Attempt, "error", err)
	}
}

// finishDone finishes a row whose func has returned nil. A statement whose answer was lost is repeated.
func (r *Rows) finishDone(ctx context.Context, c Claim) error {
	if r.cfg.Done == "" {
		return errUnfinished
	}
	for failures := 0; ; failures++ {
		lost, err := r.endOne(ctx, c)
		if len(lost) > 0 && failures > 0 { // to an earlier statement, unless the session was lost meanwhile
			lost = nil
		}
		err = r.finished([]Claim{c}, lost, nil, err)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, tenure.ErrLost), errors.Is(err, tenure.ErrInvalid), errors.Is(err, tenure.ErrSetup), errors.As(err, new(*objects.Refused)):
			return err
		case !pace.Sleep(ctx, pace.Retry(r.s.cfg.RenewInterval, longestRetryPause, failures)):
			return err
		}
	}
}

// later releases a row so that nobody takes it for a while. Without a column for that, the session
// keeps it meanwhile: that costs nothing, and ends if the session does.
func (r *Rows) later(c Claim, d time.Duration) {
	s, k := r.s, r.keys
	if r.cfg.NotBefore != "" {
		ctx, cancel := context.WithTimeout(context.Background(), s.limit)
		defer cancel()
		err := r.ReleaseAfter(ctx, d, c)
		if err == nil || errors.Is(err, tenure.ErrLost) {
			return
		}
		s.cfg.Logger.Warn("a row is not released, and kept meanwhile", "table", r.cfg.Table, "id", c.Key.ID, "error", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if k.holds(c) != nil {
		return
	}
	h := k.now
	if call := k.running[c.Key.ID]; call != nil && call.token == c.Token {
		call.kept = true
	}
	time.AfterFunc(d, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if h.term.over == nil && h.tokens[c.Key.ID] == c.Token {
			k.free(h, c.row())
		}
	})
}
