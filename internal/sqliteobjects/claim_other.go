//go:build !(linux || darwin || freebsd || netbsd || openbsd || dragonfly)

package sqliteobjects

import (
	"errors"
	"os"
)

func lockFile(string, bool) (*os.File, error) {
	return nil, errors.New("locks on files are not supported on this system")
}
