//go:build unix

package main

import (
	"fmt"
	"os"
	"os/exec"
	"sync"
	"syscall"
)

// program is a charge: a process, with all that it starts.
type program struct {
	args   []string
	pid    int           // also its process group
	exited chan struct{} // closed when the process itself has ended; others may be left
	left   chan ending

	mu   sync.Mutex // held while a child is collected, and while one is signalled by its number
	free bool       // the number of the process and of its group may be somebody else's by now
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

func endingOf(status syscall.WaitStatus) ending {
	if status.Signaled() {
		return ending{Status: 128 + int(status.Signal()), Text: "signal: " + status.Signal().String()}
	}
	return ending{Status: status.ExitStatus(), Text: fmt.Sprintf("exit status %d", status.ExitStatus())}
}

func (p *program) pass(sig syscall.Signal) { p.signal(p.pid, sig) }

func (p *program) stop(sig syscall.Signal) {
	p.signal(-p.pid, sig)
	p.signal(-p.pid, syscall.SIGCONT) // who is stopped does not hear the first
}

func (p *program) stopOthers() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, d := range descendants(os.Getpid()) {
		if d.group != p.pid { // the others were told with their group
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

// signal signals the process, or its group by the negative number, unless that
// number may be somebody else's.
func (p *program) signal(number int, sig syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.free {
		syscall.Kill(number, sig)
	}
}

func (p *program) ended() <-chan struct{} { return p.exited }
func (p *program) gone() <-chan ending    { return p.left }
