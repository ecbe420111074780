package pgtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	neturl "net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure/internal/verify/freeport"
)

var errNoBouncer = errors.New("pgtest: no PgBouncer on this machine: install pgbouncer or set TENURE_TEST_PGBOUNCER to the program")

// Bouncer starts a PgBouncer for this test only, in front of the server at that URL, and
// returns the URL through it. It uses transaction pooling: the clients of a database share
// five sessions, so one client's session state affects others. It rejects startup
// parameters such as lock_timeout, which is PgBouncer's default.
//
// The program is the one that TENURE_TEST_PGBOUNCER names, or that in PATH, or that of
// Debian's package. If there is none, the test is skipped, or fails if
// TENURE_REQUIRE_PGBOUNCER is 1.
func Bouncer(t testing.TB, url string) string {
	t.Helper()
	program, err := bouncerProgram()
	if errors.Is(err, errNoBouncer) && os.Getenv("TENURE_REQUIRE_PGBOUNCER") != "1" {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	b, err := newBouncer(program, url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.stop)
	return b.url
}

func bouncerProgram() (string, error) {
	if name := os.Getenv("TENURE_TEST_PGBOUNCER"); name != "" {
		program, err := exec.LookPath(name)
		if err != nil {
			return "", fmt.Errorf("pgtest: TENURE_TEST_PGBOUNCER: %w", err)
		}
		return filepath.Abs(program) // because it is started in another directory
	}
	for _, name := range []string{"pgbouncer", "/usr/sbin/pgbouncer"} { // not every PATH contains sbin
		if program, err := exec.LookPath(name); err == nil {
			return program, nil
		}
	}
	return "", errNoBouncer
}

type bouncer struct {
	dir string
	url string

	shell *exec.Cmd
	stdin io.Closer
	gone  chan struct{} // closed when the bouncer has ended
	log   bytes.Buffer  // read only after that
}

// newBouncer starts a bouncer and returns when it answers.
func newBouncer(program, url string) (*bouncer, error) {
	dir, err := os.MkdirTemp("", "tenure-pgtest-")
	if err != nil {
		return nil, fmt.Errorf("pgtest: bouncer: %w", err)
	}
	b := &bouncer{dir: dir}
	if err := b.start(program, url); err != nil {
		return nil, fmt.Errorf("pgtest: bouncer: %w", errors.Join(err, os.RemoveAll(dir)))
	}
	return b, nil
}

// bouncerConfig turns off the logging of clients and statistics.
const bouncerConfig = `
[databases]
* = host=%s port=%d
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = trust
auth_file = users
pool_mode = transaction
default_pool_size = 5
log_connections = 0
log_disconnections = 0
log_stats = 0
`

// mindBouncer runs the bouncer, "$@", until the end of its input, when the test is over or
// its process is gone. It uses KILL because there is nothing to save: on TERM the bouncer
// may wait for its clients, and a background process of a shell ignores QUIT. Only the
// bouncer keeps the shell's stderr open.
const mindBouncer = `
dir=$1
shift
"$@" </dev/null &
exec 2>&-
read -r _
kill -s KILL $!
wait $!
cd / && rm -rf "$dir"
`

func (b *bouncer) start(program, url string) error {
	port, err := freeport.Find()
	if err != nil {
		return err
	}
	if err := b.configure(url, port); err != nil {
		return err
	}
	b.shell = exec.Command("sh", "-c", mindBouncer, "sh", b.dir, program, "ini")
	b.shell.Dir = b.dir
	if b.shell.SysProcAttr, err = processAttr(b.dir); err != nil {
		return err
	}
	if b.stdin, err = b.shell.StdinPipe(); err != nil {
		return err
	}
	stderr, err := b.shell.StderrPipe()
	if err != nil {
		return err
	}
	if err := b.shell.Start(); err != nil {
		return err
	}
	b.gone = make(chan struct{})
	go func() {
		defer close(b.gone)
		b.log.ReadFrom(stderr)
	}()
	if err := b.awaitReady(); err != nil {
		b.stop()
		return fmt.Errorf("%w\n%s", err, &b.log)
	}
	return nil
}

// configure writes the files that the bouncer reads, and sets the URL.
func (b *bouncer) configure(url string, port int) error {
	u, err := neturl.Parse(url)
	if err != nil {
		return err
	}
	u.Host = net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	b.url = u.String()
	server, err := pgx.ParseConfig(url)
	if err != nil {
		return err
	}
	ini := fmt.Sprintf(bouncerConfig, server.Host, server.Port, port)
	if err := os.WriteFile(filepath.Join(b.dir, "ini"), []byte(ini), 0o644); err != nil {
		return err
	}
	users := fmt.Sprintf("%q %q\n", server.User, server.Password)
	return os.WriteFile(filepath.Join(b.dir, "users"), []byte(users), 0o644)
}

func (b *bouncer) awaitReady() error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	for {
		conn, err := pgx.Connect(ctx, b.url)
		if err == nil {
			return conn.Close(ctx)
		}
		select {
		case <-b.gone:
			return errors.New("it exited")
		case <-ctx.Done():
			return err
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// stop ends the bouncer, and returns when it and its directory are gone.
func (b *bouncer) stop() {
	b.stdin.Close()
	<-b.gone
	b.shell.Wait() // the status is that of rm
}
