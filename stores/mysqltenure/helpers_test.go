//go:build linux

package mysqltenure_test

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/go-sql-driver/mysql"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/testkit/rig"
	"github.com/tenurelib/tenure/stores/mysqltenure"
)

// TestMain runs more tests at once than there are cores, since they mostly wait.
func TestMain(m *testing.M) {
	flag.Parse()
	if err := flag.Set("test.parallel", "4"); err != nil {
		panic(err)
	}
	_ = mysql.SetLogger(&mysql.NopLogger{})
	status := m.Run()
	end()
	os.Exit(status)
}

const (
	database = "tenure"
	password = "s3cret"
	program  = "/usr/sbin/mariadbd"
)

// server is MariaDB in a process of its own, with a user for the store and one who may do everything.
type server struct {
	*rig.Server
	dir string
}

// command returns a command that runs as an unprivileged user, and does not outlive the tests.
func command(program string, args ...string) *exec.Cmd {
	if os.Geteuid() != 0 {
		return exec.Command(program, args...)
	}
	return exec.Command("setpriv", append([]string{"--reuid=mysql", "--regid=mysql", "--clear-groups", "--pdeathsig=KILL", program}, args...)...)
}

// serverDir makes a directory for a server, in memory if the system has that.
func serverDir() (string, error) {
	dir, err := os.MkdirTemp(testkit.MemoryDir(), "mysqltenure")
	if err != nil || os.Geteuid() != 0 {
		return dir, err
	}
	account, err := user.Lookup("mysql")
	if err != nil {
		return dir, err
	}
	uid, err := strconv.Atoi(account.Uid)
	if err != nil {
		return dir, err
	}
	return dir, errors.Join(os.Chown(dir, uid, -1), os.Chmod(dir, 0o755))
}

const logSize = "--innodb-log-file-size=8M"

// template is the directory that each server begins with. To make it takes some seconds.
var template = sync.OnceValues(func() (string, error) {
	dir, err := serverDir()
	whenAllEnd(func() { _ = os.RemoveAll(dir) })
	if err != nil {
		return dir, err
	}
	data := filepath.Join(dir, "data")
	out, err := command("mariadb-install-db", "--no-defaults", "--datadir="+data, "--auth-root-authentication-method=normal", "--skip-test-db", logSize).CombinedOutput()
	if err != nil {
		return dir, fmt.Errorf("mariadb-install-db: %w: %s", err, out)
	}
	init := fmt.Sprintf(`CREATE DATABASE IF NOT EXISTS %s;
CREATE USER IF NOT EXISTS 'app'@'%%' IDENTIFIED BY '%s';
GRANT ALL ON *.* TO 'admin'@'%%' IDENTIFIED BY '%s' WITH GRANT OPTION;
GRANT SELECT, INSERT, UPDATE, DELETE, CREATE, ALTER, DROP ON %s.* TO 'app'@'%%';
`, database, password, password, database)
	return dir, os.WriteFile(filepath.Join(dir, "init.sql"), []byte(init), 0o644)
})

// newServer returns a server that does not run yet.
func newServer(args ...string) (*server, error) {
	from, err := template()
	if err != nil {
		return nil, err
	}
	dir, err := serverDir()
	if err != nil {
		return nil, err
	}
	if out, err := command("cp", "-R", filepath.Join(from, "data"), dir).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("copy the template: %w: %s", err, out)
	}
	port, err := testkit.FreePort()
	if err != nil {
		return nil, err
	}
	s := &server{&rig.Server{URL: &url.URL{Scheme: "mysql", Host: fmt.Sprint("127.0.0.1:", port)}}, dir}
	s.Log = filepath.Join(dir, "log")
	s.Answers = s.greets
	s.Command = func() *exec.Cmd {
		return command(program, append([]string{"--no-defaults", "--datadir=" + filepath.Join(dir, "data"), "--socket=" + filepath.Join(dir, "socket"), "--tmpdir=" + dir,
			"--pid-file=" + filepath.Join(dir, "pid"), "--bind-address=127.0.0.1", fmt.Sprint("--port=", port), "--skip-name-resolve",
			"--init-file=" + filepath.Join(from, "init.sql"), "--innodb-buffer-pool-size=32M", logSize, "--max-connections=300"}, args...)...)
	}
	return s, nil
}

