//go:build unix

package main

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"

	"github.com/tenurelib/tenure/internal/proctree"
)

// program is a charge: a process, and all that it starts.
type program struct {
	args []string
	tree *proctree.Tree
	left chan ending
}

func newProgram(args []string) *program {
	return &program{args: args, tree: proctree.New(true), left: make(chan ending, 1)}
}

func (p *program) begin() (int, error) {
	path, err := exec.LookPath(p.args[0])
	if err != nil {
		return 0, err
	}
	pid, err := p.tree.Start(path, p.args, &syscall.ProcAttr{Env: os.Environ(), Files: []uintptr{0, 1, 2}, Sys: ownGroup()})
	if err != nil {
		return 0, err
	}
	go func() {
		<-p.tree.Gone()
		p.left <- endingOf(p.tree.Status())
	}()
	return pid, nil
}

func endingOf(status syscall.WaitStatus) ending {
	text := fmt.Sprintf("exit status %d", status.ExitStatus())
	if status.Signaled() {
		text = "signal: " + status.Signal().String()
	}
	return ending{Status: proctree.Code(status), Text: text}
}

func (p *program) pass(sig syscall.Signal) { p.tree.Signal(sig) }

func (p *program) stop(sig syscall.Signal) {
	p.tree.SignalGroup(sig)
	p.tree.SignalGroup(syscall.SIGCONT) // a stopped process does not get the first signal until it continues
}

func (p *program) stopOthers()            { p.tree.SignalOthers(syscall.SIGTERM) } // the group was signalled before
func (p *program) kill()                  { p.tree.Kill() }
func (p *program) ended() <-chan struct{} { return p.tree.Exited() }
func (p *program) gone() <-chan ending    { return p.left }
