//go:build !linux

package witness

import (
	"errors"
	"fmt"
)

const supported = false

func run(Config, string, []string) (int, error) {
	return 0, fmt.Errorf("witness: run: %w: only on Linux can a process prove that another and all that it has started are dead", errors.ErrUnsupported)
}
