// Package storeurl determines which kind of database a URL names.
package storeurl

import (
	"errors"
	"path/filepath"
	"strings"
)

// Path returns the path of the SQLite file that a URL names, and whether other processes share the file; the
// path is "" if the URL names a Postgres database. Its errors don't quote the URL, because any part of it may
// be a password.
func Path(url string) (path string, shared bool, err error) {
	path, isSQLite := strings.CutPrefix(url, "sqlite:")
	path, option, given := strings.Cut(path, "?shared")
	if isSQLite && strings.HasPrefix(path, "///") {
		path = path[2:] // after an empty authority
	}
	switch {
	case url == "":
		return "", false, errors.New("the URL is empty")
	case IsPostgres(url):
		return "", false, nil
	case given && option != "=true" && option != "=false":
		return "", false, errors.New("after the path comes ?shared=true, ?shared=false or nothing")
	case path == "":
		return "", false, errors.New("the path is empty")
	case isSQLite && strings.HasPrefix(path, "//"):
		return "", false, errors.New("after sqlite: comes a path, as in sqlite:data.db or sqlite:/var/lib/data.db")
	case path == ":memory:":
		return "", false, errors.New("a database in memory cannot be shared; OpenSQLite opens one")
	case !IsPath(path):
		return "", false, errors.New("the URL is neither a postgres:// URL nor the path of a SQLite file; " + Remedy)
	}
	return path, option == "=true", nil
}

// IsPostgres reports whether a URL names a Postgres database.
func IsPostgres(url string) bool {
	return strings.HasPrefix(url, "postgres://") || strings.HasPrefix(url, "postgresql://")
}

// IsPath reports whether a text can only be meant as a path. It can if it is absolute or begins with a dot. It
// also can if it has nothing that a mistyped URL, an address or libpq's "host=db" has: if that became a file,
// each host would have its own, and run the job.
func IsPath(text string) bool {
	return filepath.IsAbs(text) || strings.HasPrefix(text, ".") || !strings.ContainsAny(text, ":@?=") && !strings.Contains(text, "//")
}

// Remedy says what to do about a path that is none by [IsPath].
const Remedy = `put ./ before a relative path with //, or one of : @ ? = in it`
