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

// self returns the path of this program.
func self() string {
	path, err := os.Executable()
	if err != nil {
		return os.Args[0]
	}
	return path
}

// ownGroup makes a child the leader of its own process group.
func ownGroup() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// becomeSubreaper does nothing here.
func becomeSubreaper() error { return nil }

// holdName and nameScope are not called here: validate refuses -unique-replica.
func holdName(string) (*os.File, error) { return nil, errors.ErrUnsupported }
func nameScope() (string, error)        { return "", errors.ErrUnsupported }

// collectOrphans does nothing: orphans go to PID 1 here.
func collectOrphans() {}

// runGroup runs a command that leads a process group, and reports the group. When ctx is
// done it kills the group, unless the command has ended by then.
func runGroup(ctx context.Context, cmd *exec.Cmd, tell func(report)) error {
	if err := cmd.Start(); err != nil {
		return err
	}
	tell(report{Group: cmd.Process.Pid})
	defer tell(report{Returned: true})
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		if cmd.Process.Signal(syscall.Signal(0)) == nil { // otherwise its pid may have been reused
			syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		}
		return <-ended
	}
}

// reap collects the program and waits until nothing is left of its process group. As long
// as a process of the group is left, the group's number is not reused. Once the group was
// seen to be gone it is no longer signalled, because the number may have been reused.
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

// descendants returns nothing: here only the process group is known.
func descendants(int) []process { return nil }

func (process) signal(int, syscall.Signal) {}

// knownGroup is a process group whose leader is not a child of this process. Here only
// its number is known.
type knownGroup struct{ id int }

func knowGroup(id, _ int) knownGroup { return knownGroup{id} }

// signal returns ESRCH if there is no process to signal.
func (g knownGroup) signal(sig syscall.Signal) error {
	if g.id == 0 {
		return syscall.ESRCH
	}
	return syscall.Kill(-g.id, sig)
}

// onlyZombies returns false: there is no way to know here.
func (knownGroup) onlyZombies() bool { return false }

func (knownGroup) close() {}
