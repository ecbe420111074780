//go:build unix && !linux

package proctree

import (
	"errors"
	"syscall"
	"time"
)

// BecomeSubreaper does nothing here.
func BecomeSubreaper() error { return nil }

// reap collects the program and waits until its process group is empty. The kernel does not reuse the group's number
// before then. Once the group was seen to be empty, it is no longer signalled.
func (t *Tree) reap() {
	for {
		if _, err := syscall.Wait4(t.pid, &t.status, 0, nil); !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	gone := t.groupGone()
	close(t.exited)
	for !gone {
		time.Sleep(10 * time.Millisecond)
		gone = t.groupGone()
	}
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
