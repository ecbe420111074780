//go:build !linux

package filewatch

import "errors"

// New fails on this system.
func New(string) (*Watcher, error) { return nil, errors.ErrUnsupported }
