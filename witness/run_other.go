//go:build !linux

package witness

import (
	"context"
	"errors"
	"fmt"
)

const supported = false

var errUnsupported = fmt.Errorf("%w: only Linux can prove that a program and all processes that it has started are dead", errors.ErrUnsupported)

func run(Config, string, []string) (int, error) {
	return 0, fmt.Errorf("witness: run: %w", errUnsupported)
}

// Listen needs Linux.
func Listen(context.Context, Config, string) error {
	return fmt.Errorf("witness: listen: %w", errUnsupported)
}
