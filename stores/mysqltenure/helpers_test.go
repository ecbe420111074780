//go:build linux

package mysqltenure_test

import (
	"context"
	"database/sql"
	"flag"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
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
	endCommon()
	rig.RemoveMariaDB()
	os.Exit(status)
}

const (
	database = "tenure"
	password = rig.MariaDBPassword
)

// server is MariaDB in a process of its own.
type server struct{ *rig.MariaDB }

// newServer returns a server that does not run yet.
func newServer(args ...string) (*server, error) {
	s, err := rig.NewMariaDB("", args...)
	return &server{s}, err
}

func (s *server) close() { _ = s.Close() }

// needsServer skips a test where there is no MariaDB.
func needsServer(t testing.TB) {
	t.Helper()
	if _, err := os.Stat(rig.MariaDBProgram); err != nil && os.Getenv("TENURE_REQUIRE_MARIADB") == "" {
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

var endCommon = func() {}

// common is the server of the tests that do it no harm.
var common = sync.OnceValues(func() (*server, error) {
	s, err := newServer("--log-bin=binlog", "--sync-binlog=1", "--binlog-format=ROW")
	if err == nil {
		endCommon = s.close
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

func (s *server) process(t testing.TB) *os.Process {
	t.Helper()
	process, err := os.FindProcess(s.PID())
	require.NoError(t, err)
	return process
}

func dsnAt(host, user, parameters string) string {
	return fmt.Sprintf("%s:%s@tcp(%s)/%s?%s", user, password, host, database, parameters)
}

// db returns a pool, until the test ends.
func (s *server) db(t testing.TB, user, parameters string) *sql.DB {
	t.Helper()
	return pool(t, s.DSN(user, parameters))
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
