package sim

import (
	"context"
	"errors"
	"time"

	"github.com/tenurelib/tenure/storetest"
)

// weather is what becomes of the calls between a replica and the store.
type weather string

const (
	clear    weather = ""
	slow     weather = "slow requests and answers"
	late     weather = "late answers"
	dropping weather = "lost requests and answers"
	answers  weather = "lost answers"
	errored  weather = "errors"
	cut      weather = "cut off"
)

var weathers = []weather{slow, late, dropping, answers, errored, cut}

var (
	errRefused = errors.New("connection refused")
	errReset   = errors.New("connection reset by peer")
	errCrashed = errors.New("the process is gone")
)

// fate is what becomes of one call.
type fate struct {
	request, answer         time.Duration // how long each is under way
	requestLost, answerLost bool
	hangs                   bool // the caller is not told of the loss
}

// call is the [storetest.Hook] of a process.
func (l *life) call(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
	if !l.halt() {
		return errCrashed
	}
	l.r.w.locked(func() { l.r.w.judge.sent(l, call) })
	f := l.fate(call)
	err := l.carry(ctx, f, do)
	if !l.halt() { // paused before it saw the answer
		return errCrashed
	}
	return err
}

func (l *life) fate(call storetest.Call) fate {
	r := l.r
	var weather weather
	r.w.locked(func() { weather = r.link })
	var f fate
	if r.w.latency > 0 {
		f.request, f.answer = r.dice.upTo(r.w.latency), r.dice.upTo(r.w.latency)
	}
	f.answer += r.slow
	switch weather {
	case slow:
		f.request, f.answer = r.dice.upTo(r.lateness()), r.dice.upTo(r.lateness())
	case late:
		f.answer = r.dice.upTo(r.lateness())
	case dropping:
		f.requestLost, f.answerLost, f.hangs = r.dice.one(3), r.dice.one(3), r.dice.one(2)
	case answers:
		f.answerLost, f.hangs = true, r.dice.one(2)
	case errored:
		f.requestLost = true
	case cut:
		f.requestLost, f.hangs = true, true
	}
	if call.Key != leaseKey && r.dice.one(5) { // a job's write that a network holds back
		f.request += r.dice.upTo(3 * r.ttl)
	}
	return f
}

// lateness is the most that a request or an answer is under way in bad weather: longer
// than a call may take, and often shorter.
func (r *replica) lateness() time.Duration { return min(r.ttl/3, 20*time.Second) }

// callerKey is under which a request has the context of its caller.
type callerKey struct{}

// givenUp reports whether the caller of a request has given up.
func givenUp(request context.Context) bool {
	caller, ok := request.Value(callerKey{}).(context.Context)
	return ok && caller.Err() != nil
}

// carry takes a request to the store and its answer back. What was sent lands,
// though its caller may have given up, or crashed.
func (l *life) carry(ctx context.Context, f fate, do func(context.Context) error) error {
	if f.requestLost {
		if f.hangs {
			<-ctx.Done()
			return ctx.Err()
		}
		return errRefused
	}
	// A process that was paused before it sent a request may send it all the same
	// when it is resumed, though its timer fires at that moment.
	if ctx.Err() != nil && l.r.dice.one(2) {
		return ctx.Err()
	}
	sent := context.WithValue(context.WithoutCancel(ctx), callerKey{}, ctx)
	if f.request+f.answer == 0 {
		if err := do(sent); !f.answerLost {
			return err
		}
	} else {
		answered := make(chan error, 1)
		l.r.w.running.Go(func() {
			time.Sleep(f.request)
			err := do(sent)
			time.Sleep(f.answer)
			answered <- err
		})
		if !f.answerLost {
			select {
			case err := <-answered:
				return err
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
	if f.hangs {
		<-ctx.Done()
		return ctx.Err()
	}
	return errReset
}
