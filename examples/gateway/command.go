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

// command is a shell command. With it the operator provides what this program can't know:
// whether its host is fit for the job, and how to cut off another host. It may be empty.
type command string

// run runs the command with an additional environment variable, and kills it with its
// process group when ctx is done. The command's output goes to stderr, like the log.
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

// check returns a [tenure.CoordinatorConfig.Check], or nil if there is no command.
func (c command) check() func(context.Context, tenure.Role) error {
	if c == "" {
		return nil
	}
	return func(ctx context.Context, role tenure.Role) error { return c.run(ctx, "ROLE", role.String()) }
}

// fence returns a [tenure.CoordinatorConfig.FencePredecessor], or nil if there is no
// command. It doesn't fence an earlier run of this replica, which has crashed and been
// restarted: that would cut off this run as well.
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
