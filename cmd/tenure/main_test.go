//go:build unix

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

// asTenure is an environment variable that makes the test binary act as tenure, its guard, or the service that
// it runs. Nothing needs to be built, and the race detector is on if it is on in the tests.
const asTenure = "TENURE_TEST_AS_TENURE"

func TestMain(m *testing.M) {
	if os.Getenv(asTenure) != "" {
		if len(os.Args) > 1 && os.Args[1] == "service" {
			serve(os.Args[2:])
		}
		main()
	}
	if len(os.Args) > 1 && !strings.HasPrefix(os.Args[1], "-test.") {
		// The guard of a run that tenureCommand should have refused: it must not run the tests.
		fmt.Fprintln(os.Stderr, "this is the test of a command, and not the command")
		os.Exit(2)
	}
	flag.Set("test.parallel", "6") // the tests mostly wait for real time to pass
	testkit.Main(m)
}

// tenureCommand runs a command in this process, and returns its exit status and output.
func tenureCommand(t *testing.T, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	var out, errOut bytes.Buffer
	status = run(ctx, args, &out, &errOut)
	return status, out.String(), errOut.String()
}

func TestABadCommandLineIsReportedInOneLineAndExitStatus2(t *testing.T) {
	t.Setenv(storeEnv, "")
	db := filepath.Join(t.TempDir(), "t.db")
	runOn := func(args ...string) []string { return append([]string{"run", "--store", db, "--key", "k"}, args...) }
	for _, args := range [][]string{
		{"no-such-command"},
		{"run", "-no-such-flag"},
		{"run", "--key", "k", "--", "true"},
		{"run", "--store", db, "--", "true"},
		{"run", "--store", db, "--key", "/", "--", "true"},
		{"run", "--store", ":memory:", "--key", "k", "--", "true"},
		{"run", "--store", "sqlite::memory:", "--key", "k", "--once", "--", "true"},
		{"run", "--store", "mongodb://localhost/db", "--key", "k", "--", "true"},
		{"run", "--store", "host=localhost dbname=db", "--key", "k", "--", "true"},
		{"run", "--store", "postgres:/localhost/db", "--key", "k", "--", "true"},
		{"run", "--store", "postgres//u:secret@localhost/db", "--key", "k", "--", "true"},
		{"run", "--store", "u:secret@localhost/db", "--key", "k", "--", "true"},
		{"run", "--store", "localhost:5432", "--key", "k", "--", "true"},
		runOn(),
		runOn("--", "no-such-program"),
		runOn("--ttl", "soon", "--", "true"),
		runOn("--ttl", "10ms", "--", "true"),
		runOn("--ttl", "2000000h", "--", "true"),
		runOn("--renew", "-1s", "--", "true"),
		runOn("--renew", "25s", "--", "true"),
		runOn("--acquire", "-1s", "--", "true"),
		runOn("--stop-timeout", "25s", "--", "true"),
		runOn("--check-timeout", "1s", "--", "true"),
		runOn("--check", "true", "--check-timeout", "23s", "--", "true"),
		runOn("--confirm", "-1", "--", "true"),
		runOn("--on-loss", "restart", "--", "true"),
		runOn("--replica", "", "--", "true"),
		runOn("--fence", "true", "--", "true"),
		runOn("--start", "true"),
		runOn("--stop", "true"),
		runOn("--start", "true", "--stop", "true", "--", "true"),
		runOn("--start", "true", "--stop", "true", "--once"),
		runOn("--unique-replica", "--", "true"),
		runOn("--fence", "true", "--replica", "a", "--fence-every", "1s", "--", "true"),
		runOn("--fence", "true", "--replica", "a", "--peers", "b", "--fence-every", "-1s", "--", "true"),
		runOn("--unfence-every", "1s", "--", "true"),
		runOn("--unfence", "true", "--unfence-every", "-1s", "--", "true"),
		runOn("--missed", "2", "--", "true"),
		runOn("--missed", "-2", "--renew", "5s", "--", "true"),
		runOn("--missed", "2", "--renew", "-5s", "--", "true"),
		runOn("--missed", "1", "--renew", "5s", "--", "true"),
		runOn("--missed", "2", "--renew", "5s", "--ttl", "30s", "--", "true"),
		runOn("--missed", "2", "--renew", "100ms", "--", "true"),
		runOn("--missed", "9223372036854775807", "--renew", "1h", "--", "true"),
		runOn("--schema", "s", "--", "true"),
		runOn("--lossless", "--", "true"),
		runOn("--table", "objects_tombstones", "--", "true"),
		runOn("--peers", "a,b", "--", "true"),
		runOn("--fence", "true", "--replica", "a", "--peers", "a,,b", "--", "true"),
		runOn("--start-every", "1s", "--", "true"),
		runOn("--start", "true", "--stop", "true", "--start-every", "-1s"),
		runOn("--stop-every", "1s", "--", "true"),
		runOn("--start", "true", "--stop", "true", "--stop-every", "-1s"),
		{"status", "--store", db},
		{"status", "--store", db, "--key", "k", "more"},
		{"watch", "--store", db},
		{"list", "--store", db, "more"},
		{"list", "--store", db, "--type", ""},
		{"list", "--store", db, "--type", "t", "--sessions"},
		{"owner", "--store", db},
		{"owner", "--store", db, "--key", "acme"},
		{"owner", "--store", db, "--key", "/acme"},
		{"owner", "--store", db, "--key", "tenant/"},
		{"owner", "--store", db, "--key", "tenant/a\x00b"},
		{"owner", "--store", db, "--key", "tenant/acme", "more"},
		{"owner", "--key", "tenant/acme"},
		{"resign", "--store", db},
		{"resign", "--store", db, "--key", "k", "more"},
		{"handover", "--store", db, "--key", "k"},
		{"handover", "--key", "k", "--to", "b"},
		{"handover", "--store", db, "--key", "k", "--to", "b", "--wait", "-1s"},
		{"migrate"},
		{"migrate", "--store", db, "more"},
		{"migrate", "--store", db, "--print", "--json"},
		{"migrate", "--store", db, "--print", "--schema", "s"},
		{"migrate", "--store", db, "--print", "--table", "objects_tombstones"},
		{"migrate", "--store", "postgres://h/db", "--print", "--table", strings.Repeat("long", 20)},
		{"version", "more"},
		{"ddl", "--store", db},
		{"ddl", "--queue", "mails"},
		{"ddl", "--store", db, "--queue", "mails", "--table", "t"},
		{"ddl", "--store", "nats://h", "--queue", "mails"},
		{"ddl", "--store", db, "--queue", "mails", "--columns", "attempts,mood"},
		{"ddl", "--store", db, "--queue", "mails", "--columns", "limit"},
		{"ddl", "--store", db, "--queue", "mails", "--columns", "attempts=id"},
		{"unit", "--key", "k"},
		{"unit", "--", "true"},
		{"unit", "--key", "k", "--ttl", "10ms", "--", "true"},
		{"unit", "--key", "k", "--store", "postgres://h/db", "--", "true"},
		{"completion", "bash", "zsh"},
		{"man", "more"},
		{"help", "no-such-command"},
		{"run", "---"},
	} {
		status, stdout, stderr := tenureCommand(t, args...)
		if status != 2 || stdout != "" || strings.Count(stderr, "\n") != 1 || !strings.HasPrefix(stderr, "tenure") {
			t.Errorf("%q: exit status %d, %q and %q; want 2 and one line", args, status, stdout, stderr)
		}
		if strings.Contains(stderr, "(not shown)") {
			t.Errorf("%q: %q; there was nothing to hide", args, stderr)
		}
	}
	if _, err := os.Stat(db); err == nil {
		t.Error("a bad command line created the store")
	}
}

