package main

import (
	"bufio"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit/rig"
	"github.com/tenurelib/tenure/stores/mysqltenure"
)

// mysqlServers are one server of MariaDB, or the nodes of a Galera cluster. The binary log has all rows as they were
// written, in the order of the commits: so it is the ledger as well. In a cluster that is the last node's, which is never killed.
type mysqlServers struct {
	objectsOnly
	nodes   []*rig.MariaDB
	started int
	admins  []*sql.DB // of each node, without a proxy
	store   *mysqltenure.Store
}

// errNoMariaDB is the error of a phase that is left out.
var errNoMariaDB = errors.New("there is no MariaDB: install mariadb-server and galera-4")

func newMySQL(ctx context.Context, nodes int) (db *mysqlServers, err error) {
	for _, path := range []string{rig.MariaDBProgram, rig.GaleraProvider} {
		if _, err := os.Stat(path); err != nil && os.Getenv("TENURE_REQUIRE_MARIADB") == "" {
			return nil, errNoMariaDB
		}
	}
	if err := mysql.SetLogger(&mysql.NopLogger{}); err != nil { // it would write into the report
		return nil, err
	}
	db = &mysqlServers{}
	defer func() {
		if err != nil {
			err = errors.Join(err, db.close())
		}
	}()
	if nodes > 1 {
		db.nodes, err = rig.NewGalera(nodes)
	} else if one, e := rig.NewMariaDB("", "--log-bin=binlog", "--sync-binlog=1", "--binlog-format=ROW"); e != nil {
		err = e
	} else {
		db.nodes = []*rig.MariaDB{one}
	}
	if err != nil {
		return db, err
	}
	for i, node := range db.nodes {
		admin, err := sql.Open("mysql", node.DSN("admin", "timeout=1s&readTimeout=5s&innodb_lock_wait_timeout=1"))
		if err != nil {
			return db, err
		}
		db.admins = append(db.admins, admin)
		if nodes > 1 {
			node.Answers = func(ctx context.Context) error { return db.isWhole(ctx, i) }
		}
		db.started++
		if err := node.Start(ctx); err != nil {
			return db, err
		}
	}
	last := len(db.nodes) - 1
	if db.store, err = mysqltenure.Open(ctx, db.nodes[last].URL.String(), mysqltenure.Config{Logger: slog.New(slog.DiscardHandler)}); err != nil {
		return db, err
	}
	if err := db.store.Migrate(ctx); err != nil {
		return db, err
	}
	_, err = db.admins[last].ExecContext(ctx, `CREATE TABLE ledger (kind VARBINARY(20) NOT NULL, id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, said BLOB NOT NULL)`)
	return db, err
}

// isWhole returns nil if a node serves requests in a cluster of all that were started.
func (db *mysqlServers) isWhole(ctx context.Context, node int) error {
	for name, want := range map[string]string{"wsrep_ready": "ON", "wsrep_cluster_size": strconv.Itoa(db.started)} {
		var is string
		if err := db.admins[node].QueryRowContext(ctx, "SHOW STATUS LIKE '"+name+"'").Scan(&name, &is); err != nil {
			return err
		}
		if is != want {
			return fmt.Errorf("%s is %s, not %s", name, is, want)
		}
	}
	return nil
}

// replica gives a DSN to each replica: the COMMIT of a fenced transaction ends by its readTimeout if the network swallows it.
func (db *mysqlServers) replica(i int, cfg replicaConfig) (replicaConfig, *rig.Proxy, error) {
	node := db.nodes[i%len(db.nodes)]
	proxy, err := rig.NewProxy(node.URL.Host, nil)
	if err != nil {
		return cfg, nil, err
	}
	dsn := strings.Replace(node.DSN("app", "readTimeout="+(cfg.TTL/5).String()), node.URL.Host, proxy.Addr(), 1)
	cfg.URL, cfg.Pace, cfg.Crowd = mysqlScheme+":"+dsn, 100*time.Millisecond, 2
	return cfg, proxy, nil
}

const mysqlScheme = "mysql"

