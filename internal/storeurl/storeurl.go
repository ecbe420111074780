// Package storeurl determines which kind of database a URL names.
package storeurl

import (
	"errors"
	"regexp"
	"strings"
)

// Path returns the path of the SQLite file that a URL names, or "" if the URL names a Postgres database.
// Its errors don't quote the URL, because any part of it may be a password.
func Path(url string) (path string, err error) {
	path, isSQLite := strings.CutPrefix(url, "sqlite:")
	if isSQLite && strings.HasPrefix(path, "///") {
		path = path[2:] // after an empty authority
	}
	switch {
	case url == "":
		return "", errors.New("the URL is empty")
	case IsPostgres(url):
		return "", nil
	case isSQLite && strings.HasPrefix(path, "//"):
		return "", errors.New("after sqlite: comes a path, as in sqlite:data.db or sqlite:/var/lib/data.db")
	case path == ":memory:":
		return "", errors.New("a database in memory cannot be shared; OpenSQLite opens one")
	case strings.Contains(path, "://"), !isSQLite && IsMistyped(url):
		// If it were a path, each host would have its own file and run the job.
		return "", errors.New("the URL is neither a postgres:// URL nor the path of a SQLite file")
	case MayHoldSecret(path):
		return "", errors.New("the path has an @ or parameters, so it may be a mistyped URL with a password: use another path")
	}
	if path == "" {
		return "", errors.New("the path is empty")
	}
	return path, nil
}

// IsPostgres reports whether a URL names a Postgres database.
func IsPostgres(url string) bool {
	return strings.HasPrefix(url, "postgres://") || strings.HasPrefix(url, "postgresql://")
}

// IsMistyped reports whether a path is probably not meant as a path: libpq's "host=db password=…", a URL
// that lacks a colon or a slash, or an address without its scheme, such as "user:password@db/app", even
// with a slash in the password, or "localhost:5432".
func IsMistyped(path string) bool { return notPath.MatchString(path) }

var notPath = regexp.MustCompile(`(?i)^postgres(ql)?:|^[a-z][a-z0-9+.-]+:/|^[^/]+//|^[^/]*@|^[^/]+:[^@]*@|^[^/]+:\d+(/|$)|` +
	`[?&]\w+=|(^|\s)(host|hostaddr|port|user|dbname|service|sslmode|passfile)\s*=|pass\w*\s*=`)

// MayHoldSecret reports whether a path may be a URL with a password, mistyped anywhere. Such a path must not
// be quoted.
func MayHoldSecret(path string) bool { return secret.MatchString(path) }

var secret = regexp.MustCompile(`(?i)@|%40|[?&]\w+=|pass\w*\s*=`)

// Shown returns a path as errors may quote it.
func Shown(path string) string {
	if MayHoldSecret(path) {
		return "(a path that is not shown, as it may hold a password)"
	}
	return path
}
