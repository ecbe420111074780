//go:build unix

package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
)

// lookAtFile examines a SQLite file and where it is, and reports whether it can be opened.
func (d *diagnosis) lookAtFile(path string, s *storeFlag) bool {
	d.Server = "SQLite"
	header := make([]byte, 20)
	file, err := os.Open(path)
	if err == nil {
		_, err = io.ReadFull(file, header)
		file.Close()
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		d.add("file", fault("there is no store "+path, "run tenure migrate"))
		return false
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF): // a new file: Migrate was not called
	case err != nil:
		d.add("file", fault(err.Error(), ""))
		return false
	case header[18] != 2: // the file format's write version: a rollback journal
		d.add("journal_mode", warning("the file is not in WAL mode, so each read keeps writers out", "open it with OpenSQLite, or run PRAGMA journal_mode = WAL"))
		return false // opening it here would change it
	}
	if p := s.alone(); p != nil {
		d.add("exclusive", fault(p.explain(), "open it with SQLiteConfig.Shared or with ?shared=true after the path, or run only that process"))
		return false
	}
	v, err := volumeOf(path)
	if err != nil {
		return true // it is unknown on this system
	}
	d.Server += " on " + v.fileSystem
	d.add("file_system", v.suits())
	d.add("free_space", v.hasRoom())
	return true
}

// volume is what a file is on.
type volume struct {
	fileSystem string
	remote     bool  // over a network, or shared with another machine
	memory     bool  // gone after a restart of the machine
	free       int64 // bytes
}

func (v volume) suits() finding {
	switch {
	case v.remote:
		return fault("the file is on "+v.fileSystem+", over which locks are unreliable", "move it to a local disk, or use Postgres")
	case v.memory:
		return finding{Level: levelNote, Text: "the file is in memory: it is gone when the machine restarts"}
	}
	return finding{}
}

func (v volume) hasRoom() finding {
	text := fmt.Sprintf("%d MiB are free on its volume; a full one keeps holders from renewing", v.free>>20)
	switch {
	case v.free < 4<<20:
		return fault(text, "free some space")
	case v.free < 64<<20:
		return warning(text, "free some space")
	}
	return finding{}
}
