package main

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"syscall"
)

// self is the program that runs, also when its file has been replaced since.
func self() string { return "/proc/self/exe" }

// ownGroup is for a child that leads a process group, and is killed when the
// thread that started it ends.
func ownGroup() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// becomeSubreaper makes this process the parent of all its descendants whose own
// parents end, so that none gets lost.
func becomeSubreaper() error {
	const setChildSubreaper = 36
	if _, _, errno := syscall.RawSyscall(syscall.SYS_PRCTL, setChildSubreaper, 1, 0); errno != 0 {
		return fmt.Errorf("become subreaper: %w", errno)
	}
	return nil
}

// process is one that /proc shows.
type process struct{ pid, group int }

// descendants returns all that this process has started, and what those have.
func descendants() []process {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1)
	children := make(map[int][]process) // by parent
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		stat, err := os.ReadFile("/proc/" + name + "/stat")
		if err != nil {
			continue // has ended
		}
		// The second field is the program's name in parentheses, which may hold
		// anything. After it come the state, the parent and the group.
		fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
		if len(fields) < 3 || fields[0][0] == 'Z' {
			continue
		}
		parent, _ := strconv.Atoi(string(fields[1]))
		group, _ := strconv.Atoi(string(fields[2]))
		children[parent] = append(children[parent], process{pid, group})
	}
	var found []process
	for next := children[os.Getpid()]; len(next) > 0; {
		found = append(found, next...)
		var below []process
		for _, p := range next {
			below = append(below, children[p.pid]...)
		}
		next = below
	}
	return found
}
