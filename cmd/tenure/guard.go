//go:build unix

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/tenurelib/tenure/internal/proctree"
)

// The guard is a process between tenure and the program, one for each term. It ends the
// program when tenure orders it or has ended, and, by its own timer, before trust in the term
// ends. The program therefore ends in time even if tenure is stopped, hangs or has been killed.
func guardCommand(out *output) *cobra.Command {
	cfg := guardConfig{}
	c := &cobra.Command{
		Use:    "guard [flags] [-- program [argument...]]",
		Hidden: true,
		Args:   cobra.ArbitraryArgs,
		RunE:   func(_ *cobra.Command, args []string) error { return runGuard(cfg, args, out.stderr) },
	}
	flags := c.Flags()
	flags.DurationVar(&cfg.ask, "ask", 0, "")
	flags.DurationVar(&cfg.stopTimeout, "stop-timeout", 0, "")
	flags.StringVar(&cfg.onLoss, "on-loss", "", "")
	flags.StringVar(&cfg.start, "start", "", "")
	flags.StringVar(&cfg.stop, "stop", "", "")
	flags.DurationVar(&cfg.startEvery, "start-every", 0, "")
	flags.StringVar(&cfg.log, "log", "", "")
	return c
}

// The file descriptors that a guard inherits.
const (
	ordersFD  = 3
	reportsFD = 4
	nameFD    = 5 // with --unique-replica: held open, so that the next run waits for this guard
)

// killInterval is the time between two SIGKILLs.
const killInterval = 20 * time.Millisecond

// guardConfig is the options that a guard takes.
type guardConfig struct {
	ask         time.Duration // between two questions
	stopTimeout time.Duration
	onLoss      string
	start, stop string
	startEvery  time.Duration
	log         string
}

// killsService reports whether the guard kills a service at a loss. Otherwise --stop stops it,
// however long that takes.
func (c guardConfig) killsService() bool { return c.start != "" && c.onLoss == onLossKill }

// charge is what a guard looks after. Its methods are called by one goroutine.
type charge interface {
	begin() (group int, err error)
	pass(sig syscall.Signal)
	stop(sig syscall.Signal) // asks it to end; called once
	stopOthers()             // asks the processes it left behind to end; called once it has ended
	kill()                   // kills all of it; called repeatedly until it is gone
	ended() <-chan struct{}  // closed when it has ended; processes it started may be left
	gone() <-chan ending     // receives once, when nothing of it is left
}

// guard is the state of a guard's loop.
type guard struct {
	cfg     guardConfig
	charge  charge
	reports *json.Encoder
	log     *slog.Logger

	asked    time.Time // when the open question was asked; zero if none is open
	nextAsk  time.Time
	begun    bool
	hard     instant
	soft     instant
	ended    <-chan struct{} // nil once it was received from
	byItself bool            // the charge ended before it was told to
	stopping bool
	killBy   instant // set once stopping
	killing  bool
}

func runGuard(cfg guardConfig, args []string, stderr io.Writer) error {
	// The program dies with its parent (Pdeathsig), and its parent is this thread, not the
	// process. The main thread is the one that lives as long as the process.
	runtime.LockOSThread()
	syscall.CloseOnExec(ordersFD)
	syscall.CloseOnExec(reportsFD)
	syscall.CloseOnExec(nameFD)
	syscall.SetNonblock(reportsFD, true) // for reportNow; an os.File waits all the same
	surviveSignals()
	lines := newLateWriter(stderr)
	defer lines.close()

	g := &guard{
		cfg:     cfg,
		reports: json.NewEncoder(os.NewFile(reportsFD, "reports")),
		log:     newLogger(lines, cfg.log).With("guard", os.Getpid()),
	}
	if len(args) > 0 || cfg.killsService() {
		if err := proctree.BecomeSubreaper(); err != nil {
			g.log.Warn("processes that leave the program's group will not be found", "error", err)
		}
	}
	if len(args) > 0 {
		g.charge = newProgram(args)
	} else {
		g.charge = newService(cfg, g.log, reportNow)
	}
	if cfg.killsService() {
		go collectOrphans()
	}
	return g.run(readOrders(os.NewFile(ordersFD, "orders")))
}

// surviveSignals keeps signals that are meant for tenure, or for a whole group, from
// ending the guard. It doesn't ignore them, because the program would inherit that.
func surviveSignals() {
	all := make(chan os.Signal, 1) // never received from: signals are dropped once it is full
	for _, sig := range []os.Signal{
		syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGPIPE, syscall.SIGALRM,
		syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGTSTP, syscall.SIGTTIN, syscall.SIGTTOU,
	} {
		if !signal.Ignored(sig) {
			signal.Notify(all, sig)
		}
	}
}

func readOrders(r io.Reader) <-chan order {
	orders := make(chan order)
	go func() {
		defer close(orders)
		for decoder := json.NewDecoder(r); ; {
			var o order
			if decoder.Decode(&o) != nil {
				return
			}
			orders <- o
		}
	}()
	return orders
}

