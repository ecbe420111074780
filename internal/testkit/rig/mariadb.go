//go:build unix

package rig

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/tenurelib/tenure/internal/testkit"
)

// MariaDB is a server of MariaDB with the database tenure. Its users have the password of MariaDBPassword: app is for a
// store, reader may only read there, and admin may do everything. It keeps what it has acknowledged when it is killed.
type MariaDB struct {
	Server
	Dir string // has the directory data, and the log
}

// These say where MariaDB and Galera are, as Debian installs them, and how to use a server.
const (
	MariaDBProgram  = "/usr/sbin/mariadbd"
	GaleraProvider  = "/usr/lib/galera/libgalera_smm.so"
	MariaDBPassword = "s3cret"
)

// MariaDBCommand returns a command that runs as an unprivileged user, since the server refuses to run as root, and that
// does not outlive this process.
func MariaDBCommand(program string, args ...string) *exec.Cmd {
	if os.Geteuid() != 0 {
		return exec.Command(program, args...)
	}
	return exec.Command("setpriv", append([]string{"--reuid=mysql", "--regid=mysql", "--clear-groups", "--pdeathsig=KILL", program}, args...)...)
}

// giveAway makes a directory that of the user that servers run as.
func giveAway(dir string) error {
	if os.Geteuid() != 0 {
		return nil
	}
	account, err := user.Lookup("mysql")
	if err != nil {
		return err
	}
	uid, err := strconv.Atoi(account.Uid)
	if err != nil {
		return err
	}
	return errors.Join(os.Chown(dir, uid, -1), os.Chmod(dir, 0o755))
}

const mariaDBLogSize = "--innodb-log-file-size=8M"

// mariaDB has the directory that each server begins with. To make it takes some seconds.
var mariaDB struct {
	once sync.Once
	dir  string // empty: there is none
	err  error
}

func mariaDBTemplate() (dir string, err error) {
	mariaDB.once.Do(func() { mariaDB.dir, mariaDB.err = makeMariaDB() })
	return mariaDB.dir, mariaDB.err
}

// RemoveMariaDB removes what the servers of this process began with. It can start none afterwards.
func RemoveMariaDB() {
	mariaDB.once.Do(func() { mariaDB.err = errors.New("RemoveMariaDB was called") })
	if mariaDB.dir != "" {
		_ = os.RemoveAll(mariaDB.dir)
	}
}

func makeMariaDB() (dir string, err error) {
	dir, err = os.MkdirTemp(testkit.MemoryDir(), "tenure-mariadb-template-")
	if err == nil {
		err = giveAway(dir)
	}
	if err != nil {
		return dir, err
	}
	out, err := MariaDBCommand("mariadb-install-db", "--no-defaults", "--datadir="+filepath.Join(dir, "data"), "--auth-root-authentication-method=normal", "--skip-test-db", mariaDBLogSize).CombinedOutput()
	if err != nil {
		return dir, fmt.Errorf("mariadb-install-db: %w: %s", err, out)
	}
	const init = `CREATE DATABASE IF NOT EXISTS tenure;
CREATE USER IF NOT EXISTS 'app'@'%' IDENTIFIED BY '` + MariaDBPassword + `';
CREATE USER IF NOT EXISTS 'reader'@'%' IDENTIFIED BY '` + MariaDBPassword + `';
GRANT ALL ON *.* TO 'admin'@'%' IDENTIFIED BY '` + MariaDBPassword + `' WITH GRANT OPTION;
GRANT SELECT, INSERT, UPDATE, DELETE, CREATE, ALTER, DROP ON tenure.* TO 'app'@'%';
GRANT SELECT ON tenure.* TO 'reader'@'%';
`
	return dir, os.WriteFile(filepath.Join(dir, "init.sql"), []byte(init), 0o644)
}

