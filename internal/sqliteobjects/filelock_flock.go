//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package sqliteobjects

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
	"time"
)

// lockFile locks a file until it is closed. It creates the file if necessary, with the permissions and the
// owner of the database, so that every user of the database can lock it.
func lockFile(path, database string, shared bool) (*os.File, error) {
	_, err := os.Stat(path)
	isNew := errors.Is(err, fs.ErrNotExist)
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o666)
	mayWrite := err == nil
	if errors.Is(err, fs.ErrPermission) { // another user's file, which can be locked nevertheless
		file, err = os.Open(path)
	}
	if err != nil {
		return nil, err
	}
	if info, err := os.Stat(database); isNew && err == nil {
		_ = file.Chmod(info.Mode().Perm())
		if owner, ok := info.Sys().(*syscall.Stat_t); ok {
			_ = file.Chown(int(owner.Uid), int(owner.Gid)) // for root, as SQLite does with its files
		}
	}
	how := syscall.LOCK_EX
	if shared {
		how = syscall.LOCK_SH
	}
	err = syscall.Flock(int(file.Fd()), how|syscall.LOCK_NB)
	for tries := 1; errors.Is(err, syscall.EWOULDBLOCK) && !shared && tries < 5; tries++ { // tenure status holds it for an instant
		time.Sleep(10 * time.Millisecond)
		err = syscall.Flock(int(file.Fd()), how|syscall.LOCK_NB)
	}
	if err != nil {
		file.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			err = errClaimed
		}
		return nil, err
	}
	// For the error of the second process; it decides nothing.
	if mayWrite {
		_ = file.Truncate(0)
		_, _ = fmt.Fprintln(file, os.Getpid())
	}
	return file, nil
}

// isAlive reports whether there is a process with that ID.
func isAlive(pid int) bool { return pid > 0 && !errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) }
