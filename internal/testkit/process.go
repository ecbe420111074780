package testkit

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

// startTimeout bounds the wait for a server that neither answers nor exits.
const startTimeout = 2 * time.Minute

// process is a server process, in a temporary directory, that does not outlive the tests. It
// can be stopped and started again.
type process struct {
	dir  string               // contains the log
	attr *syscall.SysProcAttr // for every process

	// State of the running process; nil while it is stopped.
	shell *exec.Cmd
	stdin io.WriteCloser // takes the signal to stop with
	gone  chan struct{}  // closed when nothing is left of the process and its children
}

// newProcess returns a process that is not running, with its data in a directory.
func newProcess(in string) (process, error) {
	dir, err := os.MkdirTemp(in, "tenure-kit-")
	if err != nil {
		return process{}, fmt.Errorf("kit: %w", err)
	}
	attr, err := processAttr(dir)
	if err != nil {
		return process{}, errors.Join(err, os.RemoveAll(dir))
	}
	return process{dir: dir, attr: attr}, nil
}

// command returns a command that runs in the directory and as the user of the server.
func (p *process) command(program string, args ...string) *exec.Cmd {
	cmd := exec.Command(program, args...)
	cmd.Dir, cmd.SysProcAttr = p.dir, p.attr
	return cmd
}

// mind runs a server, "$@", until it reads the signal that ends it. If its input ends, the test
// process is gone, so the shell ends the server with the signal $last and removes the directory.
// Only the server keeps the shell's output open.
const mind = `
dir=$1 last=$2
shift 2
"$@" </dev/null &
exec >&-
if read -r signal; then
	kill -s "$signal" $!
	wait $!
else
	kill -s "$last" $!
	wait $!
	cd / && rm -rf "$dir"
fi
`

// start runs a program that serves PostgreSQL's protocol at the URL, and returns when the program
// answers. If the test process ends first, the program gets the signal last.
func (p *process) start(url, last, program string, args ...string) error {
	if err := p.run(last, program, args...); err != nil {
		return fmt.Errorf("kit: start %s: %w", filepath.Base(program), err)
	}
	if err := p.awaitReady(url); err != nil {
		err = fmt.Errorf("kit: start %s: %w\n%s", filepath.Base(program), err, p.logTail())
		return errors.Join(err, p.stop("KILL"))
	}
	return nil
}

func (p *process) run(last, program string, args ...string) error {
	if p.shell != nil {
		return errors.New("it is running already")
	}
	log, err := os.OpenFile(p.log(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	shell := p.command("sh", append([]string{"-c", mind, "sh", p.dir, last, program}, args...)...)
	shell.Stderr = log
	stdin, err := shell.StdinPipe()
	if err != nil {
		return err
	}
	stdout, err := shell.StdoutPipe()
	if err != nil {
		return err
	}
	if err := shell.Start(); err != nil {
		return err
	}
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		io.Copy(io.Discard, stdout)
	}()
	p.shell, p.stdin, p.gone = shell, stdin, gone
	return nil
}

func (p *process) awaitReady(url string) error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	for {
		conn, err := pgx.Connect(ctx, url)
		if err == nil {
			return conn.Close(ctx)
		}
		select {
		case <-p.gone:
			return errors.New("it exited")
		case <-ctx.Done():
			return err
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// stop sends a signal, and returns when nothing is left of the process.
func (p *process) stop(signal string) error {
	if p.shell == nil {
		return errors.New("kit: stop: the server is stopped already")
	}
	if _, err := fmt.Fprintln(p.stdin, signal); err != nil {
		return fmt.Errorf("kit: stop: %w", err)
	}
	<-p.gone
	p.shell.Wait() // the status does not matter: the server was told to end
	p.shell = nil
	return nil
}

// close stops the process with a signal if it is running, and removes the directory.
func (p *process) close(signal string) error {
	var err error
	if p.shell != nil {
		err = p.stop(signal)
	}
	return errors.Join(err, os.RemoveAll(p.dir))
}

func (p *process) log() string { return filepath.Join(p.dir, "log") }

func (p *process) logTail() string {
	log, err := os.ReadFile(p.log())
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(log)), "\n")
	return strings.Join(lines[max(0, len(lines)-20):], "\n")
}
