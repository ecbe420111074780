//go:build unix

package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"syscall"

	"github.com/tenurelib/tenure"
)

// command is a line for the shell. With it the operator says what this program
// can't know: whether its host is fit for the job, and how another is cut off.
// The zero value is none.
type command string

// run runs the command with one more variable in its environment, and kills it,
// with all that it has started, when ctx ends. It may only print what the
// operator should see: that goes where the log goes.
func (c command) run(ctx context.Context, variable, value string) error {
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", string(c))
	cmd.Env = append(os.Environ(), variable+"="+value)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w", c, err)
	}
	return nil
}

// check returns a [tenure.CoordinatorConfig.Check], or nil where there is no
// command.
func (c command) check() func(context.Context, tenure.Role) error {
	if c == "" {
		return nil
	}
	return func(ctx context.Context, role tenure.Role) error { return c.run(ctx, "ROLE", role.String()) }
}

// fence returns a [tenure.CoordinatorConfig.FencePredecessor], or nil where there
// is no command. It fences no earlier run of this replica, which has crashed and was
// started anew: what cuts off that one would cut off this one too.
func (c command) fence(replica string, log *slog.Logger) func(context.Context, tenure.Holding) error {
	if c == "" {
		return nil
	}
	return func(ctx context.Context, prev tenure.Holding) error {
		if prev.Holder == replica {
			return nil
		}
		log.Info("fencing the predecessor", "predecessor", prev.Holder, "token", tenure.TermFromContext(ctx).Token())
		return c.run(ctx, "PREDECESSOR", prev.Holder)
	}
}
