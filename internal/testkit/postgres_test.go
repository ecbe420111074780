package testkit_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestDatabasesAreSeparate(t *testing.T) {
	one, other := connect(t, testkit.PostgresURL(t)), connect(t, testkit.PostgresURL(t))
	query(t, one, "CREATE TABLE things (id int)")
	query(t, other, "CREATE TABLE things (id int)")
	query(t, one, "INSERT INTO things VALUES (1)")
	if got, want := count(t, other), 0; got != want {
		t.Errorf("rows in the other database: got %d, want %d", got, want)
	}
}

func TestEachVersionOfPostgresIsStartedAndStopped(t *testing.T) {
	testkit.OnEachPostgres(t, `^TestARestartKeepsTheDataAndTheAddress$`)
}

func TestADatabaseWithAnOpenConnectionIsDropped(t *testing.T) {
	var url string
	t.Run("uses a database", func(t *testing.T) {
		url = testkit.PostgresURL(t)
		conn, err := pgx.Connect(t.Context(), url)
		if err != nil {
			t.Fatal(err)
		}
		query(t, conn, "SELECT 1")
	})
	if conn, err := pgx.Connect(t.Context(), url); err == nil {
		conn.Close(t.Context())
		t.Error("the database is still there after its test")
	}
}

func TestARestartKeepsTheDataAndTheAddress(t *testing.T) {
	server := testkit.StartPostgres(t)
	url := server.URL()
	conn := connect(t, url)
	query(t, conn, "CREATE TABLE things (id int)")
	for i, mode := range []string{"fast", "immediate"} {
		query(t, conn, "INSERT INTO things VALUES (1)")
		if err := server.Stop(mode); err != nil {
			t.Fatal(err)
		}
		if _, err := pgx.Connect(t.Context(), url); err == nil {
			t.Fatalf("after Stop(%q) the server answers", mode)
		}
		if err := server.Start(); err != nil {
			t.Fatal(err)
		}
		conn = connect(t, url)
		if got, want := count(t, conn), i+1; got != want {
			t.Errorf("rows after Stop(%q) and Start: got %d, want %d", mode, got, want)
		}
	}
}

func TestTheLogContainsFailedStatements(t *testing.T) {
	conn := connect(t, testkit.PostgresURL(t))
	query(t, conn, "CREATE TABLE things (id int PRIMARY KEY)")
	query(t, conn, "INSERT INTO things VALUES (1)")
	const complaint = "duplicate key"
	before := strings.Count(testkit.PostgresLog(t), complaint)
	if _, err := conn.Exec(t.Context(), "INSERT INTO things VALUES (1)"); err == nil {
		t.Fatal("a second row under one primary key was accepted")
	}
	if got, want := strings.Count(testkit.PostgresLog(t), complaint), before+1; got != want {
		t.Errorf("lines with %q in the log: got %d, want %d", complaint, got, want)
	}
}

// The test runs itself as a child process, kills it, and then looks for the child's
// cluster.
func TestAKilledTestProcessTakesItsServerAlong(t *testing.T) {
	testkit.Slow(t)
	const asChild = "KIT_AS_CHILD"
	if os.Getenv(asChild) != "" {
		fmt.Println(testkit.StartPostgres(t).URL())
		io.Copy(io.Discard, os.Stdin) // until it is killed
		return
	}
	testkit.PostgresURL(t) // skips if there is no PostgreSQL

	url := killedChild(t, asChild+"=1")
	if conn, err := pgx.Connect(t.Context(), url); err == nil {
		conn.Close(t.Context())
		t.Error("the server answers after the end of its tests")
	}
}

// killedChild runs this test as a child process, kills the child when it has printed the
// address of the server that it started, and returns the address once the child's
// temporary directory is empty.
func killedChild(t *testing.T, env ...string) (url string) {
	t.Helper()
	temp := openDir(t)
	child := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
	child.Env = append(append(os.Environ(), env...), "TMPDIR="+temp)
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
	url, err = bufio.NewReader(out).ReadString('\n')
	child.Process.Kill()
	child.Wait()
	if err != nil || !strings.HasPrefix(url, "postgres://") {
		t.Fatalf("the child's first line: got %q, error %v; want an address", url, err)
	}
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(10 * time.Millisecond) {
		left, err := os.ReadDir(temp)
		if err != nil {
			t.Fatal(err)
		}
		if len(left) == 0 {
			return strings.TrimSpace(url)
		}
		if time.Now().After(deadline) {
			t.Fatalf("two minutes after the end of its tests there is still %v", left)
		}
	}
}

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(context.Background()) })
	return conn
}

func query(t *testing.T, conn *pgx.Conn, sql string) {
	t.Helper()
	if _, err := conn.Exec(t.Context(), sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func count(t *testing.T, conn *pgx.Conn) int {
	t.Helper()
	var n int
	if err := conn.QueryRow(t.Context(), "SELECT count(*) FROM things").Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}
