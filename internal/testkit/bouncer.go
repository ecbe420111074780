package testkit

import (
	"errors"
	"fmt"
	"net"
	neturl "net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// ErrNoBouncer is the error of [NewBouncer] if there is no PgBouncer.
var ErrNoBouncer = errors.New("kit: no PgBouncer on this machine: install pgbouncer or set TENURE_TEST_PGBOUNCER to the program")

// StartBouncer starts a PgBouncer for this test only, in front of the server at that URL, and
// returns the URL through it. It uses transaction pooling: the clients of a database share
// five sessions, so one client's session state affects others. It rejects startup
// parameters such as lock_timeout, which is PgBouncer's default. Settings, such as "pool_mode = session",
// override that.
//
// The program comes from TENURE_TEST_PGBOUNCER, from PATH, or from Debian's package. If there is none,
// the test is skipped, or fails if TENURE_REQUIRE_PGBOUNCER is 1. Such a test is slow.
func StartBouncer(t testing.TB, url string, settings ...string) string {
	t.Helper()
	Slow(t)
	b, err := NewBouncer(url, settings...)
	if errors.Is(err, ErrNoBouncer) && os.Getenv("TENURE_REQUIRE_PGBOUNCER") != "1" {
		t.Skip(err)
	}
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	return b.URL
}

// Bouncer is a PgBouncer.
type Bouncer struct {
	process
	URL string // of the database, through it
}

// again runs a bouncer, "$0" "$@", and restarts it when it ends, as a supervisor does: versions
// 1.18 to 1.20 exit when a request to cancel a statement arrives just as the statement ends
// (pgbouncer/pgbouncer#801, #822). It kills the bouncer, which has nothing to save, because on TERM
// it may wait for its clients, and a background process of a shell ignores QUIT.
const again = `
trap 'kill -s KILL $pid; wait $pid; exit' TERM
while :; do
	"$0" "$@" & pid=$!
	wait $pid
	sleep 0.1
done
`

// NewBouncer starts a PgBouncer for a program that is not a test; tests use [StartBouncer].
// [Bouncer.Close] ends it.
func NewBouncer(url string, settings ...string) (_ *Bouncer, err error) {
	program, err := bouncerProgram()
	if err != nil {
		return nil, err
	}
	b := &Bouncer{}
	if b.process, err = newProcess(""); err != nil {
		return nil, err
	}
	if b.URL, err = configureBouncer(b.dir, url, settings); err == nil {
		err = b.start(b.URL, "TERM", "sh", "-c", again, program, "ini")
	}
	if err != nil {
		return nil, errors.Join(err, b.Close())
	}
	return b, nil
}

// Close ends it.
func (b *Bouncer) Close() error { return b.close("TERM") }

func bouncerProgram() (string, error) {
	if name := os.Getenv("TENURE_TEST_PGBOUNCER"); name != "" {
		program, err := exec.LookPath(name)
		if err != nil {
			return "", fmt.Errorf("kit: TENURE_TEST_PGBOUNCER: %w", err)
		}
		return filepath.Abs(program) // because it is started in another directory
	}
	for _, name := range []string{"pgbouncer", "/usr/sbin/pgbouncer"} { // not every PATH contains sbin
		if program, err := exec.LookPath(name); err == nil {
			return program, nil
		}
	}
	return "", ErrNoBouncer
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
server_login_retry = 0.1
`

// configureBouncer writes the files that a bouncer reads, and returns the URL through it.
func configureBouncer(dir, url string, settings []string) (bounced string, err error) {
	port, err := FreePort()
	if err != nil {
		return "", err
	}
	u, err := neturl.Parse(url)
	if err != nil {
		return "", err
	}
	u.Host = net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	server, err := pgx.ParseConfig(url)
	if err != nil {
		return "", err
	}
	ini := fmt.Sprintf(bouncerConfig, server.Host, server.Port, port) + strings.Join(settings, "\n") + "\n"
	if err := os.WriteFile(filepath.Join(dir, "ini"), []byte(ini), 0o644); err != nil {
		return "", err
	}
	users := fmt.Sprintf("%q %q\n", server.User, server.Password)
	return u.String(), os.WriteFile(filepath.Join(dir, "users"), []byte(users), 0o644)
}
