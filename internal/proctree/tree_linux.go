package proctree

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// reap collects children until there are none. A patient tree collects the program itself last: until then the kernel
// does not reuse the program's number for another process or group, so that the group can be signalled.
func (t *Tree) reap() {
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
	// The search has not seen a process that was forked meanwhile, and the group cannot be signalled when the program is
	// collected.
	t.signal(-t.pid, syscall.SIGKILL)
	t.collect(t.pid, &t.status)
	if !t.patient {
		close(t.exited)
	}
	for {
		pid, err := AwaitEnd(AnyChild, 0)
		if err == syscall.ECHILD {
			return
		}
		if err != nil {
			panic(fmt.Sprintf("bug: wait for what the program has left: %v", err))
		}
		t.collect(pid, nil)
	}
}

// collectOthers collects all children that have ended, except the program, and reports whether any child is left.
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
