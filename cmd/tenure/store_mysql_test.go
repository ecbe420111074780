//go:build linux

package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/testkit/rig"
)

// startMySQL starts a MariaDB server until the test ends, and returns its address. Its users are app, whose password is
// s3cret and who may use the database tenure, and reader, who may only read there.
func startMySQL(t *testing.T) (address string) {
	t.Helper()
	program := "/usr/sbin/mariadbd"
	if _, err := os.Stat(program); err != nil {
		if os.Getenv("TENURE_REQUIRE_MARIADB") != "" {
			t.Fatal(err)
		}
		t.Skip("there is no mariadbd: install mariadb-server")
	}
	dir := t.TempDir()
	data, init := filepath.Join(dir, "data"), filepath.Join(dir, "init.sql")
	const sql = `CREATE DATABASE IF NOT EXISTS tenure;
CREATE USER IF NOT EXISTS 'app'@'%' IDENTIFIED BY 's3cret';
CREATE USER IF NOT EXISTS 'reader'@'%' IDENTIFIED BY 's3cret';
GRANT SELECT, INSERT, UPDATE, CREATE ON tenure.* TO 'app'@'%';
GRANT SELECT ON tenure.* TO 'reader'@'%';
`
	if err := os.WriteFile(init, []byte(sql), 0o644); err != nil {
		t.Fatal(err)
	}
	as := "--user=" + os.Getenv("USER")
	if os.Geteuid() == 0 { // which the server refuses
		as = "--user=mysql"
		for parent := dir; parent != os.TempDir() && parent != "/"; parent = filepath.Dir(parent) {
			if err := os.Chmod(parent, 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	if out, err := exec.Command("mariadb-install-db", "--no-defaults", "--datadir="+data, as, "--skip-test-db", "--innodb-log-file-size=8M").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	port, err := testkit.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	server := rig.Server{URL: &url.URL{Host: fmt.Sprint("127.0.0.1:", port)}}
	server.Log = filepath.Join(dir, "log")
	server.Command = func() *exec.Cmd {
		return exec.Command(program, "--no-defaults", "--datadir="+data, as, "--socket="+filepath.Join(data, "socket"), "--bind-address=127.0.0.1",
			fmt.Sprint("--port=", port), "--init-file="+init, "--tmpdir="+data, "--skip-name-resolve", "--innodb-buffer-pool-size=32M", "--innodb-log-file-size=8M")
	}
	server.Answers = func(ctx context.Context) error { // by a greeting
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", server.URL.Host)
		if err != nil {
			return err
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(time.Second))
		_, err = io.ReadFull(conn, make([]byte, 5))
		return err
	}
	t.Cleanup(func() { server.End(syscall.SIGKILL) })
	if err := server.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	return server.URL.Host
}

func TestCommandsOnMySQL(t *testing.T) {
	t.Parallel()
	address := startMySQL(t)
	const password = "s3cret"
	s := newSite(t, "mysql://app:"+password+"@"+address+"/tenure")

	status, _, stderr := tenureCommand(t, "status", "--store", s.store, "--key", "svc")
	if status != 1 || !strings.Contains(stderr, `run "tenure migrate"`) || strings.Contains(stderr, password) {
		t.Errorf("at first: exit status %d and %q", status, stderr)
	}
	status, stdout, stderr := tenureCommand(t, "doctor", "--store", s.store, "--look", "100ms")
	if status != exitUnfit || !strings.Contains(stdout, "run tenure migrate") {
		t.Errorf("doctor at first: exit status %d, %q and %q", status, stdout, stderr)
	}
	s.handsOver(t, "")
	for _, args := range [][]string{{"drain", "--replica", "a", "--for", "1m", "--force"}, {"list", "--drained"}} {
		if status, stdout, stderr := tenureCommand(t, append(args, "--store", s.store)...); status != 0 || !strings.Contains(stdout, "a ") {
			t.Errorf("%q: exit status %d, %q and %q", args, status, stdout, stderr)
		}
	}
	status, stdout, stderr = tenureCommand(t, "doctor", "--store", s.store, "--look", "200ms")
	if status != 0 || !strings.Contains(stdout, "MySQL or MariaDB") || !strings.Contains(stdout, "renewal") {
		t.Errorf("doctor: exit status %d, %q and %q", status, stdout, stderr)
	}
	reader := strings.Replace(s.store, "app:", "reader:", 1)
	if status, _, stderr := tenureCommand(t, "list", "--store", reader); status != 0 {
		t.Errorf("list as a user who may only read: %q", stderr)
	}

	for _, test := range []struct {
		args         []string
		status       int
		store, wants string
	}{
		{[]string{"list", "--sessions"}, 2, s.store, "on Postgres or SQLite only"},
		{[]string{"owner", "--key", "tenant/acme"}, 2, s.store, "on Postgres or SQLite only"},
		{[]string{"migrate", "--print"}, 2, s.store, "run migrate once as a user who may"},
		{[]string{"list", "--schema", "x"}, 2, s.store, "on Postgres"},
		{[]string{"list", "--table", "a.b.c"}, 2, s.store, "a.b.c"},
		{[]string{"list", "--table", "mine"}, 1, s.store, "mine"},
		{[]string{"migrate", "--table", "mine"}, 1, reader, "GRANT SELECT, INSERT, UPDATE"},
		{[]string{"list"}, 2, "mysql://app:" + password + "@h", "no database"},
		{[]string{"list"}, 2, "mysql://app:" + password + "@h/d?x=y", `a parameter "x"`},
		{[]string{"list"}, 2, "mysql://app:" + password + "/x@h/d", "%XX"},
		{[]string{"list"}, 1, "mysql://app:" + password + "@127.0.0.1:1/d", "connection refused"},
		{[]string{"list"}, 1, strings.Replace(s.store, password, password+"2", 1), "refuses the user"},
	} {
		status, stdout, stderr := tenureCommand(t, append(test.args, "--store", test.store)...)
		if status != test.status || stdout != "" || strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, test.wants) || strings.Contains(stderr, password) {
			t.Errorf("%q on %s: exit status %d, %q and %q", test.args, test.store, status, stdout, stderr)
		}
	}
}
