//go:build unix

package main

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"syscall"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/witnessed"
	"github.com/tenurelib/tenure/witness"
)

var witnessCommand = command{
	name:     "witness",
	synopsis: "-store STORE [flags] -- program [argument...]",
	summary:  "release a program's leases as soon as it is dead",
	about: `
Witness runs a program that uses the library, or "tenure run", and waits for its end. When
the program is dead, witness kills all that it has left behind, and then releases its leases
and sessions, so that another replica works at once and not after the TTL. It never releases
for a process that lives. If witness itself is killed, the program goes on, and a crash
costs the TTL again.

  tenure witness -- ./server --port 80
  tenure witness -pass-store -- tenure run -key web -- ./web

The program needs no change. Signals are passed to it, and witness exits with its status, or
with 128 plus the number of the signal that has killed it. The program's environment does
not have TENURE_STORE, unless -pass-store is given. It must stay in the foreground.

In a container, witness is the entrypoint, and needs no other init:

  ENTRYPOINT ["/tenure", "witness", "-stop-timeout", "25s", "--", "/server"]

As a sidecar in Kubernetes, it is the witness of containers that mount the directory of its
socket and have the path in TENURE_WITNESS:

  tenure witness -listen /run/tenure/witness.sock

Under systemd, use KillMode=mixed, OOMPolicy=continue and OOMScoreAdjust=-900, and for
Type=notify also NotifyAccess=all. It needs Linux.`,
	flags: storeFlags + "listen drain settle young stop-timeout release-timeout pass-store log",
	usages: map[string]string{
		"store":        "`PATH` or URL of the store that the program uses",
		"stop-timeout": "`TIME` from SIGTERM until witness kills the program, and releases (default never); less than\nthe grace period of the container, so that a job that hangs hands over all the same",
	},
	takes: true,
	act:   runWitness,
}

func runWitness(ctx context.Context, o *options, out *output, args []string) error {
	name, err := o.store.name()
	switch {
	case err != nil:
		return err
	case len(args) == 0 && o.listen == "":
		return usageError(`no program: "tenure witness -h" explains the usage`)
	case len(args) > 0 && o.listen != "":
		return usageError("-listen is for programs that others start: give either it or a program")
	case o.settle < 0 || o.young < 0 || o.stopTimeout < 0 || o.releaseTimeout <= 0:
		return usageError("-settle, -young, -stop-timeout and -release-timeout must not be negative, and -release-timeout not be 0")
	}
	if o.listen == "" {
		if _, err := exec.LookPath(args[0]); err != nil {
			return usageError("%v", err)
		}
	}
	lines := newLateWriter(out.stderr)
	defer lines.close()
	log := newLogger(lines, o.log).With("witness", os.Getpid())
	cfg := witness.Config{
		Open:   func(ctx context.Context) (tenure.Store, error) { return o.store.open(ctx, log) },
		Settle: o.settle, Young: o.young, StopTimeout: o.stopTimeout, ReleaseTimeout: o.releaseTimeout,
		NoDrain: !o.drain, Env: environ(), Logger: log,
	}
	if o.young == 0 {
		cfg.Young = -1
	}
	if o.listen != "" {
		ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM, syscall.SIGINT)
		defer stop()
		return witness.Listen(ctx, cfg, o.listen)
	}
	if o.passStore {
		cfg.Env = append(cfg.Env, storeEnv+"="+name)
	}
	// Systemd gives sockets and a watchdog to this process, by its number. The program has another.
	if pid := strconv.Itoa(os.Getpid()); os.Getenv("LISTEN_PID") == pid || os.Getenv("WATCHDOG_PID") == pid {
		args = append([]string{self(), adoptedCommand.name, "--"}, args...)
	}
	status, err := witness.Run(cfg, args...)
	if err == nil && status != 0 {
		return exitStatus(status)
	}
	return err
}

var adoptedCommand = command{
	name:     "adopted",
	synopsis: "-- program [argument...]",
	about:    "Started by tenure witness.",
	takes:    true,
	act: func(_ context.Context, _ *options, _ *output, args []string) error {
		if len(args) == 0 {
			return errors.New("no program")
		}
		path, err := exec.LookPath(args[0])
		if err != nil {
			return err
		}
		witnessed.Adopt()
		return syscall.Exec(path, args, os.Environ())
	},
}
