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
	"sync"
	"syscall"
	"time"

	"github.com/tenurelib/tenure"
)

// guarded is a program under a guard, as tenure sees it, for one term.
type guarded struct {
	cmd     *exec.Cmd // the guard
	term    *tenure.Term
	timing  timing
	reports chan report // closed when the guard has ended
	log     *slog.Logger

	mu     sync.Mutex // guards orders: signals are passed from another goroutine
	orders *os.File

	group int // the program's; 0: it has not been started
}

// startGuarded starts a guard, which starts the program once it knows how much
// trust there is.
func startGuarded(term *tenure.Term, args []string, t timing, log *slog.Logger) (*guarded, error) {
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
	cmd := exec.Command(self(), append([]string{"guard", "-ask", t.ask.String(), "-stop-timeout", t.stop.String()}, args...)...)
	cmd.Args[0] = "tenure"
	cmd.Env = append(environ(), termEnv(term)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.ExtraFiles = []*os.File{ordersOut, reportsIn} // ordersFD, reportsFD
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

// termEnv is what a program is told of the term for which it runs.
func termEnv(term *tenure.Term) []string {
	return []string{
		fmt.Sprintf("TENURE_TOKEN=%d", term.Token()),
		"TENURE_TERM=" + term.ID(),
		"TENURE_HOLDER=" + term.Holder(),
	}
}

// send returns soon, also where the guard is stopped and its pipe is full: then the
// order is dropped, whole, and the guard is killed when the program is to end.
func (g *guarded) send(o order) {
	line, err := json.Marshal(o) // shorter than what a pipe takes as a whole
	if err != nil {
		panic(err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	// More than once: where this process was stopped in between, the time is over
	// before anything was tried, and the guard asks only once.
	for range 3 {
		g.orders.SetWriteDeadline(time.Now().Add(10 * time.Millisecond))
		_, err := g.orders.Write(append(line, '\n'))
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return // if the guard is gone, its reports end
		}
	}
}

// run returns when nothing of the program is left. At the end of ctx it ends the
// program, in the way that end says.
func (g *guarded) run(ctx context.Context, end func(cause error) order) (ending, error) {
	var final *ending
	done := ctx.Done()
	late := time.NewTimer(0)
	late.Stop()
	defer late.Stop()
	for reports := g.reports; reports != nil; {
		select {
		case <-done:
			done = nil
			how := end(context.Cause(ctx))
			g.send(how)
			allowed := min(g.timing.stop, g.timing.left(g.term).Hard)
			if how.Kill {
				allowed = 0
			}
			late.Reset(max(allowed+g.timing.slack, 250*time.Millisecond))
		case <-late.C: // a guard that is stopped too does nothing
			if !g.timing.patient {
				g.kill()
			}
		case r, ok := <-reports:
			switch {
			case !ok:
				reports = nil
			case r.Ask:
				left := g.timing.left(g.term)
				g.send(order{Trust: &left})
			case r.Group != 0:
				g.group = r.Group
				g.log.Info("program started", "pid", r.Group)
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

// kill ends the guard, and first the program with all that it has started: it
// could not be found any more where its guard is gone.
func (g *guarded) kill() {
	g.log.Warn("guard does not answer, killed")
	if g.group != 0 {
		signalGroup(g.group, syscall.SIGKILL)
	}
	for found := descendants(g.cmd.Process.Pid); len(found) > 0; found = descendants(g.cmd.Process.Pid) {
		for _, d := range found {
			syscall.Kill(d.pid, syscall.SIGKILL)
		}
		time.Sleep(10 * time.Millisecond)
	}
	g.cmd.Process.Kill()
}

// reap makes sure that nothing is left of the process group of a program whose
// guard is gone.
func (g *guarded) reap() {
	for g.group != 0 && !errors.Is(syscall.Kill(-g.group, syscall.SIGKILL), syscall.ESRCH) && !onlyZombies(g.group) {
		syscall.Wait4(-g.group, nil, syscall.WNOHANG, nil) // they are this process's own where it is the init
		time.Sleep(10 * time.Millisecond)
	}
}
