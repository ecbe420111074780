package sim

import (
	"context"
	"errors"
	"time"

	"github.com/tenurelib/tenure"
)

var (
	errJob   = errors.New("the job failed")
	errPanic = errors.New("the job panicked")
)

var ledgerKey = tenure.Key{Type: "ledger", ID: "line"}

func (l *life) watch(ctx context.Context) error     { return l.work(ctx) }
func (l *life) reconcile(ctx context.Context) error { return l.work(ctx) }

// work is a job: it makes fenced writes now and then until it is told to return. Then
// it delays and still writes.
func (l *life) work(ctx context.Context) error {
	tm := tenure.TermFromContext(ctx)
	l.r.w.locked(func() { l.r.w.judge.jobBegins(l, ctx, tm) })
	defer l.r.w.locked(func() { l.r.w.judge.jobReturns(l, tm) })
	if !l.halt() {
		return errCrashed
	}
	p := l.plan()
	early := time.NewTimer(p.early)
	defer early.Stop()
	for ctx.Err() == nil {
		select {
		case <-early.C:
			if !l.halt() {
				return errCrashed
			}
			if p.panics {
				l.r.w.line.Say(l.r.name, "its job panics")
				l.r.w.locked(func() { l.panicked = true })
				panic(errPanic)
			}
			return p.err
		case <-l.gone:
			return errCrashed
		case <-ctx.Done():
		case <-time.After(l.r.ttl/10 + l.r.dice.UpTo(2*l.r.ttl)):
			if !l.write(tm) {
				return errCrashed
			}
		}
	}
	if !l.halt() { // a job can't return while its process is paused
		return errCrashed
	}
	for end := time.Now().Add(p.delay); time.Now().Before(end); {
		if !l.wait(context.WithoutCancel(ctx), min(time.Until(end), l.r.ttl/5)) || !l.write(tm) {
			return errCrashed
		}
	}
	return context.Cause(ctx)
}

// write writes to the ledger. It returns false if the process is gone.
func (l *life) write(tm *tenure.Term) bool {
	if !l.halt() {
		return false
	}
	fenced, err := tenure.Fence(l.store, tm)
	if err != nil { // the term is known to be over
		return true
	}
	ctx, cancel := timed(l.r.ttl / 10)
	defer cancel()
	_, err = fenced.PutIf(ctx, tenure.Object{Key: ledgerKey, Payload: []byte(l.r.name)}, tenure.Unconditional())
	return !errors.Is(err, errCrashed)
}

// plan decides what one run of a job does.
type plan struct {
	early  time.Duration // when it returns without being told to
	err    error
	panics bool
	delay  time.Duration // after it was told to return
}

func (l *life) plan() plan {
	d, ttl := l.r.dice, l.r.ttl
	p := plan{early: time.Duration(1<<62 - 1)}
	switch n := d.N(40); {
	case n < 2:
		p.early = d.UpTo(5 * ttl)
	case n < 5:
		p.early, p.err = d.UpTo(5*ttl), errJob
	case n < 6:
		p.early, p.panics = d.UpTo(5*ttl), true
	}
	switch n := d.N(40); {
	case n < 14:
		p.delay = d.UpTo(l.allowed() * 9 / 10)
	case n < 17:
		p.delay = l.allowed() + d.UpTo(2*ttl)
	case n < 18: // never, unless it crashes
		p.delay = 1000 * ttl
	}
	return p
}
