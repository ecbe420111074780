//go:build !(linux || darwin || freebsd || netbsd || openbsd || dragonfly)

package sqliteobjects

import (
	"errors"
	"os"
)

func lockFile(path, database string, shared bool) (*os.File, error) {
	if shared {
		return nil, nil
	}
	return nil, errors.New("locks on files are not supported on this system")
}
