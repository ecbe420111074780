// Package storeurl tells by a URL which kind of database is meant.
package storeurl

import (
	"errors"
	"regexp"
	"strings"
)

// Path returns the path of the SQLite file that a URL names, or "" if it is one of Postgres.
// Its errors don't quote the URL, because any part of it may be a password.
func Path(url string) (path string, err error) {
	path, isSQLite := strings.CutPrefix(url, "sqlite:")
	switch {
	case url == "":
		return "", errors.New("the URL is empty")
	case IsPostgres(url):
		return "", nil
	case isSQLite && strings.HasPrefix(path, "//") && !strings.HasPrefix(path, "///"):
		return "", errors.New("after sqlite: comes a path, as in sqlite:data.db or sqlite:/var/lib/data.db")
	case isSQLite && strings.HasPrefix(path, "///"):
		return path[2:], nil // after an empty authority
	case path == ":memory:":
		return "", errors.New("a database in memory cannot be shared; OpenSQLite opens one")
	case strings.Contains(path, "://"), !isSQLite && notPath.MatchString(url):
		// Taken for a path, each host would have its own file, and run the job.
		return "", errors.New("the URL is neither a postgres:// URL nor the path of a SQLite file")
	}
	if path == "" {
		return "", errors.New("the path is empty")
	}
	return path, nil
}

// IsPostgres reports whether a URL is one of Postgres.
func IsPostgres(url string) bool {
	return strings.HasPrefix(url, "postgres://") || strings.HasPrefix(url, "postgresql://")
}

// notPath matches what is not meant as a path: libpq's "host=db password=…", a URL that
// lacks a slash, and an address without its scheme, as "user:password@db/app", even if there
// is a slash in the password, or "localhost:5432".
var notPath = regexp.MustCompile(`(?i)^postgres(ql)?(:|//)|^[^/]*@|^[^/]+:[^@]*@|^[^/]+:\d+(/|$)|(^|\s)(host|hostaddr|port|user|dbname|service|sslmode|passfile)\s*=|password\s*=`)
