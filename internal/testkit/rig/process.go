package rig

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"time"
)

// Process is a child process that can be ended and started again. On Linux the kernel kills it
// when this process ends.
type Process struct {
	Command func() *exec.Cmd
	Log     string // the file to which its error output is appended, and its output unless Command redirects it

	cmd *exec.Cmd // nil while it does not run
}

// Start starts the process.
func (p *Process) Start() error {
	log, err := os.OpenFile(p.Log, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := p.Command()
	if cmd.Stderr = log; cmd.Stdout == nil {
		cmd.Stdout = log
	}
	cmd.SysProcAttr = childAttr()
	if err := cmd.Start(); err != nil {
		return err
	}
	p.cmd = cmd
	return nil
}

// Runs reports whether the process has been started and not been waited for since.
func (p *Process) Runs() bool { return p.cmd != nil }

// PID returns the process ID.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Signal sends a signal to the process.
func (p *Process) Signal(s os.Signal) error { return p.cmd.Process.Signal(s) }

// Wait waits until the process has ended. Its error is that of [exec.Cmd.Wait].
func (p *Process) Wait() error {
	err := p.cmd.Wait()
	p.cmd = nil
	return err
}

// LogTail returns the last lines of the log.
func (p *Process) LogTail() string {
	log, err := os.ReadFile(p.Log)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(log)), "\n")
	return strings.Join(lines[max(0, len(lines)-40):], "\n")
}

// Server is a server in a process of its own.
type Server struct {
	Process
	URL     *url.URL                    // where clients reach it, also after a restart
	Answers func(context.Context) error // returns nil if the server serves requests
}

// Start starts the server and returns when it serves requests.
func (s *Server) Start(ctx context.Context) error {
	if err := s.Process.Start(); err != nil {
		return err
	}
	return s.AwaitReady(ctx)
}

// AwaitReady returns when the server serves requests.
func (s *Server) AwaitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 90*time.Second)
	defer cancel()
	for {
		once, done := context.WithTimeout(ctx, time.Second)
		err := s.Answers(once)
		done()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s does not serve requests: %w\n%s", s.cmd, err, s.LogTail())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// End ends the server by a signal if it runs, and kills it if that takes more than two seconds, as
// a service manager does: etcd's waits for the streams of its clients.
func (s *Server) End(signal os.Signal) error {
	if !s.Runs() {
		return nil
	}
	process := s.cmd.Process
	err := s.Signal(signal)
	late := time.AfterFunc(2*time.Second, func() { process.Kill() })
	defer late.Stop()
	var exit *exec.ExitError
	if e := s.Wait(); e != nil && !errors.As(e, &exit) { // its exit status does not matter
		err = errors.Join(err, e)
	}
	return err
}

// anew is a client that connects again for each request.
var anew = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}

// healthy returns a func that asks a server for its health by HTTP.
func healthy(client *http.Client, url string) func(context.Context) error {
	return func(ctx context.Context) error {
		ask, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		answer, err := client.Do(ask)
		if err != nil {
			return err
		}
		answer.Body.Close()
		if answer.StatusCode != http.StatusOK {
			return fmt.Errorf("%s: %s", url, answer.Status)
		}
		return nil
	}
}
