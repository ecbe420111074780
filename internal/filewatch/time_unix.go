//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package filewatch

import "syscall"

// systemTime returns the time in nanoseconds since 1970, whatever package time says.
func systemTime() int64 {
	var now syscall.Timeval
	_ = syscall.Gettimeofday(&now) // it fails only for a bad address
	return now.Nano()
}
