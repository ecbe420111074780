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
type process struct {
	pid, parent, group int
	zombie             bool // has ended, and its parent has not asked how
}

func processes() (all []process) {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1)
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
		if len(fields) < 3 {
			continue
		}
		parent, _ := strconv.Atoi(string(fields[1]))
		group, _ := strconv.Atoi(string(fields[2]))
		all = append(all, process{pid, parent, group, fields[0][0] == 'Z'})
	}
	return all
}

// descendants returns all that a process has started, and what those have, as far
// as it has not ended.
func descendants(of int) (found []process) {
	children := make(map[int][]process) // by parent
	for _, p := range processes() {
		if !p.zombie {
			children[p.parent] = append(children[p.parent], p)
		}
	}
	for next := children[of]; len(next) > 0; {
		found = append(found, next...)
		var below []process
		for _, p := range next {
			below = append(below, children[p.pid]...)
		}
		next = below
	}
	return found
}

// onlyZombies reports whether all of a process group have ended, and stay for a
// parent that does not ask how: the first process of some containers never does.
func onlyZombies(group int) bool {
	some := false
	for _, p := range processes() {
		if p.group == group {
			if !p.zombie {
				return false
			}
			some = true
		}
	}
	return some
}
