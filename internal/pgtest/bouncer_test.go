package pgtest_test

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure/internal/pgtest"
)

func TestABouncersClientsShareItsSessions(t *testing.T) {
	url := pgtest.Bouncer(t, pgtest.URL(t)) + "&default_query_exec_mode=exec"
	one, other := connect(t, url), connect(t, url)
	query(t, one, "SET lock_timeout = '123ms'")
	var got string
	if err := other.QueryRow(t.Context(), "SHOW lock_timeout").Scan(&got); err != nil {
		t.Fatal(err)
	}
	if want := "123ms"; got != want {
		t.Errorf("the other client's lock_timeout: got %s, want %s", got, want)
	}
}

func TestABouncerRefusesAStartupParameter(t *testing.T) {
	url := pgtest.Bouncer(t, pgtest.URL(t))
	conn, err := pgx.Connect(t.Context(), url+"&lock_timeout=123ms")
	if err == nil {
		conn.Close(t.Context())
	}
	if err == nil || !strings.Contains(err.Error(), "08P01") {
		t.Errorf("got error %v, want 08P01", err)
	}
}

func TestABouncerIsGoneWithItsTest(t *testing.T) {
	url, temp := pgtest.URL(t), openDir(t)
	t.Setenv("TMPDIR", temp)
	var bounced string
	t.Run("uses a bouncer", func(t *testing.T) {
		bounced = pgtest.Bouncer(t, url)
		conn, err := pgx.Connect(t.Context(), bounced)
		if err != nil {
			t.Fatal(err)
		}
		query(t, conn, "SELECT 1") // and stays open
	})
	refuses(t, bounced)
	if left, err := os.ReadDir(temp); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, error %v", left, err)
	}
}

// The test runs itself as a child, whose bouncer it looks for after the child's
// sudden end.
func TestAKilledTestProcessTakesItsBouncerAlong(t *testing.T) {
	const asChild = "PGTEST_BOUNCER_AS_CHILD"
	if os.Getenv(asChild) != "" {
		fmt.Println(pgtest.Bouncer(t, os.Getenv(asChild)))
		io.Copy(io.Discard, os.Stdin) // until it is killed
		return
	}
	url, temp := pgtest.URL(t), openDir(t)
	pgtest.Bouncer(t, url) // skips where there is none

	child := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
	child.Env = append(os.Environ(), asChild+"="+url, "TMPDIR="+temp)
	if _, err := child.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	bounced, err := bufio.NewReader(out).ReadString('\n')
	child.Process.Kill()
	child.Wait()
	if err != nil || !strings.HasPrefix(bounced, "postgres://") {
		t.Fatalf("the child's first line: got %q, error %v; want its bouncer's address", bounced, err)
	}
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		left, err := os.ReadDir(temp)
		if err != nil {
			t.Fatal(err)
		}
		if len(left) == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("30 s after the end of its tests the bouncer is still there: %v", left)
		}
	}
	refuses(t, strings.TrimSpace(bounced))
}

// openDir returns an empty directory into which every user may look, unlike
// that of t.TempDir.
func openDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "tenure-pgtest-parent-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	return dir
}

func refuses(t *testing.T, url string) {
	t.Helper()
	if conn, err := pgx.Connect(t.Context(), url); err == nil {
		conn.Close(t.Context())
		t.Error("the bouncer answers after its end")
	}
}
