package proctree

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// reap collects all children until there are none, and returns how the program ended. If the tree
// is patient, reap collects the program itself last: until then its number is not reused for
// another process or group, so its group can be signalled as long as anything else is left.
func (t *Tree) reap() syscall.WaitStatus {
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGCHLD)
	defer signal.Stop(ended)
	for {
		pid, err := AwaitEnd(AnyChild, 0)
		if err != nil {
			panic(fmt.Sprintf("bug: wait for the program: %v", err))
		}
		if pid == t.pid {
			break
		}
		t.collect(pid, nil)
	}
	if t.patient {
		close(t.exited)
		for t.collectOthers() {
			<-ended
		}
	}
	// A process that was forked during the search was not seen, and after the program is
	// collected it could no longer be signalled with its group.
	t.signal(-t.pid, syscall.SIGKILL)
	t.collect(t.pid, &t.status)
	if !t.patient {
		close(t.exited)
	}
	for {
		pid, err := AwaitEnd(AnyChild, 0)
		if err == syscall.ECHILD {
			return t.status
		}
		if err != nil {
			panic(fmt.Sprintf("bug: wait for what the program has left: %v", err))
		}
		t.collect(pid, nil)
	}
}

// collectOthers collects the children other than the program that have ended, and
// reports whether any is left.
func (t *Tree) collectOthers() (left bool) {
	for _, c := range All() {
		if c.Parent == os.Getpid() && c.PID != t.pid && !t.collect(c.PID, nil) {
			left = true
		}
	}
	return left
}

// collect collects a child, and reports whether it had ended.
func (t *Tree) collect(pid int, status *syscall.WaitStatus) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for {
		got, err := syscall.Wait4(pid, status, syscall.WNOHANG, nil)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if got == pid && pid == t.pid {
			t.free = true
		}
		return got == pid || err != nil
	}
}
