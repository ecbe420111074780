//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package sqliteobjects

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
)

// lockFile locks a file, which it creates if necessary, until it is closed.
func lockFile(path string, shared bool) (*os.File, error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o666)
	if errors.Is(err, fs.ErrPermission) { // another user's file, which can be locked nevertheless
		file, err = os.Open(path)
	}
	if err != nil {
		return nil, err
	}
	how := syscall.LOCK_EX
	if shared {
		how = syscall.LOCK_SH
	}
	if err := syscall.Flock(int(file.Fd()), how|syscall.LOCK_NB); err != nil {
		file.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			err = errClaimed
		}
		return nil, err
	}
	// For the error of the process that comes second; it decides nothing.
	_ = file.Truncate(0)
	if !shared {
		_, _ = fmt.Fprintln(file, os.Getpid())
	}
	return file, nil
}
