//go:build unix

package main

import (
	"io"
	"log/slog"
	"slices"
	"time"
)

// newLogger returns a logger whose lines are text, or JSON for --log json.
func newLogger(w io.Writer, format string) *slog.Logger {
	if format == "json" {
		return slog.New(slog.NewJSONHandler(w, nil))
	}
	return slog.New(slog.NewTextHandler(w, nil))
}

// lateWriter writes in its own goroutine, and drops lines that it cannot write in time: an
// unread log must neither delay renewals nor keep a program alive.
type lateWriter struct {
	lines chan []byte
	last  chan struct{} // closed when no more lines will come
	done  chan struct{}
}

func newLateWriter(w io.Writer) *lateWriter {
	l := &lateWriter{lines: make(chan []byte, 256), last: make(chan struct{}), done: make(chan struct{})}
	go func() {
		defer close(l.done)
		for {
			select {
			case line := <-l.lines:
				w.Write(line)
			case <-l.last:
				for range len(l.lines) {
					w.Write(<-l.lines)
				}
				return
			}
		}
	}()
	return l
}

func (l *lateWriter) Write(line []byte) (int, error) {
	select {
	case l.lines <- slices.Clone(line):
	default:
	}
	return len(line), nil
}

// close waits at most a second for the last lines to be written.
func (l *lateWriter) close() {
	close(l.last)
	select {
	case <-l.done:
	case <-time.After(time.Second):
	}
}
