//go:build !(linux || darwin || freebsd || netbsd || openbsd || dragonfly || windows)

package filewatch

import (
	"errors"
	"time"
)

func systemTime() int64 { return time.Now().UnixNano() }

func watch(string) (*Watcher, error) { return nil, errors.ErrUnsupported }
