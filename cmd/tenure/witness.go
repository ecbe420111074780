//go:build unix

package main

import (
	"context"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/witnessed"
	"github.com/tenurelib/tenure/witness"
)

// witnessOptions are the flags of witness.
type witnessOptions struct {
	options
	cfg       witness.Config
	listen    string
	drain     bool
	passStore bool
	log       string
}

func witnessCommand(out *output) *cobra.Command {
	o := &witnessOptions{}
	c := &cobra.Command{
		Use:   "witness --store STORE [flags] -- program [argument...]",
		Short: "release a program's leases as soon as it is dead",
		Long: `Witness runs a program that uses the library, or "tenure run", and waits for its end. When
the program is dead, witness kills all that it has left behind, and then releases its leases
and sessions, so that another replica works at once and not after the TTL. It never releases
for a process that lives. If witness itself is killed, the program goes on, and a crash
costs the TTL again.

    tenure witness -- ./server --port 80
    tenure witness --pass-store -- tenure run --key web -- ./web

The program needs no change. Signals are passed to it, and witness exits with its status, or
with 128 plus the number of the signal that has killed it. The program's environment does
not have TENURE_STORE, unless --pass-store is given. It must stay in the foreground.

In a container, witness is the entrypoint, and needs no other init:

    ENTRYPOINT ["/tenure", "witness", "--stop-timeout", "25s", "--", "/server"]

As a sidecar in Kubernetes, it is the witness of containers that mount the directory of its
socket and have the path in TENURE_WITNESS:

    tenure witness --listen /run/tenure/witness.sock

Under systemd, use KillMode=mixed, OOMPolicy=continue and OOMScoreAdjust=-900, and for
Type=notify also NotifyAccess=all. It needs Linux.`,
		Args: cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, args []string) error { return o.run(c.Context(), out, args) },
	}
	o.storeFlags(c)
	c.Flags().Lookup("store").Usage = "`PATH` or URL of the store that the program uses"
	flags := c.Flags()
	flags.StringVar(&o.listen, "listen", "", "`PATH` of a socket, for programs that others start: see docs/witness.md")
	flags.BoolVar(&o.drain, "drain", true, "on Postgres, end the sessions of the dead program before the release")
	flags.DurationVar(&o.cfg.Settle, "settle", 0, "`TIME` to wait between the death and the release, for requests that the program had sent")
	flags.DurationVar(&o.cfg.Young, "young", 10*time.Second, "`TIME` that a term must have lasted when its process dies; a younger one is left to expire, so that a job that crashes its process does not crash one replica after the other")
	flags.DurationVar(&o.cfg.StopTimeout, "stop-timeout", 0, "`TIME` from SIGTERM until witness kills the program, and releases (default never); less than the grace period of the container, so that a job that hangs hands over all the same")
	flags.DurationVar(&o.cfg.ReleaseTimeout, "release-timeout", 2*time.Second, "`TIME` after the program's end at which witness exits even if nothing could be released")
	flags.BoolVar(&o.passStore, "pass-store", false, "leave TENURE_STORE in the program's environment")
	flags.StringVar(&o.log, "log", "text", "json or text: `FORMAT` of the log")
	return c
}

func (o *witnessOptions) run(ctx context.Context, out *output, args []string) error {
	name, err := o.store.name()
	switch {
	case err != nil:
		return err
	case len(args) == 0 && o.listen == "":
		return usageError(`no program: "tenure witness -h" explains the usage`)
	case len(args) > 0 && o.listen != "":
		return usageError("--listen is for programs that others start: give either it or a program")
	case o.log != "text" && o.log != "json":
		return usageError("--log: want json or text")
	case o.cfg.ReleaseTimeout == 0:
		return usageError("--release-timeout must not be 0")
	}
	if o.listen == "" {
		if err := findProgram(args[0]); err != nil {
			return err
		}
	}
	lines := newLateWriter(out.stderr)
	defer lines.close()
	log := newLogger(lines, o.log).With("witness", os.Getpid())
	cfg := o.cfg
	cfg.Open = func(ctx context.Context) (tenure.Store, error) { return o.store.open(ctx, log) }
	cfg.NoDrain, cfg.Env, cfg.Logger = !o.drain, environ(), log
	if cfg.Young == 0 {
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
		args = append([]string{self(), "adopted", "--"}, args...)
	}
	status, err := witness.Run(cfg, args...)
	if err == nil && status != 0 {
		return exitStatus(status)
	}
	return err
}

// adoptedCommand is what a witness starts under systemd in place of the program, which follows.
func adoptedCommand(*output) *cobra.Command {
	return &cobra.Command{
		Use:    "adopted -- program [argument...]",
		Hidden: true,
		Args:   cobra.MinimumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			path, err := exec.LookPath(args[0])
			if err != nil {
				return err
			}
			witnessed.Adopt()
			return syscall.Exec(path, args, os.Environ())
		},
	}
}
