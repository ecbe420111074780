package claims_test

import (
	"context"
	"errors"
	"time"

	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

var errCrashed = errors.New("the process is gone")

type senderKey struct{}

// workerKey is the context key that marks the calls of workers, which want keys.
type workerKey struct{}

// sender is the process that has sent a statement, and the time of the call, perhaps before a pause.
type sender struct {
	life   *life
	called time.Time
}

func senderOf(ctx context.Context) sender {
	s, _ := ctx.Value(senderKey{}).(sender)
	return s
}

// lifeOf returns the process that has sent a statement.
func lifeOf(ctx context.Context) *life { return senderOf(ctx).life }

// call is the [storetest.Hook] of a process.
func (l *life) call(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
	ctx = context.WithValue(ctx, senderKey{}, sender{l, time.Now()})
	if call.Op == "claims.take" || call.Op == "claims.move" {
		l.h.a.locked(func() { l.taking[call.Session]++ })
		defer l.h.a.locked(func() { l.taking[call.Session]-- })
	}
	if !l.halt() {
		return errCrashed
	}
	op := call.Op
	if op == "claims.look" && ctx.Value(workerKey{}) == nil {
		op = "settle"
	}
	l.h.a.locked(func() { l.h.a.judge.sent(l, op) })
	f := l.fate(call.Op)
	err := f.Carry(ctx, l.h.dice, &l.h.a.running, do)
	if call.Op == "claims.take" && l.h.a.pausesClaims && l.h.dice.One(30) {
		l.h.pause(l.h.dice.UpTo(3*l.h.ttl), false)
	}
	if !l.halt() { // paused before it saw the answer
		return errCrashed
	}
	l.db.answered(call.Op, err)
	return err
}

func (l *life) fate(op string) testkit.Fate {
	h := l.h
	var weather testkit.Weather
	h.a.locked(func() {
		if h.only == "" || h.only == op {
			weather = h.link
		}
	})
	var f testkit.Fate
	if h.a.latency > 0 {
		f.Request, f.Answer = h.dice.UpTo(h.a.latency), h.dice.UpTo(h.a.latency)
	}
	f.In(weather, h.dice, min(h.ttl/3, 20*time.Second))
	if weather != testkit.WeatherClear && op == "claims.take" && h.dice.One(3) { // most land within their limit and a TTL, or never
		f.Request = min(h.ttl, f.Request+h.dice.UpTo(h.ttl))
		if h.dice.One(3) { // or very late
			f.Request += h.dice.UpTo(3 * h.ttl)
		}
	}
	return f
}
