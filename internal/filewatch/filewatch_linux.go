package filewatch

import (
	"os"
	"sync"
	"syscall"
)

// watch fails at the system's limit of inotify's instances or watches.
func watch(path string) (*Watcher, error) {
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