func TestANumberWithoutAUnitIsAnsweredWithADuration(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"ttl", "renew", "acquire", "check-timeout", "stop-timeout"} {
		status, _, stderr := tenureCommand(t, "run", "-"+name, "10ns")
		if says := fmt.Sprintf(`--%s: want at least 1ms`, name); status != 2 || !strings.Contains(stderr, says) {
			t.Errorf("-%s 10ns: exit status %d and %q, want %q", name, status, stderr, says)
		}
		for value, want := range map[string]string{"3": "3s", "0.5": "0.5s", "1m30": "1m30s", "soon": "30s", "": "30s"} {
			status, _, stderr := tenureCommand(t, "run", "-"+name, value)
			if says := fmt.Sprintf("--%s: want a duration such as %s; ", name, want); status != 2 || !strings.Contains(stderr, says) {
				t.Errorf("-%s %q: exit status %d and %q, want %q", name, value, status, stderr, says)
			}
		}
	}
}

func TestEachCommandExplainsItself(t *testing.T) {
	_, overview, _ := tenureCommand(t, "-h")
	for _, c := range newRoot(&output{}).Commands() {
		if c.Hidden {
			continue
		}
		if !strings.Contains(overview, "\n  "+c.Name()+" ") {
			t.Errorf("the overview does not mention %s", c.Name())
		}
		for _, args := range [][]string{{c.Name(), "-h"}, {c.Name(), "--help"}, {"help", c.Name()}} {
			status, stdout, stderr := tenureCommand(t, args...)
			if status != 0 || stderr != "" || !strings.Contains(stdout, "\nUsage:\n  tenure "+c.Name()) ||
				strings.Contains(stdout, "--store PATH") != (c.Flags().Lookup("store") != nil) {
				t.Errorf("%q: exit status %d, %q and %q", args, status, stdout, stderr)
			}
			for _, line := range strings.Split(stdout, "\n") {
				if len(line) > 140 {
					t.Errorf("%q: %q is too long", args, line)
				}
			}
		}
	}
	for _, args := range [][]string{nil, {""}, {"--", "status"}} {
		if status, stdout, stderr := tenureCommand(t, args...); status != 2 || stdout != "" || stderr != overview {
			t.Errorf("%q has no command: exit status %d and %q", args, status, stderr)
		}
	}
}

