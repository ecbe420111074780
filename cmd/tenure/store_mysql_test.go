//go:build linux

package main

import (
	"os"
	"strings"
	"testing"

	"github.com/tenurelib/tenure/internal/testkit/rig"
)

// startMySQL starts a MariaDB server until the test ends.
func startMySQL(t *testing.T) *rig.MariaDB {
	t.Helper()
	if _, err := os.Stat(rig.MariaDBProgram); err != nil && os.Getenv("TENURE_REQUIRE_MARIADB") == "" {
		t.Skip("there is no mariadbd: install mariadb-server")
	}
	t.Cleanup(rig.RemoveMariaDB)
	server, err := rig.NewMariaDB("")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Close() })
	if err := server.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	return server
}

func TestCommandsOnMySQL(t *testing.T) {
	t.Parallel()
	const password = rig.MariaDBPassword
	s := newSite(t, startMySQL(t).URL.String())

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
	if status != 0 || !strings.Contains(stdout, "MariaDB 1") || !strings.Contains(stdout, "renewal") {
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
