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

	group knownGroup // the program's
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
		environVar("TENURE_TERM", term.ID()),
		environVar("TENURE_HOLDER", term.Holder()),
	}
}

// environVar is a variable with a value that others may have written to the store.
// No program can be started with one that has a NUL or is very long. The marks in
// the place of what is missing make sure that the value is not another's name.
func environVar(name, value string) string {
	const most = 4096
	if len(value) > most {
		value = strings.ToValidUTF8(value[:most], "") + "…"
	}
	return name + "=" + strings.ReplaceAll(value, "\x00", "\uFFFD")
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
				timer.Reset(min(left, g.timing.ask)) // it stands still while the machine is suspended
			} else {
				g.kill() // a guard that is stopped too does nothing
			}
		case r, ok := <-reports:
			switch {
			case !ok:
				reports = nil
			case r.Ask:
				left := g.timing.left(g.term.Remaining())
				g.send(order{Trust: &left})
			case r.Group != 0:
				g.group = knowGroup(r.Group, g.cmd.Process.Pid)
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
	g.group.signal(syscall.SIGKILL)
	guard := g.cmd.Process.Pid // its own until Wait
	for found := descendants(guard); len(found) > 0; found = descendants(guard) {
		for _, d := range found {
			d.signal(guard, syscall.SIGKILL)
		}
		time.Sleep(10 * time.Millisecond)
	}
	g.cmd.Process.Kill()
}

// reap makes sure that nothing is left of the process group of a program whose
// guard is gone.
func (g *guarded) reap() {
	for !errors.Is(g.group.signal(syscall.SIGKILL), syscall.ESRCH) && !g.group.onlyZombies() {
		if os.Getpid() == 1 { // they are this process's own
			syscall.Wait4(-g.group.id, nil, syscall.WNOHANG, nil)
		}
		time.Sleep(10 * time.Millisecond)
	}
}
