//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/pgconns"
)

// serverFacts is what a server on Postgres says about itself. The names are those of its JSON.
type serverFacts struct {
	Version   string
	Number    int // as in server_version_num
	Recovery  bool
	PID       uint32
	Settings  map[string]string
	Signs     []string // of a cloud: the first parts of settings' names
	Used      int      // connections
	RoleLimit int      // -1: none
	RoleUsed  int
	BaseLimit int
	BaseUsed  int
	Standbys  int // that stream
	Async     int // of them
	Sync      int
	pooler    string // the mode of a pooler in between; empty: there is none
}

const askServer = `
	SELECT jsonb_build_object(
		'Version', version(), 'Number', current_setting('server_version_num')::int, 'Recovery', pg_is_in_recovery(), 'PID', pg_backend_pid(),
		'Settings', (SELECT jsonb_object_agg(name, setting) FROM pg_settings
			WHERE name = ANY (string_to_array($1, ' '))),
		'Signs', ARRAY(SELECT DISTINCT substring(name FROM '^[a-z]+[.]') FROM pg_settings WHERE name LIKE '%.%'
			UNION SELECT 'aurora.' FROM pg_proc WHERE proname = 'aurora_version' UNION SELECT 'supabase.' FROM pg_roles WHERE rolname = 'supabase_admin'),
		'Used', (SELECT sum(numbackends) FROM pg_stat_database),
		'RoleLimit', (SELECT rolconnlimit FROM pg_roles WHERE rolname = session_user),
		'RoleUsed', (SELECT count(*) FROM pg_stat_activity WHERE usename = session_user),
		'BaseLimit', (SELECT datconnlimit FROM pg_database WHERE datname = current_database()),
		'BaseUsed', (SELECT numbackends FROM pg_stat_database WHERE datname = current_database()),
		'Standbys', (SELECT count(*) FROM pg_stat_replication WHERE state IS DISTINCT FROM 'backup'),
		'Async', (SELECT count(*) FROM pg_stat_replication WHERE state IS DISTINCT FROM 'backup' AND sync_state = 'async'),
		'Sync', (SELECT count(*) FROM pg_stat_replication WHERE sync_state IN ('sync', 'quorum')))`

// kind names the server for people.
func (f *serverFacts) kind() string {
	kind := strings.Join(strings.Fields(f.Version)[:min(2, len(strings.Fields(f.Version)))], " ")
	for _, cloud := range []struct{ sign, name string }{
		{"aurora.", "Aurora"}, {"neon.", "Neon"}, {"supabase.", "Supabase"}, {"alloydb.", "AlloyDB"}, {"cloudsql.", "Cloud SQL"}, {"azure.", "Azure"}, {"rds.", "RDS"},
	} {
		if slices.Contains(f.Signs, cloud.sign) {
			kind = cloud.name + ", " + kind
			break
		}
	}
	if f.Recovery {
		kind += ", a standby"
	}
	if f.pooler != "" {
		kind += ", through a pooler in " + f.pooler + " mode"
	}
	return kind
}

// postgresCheck is one check of the facts.
type postgresCheck struct {
	name, level string
	when        func(f *serverFacts) bool // the finding applies
	text        string
	remedy      string
}

// set checks whether a setting has one of some values.
func set(setting string, values ...string) func(*serverFacts) bool {
	return func(f *serverFacts) bool { return slices.Contains(values, f.Settings[setting]) }
}

// below checks whether a time limit is set, and is at most this long.
func below(setting string, most time.Duration) func(*serverFacts) bool {
	return func(f *serverFacts) bool { limit := ms(int64(f.number(setting))); return limit > 0 && limit <= most }
}

