//go:build unix

// Package proctree runs a program, and finds, signals and collects all processes that the program has started. On Linux
// none of them escapes; elsewhere only the program's process group is known.
package proctree

import (
	"fmt"
	"os"
	"sync"
	"syscall"
)

// Tree is a program and all processes that it has started. This process must be a subreaper and have no other children.
// All methods are safe for concurrent use.
type Tree struct {
	patient bool
	pid     int           // also its process group
	exited  chan struct{} // closed when the program itself has ended
	gone    chan struct{} // closed when nothing of the tree is left
	status  syscall.WaitStatus

	mu   sync.Mutex // held while a child is collected, and while one is signalled by its number
	free bool       // the program was collected, and its pid may have been reused
}

// New returns a tree. A patient tree leaves the program's process group alone when the program has ended, and can signal
// the group until it is empty. Any other tree kills the group then.
func New(patient bool) *Tree {
	return &Tree{patient: patient, exited: make(chan struct{}), gone: make(chan struct{})}
}

// Start starts the program. It must lead a process group of its own.
func (t *Tree) Start(path string, args []string, attr *syscall.ProcAttr) (pid int, err error) {
	// Package os/exec would wait only for this child, and not for the orphans that this process adopts as a subreaper.
	t.pid, err = syscall.ForkExec(path, args, attr)
	if err != nil {
		return 0, fmt.Errorf("start %s: %w", path, err)
	}
	go func() {
		defer close(t.gone)
		t.reap()
	}()
	return t.pid, nil
}

// Exited is closed when the program itself has ended. Processes that it has started may still run.
func (t *Tree) Exited() <-chan struct{} { return t.exited }

// Gone is closed when nothing of the tree is left.
func (t *Tree) Gone() <-chan struct{} { return t.gone }

// Status returns how the program has ended. Call it when Gone is closed, or, if the tree is not patient, Exited.
func (t *Tree) Status() syscall.WaitStatus { return t.status }

// Code returns the exit status of a program, or 128 plus the number of the signal that killed it, as a shell does.
func Code(status syscall.WaitStatus) int {
	if status.Signaled() {
		return 128 + int(status.Signal())
	}
	return status.ExitStatus()
}

// Signal sends a signal to the program.
func (t *Tree) Signal(sig syscall.Signal) { t.signal(t.pid, sig) }

// SignalGroup sends a signal to the program's process group.
func (t *Tree) SignalGroup(sig syscall.Signal) { t.signal(-t.pid, sig) }

// SignalOthers sends a signal to all processes of the tree that are not in the program's process group.
func (t *Tree) SignalOthers(sig syscall.Signal) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, d := range Descendants(os.Getpid()) {
		if d.Group != t.pid {
			d.Signal(os.Getpid(), sig)
		}
	}
}

// Kill kills all processes of the tree that it finds. Call it again until Gone is closed: a process that it has not
// killed yet may start another.
func (t *Tree) Kill() {
	t.signal(-t.pid, syscall.SIGKILL)
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, d := range Descendants(os.Getpid()) {
		d.Signal(os.Getpid(), syscall.SIGKILL)
	}
}

// signal sends a signal to the program, or to its group if number is negative, unless the pid may have been reused.
func (t *Tree) signal(number int, sig syscall.Signal) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.free {
		syscall.Kill(number, sig)
	}
}
