package pgconns

import (
	"context"
	"errors"
	"regexp"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// URLForm is the form of a URL that errors ask for. It has no secret in it.
const URLForm = "postgres://user:password@host:port/database"

// ParseURL parses a connection string, either a URL or keywords and values. Its error shows no part of the
// string, because in a string that does not parse, the password can't be told from the rest. For the same
// reason it does not wrap the driver's error, which contains the string and quotes parts of it.
func ParseURL(url string) (*pgxpool.Config, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		problem, remedy := parseProblem(err), "want "+URLForm+", with special characters in user and password as %XX"
		if problem != "" && problem != invalidPort { // a password with a separator may look like a port
			remedy = "correct this setting, or remove it from the URL if it is meant for another program"
		}
		return nil, errors.New("cannot parse the connection string" + problem + "; " + remedy)
	}
	if !separated(cfg) {
		return nil, errors.New("the connection string has a separator in a user, host, database or name of a setting; want " + URLForm + ", " +
			"with settings after a question mark, as in ?sslmode=require&connect_timeout=5")
	}
	if misplaced(url) {
		return nil, errors.New("the connection string has an @ after the host; want special characters in user and password as %XX, and an @ in a setting as %40")
	}
	if !choosesServer(url) {
		findPrimary(cfg.ConnConfig)
	}
	// A password in a file (passfile, service) may be rotated while the program runs, so each connection
	// reads the files anew. If they can't be read now, what was read before may still be right.
	cfg.BeforeConnect = func(_ context.Context, conn *pgx.ConnConfig) error {
		if now, err := pgconn.ParseConfig(url); err == nil {
			conn.User, conn.Password = now.User, now.Password
		}
		return nil
	}
	return cfg, nil
}

// misplaced reports whether a part of the password seems to have been parsed as a part of the URL that
// errors show. A password with an @ or a slash that is not written as %XX parses, and the rest of it
// becomes the host, the database or the name of a setting.
func misplaced(url string) bool {
	_, rest, isURL := strings.Cut(url, "://")
	if !isURL || !strings.HasPrefix(url, "postgres") {
		return false
	}
	if at := strings.IndexAny(rest, "@/"); at >= 0 && rest[at] == '@' {
		rest = rest[at+1:]
	}
	rest, query, _ := strings.Cut(rest, "?")
	if strings.Contains(rest, "@") {
		return true
	}
	for _, setting := range strings.Split(query, "&") {
		name, value, _ := strings.Cut(setting, "=")
		if strings.Contains(value, "@") && !slices.Contains([]string{"application_name", "options", "password", "user"}, name) {
			return true
		}
	}
	return false
}

// separated reports whether no name that errors, or the server, may show has a separator of a connection string
// in it. One that has may be two parts, the second of them the password.
func separated(cfg *pgxpool.Config) bool {
	conn := cfg.ConnConfig
	names := []string{conn.Host, conn.Database}
	for _, fallback := range conn.Fallbacks {
		names = append(names, fallback.Host)
	}
	for name := range conn.RuntimeParams {
		if !settingName.MatchString(name) {
			return false
		}
	}
	return !strings.ContainsAny(conn.User, "?&=:") && !slices.ContainsFunc(names, func(name string) bool { return strings.ContainsAny(name, "?&=") })
}

var settingName = regexp.MustCompile(`^[A-Za-z_][\w.]*$`)

const invalidPort = ": invalid port"

// parseProblem returns the driver's message if it is one of a fixed list.
func parseProblem(err error) string {
	var parse *pgconn.ParseConfigError
	if !errors.As(err, &parse) {
		return ""
	}
	for _, problem := range []string{
		"invalid port", "invalid connect_timeout", "invalid sslcertmode", "invalid require_auth", "invalid default_query_exec_mode",
		"unknown target_session_attrs", "unknown channel_binding", "invalid min_protocol_version", "invalid max_protocol_version",
		"failed to configure TLS (sslmode is invalid)", "failed to configure TLS", "failed to read service",
		"cannot parse pool_max_conns", "pool_max_conns too small", "cannot parse pool_min_conns", "cannot parse pool_min_idle_conns",
		"cannot parse pool_max_conn_lifetime_jitter", "cannot parse pool_max_conn_lifetime", "cannot parse pool_max_conn_idle_time",
		"cannot parse pool_health_check_period", "cannot parse pool_ping_timeout",
		"cannot parse statement_cache_capacity", "cannot parse description_cache_capacity",
	} {
		if strings.Contains(err.Error(), "`: "+problem) {
			return ": " + problem
		}
	}
	return ""
}
