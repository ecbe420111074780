//go:build unix && !linux

package main

import (
	"os"
	"syscall"
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

type process struct{ pid, group int }

// descendants returns none: only the process group is known here.
func descendants(int) []process { return nil }

// onlyZombies cannot tell here.
func onlyZombies(int) bool { return false }
