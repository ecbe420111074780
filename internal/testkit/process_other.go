//go:build !unix

package testkit

import (
	"fmt"
	"syscall"
)

// processAttr fails here, because the server is supervised by a Unix shell.
func processAttr(string) (*syscall.SysProcAttr, error) {
	return nil, fmt.Errorf("%w (a Unix is needed)", errNoPostgres)
}
