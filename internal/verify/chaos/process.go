package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// process is a replica as the injector of faults sees it.
type process struct {
	cfg    replicaConfig
	proxy  *proxy // nil if there is no network in between
	record *record
	dir    string

	// State of the running process.
	cmd   *exec.Cmd
	stdin io.WriteCloser
	read  chan error // the result of reading its events
}

func (p *process) name() string { return p.cfg.Name }
func (p *process) runs() bool   { return p.cmd != nil }
func (p *process) pid() int     { return p.cmd.Process.Pid }
func (p *process) log() string  { return filepath.Join(p.dir, p.name()+".log") }

// start runs this program again as the replica.
func (p *process) start() error {
	program, err := os.Executable()
	if err != nil {
		return err
	}
	cfg, err := json.Marshal(p.cfg)
	if err != nil {
		return err
	}
	appendTo := func(name string) (*os.File, error) {
		return os.OpenFile(name, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	}
	log, err := appendTo(p.log())
	if err != nil {
		return err
	}
	defer log.Close()
	history, err := appendTo(filepath.Join(p.dir, p.name()+".jsonl"))
	if err != nil {
		return err
	}
	cmd := exec.Command(program)
	cmd.Env = append(os.Environ(), replicaEnv+"="+string(cfg))
	cmd.Stderr = log
	// Even a stopped process must not outlive this one.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	p.cmd, p.stdin, p.read = cmd, stdin, make(chan error, 1)
	go func() {
		defer history.Close()
		p.read <- p.record.read(stdout, history)
	}()
	return nil
}

// wait returns when the process has ended and all of its events have been read.
func (p *process) wait() error {
	err := <-p.read
	err = errors.Join(err, p.cmd.Wait())
	p.cmd = nil
	return err
}

// kill ends the process as the kernel does when it is out of memory, and returns the time
// at which it did.
func (p *process) kill() (time.Duration, error) {
	cmd := p.cmd
	if err := cmd.Process.Kill(); err != nil {
		return 0, err
	}
	at := monotonic()
	err := p.wait()
	if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || status.Signal() != syscall.SIGKILL {
		return 0, fmt.Errorf("%s had ended before it was killed: %w\n%s", p.name(), err, p.logTail())
	}
	p.record.add(event{At: at, Replica: p.name(), Kind: killed})
	return at, nil
}

// terminate asks the process to shut down and waits until it has ended.
func (p *process) terminate() error {
	for _, signal := range []os.Signal{syscall.SIGCONT, syscall.SIGTERM} { // it may still be stopped if a fault went wrong
		if err := p.cmd.Process.Signal(signal); err != nil {
			return err
		}
	}
	late := time.AfterFunc(30*time.Second, func() { p.cmd.Process.Signal(syscall.SIGQUIT) }) // dumps its goroutines into its log
	defer late.Stop()
	if err := p.wait(); err != nil {
		return fmt.Errorf("%s did not shut down properly: %w\n%s", p.name(), err, p.logTail())
	}
	return nil
}

func (p *process) resign() error {
	_, err := io.WriteString(p.stdin, "resign\n")
	return err
}

func (p *process) logTail() string {
	log, err := os.ReadFile(p.log())
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(log)), "\n")
	return strings.Join(lines[max(0, len(lines)-40):], "\n")
}
