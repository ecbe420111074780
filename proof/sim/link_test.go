package sim

import (
	"context"
	"errors"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

var errCrashed = errors.New("the process is gone")

// call is the [storetest.Hook] of a process.
func (l *life) call(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
	ctx, told := l.r.w.trace.sends(ctx, l, call)
	if !l.halt() {
		return errCrashed
	}
	l.r.w.locked(func() { l.r.w.judge.sent(ctx, l, call) })
	f, sent := l.fate(call), time.Now()
	err := f.Carry(ctx, l.r.dice, &l.r.w.running, do)
	if !l.halt() { // paused before it saw the answer
		return errCrashed
	}
	told(err)
	if (err == nil || errors.Is(err, tenure.ErrNotFound)) && call.Op == "get" && call.Key == leaseKey && ctx.Value(runKey{}) != nil {
		l.r.w.locked(func() { l.r.w.judge.looks(l, sent) })
	}
	return err
}

func (l *life) fate(call storetest.Call) testkit.Fate {
	r := l.r
	var weather testkit.Weather
	r.w.locked(func() { weather = r.link })
	var f testkit.Fate
	if r.w.latency > 0 {
		f.Request, f.Answer = r.dice.UpTo(r.w.latency), r.dice.UpTo(r.w.latency)
	}
	f.Answer += r.slow
	f.In(weather, r.dice, r.lateness())
	if call.Key == ledgerKey && r.dice.One(5) { // the network delays a job's write
		f.Request += r.dice.UpTo(3 * r.ttl)
	}
	return f
}

// lateness is the longest time that a request or an answer is in flight in bad weather.
// It is longer than the timeout of a call; most requests take less.
func (r *replica) lateness() time.Duration { return min(r.ttl/3, 20*time.Second) }
