package filewatch

import (
	"errors"
	"os"
	"sync"
	"syscall"
	"time"
)

// New watches the file at path. It fails if the file does not exist, at the system's limit of inotify's instances or watches,
// in virtual time, and on other systems.
func New(path string) (*Watcher, error) {
	if isVirtual() {
		return nil, errors.New("files are not watched in virtual time")
	}
	fd, err := syscall.InotifyInit1(syscall.IN_NONBLOCK | syscall.IN_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("inotify_init1", err)
	}
	events := os.NewFile(uintptr(fd), "inotify") // its Close ends a Read, because it does not block
	if _, err := syscall.InotifyAddWatch(fd, path, syscall.IN_MODIFY); err != nil {
		events.Close()
		return nil, &os.PathError{Op: "inotify_add_watch", Path: path, Err: err}
	}
	c, closing := make(chan struct{}), make(chan struct{})
	var reading sync.WaitGroup
	reading.Go(func() {
		var buf [4096]byte
		for {
			if _, err := events.Read(buf[:]); err != nil {
				return
			}
			select { // meanwhile the kernel merges equal events
			case c <- struct{}{}:
			case <-closing:
				return
			}
		}
	})
	return &Watcher{C: c, end: func() {
		close(closing)
		events.Close()
		reading.Wait()
	}}, nil
}

// isVirtual reports whether time is virtual, as in a bubble of package synctest. There, time stands still while a goroutine
// waits for the operating system.
func isVirtual() bool {
	var now syscall.Timeval
	_ = syscall.Gettimeofday(&now) // it fails only for a bad address
	return time.Since(time.Unix(0, now.Nano())).Abs() > time.Hour
}
