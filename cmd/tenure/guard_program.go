//go:build unix

package main

import (
	"fmt"
	"os"
	"os/exec"
	"sync"
	"syscall"
)

// program is a charge: a process, and all that it starts.
type program struct {
	args   []string
	pid    int           // also its process group
	exited chan struct{} // closed when the process itself has ended; others may be left
	left   chan ending

	mu   sync.Mutex // held while a child is collected, and while one is signalled by its number
	free bool       // the process was collected: its pid may have been reused
}

func newProgram(args []string) *program {
	return &program{args: args, exited: make(chan struct{}), left: make(chan ending, 1)}
}

func (p *program) begin() (int, error) {
	path, err := exec.LookPath(p.args[0])
	if err != nil {
		return 0, err
	}
	// os/exec would wait for this child alone, and not for the orphans that this process
	// adopts as a subreaper.
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

func endingOf(status syscall.WaitStatus) ending {
	if status.Signaled() {
		return ending{Status: 128 + int(status.Signal()), Text: "signal: " + status.Signal().String()}
	}
	return ending{Status: status.ExitStatus(), Text: fmt.Sprintf("exit status %d", status.ExitStatus())}
}

func (p *program) pass(sig syscall.Signal) { p.signal(p.pid, sig) }

func (p *program) stop(sig syscall.Signal) {
	p.signal(-p.pid, sig)
	p.signal(-p.pid, syscall.SIGCONT) // a stopped process does not get the first signal until it continues
}

func (p *program) stopOthers() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, d := range descendants(os.Getpid()) {
		if d.group != p.pid { // those in the group were signalled with it
			d.signal(os.Getpid(), syscall.SIGTERM)
		}
	}
}

func (p *program) kill() {
	p.signal(-p.pid, syscall.SIGKILL)
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, d := range descendants(os.Getpid()) {
		d.signal(os.Getpid(), syscall.SIGKILL)
	}
}

// signal sends a signal to the process, or, if number is negative, to its group, unless
// the pid may have been reused.
func (p *program) signal(number int, sig syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.free {
		syscall.Kill(number, sig)
	}
}

func (p *program) ended() <-chan struct{} { return p.exited }
func (p *program) gone() <-chan ending    { return p.left }
