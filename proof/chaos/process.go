package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/tenurelib/tenure/internal/testkit/rig"
)

// process is a replica as the injector of faults sees it.
type process struct {
	rig.Process
	cfg    replicaConfig
	other  string     // the program of another version that the replica runs; empty: this program
	proxy  *rig.Proxy // nil if there is no network in between
	record *record
	dir    string

	// State of the running process.
	stdin io.WriteCloser
	said  chan struct{} // closed when it has written an event, or ended
	read  chan error    // the result of reading its events
}

func (p *process) name() string { return p.cfg.Name }

// start runs this program, or that of another version, as the replica.
func (p *process) start() error {
	program := p.other
	if program == "" {
		var err error
		if program, err = os.Executable(); err != nil {
			return err
		}
	}
	cfg, err := json.Marshal(p.cfg)
	if err != nil {
		return err
	}
	history, err := os.OpenFile(filepath.Join(p.dir, p.name()+".jsonl"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	cmd := exec.Command(program)
	cmd.Env = append(os.Environ(), replicaEnv+"="+string(cfg))
	if p.cfg.Lock != "" {
		cmd.Env = append(cmd.Env, witnessEnv+"=1")
	}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	p.Log = filepath.Join(p.dir, p.name()+".log")
	p.Command = func() *exec.Cmd { return cmd }
	if err := p.Start(); err != nil {
		return err
	}
	p.stdin, p.said, p.read = stdin, make(chan struct{}), make(chan error, 1)
	go func() {
		defer history.Close()
		events := bufio.NewReader(stdout)
		events.Peek(1)
		close(p.said)
		p.read <- p.record.read(events, history)
	}()
	return nil
}

// wait returns when the process has ended and all of its events have been read.
func (p *process) wait() error {
	err := <-p.read
	return errors.Join(err, p.Wait())
}

// kill ends the process as the kernel does when it is out of memory, and returns the time
// at which it did.
func (p *process) kill() (time.Duration, error) {
	if err := p.signal(syscall.SIGKILL); err != nil {
		return 0, err
	}
	at := monotonic()
	err := p.wait()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL && exit.ExitCode() != 128+int(syscall.SIGKILL) {
		return 0, fmt.Errorf("%s had ended before it was killed: %w\n%s", p.name(), err, p.LogTail())
	}
	p.record.add(event{At: at, Replica: p.name(), Kind: killed})
	return at, nil
}

// terminate asks the process to shut down and waits until it has ended.
func (p *process) terminate() error {
	late := time.AfterFunc(30*time.Second, func() { p.Signal(syscall.SIGQUIT) }) // dumps its goroutines into its log
	defer late.Stop()
	if err := p.signal(syscall.SIGCONT); err != nil { // it may still be stopped if a fault went wrong
		return err
	}
	<-p.said // SIGTERM would kill it before it has asked for that
	if err := p.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	if err := p.wait(); err != nil {
		return fmt.Errorf("%s did not shut down properly: %w\n%s", p.name(), err, p.LogTail())
	}
	return nil
}

func (p *process) resign() error {
	_, err := io.WriteString(p.stdin, "resign\n")
	return err
}