var postgresChecks = []postgresCheck{
	{"version", levelFault, func(f *serverFacts) bool { return f.Number < 130000 },
		"the server is older than PostgreSQL 13", "upgrade it"},
	{"untested", levelWarning, func(f *serverFacts) bool { return strings.Contains(f.Version, "-YB-") },
		"this is YugabyteDB, on which nothing of this library is tested", "run the tests of package storetest on it first"},
	{"standby", levelFault, func(f *serverFacts) bool { return f.Recovery },
		"this server is a standby, which takes no writes", "use the primary's address, or name all hosts in the URL"},
	{"read_only", levelFault, func(f *serverFacts) bool { return f.Settings["default_transaction_read_only"] == "on" && !f.Recovery },
		"default_transaction_read_only is on", "turn it off for this role"},
	{"fsync", levelFault, set("fsync", "off"),
		"fsync is off: a crash of the machine loses what was committed, and may destroy the tables", "set fsync = on"},
	{"full_page_writes", levelWarning, set("full_page_writes", "off"),
		"full_page_writes is off: a crash may destroy pages, unless the file system writes them whole, as ZFS does", "set full_page_writes = on"},
	{"synchronous_commit", levelWarning, set("synchronous_commit", "off", "local"),
		"synchronous_commit is off or local: leases and claims commit with on all the same, but what your own transactions commit may be lost", "set it to on for what must last"},
	{"synchronous_standby", levelFault, func(f *serverFacts) bool { return f.Settings["synchronous_standby_names"] != "" && f.Standbys == 0 },
		"synchronous_standby_names names a standby, and none is connected, so no commit returns", "start the standby, or change the setting"},
	{"asynchronous_standby", levelNote, func(f *serverFacts) bool { return f.Async > 0 && f.Sync == 0 },
		"the standbys are asynchronous: a failover loses the last commits. Leases and claims survive that, your own rows don't", "see docs/failovers.md"},
	{"shared_storage", levelNote, func(f *serverFacts) bool { return slices.Contains(f.Signs, "aurora.") },
		"Aurora loses nothing in a failover, but each start of a writer counts as one", "set PostgresConfig.Lossless, or run --lossless"},
	{"autovacuum", levelWarning, set("autovacuum", "off"),
		"autovacuum is off: each renewal leaves a dead row, and lookups become slower and slower", "set autovacuum = on"},
	{"planner", levelWarning, func(f *serverFacts) bool {
		return set("enable_indexscan", "off")(f) || set("enable_bitmapscan", "off")(f)
	},
		"enable_indexscan or enable_bitmapscan is off: statements that look up one row read more of the table", "turn it on, at least for this role"},
	{"search_path", levelWarning, func(f *serverFacts) bool {
		return slices.Index(strings.Split(strings.ReplaceAll(f.Settings["search_path"], " ", ""), ","), "pg_catalog") > 0
	}, "search_path lists pg_catalog behind other schemas, whose functions can replace the server's, such as clock_timestamp", "leave pg_catalog out of it"},
	{"idle_session_timeout", levelWarning, below("idle_session_timeout", tenure.DefaultTTL/3),
		"idle_session_timeout ends sessions between two renewals: leases turn it off on connections of their own, but your pool, or a pooler, loses its", "set it to 0 for this role"},
	{"statement_timeout", levelWarning, below("statement_timeout", time.Second),
		"statement_timeout is a second or less: the server ends a renewal that a busy moment delays", "raise it in the URL, or for this role"},
	{"pooler", levelFault, func(f *serverFacts) bool { return f.pooler == statementMode },
		"the pooler is in statement mode, which refuses transactions", "use its transaction or session mode"},
	{"pooler", levelNote, func(f *serverFacts) bool { return f.pooler == transactionMode },
		"the pooler is in transaction mode, in which nobody can listen", "set PostgresConfig.ListenURL to the server itself, to have standbys woken"},
}

func (f *serverFacts) number(setting string) int {
	n, _ := strconv.Atoi(f.Settings[setting])
	return n
}

