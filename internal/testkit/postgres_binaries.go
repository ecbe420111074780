package testkit

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
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var errNoPostgres = errors.New("kit: no PostgreSQL on this machine: install PostgreSQL or set TENURE_TEST_POSTGRES to its bin directory")

// installed has the directories where packages put initdb and postgres, mostly outside of PATH. A *
// stands for a version.
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
	if dirs := named(); len(dirs) > 0 {
		if !complete(dirs[0]) {
			return "", fmt.Errorf("kit: TENURE_TEST_POSTGRES: %s lacks initdb or postgres", dirs[0])
		}
		return dirs[0], nil
	}
	// Resolve links, because a directory in PATH may contain a wrapper of one program and
	// the other program itself.
	if program, err := exec.LookPath("postgres"); err == nil {
		if program, err = filepath.EvalSymlinks(program); err == nil && complete(filepath.Dir(program)) {
			return filepath.Dir(program), nil
		}
	}
	if dirs := packaged(); len(dirs) > 0 {
		return dirs[0], nil
	}
	return "", errNoPostgres
}

// named returns the directories that TENURE_TEST_POSTGRES names.
func named() []string { return filepath.SplitList(os.Getenv("TENURE_TEST_POSTGRES")) }

// packaged returns the directories of packages, the latest version first.
func packaged() (all []string) {
	for _, pattern := range installed {
		dirs, _ := filepath.Glob(pattern)
		slices.SortFunc(dirs, func(a, b string) int { return cmp.Compare(version(b), version(a)) })
		all = append(all, slices.DeleteFunc(dirs, func(dir string) bool { return !complete(dir) })...)
	}
	return all
}

// OnEachPostgres runs the tests of this package that a regexp matches once more on every other version of
// PostgreSQL that is found: in the other directories that TENURE_TEST_POSTGRES names, and in those of packages.
// It does so by running this program again.
func OnEachPostgres(t *testing.T, run string) {
	dir, err := binaries()
	skipOrFail(t, err)
	seen := map[string]bool{versionOf(t, dir): true}
	for _, dir := range append(named(), packaged()...) {
		version := versionOf(t, dir)
		if seen[version] {
			continue
		}
		seen[version] = true
		t.Run(version, func(t *testing.T) {
			program, err := os.Executable()
			require.NoError(t, err)
			args := slices.DeleteFunc(slices.Clone(os.Args[1:]), func(arg string) bool { return strings.HasPrefix(arg, "-test.") })
			again := exec.CommandContext(t.Context(), program, append(args, "-test.run="+run, "-test.v", "-test.timeout=30m")...)
			again.Env = append(os.Environ(), "TENURE_TEST_POSTGRES="+dir, "TENURE_REQUIRE_POSTGRES=1")
			out, err := again.CombinedOutput()
			ran := strings.Count(string(out), "\n--- PASS: ")
			require.NoError(t, err, "%s", out)
			require.NotZero(t, ran, "no test is called %s", run)
			t.Logf("PostgreSQL %s: %d tests", version, ran)
		})
	}
}

// versionOf returns the version of the programs in a directory, such as 15.9.
func versionOf(t *testing.T, dir string) string {
	t.Helper()
	out, err := exec.Command(filepath.Join(dir, "postgres"), "--version").Output()
	require.NoError(t, err, "TENURE_TEST_POSTGRES: %s", dir)
	return number.FindString(string(out))
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
