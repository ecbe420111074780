package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// server is a database server in a process of its own.
type server struct {
	command func() *exec.Cmd
	log     string
	answers func(context.Context) error // whether it serves requests

	cmd *exec.Cmd // nil: it does not run
}

// start starts the server and returns when it serves requests.
func (s *server) start(ctx context.Context) error {
	log, err := os.OpenFile(s.log, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := s.command()
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return err
	}
	s.cmd = cmd
	return s.ready(ctx)
}

// ready returns when the server serves requests.
func (s *server) ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for {
		once, done := context.WithTimeout(ctx, time.Second)
		err := s.answers(once)
		done()
		if err == nil {
			return nil
		}
		if !pause(ctx, 20*time.Millisecond) {
			return fmt.Errorf("%s does not serve requests: %w; its log is %s", s.cmd, err, s.log)
		}
	}
}

// end ends the process by a signal, and kills it if it takes too long, as a service manager does.
// That of etcd waits for the streams of its clients.
func (s *server) end(signal syscall.Signal) error {
	if s.cmd == nil {
		return nil
	}
	cmd := s.cmd
	s.cmd = nil
	err := cmd.Process.Signal(signal)
	late := time.AfterFunc(2*time.Second, func() { cmd.Process.Kill() })
	defer late.Stop()
	var exit *exec.ExitError
	if e := cmd.Wait(); e != nil && !errors.As(e, &exit) { // how it exits is its own affair
		err = errors.Join(err, e)
	}
	if err != nil {
		return fmt.Errorf("%s: %w; its log is %s", cmd, err, s.log)
	}
	return nil
}

// stopKinds are the faults of the process as such. None has ended before the server serves
// requests again: how long it takes to do so is not what is tested.
func (s *server) stopKinds() []faultKind {
	return []faultKind{
		{name: "server killed", group: "server", weight: 4, begin: s.stop(syscall.SIGKILL)},
		{name: "server shut down", group: "server", weight: 3, begin: s.stop(syscall.SIGTERM)},
		{name: "server paused", group: "server", weight: 4, longer: 2, begin: s.pause},
	}
}

func (s *server) stop(signal syscall.Signal) func(context.Context, *phase) (string, ending, error) {
	return func(ctx context.Context, _ *phase) (string, ending, error) {
		if err := s.end(signal); err != nil {
			return "", nil, err
		}
		return "all", func() (time.Duration, error) { return 0, s.start(ctx) }, nil
	}
}

func (s *server) pause(ctx context.Context, _ *phase) (string, ending, error) {
	if err := s.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		return "", nil, err
	}
	return "all", func() (time.Duration, error) {
		if err := s.cmd.Process.Signal(syscall.SIGCONT); err != nil {
			return 0, err
		}
		return 0, s.ready(ctx)
	}, nil
}
