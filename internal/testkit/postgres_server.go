package testkit

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// OnDisk is the setting of a server whose commits wait for the disk. All other servers are in
// memory, if there is enough.
const OnDisk = "fsync=on"

// PostgresServer is one PostgreSQL cluster. Its methods, except URL and Log, are not safe for
// concurrent use.
type PostgresServer struct {
	process
	bin      string // directory of the programs
	port     int
	settings []string // in addition to the defaults
}

// NewPostgres creates and starts a cluster for a program that is not a test; tests use
// [StartPostgres]. [PostgresServer.Close] ends it.
func NewPostgres(settings ...string) (*PostgresServer, error) {
	bin, err := binaries()
	if err != nil {
		return nil, err
	}
	return newServer(bin, settings, func(s *PostgresServer) error {
		return s.do(filepath.Join(bin, "initdb"), "-A", "trust", "-U", "postgres", "--no-sync", "-E", "UTF8", "--locale=C", "-D", s.data())
	})
}

// Standby creates and starts a hot standby of the server, which runs. It does what pg_basebackup does, because
// some distributions of the server lack that.
func (s *PostgresServer) Standby() (*PostgresServer, error) {
	return newServer(s.bin, s.settings, func(standby *PostgresServer) error {
		ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
		defer cancel()
		conn, err := pgx.Connect(ctx, s.URL())
		if err != nil {
			return err
		}
		defer conn.Close(ctx) // which ends the backup
		begin, end := "pg_backup_start('kit', true)", "pg_backup_stop(false)"
		if conn.PgConn().ParameterStatus("server_version") < "15" {
			begin, end = "pg_start_backup('kit', true, false)", "pg_stop_backup(false, false)"
		}
		if _, err := conn.Exec(ctx, "SELECT "+begin); err != nil {
			return err
		}
		// Files come and go meanwhile, which matters neither to cp nor to the server.
		const copyAll = `! LC_ALL=C cp -R "$1" "$2" 2>&1 | grep -v "No such file or directory"`
		if err := standby.do("sh", "-c", copyAll, "sh", s.data(), standby.data()); err != nil {
			return err
		}
		var label string
		if err := conn.QueryRow(ctx, "SELECT labelfile FROM "+end).Scan(&label); err != nil {
			return err
		}
		if err := standby.do("sh", "-c", `rm -f "$1/postmaster.pid" && printf %s "$2" >"$1/backup_label"`, "sh", standby.data(), label); err != nil {
			return err
		}
		return standby.Follow(s)
	})
}

// CatchUp waits until a standby has replayed everything that its primary has.
func (s *PostgresServer) CatchUp(ctx context.Context, primary *PostgresServer) error {
	conn, err := pgx.Connect(ctx, primary.URL())
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	var is string
	if err := conn.QueryRow(ctx, `SELECT pg_current_wal_insert_lsn()::text`).Scan(&is); err != nil {
		return err
	}
	return s.await(ctx, `SELECT coalesce(pg_last_wal_replay_lsn() >= $1::text::pg_lsn, false)`, is)
}

// CutOff stops a standby from receiving anything: if it is promoted, what its primary gets from now on is lost.
func (s *PostgresServer) CutOff(ctx context.Context) error {
	if err := errors.Join(s.exec(`ALTER SYSTEM SET primary_conninfo = ''`), s.exec(`SELECT pg_reload_conf()`)); err != nil {
		return err
	}
	return s.await(ctx, `SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'walreceiver')`)
}

// await repeats a query until it returns true.
func (s *PostgresServer) await(ctx context.Context, sql string, args ...any) error {
	ctx, cancel := context.WithTimeout(ctx, Patience)
	defer cancel()
	conn, err := pgx.Connect(ctx, s.URL())
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	for {
		var ok bool
		if err := conn.QueryRow(ctx, sql, args...).Scan(&ok); err != nil || ok {
			return err
		}
		Sleep(ctx, 20*time.Millisecond)
	}
}

