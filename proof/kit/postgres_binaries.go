package kit

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
)

var errNoPostgres = errors.New("kit: no PostgreSQL on this machine: install PostgreSQL or set TENURE_TEST_POSTGRES to its bin directory")

// installed are the directories where packages put initdb and postgres, mostly outside of PATH.
// A * stands for a version.
var installed = []string{
	"/usr/lib/postgresql/*/bin",                          // Debian, Ubuntu
	"/usr/pgsql-*/bin",                                   // the PostgreSQL project's own RPMs
	"/usr/local/pgsql/bin",                               // built from source
	"/opt/homebrew/opt/postgresql@*/bin",                 // Homebrew on arm64
	"/usr/local/opt/postgresql@*/bin",                    // Homebrew on amd64
	"/Applications/Postgres.app/Contents/Versions/*/bin", // Postgres.app
}

// binaries returns a directory that has both initdb and postgres, or
// errNoPostgres.
func binaries() (string, error) {
	if dir := os.Getenv("TENURE_TEST_POSTGRES"); dir != "" {
		if !complete(dir) {
			return "", fmt.Errorf("kit: TENURE_TEST_POSTGRES: %s lacks initdb or postgres", dir)
		}
		return dir, nil
	}
	// Resolve links, because a directory in PATH may contain a wrapper of one program and
	// the other program itself.
	if program, err := exec.LookPath("postgres"); err == nil {
		if program, err = filepath.EvalSymlinks(program); err == nil && complete(filepath.Dir(program)) {
			return filepath.Dir(program), nil
		}
	}
	for _, pattern := range installed {
		dirs, _ := filepath.Glob(pattern)
		slices.SortFunc(dirs, func(a, b string) int { return cmp.Compare(version(b), version(a)) })
		if i := slices.IndexFunc(dirs, complete); i >= 0 {
			return dirs[i], nil
		}
	}
	return "", errNoPostgres
}

func complete(dir string) bool {
	for _, name := range []string{"initdb", "postgres"} {
		if _, err := exec.LookPath(filepath.Join(dir, name)); err != nil {
			return false
		}
	}
	return true
}

var number = regexp.MustCompile(`\d+(\.\d+)?`)

// version returns the number in the directory's path, so that 9.6 < 15.
func version(dir string) float64 {
	v, _ := strconv.ParseFloat(number.FindString(dir), 64)
	return v
}
