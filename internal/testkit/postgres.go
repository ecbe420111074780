package testkit

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
)

// shared is the cluster in which each test of the process gets a database.
var shared struct {
	once   sync.Once
	server *PostgresServer
	err    error
}

// Main runs the tests of a [testing.M], stops the shared cluster if one was started, and
// exits. It is the body of TestMain. The clusters end with the process in any case, but only
// Main waits for them.
//
// The last lines of the output are the commands that repeat the failed simulations, so that the
// seed is kept even where only the end of a long output is.
func Main(m interface{ Run() int }) {
	code := m.Run()
	if shared.server != nil {
		if err := shared.server.Close(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = max(code, 1)
		}
	}
	printFailed()
	os.Exit(code)
}

var databases atomic.Int64

// PostgresURL returns the address of an empty database, which is dropped when the test ends.
// The first call starts the cluster that all tests of the process share: in a temporary
// directory, on a free port of 127.0.0.1, with fsync off. It needs PostgreSQL's programs, 13 or
// later, but no running server and no container. A TMPDIR in memory makes new databases several
// times as fast.
//
// The programs come from the first directory that TENURE_TEST_POSTGRES names, from PATH, or from
// where packages install them. If there are none, a test that asks for a database is
// skipped, or fails if TENURE_REQUIRE_POSTGRES is 1.
//
// With -short, it skips the test, which needs [QuickPostgresURL] to run even then.
func PostgresURL(t testing.TB) string {
	t.Helper()
	Slow(t)
	return QuickPostgresURL(t)
}

// QuickPostgresURL is [PostgresURL] for the few tests of Postgres that make test runs: those of the
// store's contract.
func QuickPostgresURL(t testing.TB) string {
	t.Helper()
	server := sharedServer(t)
	name := fmt.Sprintf("test_%d", databases.Add(1))
	if err := server.exec("CREATE DATABASE " + name); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.exec("DROP DATABASE " + name + " WITH (FORCE)"); err != nil {
			t.Error(err)
		}
	})
	return server.url(name)
}

// PostgresLog returns what the shared cluster has logged so far, including failed statements. It
// contains the lines of all tests; each line names its database.
func PostgresLog(t testing.TB) string {
	t.Helper()
	return sharedServer(t).Log(t)
}

// StartPostgres starts a cluster for this test only, which may stop and restart it. It is removed
// when the test ends. The settings, such as "fsync=on", override the defaults. Such a test is slow:
// the server alone takes seconds.
func StartPostgres(t testing.TB, settings ...string) *PostgresServer {
	t.Helper()
	Slow(t)
	server, err := NewPostgres(settings...)
	skipOrFail(t, err)
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Error(err)
		}
	})
	return server
}

func sharedServer(t testing.TB) *PostgresServer {
	t.Helper()
	shared.once.Do(func() {
		shared.server, shared.err = NewPostgres()
	})
	skipOrFail(t, shared.err)
	return shared.server
}

func skipOrFail(t testing.TB, err error) {
	t.Helper()
	switch {
	case err == nil:
	case errors.Is(err, errNoPostgres) && os.Getenv("TENURE_REQUIRE_POSTGRES") != "1":
		t.Skip(err)
	default:
		t.Fatal(err)
	}
}

// exec runs one statement in the database postgres. It takes no context, because a test's own
// context has ended by the time its database is dropped.
func (s *PostgresServer) exec(sql string) error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	conn, err := pgx.Connect(ctx, s.URL())
	if err != nil {
		return fmt.Errorf("kit: %s: %w", sql, err)
	}
	defer conn.Close(ctx)
	if _, err := conn.Exec(ctx, sql); err != nil {
		return fmt.Errorf("kit: %s: %w", sql, err)
	}
	return nil
}
