package virtual

import (
	"context"
	"errors"
	"sync"
	"time"
)

// Weather is what happens to the calls between a process and its database.
type Weather string

// The kinds of weather.
const (
	Clear    Weather = ""
	Slow     Weather = "slow requests and answers"
	Late     Weather = "late answers"
	Dropping Weather = "lost requests and answers"
	Answers  Weather = "lost answers"
	Errored  Weather = "errors"
	Cut      Weather = "cut off"
)

// Weathers are those in which something goes wrong.
var Weathers = []Weather{Slow, Late, Dropping, Answers, Errored, Cut}

var (
	errRefused = errors.New("connection refused")
	errReset   = errors.New("connection reset by peer")
)

// Fate is what happens to one call.
type Fate struct {
	Request, Answer         time.Duration // how long each is in flight
	RequestLost, AnswerLost bool
	Hangs                   bool // the caller gets no error for a lost request or answer
}

// In draws the fate of a call in a weather where a request or an answer is in flight for at
// most lateness.
func (f *Fate) In(weather Weather, dice *Dice, lateness time.Duration) {
	switch weather {
	case Slow:
		f.Request, f.Answer = dice.UpTo(lateness), dice.UpTo(lateness)
	case Late:
		f.Answer = dice.UpTo(lateness)
	case Dropping:
		f.RequestLost, f.AnswerLost, f.Hangs = dice.One(3), dice.One(3), dice.One(2)
	case Answers:
		f.AnswerLost, f.Hangs = true, dice.One(2)
	case Errored:
		f.RequestLost = true
	case Cut:
		f.RequestLost, f.Hangs = true, true
	}
}

// callerKey is the key under which a request's context has its caller's context.
type callerKey struct{}

// GivenUp reports whether the caller of a request that was carried has given up.
func GivenUp(request context.Context) bool {
	caller, ok := request.Value(callerKey{}).(context.Context)
	return ok && caller.Err() != nil
}

// Carry takes a request to the store and the answer back. A request that was sent lands even
// if its caller gives up or crashes; running counts those that are under way.
func (f *Fate) Carry(ctx context.Context, dice *Dice, running *sync.WaitGroup, do func(context.Context) error) error {
	if f.RequestLost {
		if f.Hangs {
			<-ctx.Done()
			return ctx.Err()
		}
		return errRefused
	}
	// A process that was paused before it sent a request may still send it when it is
	// resumed, although its timer fires at that moment.
	if ctx.Err() != nil && dice.One(2) {
		return ctx.Err()
	}
	sent := context.WithValue(context.WithoutCancel(ctx), callerKey{}, ctx)
	if f.Request+f.Answer == 0 {
		if err := do(sent); !f.AnswerLost {
			return err
		}
	} else {
		answered := make(chan error, 1)
		running.Go(func() {
			time.Sleep(f.Request)
			err := do(sent)
			time.Sleep(f.Answer)
			answered <- err
		})
		if !f.AnswerLost {
			select {
			case err := <-answered:
				return err
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
	if f.Hangs {
		<-ctx.Done()
		return ctx.Err()
	}
	return errReset
}
