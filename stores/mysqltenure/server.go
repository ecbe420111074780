package mysqltenure

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/tenurelib/tenure"
)

// server is what a store has to know about its server. It is asked for once.
type server struct {
	database  string // which the connections use; empty: none
	variables map[string]string
}

// lookAt asks a server what it is.
func lookAt(ctx context.Context, db *sql.DB) (server, error) {
	s := server{variables: make(map[string]string)}
	var database sql.NullString
	if err := db.QueryRowContext(ctx, "SELECT DATABASE()").Scan(&database); err != nil {
		return s, err
	}
	s.database = database.String
	err := each(ctx, db, func(rows *sql.Rows) error {
		var name, value string
		err := rows.Scan(&name, &value)
		s.variables[name] = value
		return err
	}, `SHOW VARIABLES WHERE Variable_name IN ('version', 'version_comment', 'autocommit', 'completion_type',
		'sql_mode', 'character_set_client', 'character_set_connection', 'wsrep_on', 'group_replication_single_primary_mode', 'log_bin', 'binlog_format', 'sync_binlog', 'innodb_flush_log_at_trx_commit', 'max_allowed_packet')`)
	return s, err
}

// each calls do for each row of a query's result.
func each(ctx context.Context, db *sql.DB, do func(rows *sql.Rows) error, query string, args ...any) error {
	rows, err := db.QueryContext(ctx, query, args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := do(rows); err != nil {
			return err
		}
	}
	return rows.Err()
}

// fit returns [tenure.ErrSetup] if the server, or its sessions, can't be used.
func (s server) fit() error {
	version, comment := s.variables["version"], s.variables["version_comment"]
	for _, other := range []string{"TiDB", "Vitess", "PlanetScale", "OceanBase"} {
		if strings.Contains(version+" "+comment, other) {
			return fmt.Errorf("%w: the server is %s (%s), whose locks differ from MySQL's", tenure.ErrSetup, other, version)
		}
	}
	var major, minor int
	if _, err := fmt.Sscanf(version, "%d.%d", &major, &minor); err != nil {
		return fmt.Errorf("%w: the server has no version: %q", tenure.ErrSetup, version)
	}
	if major < 8 || s.isMariaDB() && (major < 10 || major == 10 && minor < 6) {
		return fmt.Errorf("%w: the server has version %s and must have MySQL 8.0 or MariaDB 10.6 or later", tenure.ErrSetup, version)
	}
	if _, ok := s.variables["innodb_flush_log_at_trx_commit"]; !ok {
		return fmt.Errorf("%w: the server (%s) has no InnoDB, whose locks the store needs", tenure.ErrSetup, version)
	}
	return s.fitSession()
}

// fitSession returns [tenure.ErrSetup] if the settings of the sessions would lose what the store writes, or change it.
func (s server) fitSession() error {
	mode, charset, to := s.variables["sql_mode"], s.variables["character_set_client"], s.variables["character_set_connection"]
	for _, bad := range []struct {
		is        bool
		what, why string
	}{
		{s.variables["autocommit"] != "ON", "autocommit = 0", "nothing that the store writes would be committed"},
		{s.variables["completion_type"] != "NO_CHAIN", "completion_type = " + s.variables["completion_type"], "what follows a COMMIT would not be committed"},
		{strings.Contains(mode, "EMPTY_STRING_IS_NULL"), "sql_mode EMPTY_STRING_IS_NULL", "an empty payload would be a deleted object"},
		{strings.Contains(mode, "SIMULTANEOUS_ASSIGNMENT"), "sql_mode SIMULTANEOUS_ASSIGNMENT", "an object would get a wrong time of creation"},
		{charset != to, "character_set_client " + charset + " and character_set_connection " + to, "keys and payloads would be converted: use SET NAMES"},
		// In these, the second byte of a character may be a backslash or a quote.
		{slices.Contains([]string{"big5", "gbk", "gb18030", "sjis", "cp932"}, charset), "the character set " + charset, "the driver's interpolateParams is not safe with it: use utf8mb4"},
	} {
		if bad.is {
			return fmt.Errorf("%w: the sessions have %s, and %s", tenure.ErrSetup, bad.what, bad.why)
		}
	}
	return nil
}

func (s server) isMariaDB() bool { return strings.Contains(s.variables["version"], "MariaDB") }

// isGalera reports whether the server is a node of a Galera cluster.
func (s server) isGalera() bool { return s.variables["wsrep_on"] == "ON" }

// isGroup reports whether several members of a replication group accept writes.
func (s server) isGroup() bool { return s.variables["group_replication_single_primary_mode"] == "OFF" }

// hasManyWriters reports whether several servers accept writes. Each of them has its own clock, and its own
// named locks.
func (s server) hasManyWriters() bool { return s.isGalera() || s.isGroup() }

// settings are the variables of the sessions on connections of the store's own.
func (s server) settings() map[string]string {
	set := make(map[string]string)
	if s.isMariaDB() {
		set["idle_transaction_timeout"] = "60" // of a process that is paused within a fenced transaction
	}
	switch {
	case s.isGalera():
		set["wsrep_sync_wait"] = "1" // a read sees what was written on other nodes before
	case s.isGroup():
		set["group_replication_consistency"] = "'BEFORE'"
	}
	return set
}

// packet returns the greatest length of a statement, 0 if it is not known.
func (s server) packet() (bytes int) {
	bytes, _ = strconv.Atoi(s.variables["max_allowed_packet"])
	return bytes
}

// warnings says what can lose an acknowledged lease, or makes calls fail.
func (s server) warnings() (all []string) {
	if s.variables["innodb_flush_log_at_trx_commit"] != "1" {
		all = append(all, "innodb_flush_log_at_trx_commit is not 1: a crash of the server loses leases that it has acknowledged")
	}
	if s.variables["log_bin"] == "ON" && s.variables["sync_binlog"] != "1" {
		all = append(all, "sync_binlog is not 1: after a crash of the server, its replicas and the binary log may differ")
	}
	if s.packet() < 2*tenure.MaxPayload {
		all = append(all, "max_allowed_packet is below 2 MiB: large payloads are refused")
	}
	return all
}
