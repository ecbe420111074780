//go:build unix

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/proctree"
)

// guarded is tenure's side of a guard and its program, for one term.
type guarded struct {
	cmd     *exec.Cmd // the guard
	term    *tenure.Term
	timing  timing
	reports chan report // closed when the guard has ended
	log     *slog.Logger

	mu     sync.Mutex // guards orders: signals are passed from another goroutine
	orders *os.File

	group knownGroup // the program's, or that of the run of --start that is under way
}

// startGuarded starts a guard, which starts the program once it knows how much trust is
// left. It inherits name, if there is one.
func startGuarded(term *tenure.Term, args []string, t timing, name *os.File, log *slog.Logger) (*guarded, error) {
	ordersOut, ordersIn, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer ordersOut.Close()
	reportsOut, reportsIn, err := os.Pipe()
	if err != nil {
		ordersIn.Close()
		return nil, err
	}
	defer reportsIn.Close()
	cmd := exec.Command(self(), append([]string{"guard", "--ask", t.ask.String(), "--stop-timeout", t.stop.String()}, args...)...)
	cmd.Args[0] = "tenure"
	cmd.Env = append(environ(), termEnv(term)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.ExtraFiles = []*os.File{ordersOut, reportsIn} // ordersFD, reportsFD
	if name != nil {
		cmd.ExtraFiles = append(cmd.ExtraFiles, name) // nameFD
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		ordersIn.Close()
		reportsOut.Close()
		return nil, fmt.Errorf("start the guard: %w", err)
	}
	g := &guarded{
		cmd: cmd, term: term, timing: t, log: log, reports: make(chan report),
		orders: ordersIn,
	}
	log.Info("guard started", "pid", cmd.Process.Pid)
	go func() {
		defer close(g.reports)
		defer reportsOut.Close()
		for decoder := json.NewDecoder(reportsOut); ; {
			var r report
			if decoder.Decode(&r) != nil {
				return
			}
			g.reports <- r
		}
	}()
	return g, nil
}

// termEnv returns the environment variables that describe a term to its program.
func termEnv(term *tenure.Term) []string {
	return []string{
		fmt.Sprintf("TENURE_TOKEN=%d", term.Token()),
		environVar("TENURE_TERM", term.ID()),
		environVar("TENURE_HOLDER", term.Holder()),
	}
}

// environVar returns an environment variable whose value others may have written to the
// store. A program cannot be started with a value that has a NUL or is very long. NULs are
// replaced and a cut is marked, rather than dropped, so that the value cannot become the
// name of another replica.
func environVar(name, value string) string {
	const most = 4096
	if len(value) > most {
		value = strings.ToValidUTF8(value[:most], "") + "…"
	}
	return name + "=" + strings.ReplaceAll(value, "\x00", "\uFFFD")
}

// send returns quickly even if the guard is stopped and its pipe is full. It then drops
// the whole order, and the guard is killed when the program has to end.
func (g *guarded) send(o order) {
	line, err := json.Marshal(o) // shorter than PIPE_BUF, so it is written whole or not at all
	if err != nil {
		panic(err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	// Try more than once: if this process was stopped in between, the deadline has passed
	// before anything was written, and the guard doesn't repeat its question.
	for range 3 {
		g.orders.SetWriteDeadline(time.Now().Add(10 * time.Millisecond))
		_, err := g.orders.Write(append(line, '\n'))
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return // if the guard is gone, its reports end
		}
	}
}

// run returns when nothing of the program is left. When ctx is done it sends the order
// that end returns for its cause.
func (g *guarded) run(ctx context.Context, end func(cause error) order) (ending, error) {
	var final *ending
	defer func() { g.group.close() }()
	done := ctx.Done()
	var late instant // when the guard must have ended the program
	timer := time.NewTimer(0)
	timer.Stop()
	defer timer.Stop()
	for reports := g.reports; reports != nil; {
		select {
		case <-done:
			done = nil
			how := end(context.Cause(ctx))
			g.send(how)
			allowed := min(g.timing.stop, g.timing.left(g.term.Remaining()).Hard)
			if how.Kill {
				allowed = 0
			}
			late = newInstant(time.Now(), max(allowed+g.timing.slack, 250*time.Millisecond))
			if !g.timing.patient {
				timer.Reset(0)
			}
		case <-timer.C:
			if left := late.until(time.Now()); left > 0 {
				timer.Reset(min(left, g.timing.ask)) // the timer stands still while the machine is suspended
			} else {
				g.kill() // the guard may be stopped and unable to act
			}
		case r, ok := <-reports:
			switch {
			case !ok:
				reports = nil
			case r.Ask:
				left := g.timing.left(g.term.Remaining())
				g.send(order{Trust: &left})
			case r.Group != 0:
				g.group.close()
				g.group = knowGroup(r.Group, g.cmd.Process.Pid)
				if !g.timing.patient {
					g.log.Info("program started", "pid", r.Group)
				}
			case r.Returned:
				g.group.close()
				g.group = knownGroup{}
			case r.End != nil:
				final = r.End
			}
		}
	}
	g.mu.Lock()
	g.orders.Close()
	g.mu.Unlock()
	err := g.cmd.Wait()
	if final == nil {
		g.reap()
		return ending{}, errors.Join(errors.New("the guard has ended before the program"), err)
	}
	return *final, nil
}

// kill kills the program with all that it has started, and then the guard. Without the
// guard those processes could no longer be found.
func (g *guarded) kill() {
	g.log.Warn("guard does not answer; killing it")
	g.group.signal(syscall.SIGKILL)
	killDescendants(g.cmd.Process.Pid, longestTTL) // its pid is not reused before Wait
	g.cmd.Process.Kill()
}

// killDescendants kills the descendants of a process until none is left, or for as long as
// patience lasts.
func killDescendants(of int, patience time.Duration) {
	began := time.Now()
	for found := proctree.Descendants(of); len(found) > 0 && time.Since(began) < patience; found = proctree.Descendants(of) {
		for _, d := range found {
			d.Signal(of, syscall.SIGKILL)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// reap kills what is left of the process group of a program, or of a run of --start, whose
// guard is gone.
func (g *guarded) reap() {
	for !errors.Is(g.group.signal(syscall.SIGKILL), syscall.ESRCH) && !g.group.onlyZombies() {
		if os.Getpid() == 1 { // orphans become children of this process
			syscall.Wait4(-g.group.id, nil, syscall.WNOHANG, nil)
		}
		time.Sleep(10 * time.Millisecond)
	}
}