// greets returns nil if the server greets a client, and has executed its init file before.
func (s *server) greets(ctx context.Context) error {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", s.URL.Host)
	if err != nil {
		return err
	}
	defer conn.Close()
	if deadline, ok := ctx.Deadline(); ok {
		_ = conn.SetDeadline(deadline)
	}
	_, err = io.ReadFull(conn, make([]byte, 5))
	return err
}

func (s *server) close() {
	_ = s.End(syscall.SIGKILL)
	_ = os.RemoveAll(s.dir)
}

// needsServer skips a test where there is no MariaDB.
func needsServer(t testing.TB) {
	t.Helper()
	if _, err := os.Stat(program); err != nil && os.Getenv("TENURE_REQUIRE_MARIADB") == "" {
		t.Skip("there is no mariadbd: install mariadb-server")
	}
}

// start starts a server for this test. It keeps what it has acknowledged when it is killed.
func start(t testing.TB, args ...string) *server {
	t.Helper()
	needsServer(t)
	s, err := newServer(args...)
	require.NoError(t, err)
	t.Cleanup(s.close)
	require.NoError(t, s.Start(t.Context()))
	return s
}

// common is the server of the tests that do it no harm.
var common = sync.OnceValues(func() (*server, error) {
	s, err := newServer("--log-bin=binlog", "--sync-binlog=1", "--binlog-format=ROW")
	if err == nil {
		whenAllEnd(s.close)
		err = s.Start(context.Background())
	}
	return s, err
})

func shared(t testing.TB) *server {
	t.Helper()
	needsServer(t)
	s, err := common()
	require.NoError(t, err)
	return s
}

// atEnd has what is to be done when all tests have ended, the last one first.
var atEnd struct {
	sync.Mutex
	all []func()
}

func whenAllEnd(do func()) {
	atEnd.Lock()
	defer atEnd.Unlock()
	atEnd.all = append(atEnd.all, do)
}

func end() {
	atEnd.Lock()
	defer atEnd.Unlock()
	for _, do := range slices.Backward(atEnd.all) {
		do()
	}
}

func (s *server) process(t testing.TB) *os.Process {
	t.Helper()
	process, err := os.FindProcess(s.PID())
	require.NoError(t, err)
	return process
}

// dsn returns the driver's DSN of a user, with parameters.
func (s *server) dsn(user, parameters string) string { return dsnAt(s.URL.Host, user, parameters) }

func dsnAt(host, user, parameters string) string {
	return fmt.Sprintf("%s:%s@tcp(%s)/%s?%s", user, password, host, database, parameters)
}

// db returns a pool, until the test ends.
func (s *server) db(t testing.TB, user, parameters string) *sql.DB {
	t.Helper()
	return pool(t, s.dsn(user, parameters))
}

func pool(t testing.TB, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open("mysql", dsn)
	require.NoError(t, err)
	t.Cleanup(func() { _ = db.Close() })
	return db
}

func exec1(t testing.TB, db interface {
	ExecContext(context.Context, string, ...any) (sql.Result, error)
}, query string, args ...any) {
	t.Helper()
	_, err := db.ExecContext(t.Context(), query, args...)
	require.NoError(t, err)
}

var tables atomic.Int64

// newTable returns the name of a table that nobody has used.
func newTable() string { return fmt.Sprint("objects_", tables.Add(1)) }

// open returns a store on connections of its own, until the test ends.
func open(t testing.TB, s *server, table string) *mysqltenure.Store {
	t.Helper()
	return openAt(t, s.URL.Host, table)
}

func openAt(t testing.TB, host, table string) *mysqltenure.Store {
	t.Helper()
	store, err := mysqltenure.Open(t.Context(), dsnAt(host, "app", ""), mysqltenure.Config{Table: table, Logger: testkit.Quiet})
	require.NoError(t, err)
	return ready(t, store)
}

// openOn returns a store in a pool, until the test ends.
func openOn(t testing.TB, db *sql.DB, table string) *mysqltenure.Store {
	t.Helper()
	store, err := mysqltenure.New(t.Context(), db, mysqltenure.Config{Table: table, Logger: testkit.Quiet})
	require.NoError(t, err)
	return ready(t, store)
}

func ready(t testing.TB, store *mysqltenure.Store) *mysqltenure.Store {
	t.Helper()
	t.Cleanup(func() { require.NoError(t, store.Close()) })
	require.NoError(t, store.Migrate(t.Context()))
	return store
}
