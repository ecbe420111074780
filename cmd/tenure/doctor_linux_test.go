package main

import "syscall"

func mount(dir, options string) error { return syscall.Mount("tmpfs", dir, "tmpfs", 0, options) }
func unmount(dir string)              { _ = syscall.Unmount(dir, syscall.MNT_DETACH) }
