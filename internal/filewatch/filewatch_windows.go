package filewatch

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"unsafe"
)

// systemTime returns the time in nanoseconds since 1970, whatever package time says.
func systemTime() int64 {
	var now syscall.Filetime
	syscall.GetSystemTimeAsFileTime(&now)
	return now.Nanoseconds()
}

// watch watches the file's directory.
func watch(path string) (*Watcher, error) {
	if _, err := os.Stat(path); err != nil {
		return nil, err
	}
	dir, err := syscall.UTF16PtrFromString(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	handle, err := syscall.CreateFile(dir, syscall.FILE_LIST_DIRECTORY,
		syscall.FILE_SHARE_READ|syscall.FILE_SHARE_WRITE|syscall.FILE_SHARE_DELETE, nil, syscall.OPEN_EXISTING,
		syscall.FILE_FLAG_BACKUP_SEMANTICS|syscall.FILE_FLAG_OVERLAPPED, 0)
	if err != nil {
		return nil, &os.PathError{Op: "CreateFile", Path: path, Err: err}
	}
	port, err := syscall.CreateIoCompletionPort(handle, 0, 0, 1)
	if err != nil {
		syscall.CloseHandle(handle)
		return nil, os.NewSyscallError("CreateIoCompletionPort", err)
	}
	w := &directory{handle: handle, port: port, name: filepath.Base(path)}
	if err := w.ask(); err != nil {
		w.close()
		return nil, &os.PathError{Op: "ReadDirectoryChangesW", Path: path, Err: err}
	}
	c, closing := make(chan struct{}), make(chan struct{})
	var reading sync.WaitGroup
	reading.Go(func() {
		for {
			written, err := w.answer()
			if err != nil {
				return
			}
			if written {
				select {
				case c <- struct{}{}:
				case <-closing:
					return
				}
			}
			if err := w.ask(); err != nil {
				return
			}
		}
	})
	return &Watcher{C: c, end: func() {
		close(closing)
		_ = syscall.CancelIoEx(handle, &w.overlapped) // the goroutine gets an error, even for a request that it is just making
		_ = syscall.PostQueuedCompletionStatus(port, 0, ended, nil)
		reading.Wait()
		w.close()
	}}, nil
}

const ended = 1 // the key of the message that ends the goroutine

// directory is a directory whose changes Windows reports, one answer for each request.
type directory struct {
	handle, port syscall.Handle
	name         string // of the file
	overlapped   syscall.Overlapped
	buf          [1024]uint32 // which Windows fills until an answer comes
	asked        bool
}

func (d *directory) ask() error {
	const changes = syscall.FILE_NOTIFY_CHANGE_LAST_WRITE | syscall.FILE_NOTIFY_CHANGE_SIZE
	err := syscall.ReadDirectoryChanges(d.handle, (*byte)(unsafe.Pointer(&d.buf)), uint32(unsafe.Sizeof(d.buf)), false, changes, nil, &d.overlapped, 0)
	d.asked = err == nil
	return err
}

// answer waits for an answer, and reports whether it is about the file, or about more than the buffer has room for.
func (d *directory) answer() (written bool, err error) {
	var n uint32
	var key uint32
	var overlapped *syscall.Overlapped
	err = syscall.GetQueuedCompletionStatus(d.port, &n, &key, &overlapped, syscall.INFINITE)
	if overlapped != nil {
		d.asked = false
	}
	if err != nil {
		return false, err
	}
	if key == ended {
		return false, syscall.ERROR_OPERATION_ABORTED
	}
	if n == 0 {
		return true, nil
	}
	for at := uint32(0); ; {
		// NextEntryOffset, Action, FileNameLength in bytes, FileName
		entry := d.buf[at/4:]
		name := unsafe.Slice((*uint16)(unsafe.Pointer(&entry[3])), entry[2]/2)
		if strings.EqualFold(syscall.UTF16ToString(name), d.name) {
			return true, nil
		}
		if entry[0] == 0 {
			return false, nil
		}
		at += entry[0]
	}
}

// close waits until Windows no longer fills the buffer. The goroutine has returned.
func (d *directory) close() {
	if d.asked {
		_ = syscall.CancelIoEx(d.handle, &d.overlapped)
		for d.asked {
			_, _ = d.answer()
		}
	}
	syscall.CloseHandle(d.handle)
	syscall.CloseHandle(d.port)
}
