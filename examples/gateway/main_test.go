//go:build unix

package main

import (
	"bytes"
	"context"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// runFor runs the program until it ends by itself or the time has passed, and returns its
// exit code and its output.
func runFor(t *testing.T, d time.Duration, args ...string) (int, string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	dir := t.TempDir()
	var stderr bytes.Buffer
	code := run(ctx, append([]string{
		"-listen", "127.0.0.1:0",
		"-state", filepath.Join(dir, "state"),
		"-store", filepath.Join(dir, "gateway.db"),
	}, args...), &stderr)
	return code, stderr.String()
}

func TestABadCommandLineIsReportedInOneLineAndExitCode2(t *testing.T) {
	for _, args := range [][]string{
		{"-no-such-flag"},
		{"argument"},
		{"-ttl", "0s"},
		{"-ttl", "-1s"},
		{"-ttl", "soon"},
		{"-sweep", "0s"},
		{"-grace", "0s"},
		{"-listen", ""},
		{"-listen", "nonsense"},
		{"-store", ""},
		{"-store", "mysql://localhost/db"},
		{"-state", ""},
		{"-replica", ""},
		{"-confirm", "-1"},
		{"-confirm", "twice"},
		{"-shared", "-store", "postgres://localhost/db"},
		{"-ttl", "0s", "-sweep", "0s", "argument"},
	} {
		code, out := runFor(t, time.Minute, args...)
		if code != 2 || strings.Count(out, "\n") != 1 || !strings.HasPrefix(out, "gateway: ") {
			t.Errorf("%q: exit code %d and %q, want 2 and one line", args, code, out)
		}
	}
}

func TestAnOptionThatTheLibraryRejectsIsExitCode2(t *testing.T) {
	for _, args := range [][]string{
		{"-ttl", "1ns"},
		{"-store", "postgres://user:s3cret@localhost:port/db"},
	} {
		code, out := runFor(t, time.Minute, args...)
		if code != 2 || !strings.Contains(out, "\ngateway: ") || !strings.HasSuffix(out, "\n") {
			t.Errorf("%q: exit code %d and %q, want 2 and a last line that says why", args, code, out)
		}
	}
}

func TestHelpIsExitCode0(t *testing.T) {
	if code, out := runFor(t, time.Minute, "-h"); code != 0 || !strings.Contains(out, "-ttl") {
		t.Errorf("exit code %d and %q, want 0 and the flags", code, out)
	}
}

func TestAnAddressInUseIsReportedInOneLineAndExitCode1(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	code, out := runFor(t, time.Minute, "-listen", listener.Addr().String())
	if code != 1 || strings.Count(out, "\n") != 1 || !strings.Contains(out, "in use") {
		t.Errorf("exit code %d and %q, want 1 and one line", code, out)
	}
}

func TestAGatewayEndsWhileItWaitsForItsDatabase(t *testing.T) {
	const says = "waiting for the database"
	code, out := 0, ""
	for d := 300 * time.Millisecond; d < soon && !strings.Contains(out, says); d *= 2 {
		code, out = runFor(t, d, "-store", "postgres://user:s3cret@127.0.0.1:1/db?password=s3cret")
	}
	if code != 0 || !strings.Contains(out, says) {
		t.Errorf("exit code %d and %q, want 0 and a line that says so", code, out)
	}
	if strings.Contains(out, "s3cret") {
		t.Errorf("it printed the password: %s", out)
	}
}

func TestThePasswordOfAStoreIsNotShown(t *testing.T) {
	for _, tt := range []struct{ name, want string }{
		{"gateway.db", "gateway.db"},
		{"postgres://user:s3cret@host:5432/db", "postgres://host:5432/db"},
		{"postgresql://host/db?user=user&password=s3cret", "postgresql://host/db"},
		{"postgres://user:s3cret@host:port/db", "postgres"},
		{"postgres://user:s3cret%zz@host/db", "postgres"},
	} {
		if got := redact(tt.name); got != tt.want {
			t.Errorf("%s is shown as %s, want %s", tt.name, got, tt.want)
		}
	}
	for _, name := range []string{
		"postgres://user:s3cret@host:port/db",
		"postgres://user:s3cret%zz@host/db",
		"postgres://user:s3cret@[host/db",
		"postgres://host:port/db?password=s3cret",
		"postgres://host/db?password=s3cret&sslmode=maybe",
		"postgres://user:s3cret@host/db?connect_timeout=x",
	} {
		if _, out := runFor(t, 5*time.Second, "-store", name); strings.Contains(out, "s3cret") {
			t.Errorf("with %s it printed %q", name, out)
		}
	}
}
