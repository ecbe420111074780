//go:build unix

package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// program is a charge: a process, with all that it starts.
type program struct {
	args   []string
	pid    int           // also its process group
	exited chan struct{} // closed when the process itself has ended; others may be left
	left   chan ending
}

func newProgram(args []string) *program {
	return &program{args: args, exited: make(chan struct{}), left: make(chan ending, 1)}
}

func (p *program) begin() (int, error) {
	path, err := exec.LookPath(p.args[0])
	if err != nil {
		return 0, err
	}
	// Not by os/exec, which waits for this child alone, and not for those that
	// this process is given when their parents have ended.
	pid, err := syscall.ForkExec(path, p.args, &syscall.ProcAttr{
		Env:   os.Environ(),
		Files: []uintptr{0, 1, 2},
		Sys:   ownGroup(),
	})
	if err != nil {
		return 0, fmt.Errorf("start %s: %w", path, err)
	}
	p.pid = pid
	go func() { p.left <- p.reap() }()
	return pid, nil
}

// reap collects all children until there are none, and returns how the first one
// ended.
func (p *program) reap() (end ending) {
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil: // no children
			// What has ended up elsewhere, where there are no subreapers.
			for syscall.Kill(-p.pid, 0) == nil {
				time.Sleep(10 * time.Millisecond)
			}
			return end
		case pid == p.pid:
			end = endingOf(status)
			close(p.exited)
		}
	}
}

func endingOf(status syscall.WaitStatus) ending {
	if status.Signaled() {
		return ending{Status: 128 + int(status.Signal()), Text: "signal: " + status.Signal().String()}
	}
	return ending{Status: status.ExitStatus(), Text: fmt.Sprintf("exit status %d", status.ExitStatus())}
}

func (p *program) pass(sig syscall.Signal) {
	select {
	case <-p.exited: // its number may be another's
	default:
		syscall.Kill(p.pid, sig)
	}
}

func (p *program) stop(sig syscall.Signal) {
	signalGroup(p.pid, sig)
	signalGroup(p.pid, syscall.SIGCONT) // who is stopped does not hear the first
}

func (p *program) stopOthers() {
	for _, d := range descendants(os.Getpid()) {
		if d.group != p.pid { // or it was told with its group
			syscall.Kill(d.pid, syscall.SIGTERM)
		}
	}
}

func (p *program) kill() {
	signalGroup(p.pid, syscall.SIGKILL)
	for _, d := range descendants(os.Getpid()) {
		syscall.Kill(d.pid, syscall.SIGKILL)
	}
}

func (p *program) ended() <-chan struct{} { return p.exited }
func (p *program) gone() <-chan ending    { return p.left }
