// Command mutants puts one fault after another into the library and runs the tests,
// which must fail each time. A mutant that survives shows that a test is missing.
//
//	go run ./internal/verify/mutants [-suite quick|databases|simulation|whole|command|schedule|claims|shards|nats|etcd] [-run regexp] [-record]
//
// The test that killed a mutant before, which killers.txt names, is tried first, alone. With
// -record that file is written anew for the mutants that were run.
//
// It works on a copy of the module. The cheapest tests run first: the root package's
// tests in virtual time, then those of the databases, the simulation, and finally all
// tests of the root package, of the databases and storetest. Mutants of cmd/tenure, of schedule, of
// claims, of shards, of natstenure and of etcdtenure must be killed by the tests of those packages.
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
	"time"
)

func main() {
	only := flag.String("suite", "", "run only the suite with this name")
	run := flag.String("run", "", "run only the mutants whose names match this regexp")
	record := flag.Bool("record", false, "note in killers.txt which test kills each mutant")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	known, err := readKillers(killersFile)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	survived, err := kill(ctx, ".", *only, regexp.MustCompile(*run), known)
	if *record {
		err = errors.Join(err, known.write(killersFile))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	if err != nil || survived > 0 {
		os.Exit(1)
	}
}

// suite is a set of tests.
type suite struct {
	name   string
	module string   // a nested module's directory; empty: the root module
	args   []string // for go test
	limit  string   // a test that hangs is ended after this time; empty: 15m

	passed bool // has passed without a mutant

	knownPassed bool // those of its tests that have killed mutants before have
}

// own maps a suite to the files whose mutants it, and no other suite, must kill.
var own = map[string][]string{
	"command":  {"cmd/tenure/"},
	"schedule": {"schedule/"},
	"nats":     {"natstenure/"},
	"etcd":     {"etcdtenure/"},
	"claims": {"claims/", "internal/pgobjects/claims.go", "internal/pgobjects/claimcount.go", "internal/pgobjects/claimlist.go",
		"internal/sqliteobjects/claims.go", "internal/sqliteobjects/claimcount.go", "internal/sqliteobjects/claimlist.go",
		"internal/pgobjects/rows", "internal/sqliteobjects/rows"},
	"shards": {"shards/"},
}

func (s suite) isFor(m mutant) bool {
	for name, files := range own {
		if slices.ContainsFunc(files, func(prefix string) bool { return strings.HasPrefix(m.file, prefix) }) {
			return s.name == name
		}
	}
	return own[s.name] == nil
}

func suites(dir string) ([]suite, error) {
	quick, err := quickTests(dir)
	if err != nil {
		return nil, err
	}
	return []suite{
		{name: "quick", limit: "2m", args: []string{"-run", "^(" + strings.Join(quick, "|") + ")$", "."}},
		{name: "databases", args: []string{"-run", "KeepsTheContract|VersionsStayAhead|FollowsATakeover|ATermFollowsTheNextTerm|AnotherPrograms|FencedTransactionCommits|FenceStatementCommits|BecomeReadOnly|InGroupsIsNeither|HoldsUpNoOther|GivenUpBefore|HasLittleTime|SessionEndsAs|AnotherSchema|RunCloses|CrashEmpties|WhateverBecomesOfTheTomb|LookedAtAgain|RowLevel|WithoutUniqueNames|RefusedForAWhile|ALeaseKeepsIts|LifetimeIsOver|CallerCancels|IsNotAnsweredHas|MayNotIdle|CloseDoesNot|HasOnlyRead|ConnectionString|OfAnyContent|WithoutAStamp|AreNotListed|IsNotPoisoned|WasUndone|TakesNoWriteLock|ThatHasMore|MayHaveAnyPath|DoesNotFitIsNamed|StoppedWithinFn|StarvesNoRenewal|ThatHasBegunFinds|PutStatement|FindsTheIdle|FencedTx|RefusedToASecond|OpenedByItsURL|UntilTheJobHasReturned|WithoutACode|NoFencer|PassTheFence|HeartbeatIsOne|HeartbeatsMay|SealedOrResumed|AFeed|ALoggerThatBlocks|ALoggerThatHas|OfReportsThat|APanicIsPassed|ALoggerForErrors|WhateverHidesThem|OnWhichNoPromise", ".", "./internal/verify/databases", "./internal/sqliteobjects", "./internal/listen", "./internal/pgconns", "./internal/report", "./internal/wake"}},
		{name: "simulation", args: []string{"./internal/verify/sim", "-args", "-sim.for=20s"}},
		{name: "whole", args: []string{".", "./internal/verify/databases", "./storetest"}},
		{name: "command", module: "cmd/tenure", args: []string{"."}},
		{name: "schedule", args: []string{"./schedule"}},
		{name: "claims", args: []string{"./claims"}},
		{name: "shards", args: []string{"./shards"}},
		{name: "nats", module: "natstenure", args: []string{"."}},
		{name: "etcd", module: "etcdtenure", args: []string{"."}},
	}, nil
}

var (
	testFunc = regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	bubble   = regexp.MustCompile(`synctest\.Test\(|inBubbles?\(`)
	database = regexp.MustCompile(`(?i)postgres|sqlite|bouncer|eachStore|foreignStores`)
)

// quickTests returns the root package's tests that run in a bubble or mention no
// database, so they need no server and little time.
func quickTests(dir string) (names []string, err error) {
	files, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		source, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		begins := testFunc.FindAllSubmatchIndex(source, -1)
		for i, m := range begins {
			end := len(source)
			if i+1 < len(begins) {
				end = begins[i+1][0]
			}
			body, name := source[m[0]:end], string(source[m[2]:m[3]])
			if name != "TestMain" && (bubble.Match(body) || !database.Match(body)) {
				names = append(names, name)
			}
		}
	}
	return names, nil
}

