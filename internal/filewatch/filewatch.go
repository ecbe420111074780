// Package filewatch reports when a file is written, by inotify. It uses only the standard library, so that it adds no
// dependency to programs on other databases.
//
// A notification may come before the write is complete, and writes on some file systems have none, such as those of other hosts
// on a network file system.
package filewatch

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