// run returns when nothing of the charge is left, or when it can no longer begin.
func (g *guard) run(orders <-chan order) error {
	g.ended = g.charge.ended()
	g.ask()
	timer := time.NewTimer(g.cfg.ask)
	defer timer.Stop()
	for {
		select {
		case o, ok := <-orders:
			if !ok {
				orders = nil
				if !g.begun {
					return errors.New("tenure was gone before the program began")
				}
				g.lose("tenure is gone")
			} else if end := g.obey(o); end != nil {
				return g.report(report{End: end})
			}
		case <-g.ended:
			g.ended = nil
			if !g.stopping {
				g.byItself = true
				g.stop(syscall.SIGTERM)
			}
			g.charge.stopOthers()
		case end := <-g.charge.gone():
			end.Told = g.stopping && !g.byItself
			return g.report(report{End: &end})
		case <-timer.C:
		}
		timer.Reset(g.watch())
	}
}

// watch does what is due by now, and returns how long to wait before it looks again.
func (g *guard) watch() time.Duration {
	if orders := time.Until(g.nextAsk); orders <= 0 && g.asked.IsZero() {
		g.ask()
	}
	if !g.begun {
		return g.cfg.ask
	}
	now := time.Now()
	switch {
	case g.killing:
	case g.stopping && g.killBy.passed(now):
		g.kill("it has not ended in time")
	case g.hard.passed(now):
		g.kill("trust in the term ends")
	case !g.stopping && g.soft.passed(now):
		g.lose("tenure has not extended trust in the term")
	}
	if g.killing {
		g.charge.kill()
		return killInterval // the charge may have started more processes meanwhile
	}
	next := g.soft
	if g.stopping {
		next = g.killBy
	}
	// A timer stands still while the machine is suspended, so look at least every g.cfg.ask.
	return max(time.Millisecond, min(g.cfg.ask, next.until(now), g.hard.until(now)))
}

// obey carries out an order. It returns an ending if there is nothing to look after.
func (g *guard) obey(o order) *ending {
	switch {
	case o.Trust != nil:
		return g.trust(*o.Trust)
	case !g.begun && (o.Kill || o.Stop != 0):
		return notBegun()
	case !g.begun:
	case o.Kill:
		g.kill("the lease is lost")
	case o.Stop != 0:
		g.stop(o.Stop)
	case o.Signal != 0:
		g.charge.pass(o.Signal)
	}
	return nil
}

func (g *guard) ask() {
	g.asked = time.Now()
	g.nextAsk = g.asked.Add(g.cfg.ask)
	g.report(report{Ask: true}) // if this fails tenure is gone, and the orders end
}

// trust takes the answer to a question. The first answer starts the charge.
func (g *guard) trust(t trust) *ending {
	g.hard, g.soft = newInstant(g.asked, t.Hard), newInstant(g.asked, t.Soft)
	g.asked = time.Time{}
	if g.begun {
		return nil
	}
	if g.soft.passed(time.Now()) {
		return notBegun()
	}
	g.begun = true
	group, err := g.charge.begin()
	if err != nil {
		return &ending{Status: 127, Text: err.Error()}
	}
	g.report(report{Group: group})
	return nil
}

// notBegun is the ending of a charge whose term was over before it began.
func notBegun() *ending {
	return &ending{Told: true, Status: 128 + int(syscall.SIGTERM), Text: "it had not begun"}
}

// lose ends the charge because the lease is as good as lost.
func (g *guard) lose(why string) {
	switch {
	case g.stopping:
	case g.cfg.onLoss == onLossKill:
		g.kill(why)
	default:
		g.log.Warn("told to end", "why", why)
		g.stop(syscall.SIGTERM)
	}
}

func (g *guard) stop(sig syscall.Signal) {
	if g.stopping {
		return
	}
	allowed := g.cfg.stopTimeout
	if g.cfg.killsService() {
		allowed = longestTTL // without a loss, --stop has as long as the lease lasts
	}
	g.stopping, g.killBy = true, newInstant(time.Now(), allowed)
	g.charge.stop(sig)
}

func (g *guard) kill(why string) {
	if !g.stopping {
		g.stop(syscall.SIGKILL)
	}
	if !g.killing {
		g.killing = true
		what := "killed"
		if g.cfg.start != "" && !g.cfg.killsService() {
			what = "service should have stopped by now"
		}
		g.log.Warn(what, "why", why)
	}
}

func (g *guard) report(r report) error {
	if err := g.reports.Encode(r); err != nil && !errors.Is(err, syscall.EPIPE) {
		return fmt.Errorf("report: %w", err)
	}
	return nil
}

// reportNow reports without waiting: if the pipe is full because tenure is stopped, it drops
// the report, because the service has to be stopped in time. It is safe for concurrent use,
// even with the guard's own reports.
func reportNow(r report) {
	line, err := json.Marshal(r) // shorter than PIPE_BUF, so it is written whole or not at all
	if err != nil {
		panic(err)
	}
	syscall.Write(reportsFD, append(line, '\n'))
}

// instant is a point in time by the monotonic clock and by the wall clock. Whichever
// reaches it first counts: the monotonic clock stands still while the machine is
// suspended, and the wall clock may be set.
type instant struct{ at, wall time.Time }

func newInstant(from time.Time, d time.Duration) instant {
	at := from.Add(d)
	return instant{at: at, wall: at.Round(0)}
}

func (i instant) passed(now time.Time) bool { return i.until(now) <= 0 }

func (i instant) until(now time.Time) time.Duration {
	return min(i.at.Sub(now), i.wall.Sub(now.Round(0)))
}