// kill tries the mutants and returns how many survived.
func kill(ctx context.Context, module, only string, which *regexp.Regexp, known killers) (survived int, err error) {
	dir, err := os.MkdirTemp("", "mutants")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	if err := copyModule(module, dir); err != nil {
		return 0, err
	}
	all, err := suites(dir)
	if err != nil {
		return 0, err
	}
	if only != "" {
		all = pick(all, only)
	}
	if len(all) == 0 {
		return 0, fmt.Errorf("there is no suite %q", only)
	}
	tried := 0
	for _, m := range mutants {
		if !which.MatchString(m.name) || !slices.ContainsFunc(all, func(s suite) bool { return s.isFor(m) }) {
			continue
		}
		tried++
		began := time.Now()
		by, err := m.killer(dir, all, known)
		if ctx.Err() != nil { // the tests were ended by it, too
			return survived, ctx.Err()
		}
		if err != nil { // it must not keep the others from being tried
			survived++
			fmt.Printf("FAILED    %s: %v\n", m.name, err)
			continue
		}
		took := time.Since(began).Round(time.Second)
		if by == "" {
			survived++
			fmt.Printf("SURVIVED  %s (%v): %s\n", m.name, took, m.why)
			continue
		}
		known[m.name] = by
		fmt.Printf("killed    %s (%v) by %s\n", m.name, took, by)
	}
	fmt.Printf("%d mutants, %d survived\n", tried, survived)
	return survived, nil
}

func pick(all []suite, name string) (picked []suite) {
	for _, s := range all {
		if s.name == name {
			picked = append(picked, s)
		}
	}
	return picked
}

// killer returns the test that fails with the mutant; empty if none does.
func (m mutant) killer(dir string, all []suite, known killers) (by string, err error) {
	path := filepath.Join(dir, m.file)
	source, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	mutated, err := m.apply(string(source))
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(path, []byte(mutated), 0o600); err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, os.WriteFile(path, source, 0o600)) }()
	if by, err := m.killedAgain(dir, all, known, func() error { return os.WriteFile(path, source, 0o600) }); err != nil || by != "" {
		return by, err
	}
	if err := os.WriteFile(path, []byte(mutated), 0o600); err != nil {
		return "", err
	}
	for i := range all {
		s := &all[i]
		if !s.isFor(m) {
			continue
		}
		test, out := s.fails(dir)
		if strings.Contains(out, "[build failed]") {
			return "", fmt.Errorf("does not compile:\n%s", out)
		}
		if test == "" {
			continue
		}
		if !s.passed {
			if err := os.WriteFile(path, source, 0o600); err != nil {
				return "", err
			}
			if test, out := s.fails(dir); test != "" {
				return "", fmt.Errorf("%s fails without a mutant: %s\n%s", s.name, test, out)
			}
			s.passed = true
		}
		return s.name + ": " + test, nil
	}
	return "", nil
}

// apply returns the source with the mutant's fault in it.
func (m mutant) apply(source string) (string, error) {
	if n := strings.Count(source, m.old); n != 1 {
		return "", fmt.Errorf("%s contains %q %d times, not once", m.file, m.old, n)
	}
	return strings.Replace(source, m.old, m.new, 1), nil
}

var (
	failed   = regexp.MustCompile(`(?m)^\s*--- FAIL: (\S+)`)
	hung     = regexp.MustCompile(`(?m)^panic: test timed out after \S+\n\s+running tests:\n\s+(Test\w+)`)
	violated = regexp.MustCompile(`(?m)^\s*(?:sim_)?judge\w*_test.go:\d+: (seed \d+: .+)$`)
	crashed  = regexp.MustCompile(`(?m)^(panic: .+|fatal error: .+)$`)
)

// fails runs the suite and returns the first test that fails; empty if none does.
func (s suite) fails(dir string) (test, out string) {
	// vet would reject some mutants, but a test has to kill them.
	args := append([]string{"test", "-vet=off", "-count=1", "-failfast", "-timeout=" + cmp.Or(s.limit, "15m")}, s.args...)
	out, err := output(filepath.Join(dir, s.module), "go", args...)
	if err == nil {
		return "", out
	}
	for _, says := range []*regexp.Regexp{hung, violated, failed, crashed} {
		if m := says.FindStringSubmatch(out); m != nil {
			return m[1], out
		}
	}
	return err.Error(), out
}

func output(dir, name string, args ...string) (string, error) {
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// copyModule copies the sources of the module, with those nested in it, whose examples the
// tests of documents read.
func copyModule(from, to string) error {
	return filepath.WalkDir(from, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		if entry.IsDir() {
			if name != "." && strings.HasPrefix(entry.Name(), ".") {
				return filepath.SkipDir
			}
			return os.MkdirAll(filepath.Join(to, name), 0o700)
		}
		if !entry.Type().IsRegular() {
			return nil
		}
		source, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(to, name), source, 0o600)
	})
}
