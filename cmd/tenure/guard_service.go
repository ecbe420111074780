//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"syscall"
	"time"
)

// stopPause is how long to wait after a --stop command has failed.
const stopPause = time.Second

// service is a charge that one command starts and another stops. It is gone when the stop
// command has succeeded. That command is retried rather than killed, because killing it
// would not stop the service. With --on-loss kill, a loss kills it all the same, and whatever the
// start command has left below this process. Then the stop command is run for what is not there.
type service struct {
	startLine, stopLine string
	startEvery          time.Duration
	log                 *slog.Logger
	report              func(report)    // must not block
	told                context.Context // done when the service must stop
	tell                context.CancelFunc
	lost                context.Context // done when the service must be killed; never without --on-loss kill
	lose                context.CancelFunc
	left                chan ending
}

func newService(cfg guardConfig, log *slog.Logger, tell func(report)) *service {
	s := &service{startLine: cfg.start, stopLine: cfg.stop, startEvery: cfg.startEvery, log: log, report: tell, left: make(chan ending, 1)}
	s.told, s.tell = context.WithCancel(context.Background())
	s.lost, s.lose = context.WithCancel(context.Background())
	if !cfg.killsService() {
		s.lose = func() {}
	}
	return s
}

func (s *service) begin() (int, error) {
	go func() { s.left <- s.run() }()
	return 0, nil
}

func (s *service) run() ending {
	end := ending{Text: "it was stopped"}
	for s.told.Err() == nil {
		if err := runReportedHook(s.told, s.startLine, nil, os.Environ(), os.Stderr, s.report); err != nil && s.told.Err() == nil {
			end = ending{Status: 1, Text: fmt.Sprintf("--start: %v", err)}
			break
		}
		var again <-chan time.Time // never, unless --start is run again
		if s.startEvery > 0 {
			again = time.After(s.startEvery)
		}
		select {
		case <-s.told.Done():
		case <-again:
		}
	}
	if stopService(s.lost, s.stopLine, os.Environ(), s.log) != nil {
		killDescendants(os.Getpid(), stopPause)
		stopService(context.Background(), s.stopLine, append(os.Environ(), "TENURE_STOP=kill"), s.log)
		killDescendants(os.Getpid(), longestTTL) // another host may start the service when this returns
	}
	return end
}

// stopService runs a --stop command until it succeeds or ctx is done.
func stopService(ctx context.Context, line string, env []string, log *slog.Logger) error {
	for said := ""; ; {
		err := runHook(ctx, line, nil, env, os.Stderr)
		if err == nil {
			return nil
		}
		if err.Error() != said && ctx.Err() == nil {
			said = err.Error()
			log.Error("--stop command failed; retrying", "error", err)
		}
		select {
		case <-ctx.Done():
			return errors.Join(err, context.Cause(ctx))
		case <-time.After(stopPause):
		}
	}
}

func (s *service) pass(syscall.Signal) {}

func (s *service) stop(sig syscall.Signal) {
	if sig == syscall.SIGKILL { // first, so that --stop does not begin in an orderly way
		s.kill()
	}
	s.tell()
}

func (s *service) stopOthers()            {}
func (s *service) kill()                  { s.lose() }
func (s *service) ended() <-chan struct{} { return nil }
func (s *service) gone() <-chan ending    { return s.left }
