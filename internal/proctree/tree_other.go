//go:build unix && !linux

package proctree

import (
	"errors"
	"syscall"
	"time"
)

// BecomeSubreaper does nothing here.
func BecomeSubreaper() error { return nil }

// reap collects the program and waits until its process group is empty. As long as a process of the
// group is left, the group's number is not reused. Once the group has been seen to be gone, it is
// no longer signalled, because the number may have been reused.
func (t *Tree) reap() syscall.WaitStatus {
	var status syscall.WaitStatus
	for {
		if _, err := syscall.Wait4(t.pid, &status, 0, nil); !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	gone := t.groupGone()
	close(t.exited)
	for !gone {
		time.Sleep(10 * time.Millisecond)
		gone = t.groupGone()
	}
	return status
}

func (t *Tree) groupGone() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.free = syscall.Kill(-t.pid, 0) != nil
	return t.free
}

// Process is not known here.
type Process struct{ PID, Group int }

// Descendants returns nothing: here only the process group is known.
func Descendants(int) []Process { return nil }

// Signal does nothing.
func (Process) Signal(int, syscall.Signal) {}
