package testkit

import (
	"context"
	"sync"
	"time"
)

// Weather is what happens to the calls between a process and its database.
type Weather string

// The kinds of weather.
const (
	WeatherClear    Weather = ""
	WeatherSlow     Weather = "slow requests and answers"
	WeatherLate     Weather = "late answers"
	WeatherDropping Weather = "lost requests and answers"
	WeatherAnswers  Weather = "lost answers"
	WeatherErrored  Weather = "errors"
	WeatherCut      Weather = "cut off"
)

// Weathers lists the kinds of weather in which something goes wrong.
var Weathers = []Weather{WeatherSlow, WeatherLate, WeatherDropping, WeatherAnswers, WeatherErrored, WeatherCut}

// Fate is what happens to one call.
type Fate struct {
	Request, Answer         time.Duration // how long each is in flight
	RequestLost, AnswerLost bool
	Hangs                   bool // the caller gets no error for a lost request or answer
}

// In draws the fate of a call in that weather. A request or an answer is in flight for at most
// lateness.
func (f *Fate) In(weather Weather, dice *Dice, lateness time.Duration) {
	switch weather {
	case WeatherSlow:
		f.Request, f.Answer = dice.UpTo(lateness), dice.UpTo(lateness)
	case WeatherLate:
		f.Answer = dice.UpTo(lateness)
	case WeatherDropping:
		f.RequestLost, f.AnswerLost, f.Hangs = dice.One(3), dice.One(3), dice.One(2)
	case WeatherAnswers:
		f.AnswerLost, f.Hangs = true, dice.One(2)
	case WeatherErrored:
		f.RequestLost = true
	case WeatherCut:
		f.RequestLost, f.Hangs = true, true
	}
}

// callerKey is the context key of a carried request's caller's context.
type callerKey struct{}

// CallerGaveUp reports whether the caller of a carried request has given up.
func CallerGaveUp(request context.Context) bool {
	caller, ok := request.Value(callerKey{}).(context.Context)
	return ok && caller.Err() != nil
}

// Carry takes a request to the store and the answer back. Once sent, a request reaches the store
// even if its caller gives up or crashes. running counts the requests under way.
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
	return ErrReset
}