// Rewind resets the data of a stopped server to the point where its history parted from the other server's, and
// adds what the other has done since. It needs pg_rewind, and wal_log_hints on in this server, including its
// configuration file.
func (s *PostgresServer) Rewind(to *PostgresServer) error {
	if err := to.exec("CHECKPOINT"); err != nil { // before that, the other still shows its timeline from before the promotion
		return err
	}
	return s.do(filepath.Join(s.bin, "pg_rewind"), "--no-sync", "-D", s.data(), "--source-server="+to.URL())
}

// Follow makes a stopped server start as a standby of another.
func (s *PostgresServer) Follow(primary *PostgresServer) error {
	const conf = `: >"$1/standby.signal" && printf "primary_conninfo = '%s'\n" "$2" >>"$1/postgresql.auto.conf"`
	return s.do("sh", "-c", conf, "sh", s.data(), primary.URL())
}

// do runs a program to completion, as the server's user.
func (s *PostgresServer) do(program string, args ...string) error {
	if out, err := s.command(program, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", program, err, out)
	}
	return nil
}

// newServer calls create to make the data of a server, and then starts the server.
func newServer(bin string, settings []string, create func(*PostgresServer) error) (*PostgresServer, error) {
	port, err := FreePort()
	if err != nil {
		return nil, err
	}
	in := MemoryDir()
	if slices.Contains(settings, OnDisk) {
		in = ""
	}
	p, err := newProcess(in)
	if err != nil {
		return nil, err
	}
	s := &PostgresServer{process: p, bin: bin, port: port, settings: settings}
	if err = create(s); err != nil {
		err = fmt.Errorf("kit: create a server: %w", err)
	} else {
		err = s.Start()
	}
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// Promote makes a standby a primary.
func (s *PostgresServer) Promote() error { return s.exec("SELECT pg_promote()") }

// Start starts a server that is stopped, on the same port as before, and returns when it
// answers.
func (s *PostgresServer) Start() error {
	args := []string{"-D", s.data(), "-p", strconv.Itoa(s.port)}
	for _, setting := range append([]string{ // the last one of the same name wins
		"listen_addresses=127.0.0.1",
		"unix_socket_directories=",
		"max_connections=200",
		"log_line_prefix=%m [%p] %d ",
	}, s.settings...) {
		args = append(args, "-c", setting)
	}
	return s.start(s.URL(), "QUIT", filepath.Join(s.bin, "postgres"), args...)
}

// PID returns the ID of the server's first process, the parent of the others.
func (s *PostgresServer) PID() (int, error) {
	file, err := os.ReadFile(filepath.Join(s.data(), "postmaster.pid"))
	if err != nil {
		return 0, err
	}
	first, _, _ := strings.Cut(string(file), "\n")
	return strconv.Atoi(first)
}

// Stop ends the server and returns when all of its processes are gone. "fast" rolls back open transactions and shuts
// down; "immediate" simulates a crash; "kill" kills the first process, and then the others end by themselves.
func (s *PostgresServer) Stop(mode string) error {
	signal, ok := map[string]string{"fast": "INT", "immediate": "QUIT", "kill": "KILL"}[mode]
	if !ok {
		return fmt.Errorf("kit: stop: unknown mode %q", mode)
	}
	return s.stop(signal)
}

// Restart is Stop and Start.
func (s *PostgresServer) Restart(mode string) error {
	if err := s.Stop(mode); err != nil {
		return err
	}
	return s.Start()
}

// Close stops the server if it is running, and removes the cluster.
func (s *PostgresServer) Close() error { return s.close("QUIT") }

// URL returns the address of the database postgres, where its user is the
// superuser. It stays the same across restarts.
func (s *PostgresServer) URL() string { return s.url("postgres") }

func (s *PostgresServer) url(database string) string {
	return fmt.Sprintf("postgres://postgres@127.0.0.1:%d/%s?sslmode=disable", s.port, database)
}

// Log returns what the server has logged since the cluster was created, including failed
// statements. A failed statement's line is written before the client sees the error.
func (s *PostgresServer) Log(t testing.TB) string {
	t.Helper()
	log, err := os.ReadFile(s.log())
	if err != nil {
		t.Fatal(err)
	}
	return string(log)
}

func (s *PostgresServer) data() string { return filepath.Join(s.dir, "data") }
