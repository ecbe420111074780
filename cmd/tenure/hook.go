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

// runHook runs one of the user's commands, for example that of -check. It returns when
// the command has ended, or was killed because ctx is done. If output is nil, the error
// has the last line of the command's output.
func runHook(ctx context.Context, line string, args, env []string, output io.Writer) error {
	return runReportedHook(ctx, line, args, env, output, func(report) {})
}

// runReportedHook is runHook that also reports the process group of the command when it
// has started, and when it has ended.
func runReportedHook(ctx context.Context, line string, args, env []string, output io.Writer, tell func(report)) error {
	if len(args) > 0 {
		line += ` "$@"`
	}
	cmd := exec.Command("/bin/sh", append([]string{"-c", line, "sh"}, args...)...)
	cmd.Env = env
	cmd.SysProcAttr = ownGroup()
	cmd.WaitDelay = 500 * time.Millisecond // a process that the command leaves behind may hold its output open

	// A process that dies with its parent (Pdeathsig) dies with the thread that started
	// it, so this thread must stay.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var last tail
	if output == nil {
		output = &last
	}
	cmd.Stdout, cmd.Stderr = output, output
	err := ctx.Err()
	if err == nil {
		err = runGroup(ctx, cmd, tell)
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