func TestAFlagWithOneDashIsReadAndNamedOnce(t *testing.T) {
	root := newRoot(&output{})
	for line, want := range map[string]string{ // and the first flag that the hint names
		"status -store x -key k -json":         "store: status --store x --key k --json",
		"status -store=x --key k":              "store: status --store=x --key k",
		"status --store -key -json":            "json: status --store -key --json",
		"status --store x":                     ": status --store x",
		"handover -wait -1s -to b":             "wait: handover --wait -1s --to b",
		"run -key k -- web -key -store":        "key: run --key k -- web -key -store",
		"run -once web -key -store":            "once: run --once web -key -store",
		"run -once=false -key k web -once":     "once: run --once=false --key k web -once",
		"run -check -x -key - -once":           "check: run --check -x --key - --once",
		"witness -- run -key k":                ": witness -- run -key k",
		"unit -ttl 5s --key web -- w -ttl":     "ttl: unit --ttl 5s --key web -- w -ttl",
		"status -nonsense -key k":              "key: status --nonsense --key k",
		"status more -key k":                   ": status more -key k",
		"status -h":                            ": status -h",
		"status -help":                         ": status --help",
		"-version":                             ": --version",
		"nonsense -key k":                      ": nonsense -key k",
		"__complete run -store x --key y --re": ": __complete run --store x --key y --re",
	} {
		args := strings.Fields(line)
		first := twoDashes(root, args)
		if got := first + ": " + strings.Join(args, " "); got != want {
			t.Errorf("%s: %s, want %s", line, got, want)
		}
	}
	db := filepath.Join(t.TempDir(), "t.db")
	const hint = "tenure: -store is read as --store: flags have two dashes\n"
	if status, stdout, stderr := tenureCommand(t, "migrate", "-store", db, "-json"); status != 0 || stdout != `{"migrated":"`+db+"\"}\n" || stderr != hint {
		t.Errorf("exit status %d, %q and %q", status, stdout, stderr)
	}
	if status, stdout, stderr := tenureCommand(t, "migrate", "-store="+db, "--json"); status != 0 || stdout == "" || stderr != hint {
		t.Errorf("exit status %d, %q and %q", status, stdout, stderr)
	}
}

