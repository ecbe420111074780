//go:build unix

// Package proctree runs a program, and finds, signals and collects every process that the program has
// started. On Linux no process escapes; elsewhere only the program's process group is known.
package proctree

import (
	"fmt"
	"os"
	"sync"
	"syscall"
)

// Tree is a program and all processes that it starts. The calling process must be a subreaper, and must
// have no other children. All methods are safe for concurrent use.
type Tree struct {
	patient bool
	pid     int           // also its process group
	exited  chan struct{} // closed when the program itself has ended; others may be left
	gone    chan syscall.WaitStatus
	status  syscall.WaitStatus // of an impatient tree; set before exited is closed

	mu   sync.Mutex // held while a child is collected or signalled by its number
	free bool       // the program was collected: its pid may have been reused
}

// New returns a tree. A patient tree can signal the group of a program that has ended as long as any process
// of the group is left; otherwise what the program leaves behind is killed.
func New(patient bool) *Tree {
	return &Tree{patient: patient, exited: make(chan struct{}), gone: make(chan syscall.WaitStatus, 1)}
}

// Start starts the program. It must lead a process group of its own.
func (t *Tree) Start(path string, args []string, attr *syscall.ProcAttr) (pid int, err error) {
	// os/exec would wait for this child alone, and not for the orphans that this process
	// adopts as a subreaper.
	t.pid, err = syscall.ForkExec(path, args, attr)
	if err != nil {
		return 0, fmt.Errorf("start %s: %w", path, err)
	}
	go func() { t.gone <- t.reap() }()
	return t.pid, nil
}

// Exited is closed when the program itself has ended.
func (t *Tree) Exited() <-chan struct{} { return t.exited }

// Status returns how the program of an impatient tree has ended, once Exited is closed.
func (t *Tree) Status() syscall.WaitStatus { return t.status }

// Gone receives once, when no process of the tree is left, how the program has ended.
func (t *Tree) Gone() <-chan syscall.WaitStatus { return t.gone }

// Signal sends a signal to the program.
func (t *Tree) Signal(sig syscall.Signal) { t.signal(t.pid, sig) }

// SignalGroup sends a signal to the program's process group.
func (t *Tree) SignalGroup(sig syscall.Signal) { t.signal(-t.pid, sig) }

// SignalOthers sends a signal to all processes of the tree outside the program's process group.
func (t *Tree) SignalOthers(sig syscall.Signal) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, d := range Descendants(os.Getpid()) {
		if d.Group != t.pid {
			d.Signal(os.Getpid(), sig)
		}
	}
}

// Kill kills all processes of the tree. It may have to be called again, because processes may be
// started meanwhile.
func (t *Tree) Kill() {
	t.signal(-t.pid, syscall.SIGKILL)
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, d := range Descendants(os.Getpid()) {
		d.Signal(os.Getpid(), syscall.SIGKILL)
	}
}

// signal sends a signal to the program, or, if number is negative, to its group, unless
// the pid may have been reused.
func (t *Tree) signal(number int, sig syscall.Signal) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.free {
		syscall.Kill(number, sig)
	}
}
