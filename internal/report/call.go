package report

import (
	"errors"
	"runtime/debug"
)

// ErrGoexit is the error of a func that has called runtime.Goexit.
var ErrGoexit = errors.New("runtime.Goexit was called")

// Call calls a func of the user in a goroutine of its own, and waits until it has ended: by a panic, by an error, or by
// runtime.Goexit, which would end the caller's goroutine.
func Call(fn func() error) (panicked *Panic, err error) {
	err = ErrGoexit
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		defer func() {
			if p := recover(); p != nil {
				panicked = &Panic{Value: p, Stack: debug.Stack()}
			}
		}()
		err = fn()
	}()
	<-ended
	return panicked, err
}