func TestAMistypedCommandOrFlagIsAnsweredWithTheRightOne(t *testing.T) {
	t.Parallel()
	for line, want := range map[string]string{
		"stauts":                `tenure: there is no command "stauts" (did you mean status?); "tenure -h" lists them`,
		"help lst":              `tenure: there is no command "lst" (did you mean list?); "tenure -h" lists them`,
		"nonsense":              `tenure: there is no command "nonsense"; "tenure -h" lists them`,
		"status --stroe x":      `tenure status: there is no flag "--stroe" (did you mean --store?); "tenure status -h" lists the flags`,
		"status -kye x":         `tenure status: there is no flag "--kye" (did you mean --key?); "tenure status -h" lists the flags`,
		"run --unfence-evry 1s": `tenure run: there is no flag "--unfence-evry" (did you mean --unfence-every?); "tenure run -h" lists the flags`,
		"status -k x":           `tenure status: there is no flag "--k" (did you mean --key?); "tenure status -h" lists the flags`,
		"status --nonsense":     `tenure status: there is no flag "--nonsense"; "tenure status -h" lists the flags`,
		"status --key":          `tenure status: flag needs an argument: --key; "tenure status -h" lists the flags`,
		"run --confirm some":    `tenure run: --confirm: want a number; "tenure run -h" lists the flags`,
		"status --json=perhaps": `tenure status: --json: want no value, or true or false after a =; "tenure status -h" lists the flags`,
		"--json list":           `tenure: there is no flag "--json"; the command comes first, as in "tenure status --store STORE"; "tenure -h" lists the flags`,
	} {
		status, stdout, stderr := tenureCommand(t, strings.Fields(line)...)
		if status != 2 || stdout != "" || stderr != want+"\n" {
			t.Errorf("%s: exit status %d, %q and %q, want %q", line, status, stdout, stderr, want)
		}
	}
}

func TestVersionSaysWhatWasBuiltAndByWhichGo(t *testing.T) {
	t.Parallel()
	status, stdout, stderr := tenureCommand(t, "version")
	if status != 0 || stderr != "" || !strings.HasPrefix(stdout, "tenure ") || !strings.HasSuffix(stdout, ", "+runtime.Version()+"\n") {
		t.Errorf("exit status %d, %q and %q", status, stdout, stderr)
	}
	if _, again, _ := tenureCommand(t, "--version"); again != stdout {
		t.Errorf("--version: %q", again)
	}
	var v versionView
	if _, stdout, _ := tenureCommand(t, "version", "--json"); json.Unmarshal([]byte(stdout), &v) != nil || v.Version == "" || v.Go != runtime.Version() {
		t.Errorf("version --json: %q", stdout)
	}
	for want, info := range map[string]*debug.BuildInfo{
		"tenure v1.2.3, go1.30\n": {Main: debug.Module{Version: "v1.2.3"}, GoVersion: "go1.30"},
		"tenure (devel), revision abc of 2030-01-02T03:04:05Z, modified, go1.30\n": {Main: debug.Module{Version: "(devel)"}, GoVersion: "go1.30",
			Settings: []debug.BuildSetting{{Key: "vcs.revision", Value: "abc"}, {Key: "vcs.time", Value: "2030-01-02T03:04:05Z"}, {Key: "vcs.modified", Value: "true"}}},
		"tenure (unknown), (unknown)\n": nil,
	} {
		var out bytes.Buffer
		if err := newVersionView(info).print(&out); err != nil || out.String() != want {
			t.Errorf("%q, %v; want %q", &out, err, want)
		}
	}
}

func TestALongStopTimeoutShortensTheRenewDeadline(t *testing.T) {
	t.Parallel()
	const ttl, renew = 30 * time.Second, 10 * time.Second
	for _, test := range []struct{ flag, stop, renewDeadline time.Duration }{
		{0, 8 * time.Second, 20 * time.Second},
		{time.Second, time.Second, 20 * time.Second},
		{12 * time.Second, 12 * time.Second, 16 * time.Second},
		{15 * time.Second, 15 * time.Second, 13 * time.Second},
	} {
		got, err := newTiming(ttl, renew, test.flag, 0)
		if err != nil || got.stop != test.stop || got.renewDeadline != test.renewDeadline {
			t.Errorf("--stop-timeout %v: %+v, %v", test.flag, got, err)
		}
		if sum := got.renewDeadline + got.stop + got.slack + margin(ttl); sum > ttl {
			t.Errorf("--stop-timeout %v: the parts add up to %v, more than the TTL", test.flag, sum)
		}
	}
	if _, err := newTiming(ttl, renew, 15*time.Second+time.Millisecond, 0); err == nil || !strings.Contains(err.Error(), "at most 15s") {
		t.Errorf("a stop timeout that does not fit: %v", err)
	}
}

