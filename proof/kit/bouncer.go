package kit

import (
	"errors"
	"fmt"
	"net"
	neturl "net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

var errNoBouncer = errors.New("kit: no PgBouncer on this machine: install pgbouncer or set TENURE_TEST_PGBOUNCER to the program")

// StartBouncer starts a PgBouncer for this test only, in front of the server at that URL, and
// returns the URL through it. It uses transaction pooling: the clients of a database share
// five sessions, so one client's session state affects others. It rejects startup
// parameters such as lock_timeout, which is PgBouncer's default.
//
// The program is the one that TENURE_TEST_PGBOUNCER names, the one in PATH, or the one of
// Debian's package. If there is none, the test is skipped, or fails if
// TENURE_REQUIRE_PGBOUNCER is 1.
func StartBouncer(t testing.TB, url string) string {
	t.Helper()
	program, err := bouncerProgram()
	if errors.Is(err, errNoBouncer) && os.Getenv("TENURE_REQUIRE_PGBOUNCER") != "1" {
		t.Skip(err)
	}
	require.NoError(t, err)
	p, err := newProcess("")
	require.NoError(t, err)
	// KILL, because there is nothing to save: on TERM a bouncer may wait for its clients, and a
	// background process of a shell ignores QUIT.
	t.Cleanup(func() { require.NoError(t, p.close("KILL")) })
	bounced, err := configureBouncer(p.dir, url)
	require.NoError(t, err)
	require.NoError(t, p.start(bounced, "KILL", program, "ini"))
	return bounced
}

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
	return "", errNoBouncer
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
func configureBouncer(dir, url string) (bounced string, err error) {
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
	ini := fmt.Sprintf(bouncerConfig, server.Host, server.Port, port)
	if err := os.WriteFile(filepath.Join(dir, "ini"), []byte(ini), 0o644); err != nil {
		return "", err
	}
	users := fmt.Sprintf("%q %q\n", server.User, server.Password)
	return u.String(), os.WriteFile(filepath.Join(dir, "users"), []byte(users), 0o644)
}
