//go:build unix && !linux

package main

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// self is the file of the program that runs.
func self() string {
	path, err := os.Executable()
	if err != nil {
		return os.Args[0]
	}
	return path
}

// ownGroup is for a child that leads a process group.
func ownGroup() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// becomeSubreaper does nothing here.
func becomeSubreaper() error { return nil }

// runGroup runs a command that leads a process group, which it kills at the end of
// ctx, unless the command has ended by then.
func runGroup(ctx context.Context, cmd *exec.Cmd) error {
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		if cmd.Process.Signal(syscall.Signal(0)) == nil { // else its number may be somebody else's
			syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		}
		return <-ended
	}
}

// reap collects the program and waits until nothing is left of its process group.
// As long as something is, the group's number is its own. From when it was seen to
// be gone it is not signalled any more: then the number may be somebody else's.
func (p *program) reap() ending {
	var status syscall.WaitStatus
	for {
		if _, err := syscall.Wait4(p.pid, &status, 0, nil); !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	gone := p.groupGone()
	close(p.exited)
	for !gone {
		time.Sleep(10 * time.Millisecond)
		gone = p.groupGone()
	}
	return endingOf(status)
}

func (p *program) groupGone() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.free = syscall.Kill(-p.pid, 0) != nil
	return p.free
}

type process struct{ group int }

// descendants returns none: only the process group is known here.
func descendants(int) []process { return nil }

func (process) signal(int, syscall.Signal) {}

// knownGroup is a process group that a process leads which is not a child of this
// one. Only its number is known here.
type knownGroup struct{ id int }

func knowGroup(id, _ int) knownGroup { return knownGroup{id} }

// signal returns ESRCH where nobody is there to be signalled.
func (g knownGroup) signal(sig syscall.Signal) error {
	if g.id == 0 {
		return syscall.ESRCH
	}
	return syscall.Kill(-g.id, sig)
}

// onlyZombies cannot tell here.
func (knownGroup) onlyZombies() bool { return false }

func (knownGroup) close() {}
