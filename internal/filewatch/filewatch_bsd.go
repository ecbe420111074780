//go:build darwin || freebsd || netbsd || openbsd || dragonfly

package filewatch

import (
	"errors"
	"os"
	"sync"
	"syscall"
)

// watch keeps the file open: Close drops all locks of this process on the file, as any close of it does.
func watch(path string) (*Watcher, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	quit, ended, err := os.Pipe() // quit is readable once ended is closed
	if err != nil {
		file.Close()
		return nil, err
	}
	queue, err := syscall.Kqueue()
	if err != nil {
		err = os.NewSyscallError("kqueue", err)
	} else {
		syscall.CloseOnExec(queue)
		changes := make([]syscall.Kevent_t, 2)
		syscall.SetKevent(&changes[0], int(file.Fd()), syscall.EVFILT_VNODE, syscall.EV_ADD|syscall.EV_CLEAR)
		changes[0].Fflags = syscall.NOTE_WRITE
		syscall.SetKevent(&changes[1], int(quit.Fd()), syscall.EVFILT_READ, syscall.EV_ADD)
		if _, err = syscall.Kevent(queue, changes, nil, nil); err != nil {
			err = &os.PathError{Op: "kevent", Path: path, Err: err}
			syscall.Close(queue)
		}
	}
	if err != nil {
		return nil, errors.Join(err, file.Close(), quit.Close(), ended.Close())
	}
	c, closing := make(chan struct{}), make(chan struct{})
	var reading sync.WaitGroup
	reading.Go(func() {
		for {
			var events [1]syscall.Kevent_t
			n, err := syscall.Kevent(queue, nil, events[:], nil)
			switch {
			case errors.Is(err, syscall.EINTR) || err == nil && n == 0:
				continue
			case err != nil || events[0].Filter == syscall.EVFILT_READ:
				return
			}
			select {
			case c <- struct{}{}:
			case <-closing:
				return
			}
		}
	})
	return &Watcher{C: c, end: func() {
		close(closing)
		ended.Close()
		reading.Wait()
		syscall.Close(queue)
		quit.Close()
		file.Close()
	}}, nil
}