// NewMariaDB returns a server that is not started yet, with further arguments for its program. It is in that directory, or if
// that is empty, in one of its own, in memory if the system has that.
func NewMariaDB(dir string, args ...string) (*MariaDB, error) {
	from, err := mariaDBTemplate()
	if err != nil {
		return nil, err
	}
	if dir == "" {
		if dir, err = os.MkdirTemp(testkit.MemoryDir(), "tenure-mariadb-"); err != nil {
			return nil, err
		}
	}
	if err := giveAway(dir); err != nil {
		return nil, err
	}
	if out, err := MariaDBCommand("cp", "-R", filepath.Join(from, "data"), dir).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("copy the template: %w: %s", err, out)
	}
	at, err := address()
	if err != nil {
		return nil, err
	}
	_, port, _ := strings.Cut(at, ":")
	s := &MariaDB{Server{URL: &url.URL{Scheme: "mysql", User: url.UserPassword("app", MariaDBPassword), Host: at, Path: "/tenure"}}, dir}
	s.Log = filepath.Join(dir, "log")
	s.Answers = s.greets
	s.Command = func() *exec.Cmd {
		return MariaDBCommand(MariaDBProgram, append([]string{"--no-defaults", "--datadir=" + filepath.Join(dir, "data"), "--socket=" + filepath.Join(dir, "socket"), "--tmpdir=" + dir,
			"--pid-file=" + filepath.Join(dir, "pid"), "--bind-address=127.0.0.1", "--port=" + port, "--skip-name-resolve",
			"--init-file=" + filepath.Join(from, "init.sql"), "--innodb-buffer-pool-size=32M", mariaDBLogSize, "--max-connections=300"}, args...)...)
	}
	return s, nil
}

// greets returns nil if the server greets a client, and has executed its init file before.
func (s *MariaDB) greets(ctx context.Context) error {
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

// DSN returns the name that the driver has for the server, for a user and with parameters.
func (s *MariaDB) DSN(user, parameters string) string {
	return fmt.Sprintf("%s:%s@tcp(%s)/tenure?%s", user, MariaDBPassword, s.URL.Host, parameters)
}

// Close kills the server, and removes its directory.
func (s *MariaDB) Close() error {
	return errors.Join(s.End(syscall.SIGKILL), os.RemoveAll(s.Dir))
}

// NewGalera returns the nodes of a cluster, which are not started yet. They have to be started one after the other, the first one
// first: when it starts for the second time, it joins the others.
func NewGalera(n int) (nodes []*MariaDB, err error) {
	var peers []string
	for range n {
		peer, err := address()
		if err != nil {
			return nil, err
		}
		peers = append(peers, peer)
	}
	for i := range n {
		_, base, _ := strings.Cut(peers[i], ":")
		sst, err := address()
		if err != nil {
			return nil, err
		}
		ist, err := address()
		if err != nil {
			return nil, err
		}
		s, err := NewMariaDB("", "--wsrep-on=ON", "--wsrep-provider="+GaleraProvider, "--wsrep-cluster-name=tenure", fmt.Sprint("--wsrep-node-name=n", i),
			"--wsrep-node-address=127.0.0.1", "--wsrep-sst-method=rsync", "--wsrep-sst-receive-address="+sst,
			fmt.Sprintf("--wsrep-provider-options=base_host=127.0.0.1;base_port=%s;gmcast.listen_addr=tcp://%s;ist.recv_addr=%s;evs.keepalive_period=PT0.5S;evs.inactive_check_period=PT0.25S;evs.suspect_timeout=PT2S;evs.inactive_timeout=PT4S;evs.install_timeout=PT4S;gcache.size=16M", base, peers[i], ist),
			"--wsrep-slave-threads=1", "--binlog-format=ROW", "--innodb-autoinc-lock-mode=2", "--log-bin=binlog", "--log-slave-updates", fmt.Sprint("--server-id=", i+1))
		if err != nil {
			for _, s := range nodes {
				_ = s.Close()
			}
			return nil, err
		}
		of, begins := s.Command, i == 0
		s.Command = func() *exec.Cmd {
			cmd, cluster := of(), strings.Join(peers, ",")
			if begins {
				begins, cluster = false, ""
			}
			cmd.Args = append(cmd.Args, "--wsrep-cluster-address=gcomm://"+cluster)
			return cmd
		}
		nodes = append(nodes, s)
	}
	return nodes, nil
}
