//go:build !unix

package pgtest

import (
	"fmt"
	"syscall"
)

// processAttr has no answer here: the server is minded by a Unix shell.
func processAttr(string) (*syscall.SysProcAttr, error) {
	return nil, fmt.Errorf("%w (a Unix is needed)", errNoPostgres)
}
