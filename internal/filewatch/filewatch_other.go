//go:build !(linux || darwin || freebsd || netbsd || openbsd || dragonfly || windows)

package filewatch

import "errors"

// New always fails.
func New(path string) (*Watcher, error) { return nil, errors.ErrUnsupported }