func TestACheckMayLastForWhatTheTTLLeaves(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ ttl, renew, stop, most time.Duration }{
		{30 * time.Second, 10 * time.Second, 0, 22 * time.Second},
		{30 * time.Second, 10 * time.Second, time.Second, 24 * time.Second},
		{30 * time.Second, 10 * time.Second, 8 * time.Second, 17 * time.Second},
		{30 * time.Second, time.Second, 8 * time.Second, 19*time.Second - 1}, // as before it could be longer
		{10 * time.Minute, time.Minute, time.Second, 500 * time.Second},
	} {
		got, err := newTiming(test.ttl, test.renew, test.stop, test.most)
		if err != nil {
			t.Errorf("%+v: %v", test, err)
			continue
		}
		if sum := got.renewDeadline + got.stop + got.slack + margin(test.ttl); sum > test.ttl || got.stop < min(time.Second, test.ttl/10) {
			t.Errorf("%+v: the parts of %+v add up to %v", test, got, sum)
		}
		if left := got.renewDeadline - test.most; left < min(test.ttl/10, test.renew) {
			t.Errorf("%+v: a check that takes its time leaves %v for the renewal", test, left)
		}
		lease, err := tenure.NewLease(storetest.NewMem(), tenure.LeaseConfig{Key: testkit.LeaseKey, TTL: test.ttl, Margin: margin(test.ttl)})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
			RenewInterval: test.renew, RenewDeadline: got.renewDeadline, CheckTimeout: test.most, Check: func(context.Context, tenure.Role) error { return nil },
		}); err != nil {
			t.Errorf("%+v: %v", test, err)
		}
		if _, err := newTiming(test.ttl, test.renew, test.stop, test.most+1); err == nil || !strings.Contains(err.Error(), "it is at most") {
			t.Errorf("%+v: a check that is longer: %v", test, err)
		}
	}
}

func TestMissedRenewalsMakeTheTTL(t *testing.T) {
	t.Parallel()
	const renew = 5 * time.Second
	for missed := 2; missed <= 100; missed++ { // the times fit without any other flag
		opts := runOptions{renew: renew, missed: missed}
		if err := opts.observe(pflag.NewFlagSet("", pflag.ContinueOnError)); err != nil || opts.ttl != time.Duration(missed)*renew {
			t.Errorf("--missed %d: TTL %v, %v", missed, opts.ttl, err)
		}
		if _, err := newTiming(opts.ttl, opts.renew, 0, 0); err != nil {
			t.Errorf("--missed %d: %v", missed, err)
		}
	}
	if err := (&runOptions{renew: renew, missed: 1}).observe(pflag.NewFlagSet("", pflag.ContinueOnError)); err == nil ||
		!strings.Contains(err.Error(), "when the next renewal is due") || !strings.HasSuffix(err.Error(), "; --renew 2.5s --missed 2 takes over as soon") {
		t.Errorf("--missed 1: %v", err)
	}
}

func TestHowAProgramIsEndedDependsOnTheCause(t *testing.T) {
	t.Parallel()
	term, interrupt, kill := order{Stop: syscall.SIGTERM}, order{Stop: syscall.SIGINT}, order{Kill: true}
	for _, test := range []struct {
		cause          error
		stop, withKill order // by --on-loss
	}{
		{tenure.ErrLost, kill, kill},
		{tenure.ErrDeadline, term, kill},
		{fmt.Errorf("%w: no disk", tenure.ErrUnhealthy), term, kill},
		{tenure.ErrResigned, term, term},
		{tenure.ErrShutdown, interrupt, interrupt},
	} {
		for onLoss, want := range map[string]order{onLossStop: test.stop, onLossKill: test.withKill} {
			r := &runner{opts: &runOptions{guardConfig: guardConfig{onLoss: onLoss}}}
			if test.cause == tenure.ErrShutdown {
				r.signal.Store(int32(syscall.SIGINT))
			}
			if got := r.howToEnd(test.cause); got != want {
				t.Errorf("--on-loss %s, %v: %+v, want %+v", onLoss, test.cause, got, want)
			}
		}
	}
}
