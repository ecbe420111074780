package rig

import "syscall"

// childAttr makes the kernel kill a child, even a stopped one, when this process ends, and keeps
// an interrupt from the terminal away from it.
func childAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
}