// mysqlBackend has a table for the ledger, too.
type mysqlBackend struct {
	objectsBackend
	sql *mysqltenure.Store
}

// openMySQL is for a replica.
func openMySQL(ctx context.Context, cfg replicaConfig) (backend, error) {
	store, err := mysqltenure.Open(ctx, strings.TrimPrefix(cfg.URL, mysqlScheme+":"), mysqltenure.Config{})
	if err != nil {
		return nil, err
	}
	if err := store.Migrate(ctx); err != nil {
		return nil, errors.Join(err, store.Close())
	}
	return &mysqlBackend{objectsBackend{objects: store, closed: store.Close}, store}, nil
}

// fenced lets the time pass, if there is any, between the fence and the commit, when a takeover must wait or be refused.
func (b *mysqlBackend) fenced(ctx context.Context, guard tenure.Guard, e entry, delay time.Duration) error {
	insert, said, err := b.insert(e)
	if err != nil {
		return err
	}
	if delay == 0 {
		return b.sql.Fenced(ctx, guard, func(tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, insert, said...)
			return err
		})
	}
	fence, args, err := b.sql.FenceStatement(guard)
	if err != nil {
		return err
	}
	tx, err := b.sql.DB().BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if _, err := tx.ExecContext(ctx, insert, said...); err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, fence, args...); err != nil {
		return tenure.FenceError(err)
	}
	pause(ctx, delay)
	return tx.Commit()
}

func (b *mysqlBackend) unfenced(ctx context.Context, e entry) error {
	insert, said, err := b.insert(e)
	if err != nil {
		return err
	}
	_, err = b.sql.DB().ExecContext(ctx, insert, said...)
	return err
}

// insert returns the statement that writes to the ledger what the store's history has of objects.
func (b *mysqlBackend) insert(e entry) (statement string, args []any, err error) {
	said, err := e.payload()
	return "INSERT INTO ledger (kind, said) VALUES (?, ?)", []any{e.kind, said}, err
}

func (db *mysqlServers) kinds() []faultKind {
	kinds := append(networkKinds(), faultKind{name: renewedByCopy, group: "server", weight: 3, begin: renewByCopy(db.renewAsCopy)})
	if len(db.nodes) == 1 {
		kinds = append(kinds, server{&db.nodes[0].Server, "all"}.stopKinds()...)
		return append(kinds, faultKind{name: "lease locked by somebody", group: "server", weight: 4, begin: db.lock})
	}
	for i, node := range db.nodes[:len(db.nodes)-1] {
		kinds = append(kinds, server{&node.Server, fmt.Sprint("node ", i)}.stopKinds()...)
	}
	return append(kinds, faultKind{name: "node without a majority", group: "server", weight: 6, begin: db.isolate})
}

// hasLock reports whether somebody else has the lock of a record: a replica that was paused or cut off in a fenced transaction.
func hasLock(err error) bool {
	var is *mysql.MySQLError
	return errors.As(err, &is) && is.Number == 1205
}

func (db *mysqlServers) renewAsCopy(ctx context.Context) (term string, version int64, err error) {
	term, version, err = renewObjectAsCopy(db.store)(ctx)
	if hasLock(err) {
		err = nil
	}
	return term, version, err
}

// lock locks the records of all leases.
func (db *mysqlServers) lock(ctx context.Context, _ *phase) (string, ending, error) {
	tx, err := db.admins[0].BeginTx(ctx, nil)
	if err != nil {
		return "", nil, err
	}
	rows, err := tx.QueryContext(ctx, "SELECT id FROM tenure_objects WHERE object_type = ? FOR UPDATE", leaseType)
	if err == nil {
		for rows.Next() { // each is locked when it is read
		}
		err = errors.Join(rows.Err(), rows.Close())
	}
	if hasLock(err) {
		return "nobody", func() (time.Duration, error) { return 0, nil }, tx.Rollback()
	}
	return "all", func() (time.Duration, error) { return 0, tx.Rollback() }, err
}

