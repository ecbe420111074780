package testkit_test

import (
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure/internal/testkit"
)

func TestABouncersClientsShareItsSessions(t *testing.T) {
	url := testkit.StartBouncer(t, testkit.PostgresURL(t)) + "&default_query_exec_mode=exec"
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

func TestABouncerRejectsAStartupParameter(t *testing.T) {
	url := testkit.StartBouncer(t, testkit.PostgresURL(t))
	conn, err := pgx.Connect(t.Context(), url+"&lock_timeout=123ms")
	if err == nil {
		conn.Close(t.Context())
	}
	if err == nil || !strings.Contains(err.Error(), "08P01") {
		t.Errorf("got error %v, want 08P01", err)
	}
}

func TestABouncerEndsWithItsTest(t *testing.T) {
	url, temp := testkit.PostgresURL(t), openDir(t)
	t.Setenv("TMPDIR", temp)
	var bounced string
	t.Run("uses a bouncer", func(t *testing.T) {
		bounced = testkit.StartBouncer(t, url)
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

// The test runs itself as a child process, kills it, and then looks for the child's
// bouncer.
func TestAKilledTestProcessTakesItsBouncerAlong(t *testing.T) {
	const asChild = "KIT_BOUNCER_AS_CHILD"
	if os.Getenv(asChild) != "" {
		fmt.Println(testkit.StartBouncer(t, os.Getenv(asChild)))
		io.Copy(io.Discard, os.Stdin) // until it is killed
		return
	}
	url := testkit.PostgresURL(t)
	testkit.StartBouncer(t, url) // skips if there is none
	refuses(t, killedChild(t, asChild+"="+url))
}

// openDir returns an empty directory that every user may read, unlike that of t.TempDir.
func openDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "tenure-kit-parent-")
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