// room compares the connections that are left with what replicas need: one for leases, one that listens, and up to
// four for claims. Behind a pooler they share what it has.
func (f *serverFacts) room(replicas int) (_ finding) {
	least, most := 2*replicas, (2+pgconns.ClaimConns)*replicas
	if f.pooler != "" {
		least, most = 1, replicas
	}
	left, whose := f.number("max_connections")-f.number("superuser_reserved_connections")-f.number("reserved_connections")-f.Used, "max_connections"
	if of := f.RoleLimit - f.RoleUsed; f.RoleLimit >= 0 && of < left {
		left, whose = of, "the role's limit"
	}
	if of := f.BaseLimit - f.BaseUsed; f.BaseLimit >= 0 && of < left {
		left, whose = of, "the database's limit"
	}
	is := finding{levelWarning, "", fmt.Sprintf("%d connections are left of %s; %d replicas need %d, and up to %d with claims, beside their pools",
		max(0, left), whose, replicas, least, most), "raise the limit, or put a pooler in between"}
	if left < least {
		is.Level = levelFault
	}
	if left < most {
		return is
	}
	return
}

// settingsAsked are the settings that the checks need.
const settingsAsked = "default_transaction_read_only fsync full_page_writes synchronous_commit synchronous_standby_names autovacuum " +
	"enable_indexscan enable_bitmapscan search_path idle_session_timeout statement_timeout " +
	"max_connections superuser_reserved_connections reserved_connections"

// lookAtPostgres asks a server for its facts, and reports whether a store can be opened on it.
func (d *diagnosis) lookAtPostgres(ctx context.Context, url string, replicas int) bool {
	d.Server = "a server that speaks the protocol of Postgres"
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	config, err := pgconns.ParseURL(url)
	if err != nil {
		return true // opening the store says the same, as an error of the command line
	}
	connect := config.ConnConfig
	connect.DefaultQueryExecMode = pgx.QueryExecModeExec // which any pooler admits
	conn, err := pgx.ConnectConfig(ctx, connect)
	if err != nil {
		d.add("connect", explained(pgconns.ExplainConnecting(err)))
		return false
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if err := pgconns.Unfit(conn); err != nil {
		d.add("server", explained(err))
		return false
	}
	var facts serverFacts
	if err := conn.QueryRow(ctx, askServer, settingsAsked).Scan(&facts); err != nil {
		d.add("server", fault("the server does not say what it is: "+oneLine(err), ""))
		return false
	}
	facts.Used, facts.RoleUsed, facts.BaseUsed = facts.Used-1, facts.RoleUsed-1, facts.BaseUsed-1 // this one
	if facts.PID != conn.PgConn().PID() {
		facts.pooler = poolerMode(ctx, conn, connect, facts.PID)
	}
	d.Server = facts.kind()
	for _, check := range postgresChecks {
		if check.when(&facts) {
			d.add(check.name, finding{Level: check.level, Text: check.text, Remedy: check.remedy})
		}
	}
	d.add("connections", facts.room(replicas))
	return !facts.Recovery && facts.pooler != statementMode
}

// The modes of a pooler.
const (
	unknownMode     = "unknown"
	sessionMode     = "session"
	transactionMode = "transaction"
	statementMode   = "statement"
)

// poolerMode finds out the mode of a pooler: only in session mode does a client keep its session while another
// client has a transaction.
func poolerMode(ctx context.Context, conn *pgx.Conn, config *pgx.ConnConfig, pid uint32) string {
	other, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return unknownMode
	}
	defer other.Close(context.WithoutCancel(ctx))
	if _, err := other.Exec(ctx, "BEGIN"); err != nil {
		if answer := (*pgconn.PgError)(nil); errors.As(err, &answer) && strings.Contains(answer.Message, "statement pooling") {
			return statementMode
		}
		return unknownMode
	}
	var its, again uint32
	const ask = "SELECT pg_backend_pid()"
	if errors.Join(other.QueryRow(ctx, ask).Scan(&its), conn.QueryRow(ctx, ask).Scan(&again)) != nil {
		return unknownMode
	}
	if its == pid || again != pid {
		return transactionMode
	}
	return sessionMode
}
