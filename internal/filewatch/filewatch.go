// Package filewatch reports when a file is written, using the notifications of the operating system: inotify, kqueue or
// ReadDirectoryChangesW. It uses only the standard library, so that it adds no dependency to programs on other databases.
//
// A notification may come before the write is complete, and some files have none, such as those on some network file systems,
// or in a directory that a virtual machine shares with its host. A caller must find out whether it can rely on notifications.
package filewatch

import (
	"errors"
	"time"
)

// Watcher is a watch of one file. It keeps watching that file if another one gets its name.
type Watcher struct {
	// C receives after the file was written. Writes that come while no goroutine receives become
	// one.
	C <-chan struct{}

	end func() // nil: there is nothing to end
}

// Close ends the watch, and waits until its resources are released. It must be called once.
func (w *Watcher) Close() {
	if w.end != nil {
		w.end()
	}
}

// errVirtual says that time is virtual, as in a bubble of package synctest. There, time stands still while a goroutine waits
// for the operating system.
var errVirtual = errors.New("files are not watched in virtual time")

// New watches the file at path. It fails if the file does not exist, at a limit of the system, and in
// virtual time.
func New(path string) (*Watcher, error) {
	if off := time.Since(time.Unix(0, systemTime())); off.Abs() > time.Hour {
		return nil, errVirtual
	}
	return watch(path)
}
