package main

import (
	"context"
	"syscall"
	"time"

	"github.com/tenurelib/tenure/internal/testkit/rig"
)

// server is a server that faults are done to.
type server struct {
	*rig.Server
	target string // that a report names
}

// stopKinds are the faults of the process as such. None has ended before the server serves
// requests again: how long it takes to do so is not what is tested.
func (s server) stopKinds() []faultKind {
	return []faultKind{
		{name: "server killed", group: "server", weight: 4, begin: s.stop(syscall.SIGKILL)},
		{name: "server shut down", group: "server", weight: 3, begin: s.stop(syscall.SIGTERM)},
		{name: "server paused", group: "server", weight: 4, longer: 2, begin: s.pause},
	}
}

func (s server) stop(signal syscall.Signal) func(context.Context, *phase) (string, ending, error) {
	return func(ctx context.Context, _ *phase) (string, ending, error) {
		return s.target, func() (time.Duration, error) { return 0, s.Start(ctx) }, s.End(signal)
	}
}

func (s server) pause(ctx context.Context, _ *phase) (string, ending, error) {
	return s.target, func() (time.Duration, error) {
		if err := s.Signal(syscall.SIGCONT); err != nil {
			return 0, err
		}
		return 0, s.AwaitReady(ctx)
	}, s.Signal(syscall.SIGSTOP)
}
