//go:build unix

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"runtime"
	"strings"
	"time"
)

// runHook runs a command line of the user's, for example that of -check, and
// returns when it has ended, or was killed at the end of ctx. Where no output is
// given the error has its last line.
func runHook(ctx context.Context, line string, args, env []string, output io.Writer) error {
	if len(args) > 0 {
		line += ` "$@"`
	}
	cmd := exec.Command("/bin/sh", append([]string{"-c", line, "sh"}, args...)...)
	cmd.Env = env
	cmd.SysProcAttr = ownGroup()
	cmd.WaitDelay = 500 * time.Millisecond // for the output, which a process that it left behind may hold

	// Whoever starts a process that is to die with its parent is a thread, not a
	// process, and must last as long.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var last tail
	if output == nil {
		output = &last
	}
	cmd.Stdout, cmd.Stderr = output, output
	err := ctx.Err()
	if err == nil {
		err = runGroup(ctx, cmd)
	}
	if ctx.Err() != nil {
		return fmt.Errorf("killed: %w", context.Cause(ctx))
	}
	if errors.Is(err, exec.ErrWaitDelay) && cmd.ProcessState.Success() {
		err = nil
	}
	if said := last.line(); err != nil && said != "" {
		return fmt.Errorf("%w: %s", err, said)
	}
	return err
}

// tail keeps the end of what is written to it.
type tail struct{ buf []byte }

func (t *tail) Write(b []byte) (int, error) {
	const most = 512
	t.buf = append(t.buf, b...)
	t.buf = t.buf[max(0, len(t.buf)-most):]
	return len(b), nil
}

func (t *tail) line() string {
	lines := bytes.Split(bytes.TrimSpace(t.buf), []byte("\n"))
	return strings.ToValidUTF8(string(bytes.TrimSpace(lines[len(lines)-1])), "")
}
