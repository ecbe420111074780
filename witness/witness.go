// Package witness makes a crash cost milliseconds instead of the TTL. A witness is the parent process of a program that
// holds leases. When the program has died, for whatever reason, the witness kills the processes that the program has left
// behind. The kernel proves that all of them are gone. Then the witness releases the program's leases and sessions, so
// that another replica begins at once, at any TTL. It never releases the leases of a process that is alive. If it cannot
// prove the death, or fails itself, the leases expire as they would without it. The page docs/witness.md describes what it
// can do, and what it cannot.
//
// A program that calls [Main] in the first line of its main func is its own witness. The command tenure is the
// witness of any program that uses the library:
//
//	tenure witness -- ./server --port 80
//
// It needs Linux. Elsewhere [Main] returns, and [Run] returns an error.
package witness

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/report"
	"github.com/tenurelib/tenure/internal/witnessed"
)

// Defaults of [Config.Young] and [Config.ReleaseTimeout].
const (
	defaultYoung          = 10 * time.Second
	defaultReleaseTimeout = 2 * time.Second
)

// Config configures a witness. Only Open must be set.
type Config struct {
	// Open opens the store that the program uses. It is called when the program first competes for a lease, and
	// again until it succeeds or the witness ends. It should start no processes, because the witness would wait for
	// them as for the program's. [Run] does not wait until the store is closed.
	Open func(ctx context.Context) (tenure.Store, error)

	// Young is the age below which a term is left to expire when its process dies. Otherwise a job that crashes its
	// process would crash one replica after the other. It does not apply to an acquire that has not been answered yet,
	// because its job has not begun. Default 10s; negative: no term is too young.
	Young time.Duration

	// Settle is how long the witness waits between the death and the release, so that requests that the program
	// has sent can be completed. Default 0.
	Settle time.Duration

	// NoDrain leaves the program's Postgres sessions alone. By default the witness ends them before the release, so that
	// no statement of the program is committed after the next job has begun. It ends all sessions in the store's server
	// whose application_name contains a tag that the witness has put into the program's PGAPPNAME. It needs the role of
	// the program, or pg_signal_backend. It releases nothing before the sessions have ended.
	NoDrain bool

	// StopTimeout is the time from a SIGTERM until the witness kills the program and all processes that it has started.
	// Default 0: it never does.
	StopTimeout time.Duration

	// ReleaseTimeout limits the time from the program's end, plus Settle, to the return of [Run], so that a restart of
	// the program does not wait for a store that does not answer. Default 2s.
	ReleaseTimeout time.Duration

	Env    []string     // of the program; default os.Environ()
	Logger *slog.Logger // default slog.Default()
}

func (cfg Config) withDefaults() (Config, error) {
	cfg.Young = cmp.Or(cfg.Young, defaultYoung)
	cfg.ReleaseTimeout = cmp.Or(cfg.ReleaseTimeout, defaultReleaseTimeout)
	cfg.Logger, _ = report.Logger(cmp.Or(cfg.Logger, slog.Default())) // a log that blocks must not keep leases from being released
	if cfg.Env == nil {
		cfg.Env = os.Environ()
	}
	var problems objects.Problems
	problems.If(cfg.Open == nil, "Open is nil: it opens the store in which the program's leases are")
	problems.Duration("Young", max(cfg.Young, 0))
	problems.Duration("Settle", cfg.Settle)
	problems.Duration("StopTimeout", cfg.StopTimeout)
	problems.Duration("ReleaseTimeout", cfg.ReleaseTimeout)
	return cfg, problems.Err()
}

// Main makes this process the witness of the program. Call it in the first line of main:
//
//	witness.Main(openStore)
//
// In the first process it never returns. It starts the same executable with the same arguments as its child, passes
// signals on to it, and exits with its exit status, or with 128 plus the number of the signal that killed it. In the child
// it returns at once. It also returns at once under another witness, if the environment variable TENURE_WITNESS is "off",
// and on systems other than Linux.
//
// Open is [Config].Open. Code that runs before Main, such as init funcs, runs in both processes.
func Main(open func(context.Context) (tenure.Store, error)) {
	if os.Getenv(witnessed.Env) != "" {
		witnessed.Adopt()
		witnessed.Attach()
		return
	}
	if !supported {
		return
	}
	status, err := run(Config{Open: open}, "/proc/self/exe", os.Args)
	if err != nil {
		slog.Warn("no witness; if this process dies, its leases have to expire", "error", err)
		return
	}
	os.Exit(status)
}

// Run starts the program that the first argument names, with the other arguments, and is its witness until it has ended.
// It returns the program's exit status, or 128 plus the number of the signal that killed it. An error means that the
// program was not started. Call Run from the main func of a program that does nothing else: it handles all signals and
// collects all children of this process.
func Run(cfg Config, program ...string) (status int, err error) {
	if len(program) == 0 {
		return 0, fmt.Errorf("witness: run: %w: no program is given", tenure.ErrInvalid)
	}
	return run(cfg, program[0], program)
}
