package sim

import (
	"context"
	"errors"
	"time"

	"github.com/tenurelib/tenure/storetest"
)

// weather is what happens to the calls between a replica and the store.
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

// fate is what happens to one call.
type fate struct {
	request, answer         time.Duration // how long each is in flight
	requestLost, answerLost bool
	hangs                   bool // the caller gets no error for a lost request or answer
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
	if call.Key != leaseKey && r.dice.one(5) { // the network delays a job's write
		f.request += r.dice.upTo(3 * r.ttl)
	}
	return f
}

// lateness is the longest time that a request or an answer is in flight in bad weather.
// It is longer than the timeout of a call; most requests take less.
func (r *replica) lateness() time.Duration { return min(r.ttl/3, 20*time.Second) }

// callerKey is the key under which a request's context has its caller's context.
type callerKey struct{}

// givenUp reports whether the caller of a request has given up.
func givenUp(request context.Context) bool {
	caller, ok := request.Value(callerKey{}).(context.Context)
	return ok && caller.Err() != nil
}

// carry takes a request to the store and the answer back. A request that was sent lands
// even if its caller gives up or crashes.
func (l *life) carry(ctx context.Context, f fate, do func(context.Context) error) error {
	if f.requestLost {
		if f.hangs {
			<-ctx.Done()
			return ctx.Err()
		}
		return errRefused
	}
	// A process that was paused before it sent a request may still send it when it is
	// resumed, although its timer fires at that moment.
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