// isolate cuts a node off from the others, until all are one cluster again.
func (db *mysqlServers) isolate(ctx context.Context, p *phase) (string, ending, error) {
	i := p.rand.IntN(len(db.nodes))
	set := func(to string) error {
		_, err := db.admins[i].ExecContext(ctx, "SET GLOBAL wsrep_provider_options = 'gmcast.isolate="+to+"'")
		return err
	}
	return fmt.Sprint("node ", i), func() (time.Duration, error) {
		err := set("0")
		for _, node := range db.nodes {
			err = errors.Join(err, node.AwaitReady(ctx))
		}
		return 0, err
	}, set("1")
}

func (db *mysqlServers) final(context.Context, *phase) error { return nil }

// history returns all rows of objects and of the ledger as they were written.
func (db *mysqlServers) history() (history []change, err error) {
	logs, err := filepath.Glob(filepath.Join(db.nodes[len(db.nodes)-1].Dir, "data", "binlog.0*"))
	if err != nil {
		return nil, err
	}
	for _, log := range logs {
		// A server that is killed while it writes leaves a transaction that is not committed, at which this program fails.
		cmd := rig.MariaDBCommand("mariadb-binlog", "--no-defaults", "--base64-output=decode-rows", "-v", log)
		out, err := cmd.StdoutPipe()
		if err != nil {
			return nil, err
		}
		if err := cmd.Start(); err != nil {
			return nil, err
		}
		written, err := readBinlog(out)
		if ended := cmd.Wait(); err != nil {
			return nil, errors.Join(err, ended)
		}
		history = append(history, written...)
	}
	return history, nil
}

var (
	binlogTable  = regexp.MustCompile("^### (?:INSERT INTO|UPDATE) `tenure`.`(\\w+)`")
	binlogColumn = regexp.MustCompile(`^###   @(\d+)=(?:'(.*)'|(.*))$`)
)

// readBinlog reads what mariadb-binlog prints. A row is written under its table by its columns' numbers, after SET.
func readBinlog(from io.Reader) (history []change, err error) {
	var pending []change // until the COMMIT
	var table string
	var row []string
	end := func() error {
		c, ok, err := changeOf(table, row)
		if ok {
			pending = append(pending, c)
		}
		table, row = "", nil
		return err
	}
	lines := bufio.NewScanner(from)
	lines.Buffer(nil, 64<<20)
	for lines.Scan() {
		line := lines.Text()
		if found := binlogColumn.FindStringSubmatch(line); found != nil {
			row = append(row, found[2]+found[3])
			continue
		}
		if line == "### SET" || line == "### WHERE" {
			row = nil
			continue
		}
		if err := end(); err != nil {
			return nil, err
		}
		if found := binlogTable.FindStringSubmatch(line); found != nil {
			table = found[1]
		} else if strings.HasPrefix(line, "COMMIT") {
			history, pending = append(history, pending...), nil
		}
	}
	return history, lines.Err()
}

// changeOf returns the write of an object, or of the ledger. A deletion changes no version.
func changeOf(table string, row []string) (c change, ok bool, err error) {
	switch {
	case table == "ledger" && len(row) == 3:
		return change{key: tenure.Key{Type: row[0], ID: row[1]}, payload: []byte(row[2])}, true, nil
	case table != "tenure_objects" || len(row) != 10:
		return c, false, nil
	}
	version, err := strconv.ParseInt(row[5], 10, 64)
	if err != nil {
		return c, false, err
	}
	written, err := strconv.ParseInt(row[7], 10, 64)
	c = change{key: tenure.Key{Type: row[0], ID: row[1]}, version: version, at: time.UnixMicro(written)}
	if row[4] != "NULL" {
		c.payload = []byte(row[4])
	}
	return c, true, err
}

func (db *mysqlServers) audit(ctx context.Context) (*audit, error) {
	history, err := db.history()
	if err != nil {
		return nil, err
	}
	return auditOf(ctx, history, db.store)
}

func (db *mysqlServers) close() error {
	var err error
	if db.store != nil {
		err = db.store.Close()
	}
	for _, admin := range db.admins {
		err = errors.Join(err, admin.Close())
	}
	for _, node := range db.nodes {
		err = errors.Join(err, node.Close())
	}
	return err
}
