package proctree

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"sync"
	"syscall"
	"unsafe"
)

// BecomeSubreaper makes this process adopt its orphaned descendants, so that it can find them.
func BecomeSubreaper() error {
	if errno := setSubreaper(1); errno != 0 {
		return fmt.Errorf("become subreaper: %w", errno)
	}
	return nil
}

// ResignAsSubreaper undoes [BecomeSubreaper].
func ResignAsSubreaper() { setSubreaper(0) }

func setSubreaper(on uintptr) syscall.Errno {
	const setChildSubreaper = 36
	_, _, errno := syscall.RawSyscall(syscall.SYS_PRCTL, setChildSubreaper, on, 0)
	return errno
}

// The first argument of waitid, for [AwaitEnd].
const (
	AnyChild = 0 // P_ALL
	OneChild = 1 // P_PID
)

// AwaitEnd waits until a child has ended, and does not collect it. Until it is collected, the kernel reuses neither its
// pid nor the number of the process group that it leads.
func AwaitEnd(which, pid int) (int, error) {
	var info struct {
		_   [3 + ^uint(0)>>63]int32 // the fields common to all signals
		pid int32
		_   [112]byte
	}
	for {
		_, _, errno := syscall.Syscall6(syscall.SYS_WAITID, uintptr(which), uintptr(pid), uintptr(unsafe.Pointer(&info)),
			syscall.WEXITED|syscall.WNOWAIT, 0, 0)
		switch errno {
		case 0:
			return int(info.pid), nil
		case syscall.EINTR:
		default:
			return 0, errno
		}
	}
}

// Process is a process in /proc.
type Process struct {
	PID, Parent, Group, Session int
	Ended                       bool // a zombie, which its parent has not collected
}

// ours reports whether /proc shows this process's PID namespace. In a namespace that was made without a /proc of its own, the
// numbers there are those of unrelated processes.
var ours = sync.OnceValue(func() bool {
	self, err := os.Readlink("/proc/self")
	return err == nil && self == strconv.Itoa(os.Getpid())
})

// Read reads a process. Ok is false if there is none, or if it can't be seen.
func Read(pid int) (p Process, ok bool) {
	if !ours() {
		return p, false
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return p, false // it has ended and was collected
	}
	// The second field is the program's name in parentheses, which may contain anything. The state, the parent, the group
	// and the session follow it, and later the number of threads.
	const threads = 17
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) <= threads {
		return p, false
	}
	number := func(i int) int {
		n, _ := strconv.Atoi(string(fields[i]))
		return n
	}
	// A process whose main thread has ended looks like a zombie, although its other threads still run.
	ended := fields[0][0] == 'Z' && number(threads) <= 1
	return Process{PID: pid, Parent: number(1), Group: number(2), Session: number(3), Ended: ended}, true
}

// All returns all processes that /proc shows.
func All() (all []Process) {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1)
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil {
			if p, ok := Read(pid); ok {
				all = append(all, p)
			}
		}
	}
	return all
}

// Descendants returns the processes that a process has started, directly or indirectly, and that have not ended.
func Descendants(of int) (found []Process) {
	children := make(map[int][]Process) // by parent
	for _, p := range All() {
		if !p.Ended {
			children[p.Parent] = append(children[p.Parent], p)
		}
	}
	for next := children[of]; len(next) > 0; {
		found = append(found, next...)
		var below []Process
		for _, p := range next {
			below = append(below, children[p.PID]...)
		}
		next = below
	}
	return found
}

// Signal signals a process that was seen among the descendants of descendantOf. The process may have ended since, and
// its pid may have been reused. Signal therefore opens a handle, and then checks the pid again: if it belongs to a
// descendant, the handle is for that process, or for one that has ended.
func (p Process) Signal(descendantOf int, sig syscall.Signal) {
	handle, err := os.FindProcess(p.PID)
	if err != nil {
		return
	}
	defer handle.Release()
	if Descends(p.PID, descendantOf) {
		handle.Signal(sig)
	}
}

// Descends reports whether a process is a descendant of another.
func Descends(pid, from int) bool {
	for pid > 1 {
		p, ok := Read(pid)
		if !ok {
			return false
		}
		if pid = p.Parent; pid == from {
			return true
		}
	}
	return false
}
