// Command mutants puts one fault after another into the library and runs the tests,
// which must fail each time. A mutant that survives shows that a test is missing.
//
//	go -C proof run ./mutants [-check] [-file prefix] [-run regexp] [-record] [-by "package Test"]
//
// The faults stand in testdata/mutants.txt beside the code that they change, each with the
// test that has killed it before, which is tried first, alone. With -record that test is written anew.
// With -check nothing is run: it fails if a fault no longer fits the code, or does not compile. With -by only one test is run, and it need not
// notice each fault: this shows which ones it notices, and by what.
//
// It runs in the module of proof, and works on a copy of the repository.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/tenurelib/tenure/internal/proctree"
)

func main() {
	only := flag.Bool("check", false, "see whether each mutant fits the code, and run nothing")
	prefix := flag.String("file", "", "run only the mutants of files whose paths begin with this")
	run := flag.String("run", "", "run only the mutants whose names match this regexp")
	record := flag.Bool("record", false, "note which test kills each mutant")
	by := flag.String("by", "", "try only this test, such as \"proof/sim TestEachRunIsABehaviourOfTheRules -sim.events=100000\"")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := proctree.BecomeSubreaper(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	which, err := regexp.Compile(*run)
	mutants, err2 := readMutants(repository)
	err = errors.Join(err, err2)
	if err == nil {
		err = check(repository, mutants)
	}
	if err == nil && *only {
		err = compile(repository, mutants)
	}
	if err == nil && !*only {
		mutants = slices.DeleteFunc(mutants, func(m mutant) bool {
			return !which.MatchString(m.name) || !strings.HasPrefix(m.file, *prefix)
		})
		err = kill(ctx, repository, mutants, *record, *by)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// repository is where the root module is, seen from that of this command.
const repository = ".."

// suite is the tests of one package.
type suite struct {
	dir  string
	args []string // for its tests

	passed      bool // has passed without a mutant
	knownPassed bool // its tests that have killed mutants before have passed without a mutant
}

// suites are the suites that can kill mutants, the quickest first.
var suites = []*suite{
	{dir: "."},
	{dir: "internal/health"},
	{dir: "internal/filewatch"},
	{dir: "internal/listen"},
	{dir: "internal/logtext"},
	{dir: "internal/pgconns"},
	{dir: "internal/pgobjects"},
	{dir: "internal/proctree"},
	{dir: "internal/report"},
	{dir: "internal/storeurl"},
	{dir: "internal/wake"},
	{dir: "internal/witnessed"},
	{dir: "internal/sqliteobjects"},
	{dir: "storekit"},
	{dir: "storetest"},
	{dir: "proof/sim", args: []string{"-args", "-sim.for=20s"}},
	{dir: "proof/databases"},
	{dir: "cmd/tenure"},
	{dir: "schedule"},
	{dir: "witness"},
	{dir: "claims/queuehttp"},
	{dir: "route"},
	{dir: "claims"},
	{dir: "shards"},
	{dir: "stores/natstenure"},
	{dir: "stores/etcdtenure"},
	{dir: "stores/kubetenure"},
	{dir: "stores/mysqltenure"},
	{dir: "proof/release"},
}

// own maps a suite to the files whose mutants are its own: besides the test that has killed
// one of them before, only this suite is tried. Of several suites the first one counts.
var own = map[string][]string{
	"cmd/tenure":         {"cmd/tenure/", "internal/proctree/"},
	"schedule":           {"schedule/"},
	"witness":            {"witness/"},
	"stores/natstenure":  {"stores/natstenure/"},
	"stores/etcdtenure":  {"stores/etcdtenure/"},
	"stores/kubetenure":  {"stores/kubetenure/"},
	"stores/mysqltenure": {"stores/mysqltenure/"},
	"claims/queuehttp":   {"claims/queuehttp/"},
	"route":              {"route/"},
	"claims": {"claims/", "internal/pgobjects/claim", "internal/sqliteobjects/claim",
		"internal/pgobjects/rows", "internal/sqliteobjects/rows"},
	"shards":        {"shards/"},
	"proof/release": {"proof/release/"},
}

// suites returns the suites that may kill the mutant, in the order in which they are tried.
func (m mutant) suites() []*suite {
	isOwn := func(s *suite) bool {
		return slices.ContainsFunc(own[s.dir], func(prefix string) bool { return strings.HasPrefix(m.file, prefix) })
	}
	if i := slices.IndexFunc(suites, isOwn); i >= 0 {
		return suites[i : i+1]
	}
	return slices.DeleteFunc(slices.Clone(suites), func(s *suite) bool { return own[s.dir] != nil })
}

// kill tries the mutants; it returns an error if some survived.
// If by is not empty, only that test tries, and none that survives is an error.
func kill(ctx context.Context, module string, mutants []mutant, record bool, by string) error {
	dir, err := os.MkdirTemp("", "mutants")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := copyModule(module, dir); err != nil {
		return err
	}
	survived := 0
	for _, m := range mutants {
		began := time.Now()
		if by != "" {
			killed, says, err := m.triedBy(dir, by)
			if err != nil {
				return err
			}
			if !killed {
				survived++
			}
			fmt.Printf("%-9s %s (%v)%s\n", map[bool]string{true: "killed", false: "survived"}[killed], m.name, time.Since(began).Round(time.Second), says)
			continue
		}
		by, err := m.kill(dir, mutants)
		if ctx.Err() != nil { // the tests were ended by it, too
			return ctx.Err()
		}
		took := time.Since(began).Round(time.Second)
		switch {
		case err != nil: // it must not keep the others from being tried
			survived++
			fmt.Printf("FAILED    %s: %v\n", m.name, err)
		case by == killer{}:
			survived++
			fmt.Printf("SURVIVED  %s (%v): %s\n", m.name, took, m.why)
		default:
			fmt.Printf("killed    %s (%v) by %s %s\n", m.name, took, by.dir, by.test)
			if record && by != m.killer {
				if err := m.record(module, by); err != nil {
					return err
				}
			}
		}
	}
	fmt.Printf("%d mutants, %d survived\n", len(mutants), survived)
	if survived > 0 && by == "" {
		return errors.New("the tests do not notice each fault")
	}
	return nil
}

// kill returns the test that fails with the mutant in the copy of the module; none if no test does.
func (m mutant) kill(dir string, all []mutant) (by killer, err error) {
	path := filepath.Join(dir, m.file)
	source, err := os.ReadFile(path)
	if err != nil {
		return killer{}, err
	}
	mutated, err := m.mutate(string(source))
	if err != nil {
		return killer{}, err
	}
	restore := func() error { return os.WriteFile(path, source, 0o600) }
	defer func() { err = errors.Join(err, restore()) }()

	// fails runs tests with the mutant and, once, without it.
	fails := func(s *suite, tests, limit string, passed *bool, before string) (string, error) {
		if err := os.WriteFile(path, []byte(mutated), 0o600); err != nil {
			return "", err
		}
		test, out := s.fails(dir, tests, limit)
		if strings.Contains(out, "[build failed]") {
			return "", fmt.Errorf("does not compile:\n%s", out)
		}
		if test == "" || *passed {
			return test, nil
		}
		if err := restore(); err != nil {
			return "", err
		}
		if test, out := s.fails(dir, before, ""); test != "" {
			return "", fmt.Errorf("%s: %s fails without a mutant:\n%s", s.dir, test, out)
		}
		*passed = true
		return test, nil
	}
	for _, s := range suites {
		if s.dir == m.killer.dir {
			test, err := fails(s, "^"+m.killer.test+"$", "2m", &s.knownPassed, killersOf(s.dir, all))
			if err != nil || test != "" {
				return m.killer, err
			}
		}
	}
	for _, s := range m.suites() {
		test, err := fails(s, "", "", &s.passed, "")
		if err != nil {
			return killer{}, err
		}
		if test != "" {
			return killer{s.dir, test}, nil
		}
	}
	return killer{}, nil
}

// triedBy runs one test with the mutant in the copy of the module. It reports whether the test fails, and what it says first.
func (m mutant) triedBy(dir, by string) (killed bool, says string, err error) {
	words := strings.Fields(by)
	if len(words) < 2 {
		return false, "", fmt.Errorf("-by %q names no package and test", by)
	}
	path := filepath.Join(dir, m.file)
	source, err := os.ReadFile(path)
	if err != nil {
		return false, "", err
	}
	mutated, err := m.mutate(string(source))
	if err != nil {
		return false, "", err
	}
	defer func() { err = errors.Join(err, os.WriteFile(path, source, 0o600)) }()
	if err := os.WriteFile(path, []byte(mutated), 0o600); err != nil {
		return false, "", err
	}
	tries := &suite{dir: words[0], args: append([]string{"-args"}, words[2:]...)}
	failing, out := tries.fails(dir, "^"+words[1]+"$", "3m")
	if strings.Contains(out, "[build failed]") {
		return false, "", fmt.Errorf("%s does not compile:\n%s", m.name, out)
	}
	if first := message.FindStringSubmatch(out); failing != "" && first != nil {
		says = ": " + first[1] + first[2]
	}
	return failing != "", says, nil
}

// killersOf returns a regexp of the tests of a package that have killed mutants before.
func killersOf(dir string, all []mutant) string {
	var tests []string
	for _, m := range all {
		if m.killer.dir == dir && !slices.Contains(tests, m.killer.test) {
			tests = append(tests, m.killer.test)
		}
	}
	return "^(" + strings.Join(tests, "|") + ")$"
}

var (
	message = regexp.MustCompile(`(?m)^\s*(?:\w+_test\.go:\d+: |(panic: ))(.*)$`)
	hung    = regexp.MustCompile(`(?m)^panic: test timed out after \S+\n\s+running tests:\n\s+(Test\w+)`)
	failed  = regexp.MustCompile(`(?m)^\s*--- FAIL: ((?:Test|Fuzz|Example)\w+)`)
	crashed = regexp.MustCompile(`(?m)^=== RUN\s+(\w+)[^=]*^(?:panic|fatal error): `)
)

// fails runs those tests of the suite and returns the first one that fails; empty if none does.
func (s *suite) fails(dir, tests, limit string) (test, out string) {
	// vet would reject some mutants, but a test has to kill them.
	args := []string{"test", "-vet=off", "-count=1", "-failfast", "-v", "-timeout=" + cmp.Or(limit, "15m"), "-run", cmp.Or(tests, "."), "."}
	cmd := exec.Command("go", append(args, s.args...)...)
	cmd.Dir = filepath.Join(dir, s.dir)
	cmd.WaitDelay = time.Second // what a test has left running may hold the output open
	b, err := cmd.CombinedOutput()
	out = string(b)
	endLeft()
	if err == nil || errors.Is(err, exec.ErrWaitDelay) {
		return "", out
	}
	for _, says := range []*regexp.Regexp{hung, failed, crashed} {
		if m := says.FindStringSubmatch(out); m != nil {
			return m[1], out
		}
	}
	return err.Error(), out
}

// endLeft ends the processes that a killed test has left running: they would slow down the tests of the next mutants,
// and could make them fail. This process has adopted them.
func endLeft() {
	for {
		for _, p := range proctree.Descendants(os.Getpid()) {
			p.Signal(os.Getpid(), syscall.SIGKILL)
		}
		if _, err := syscall.Wait4(-1, nil, 0, nil); err == syscall.ECHILD {
			return
		}
	}
}

// copyModule copies the sources of the module, with those nested in it, whose examples the
// tests of documents read.
func copyModule(from, to string) error { return os.CopyFS(to, sources{os.DirFS(from)}) }

// sources is a directory without its hidden directories, such as .git.
type sources struct{ fs.FS }

func (s sources) ReadDir(name string) ([]fs.DirEntry, error) {
	entries, err := fs.ReadDir(s.FS, name)
	return slices.DeleteFunc(entries, func(e fs.DirEntry) bool { return e.IsDir() && strings.HasPrefix(e.Name(), ".") }), err
}
