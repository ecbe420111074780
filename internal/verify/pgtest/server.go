package pgtest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure/internal/verify/freeport"
)

// startTimeout bounds the wait for a server that neither answers nor exits.
const startTimeout = 2 * time.Minute

// Server is one PostgreSQL cluster. Its methods, except URL and Log, are not safe for
// concurrent use.
type Server struct {
	bin  string               // directory of the programs
	dir  string               // contains data and log
	attr *syscall.SysProcAttr // for every process
	port int

	settings []string // in addition to the defaults

	// State of the running server; nil while it is stopped.
	shell *exec.Cmd
	stdin io.WriteCloser // takes the signal to stop with
	gone  chan struct{}  // closed when no process of the server is left
}

// New creates and starts a cluster for a program that is not a test; tests use [Cluster].
// [Server.Close] ends it.
func New(settings ...string) (*Server, error) {
	bin, err := binaries()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "tenure-pgtest-")
	if err != nil {
		return nil, fmt.Errorf("pgtest: %w", err)
	}
	s := &Server{bin: bin, dir: dir, settings: settings}
	if err := s.init(); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	if err := s.Start(); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	return s, nil
}

func (s *Server) init() (err error) {
	if s.attr, err = processAttr(s.dir); err != nil {
		return err
	}
	if s.port, err = freeport.Find(); err != nil {
		return err
	}
	initdb := exec.Command(filepath.Join(s.bin, "initdb"), "-D", s.data(), "-A", "trust", "-U", "postgres",
		"--no-sync", "-E", "UTF8", "--locale=C")
	initdb.Dir = s.dir // the server's user may not be able to read the tests' own directory
	initdb.SysProcAttr = s.attr
	if out, err := initdb.CombinedOutput(); err != nil {
		return fmt.Errorf("pgtest: initdb: %w\n%s", err, out)
	}
	return nil
}

// Standby creates and starts a hot standby of the server.
func (s *Server) Standby() (*Server, error) {
	dir, err := os.MkdirTemp("", "tenure-pgtest-")
	if err != nil {
		return nil, fmt.Errorf("pgtest: standby: %w", err)
	}
	next := &Server{bin: s.bin, dir: dir, settings: s.settings}
	if next.attr, err = processAttr(dir); err == nil {
		next.port, err = freeport.Find()
	}
	if err == nil {
		backup := exec.Command(filepath.Join(s.bin, "pg_basebackup"), "-D", next.data(), "-d", s.URL(), "--write-recovery-conf", "--checkpoint=fast", "--no-sync")
		backup.Dir, backup.SysProcAttr = dir, next.attr
		var out []byte
		if out, err = backup.CombinedOutput(); err != nil {
			err = fmt.Errorf("pgtest: pg_basebackup: %w\n%s", err, out)
		}
	}
	if err == nil {
		err = next.Start()
	}
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	return next, nil
}

// Promote makes a standby a primary.
func (s *Server) Promote() error { return s.exec("SELECT pg_promote()") }

// mind runs the server, "$@", until it reads the signal with which to end it. At the end
// of its input the test process is gone, and the shell cleans up in its place. Only the
// server keeps the shell's output open.
const mind = `
dir=$1
shift
"$@" </dev/null &
exec >&-
if read -r signal; then
	kill -s "$signal" $!
	wait $!
else
	kill -s QUIT $!
	wait $!
	cd / && rm -rf "$dir"
fi
`

// Start starts a server that is stopped, on the same port as before, and
// returns when it answers.
func (s *Server) Start() error {
	if s.shell != nil {
		return errors.New("pgtest: start: the server runs already")
	}
	log, err := os.OpenFile(s.log(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("pgtest: start: %w", err)
	}
	defer log.Close()
	args := []string{"-c", mind, "sh", s.dir, filepath.Join(s.bin, "postgres"), "-D", s.data(), "-p", strconv.Itoa(s.port)}
	for _, setting := range append([]string{ // the last one of the same name wins
		"listen_addresses=127.0.0.1",
		"unix_socket_directories=",
		"fsync=off",
		"full_page_writes=off",
		"max_connections=200",
		"log_line_prefix=%m [%p] %d ",
	}, s.settings...) {
		args = append(args, "-c", setting)
	}
	shell := exec.Command("sh", args...)
	shell.Dir = s.dir
	shell.SysProcAttr = s.attr
	shell.Stderr = log
	stdin, err := shell.StdinPipe()
	if err != nil {
		return fmt.Errorf("pgtest: start: %w", err)
	}
	stdout, err := shell.StdoutPipe()
	if err != nil {
		return fmt.Errorf("pgtest: start: %w", err)
	}
	if err := shell.Start(); err != nil {
		return fmt.Errorf("pgtest: start: %w", err)
	}
	s.shell, s.stdin, s.gone = shell, stdin, make(chan struct{})
	go func() {
		defer close(s.gone)
		io.Copy(io.Discard, stdout)
	}()
	if err := s.awaitReady(); err != nil {
		err = fmt.Errorf("pgtest: start: %w\n%s", err, s.logTail())
		return errors.Join(err, s.Stop("immediate"))
	}
	return nil
}

func (s *Server) awaitReady() error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	for {
		conn, err := pgx.Connect(ctx, s.URL())
		if err == nil {
			return conn.Close(ctx)
		}
		select {
		case <-s.gone:
			return errors.New("the server exited")
		case <-ctx.Done():
			return err
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// Stop ends the server and returns when all of its processes are gone. "fast" rolls back
// open transactions and shuts down; "immediate" simulates a crash.
func (s *Server) Stop(mode string) error {
	signal, ok := map[string]string{"fast": "INT", "immediate": "QUIT"}[mode]
	if !ok {
		return fmt.Errorf("pgtest: stop: unknown mode %q", mode)
	}
	if s.shell == nil {
		return errors.New("pgtest: stop: the server is stopped already")
	}
	if _, err := fmt.Fprintln(s.stdin, signal); err != nil {
		return fmt.Errorf("pgtest: stop: %w", err)
	}
	<-s.gone
	s.shell.Wait() // the status is that of a server that was told to end
	s.shell = nil
	return nil
}

// Restart is Stop and Start.
func (s *Server) Restart(mode string) error {
	if err := s.Stop(mode); err != nil {
		return err
	}
	return s.Start()
}

// Close stops the server if it is running, and removes the cluster.
func (s *Server) Close() error {
	var err error
	if s.shell != nil {
		err = s.Stop("immediate")
	}
	return errors.Join(err, os.RemoveAll(s.dir))
}

// URL returns the address of the database postgres, where its user is the
// superuser. It stays the same across restarts.
func (s *Server) URL() string { return s.url("postgres") }

func (s *Server) url(database string) string {
	return fmt.Sprintf("postgres://postgres@127.0.0.1:%d/%s?sslmode=disable", s.port, database)
}

// Log returns what the server has logged since the cluster was created, including failed
// statements. A failed statement's line is written before the client sees the error.
func (s *Server) Log(t testing.TB) string {
	t.Helper()
	log, err := os.ReadFile(s.log())
	if err != nil {
		t.Fatal(err)
	}
	return string(log)
}

func (s *Server) logTail() string {
	log, err := os.ReadFile(s.log())
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(log)), "\n")
	return strings.Join(lines[max(0, len(lines)-20):], "\n")
}

func (s *Server) data() string { return filepath.Join(s.dir, "data") }
func (s *Server) log() string  { return filepath.Join(s.dir, "log") }
