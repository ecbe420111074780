//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package sqliteobjects

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// lockFile locks a file until it is closed. It creates the file if necessary, with the permissions and the
// owner of the database, so that every user of the database can lock it.
//
// Others may write to the folder, and this process may be more privileged than they are. So lockFile opens
// nothing through a link, looks at what it has opened, gives away only what it has made, and writes only
// where nothing but the PID of an earlier process can be lost.
func lockFile(path, database string, shared bool) (*os.File, error) {
	file, err := openOrCreate(path, database)
	if err != nil {
		return nil, err
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
	if errors.Is(err, syscall.EWOULDBLOCK) {
		err = &claimedError{pid: pidIn(file)}
	}
	if err != nil {
		file.Close()
		return nil, err
	}
	// For the error of the second process; it decides nothing, and fails on a file that can only be read.
	if holdsPID(file) {
		_, _ = file.WriteAt(fmt.Appendf(nil, "%-*d\n", pidLength-1, os.Getpid()), 0)
	}
	return file, nil
}

// openOrCreate opens a file of locks, or creates it.
func openOrCreate(path, database string) (*os.File, error) {
	for tries := 0; ; tries++ {
		file, err := openLock(path)
		if !errors.Is(err, fs.ErrNotExist) {
			return file, err
		}
		file, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		if errors.Is(err, fs.ErrExist) && tries < 10 {
			continue // another process has just created it
		}
		if err != nil {
			return nil, err
		}
		if info, err := os.Stat(database); err == nil {
			if owner, ok := info.Sys().(*syscall.Stat_t); ok {
				_ = file.Chown(int(owner.Uid), int(owner.Gid)) // for root, as SQLite does with its files
			}
			_ = file.Chmod(info.Mode().Perm())
		}
		return file, nil
	}
}

// openLock opens an existing file of locks. What is not a file of its own is refused: it may be a link to a
// file of somebody else, and opening a pipe would wait for its other end.
func openLock(path string) (*os.File, error) {
	const flags = syscall.O_NOFOLLOW | syscall.O_NONBLOCK
	if info, err := os.Lstat(path); err == nil && !info.Mode().IsRegular() { // the kernel refuses a link with a different error on each system
		return nil, &strangeError{path, info.Mode()}
	}
	file, err := os.OpenFile(path, os.O_RDWR|flags, 0)
	if errors.Is(err, fs.ErrPermission) { // another user's file, which can be locked nevertheless
		file, err = os.OpenFile(path, os.O_RDONLY|flags, 0)
	}
	if err != nil {
		return nil, err
	}
	info, err := file.Stat()
	if err == nil {
		if stat, ok := info.Sys().(*syscall.Stat_t); !info.Mode().IsRegular() || ok && stat.Nlink > 1 {
			err = &strangeError{path, info.Mode()}
		}
	}
	if err != nil {
		file.Close()
		return nil, err
	}
	return file, nil
}

// Holder returns the process that has locked a table of the database at path for itself alone; the PID is 0 if
// it is unknown. It tries the lock for an instant, and creates nothing.
func Holder(path, table string) (pid int, locked bool) {
	file, err := openLock(LockFile(path, table))
	if err != nil {
		return 0, false
	}
	defer file.Close() // which also ends the lock
	if !errors.Is(syscall.Flock(int(file.Fd()), syscall.LOCK_SH|syscall.LOCK_NB), syscall.EWOULDBLOCK) {
		return 0, false
	}
	return pidIn(file), true
}

// pidLength is how long the content of a file of locks is at most.
const pidLength = 21

// pidText returns what is in a file of locks, and whether that is at most a PID.
func pidText(file *os.File) (text string, ok bool) {
	content := make([]byte, pidLength+1)
	n, _ := file.ReadAt(content, 0)
	text = strings.TrimSpace(string(content[:n]))
	return text, n <= pidLength && strings.Trim(text, "0123456789") == ""
}

func holdsPID(file *os.File) bool {
	_, ok := pidText(file)
	return ok
}

// pidIn returns the PID that a file of locks names, if such a process still runs, and 0 otherwise.
func pidIn(file *os.File) int {
	text, _ := pidText(file)
	if pid, err := strconv.Atoi(text); err == nil && pid > 0 && !errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
		return pid
	}
	return 0
}
