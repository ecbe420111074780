//go:build unix && !linux

package main

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"syscall"
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

// holdName and nameScope are not called here: validate refuses --unique-replica.
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
