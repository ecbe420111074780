//go:build unix

package main

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/tenurelib/tenure/claims"
)

// printed returns what a command prints.
func printed(t *testing.T, args ...string) string {
	t.Helper()
	status, stdout, stderr := tenureCommand(t, args...)
	if status != 0 || stderr != "" {
		t.Fatalf("%q: exit status %d and %q", args, status, stderr)
	}
	return stdout
}

func TestShellsCompleteCommandsAndFlags(t *testing.T) {
	t.Parallel()
	for shell, ask := range map[string]string{
		"bash": `complete() { :; }; source "$SCRIPT"; COMP_WORDS=($LINE_); [[ $LINE_ != *' ' ]] || COMP_WORDS+=(''); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _tenure; printf '%s\n' "${COMPREPLY[@]}"`,
		"zsh": `compdef() { : }; _files() { : }; compadd() { shift; print -l -- ${(M)@:#$words[CURRENT]*} }
			source "$SCRIPT"; words=(${=LINE_}); [[ $LINE_ != *' ' ]] || words+=(''); CURRENT=$#words; _tenure`,
		"fish": `source $SCRIPT; complete -C $LINE_`,
	} {
		t.Run(shell, func(t *testing.T) {
			t.Parallel()
			path, err := exec.LookPath(shell)
			if err != nil {
				t.Skip(err)
			}
			script := filepath.Join(t.TempDir(), "completion")
			if err := os.WriteFile(script, []byte(printed(t, "completion", shell)), 0o600); err != nil {
				t.Fatal(err)
			}
			for line, want := range map[string]string{
				"tenure st":                "status",
				"tenure h":                 "handover",
				"tenure handover -t":       "-table -to",
				"tenure run -unfence":      "-unfence -unfence-every",
				"tenure ddl -q":            "-queue",
				"tenure version -":         "-h -json",
				"tenure list -type x -sto": "-store",
				"tenure watch -key ":       "", // a value, for which there are only files
			} {
				cmd := exec.Command(path, "-c", ask)
				cmd.Dir = t.TempDir()
				cmd.Env = append(environ(), "SCRIPT="+script, "LINE_="+line, "HOME="+t.TempDir())
				out, err := cmd.CombinedOutput()
				if err != nil {
					t.Fatalf("%q: %v: %s", line, err, out)
				}
				got := map[string]bool{}
				for text := range strings.SplitSeq(string(out), "\n") {
					word, _, _ := strings.Cut(text, "\t") // fish adds a description
					got[word] = word != ""
				}
				for word := range strings.FieldsSeq(want) {
					if !got[word] && !(shell == "fish" && word == "-h") {
						t.Errorf("%q is not completed to %s: %q", line, word, out)
					}
					delete(got, word)
				}
				for word, is := range got {
					if is {
						t.Errorf("%q is completed to %s", line, word)
					}
				}
			}
		})
	}
}

func TestTheManualPageHasAllCommandsAndFlags(t *testing.T) {
	t.Parallel()
	page := printed(t, "man")
	for _, c := range commands() {
		if c.summary == "" {
			continue
		}
		_, section, ok := strings.Cut(page, "\n.SS tenure "+c.name+" ")
		section, _, _ = strings.Cut(section, "\n.SS ")
		new(options).flagSet(c).VisitAll(func(f *flag.Flag) {
			ok = ok && strings.Contains(section, "\n.TP\n\\fB\\-"+strings.ReplaceAll(f.Name, "-", `\-`)+`\fR`)
		})
		if !ok {
			t.Errorf("%s or a flag of it is missing", c.name)
		}
	}
	groff, err := exec.LookPath("groff")
	if err != nil {
		t.Skip(err)
	}
	cmd := exec.Command(groff, "-man", "-Tutf8", "-ww")
	cmd.Stdin = strings.NewReader(page)
	var warnings strings.Builder
	cmd.Stderr = &warnings
	text, err := cmd.Output()
	if err != nil || warnings.Len() > 0 {
		t.Errorf("groff: %v: %s", err, &warnings)
	}
	plain := regexp.MustCompile(`\x1b\[[0-9;]*m|.\x08`).ReplaceAllString(string(text), "") // without bold and underlined
	plain = strings.ReplaceAll(plain, "\u2212", "-")
	for _, want := range []string{"-unfence-every TIME", "$TENURE_STORE", `marked with "…"`} {
		if !strings.Contains(strings.Join(strings.Fields(plain), " "), want) {
			t.Errorf("the page does not show %s", want)
		}
	}
}

func TestTheUnitRunsTheSameCommandLine(t *testing.T) {
	t.Setenv(storeEnv, "")
	dir := t.TempDir()
	// Systemd wants the program to exist.
	args := []string{"unit", "-key", "web", "-unique-replica", "-ttl", "45s", "-check", `test 5% = "$A" && :`, "--", testBinary(t), "a b", `c\d`, "ü;"}
	unit := printed(t, args...)
	for _, want := range []string{
		"\nEnvironmentFile=/etc/tenure.env\nEnvironment=TENURE_REPLICA_ID=%H\nExecStart=" + testBinary(t) + ` run -key web -unique-replica -ttl 45s -check "test 5%% = \"$$A\" && :" -- ` + testBinary(t) + ` "a b" "c\\d" "ü;"` + "\n",
		"\nKillMode=mixed\nTimeoutStopSec=45\n",
	} {
		if !strings.Contains(unit, want) {
			t.Errorf("the unit has no %q:\n%s", want, unit)
		}
	}
	if own := printed(t, "unit", "-key", "web", "-replica", "a", "-store", "/var/lib/web.db", "--", testBinary(t)); strings.Contains(own, "Environment") || !strings.Contains(own, "-store /var/lib/web.db ") {
		t.Errorf("with a name and a store of its own the unit is\n%s", own)
	}
	verify, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip(err)
	}
	path := filepath.Join(dir, "web.service")
	if err := os.WriteFile(path, []byte(unit), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(verify, "verify", "--man=no", path).CombinedOutput(); err != nil || strings.Contains(string(out), "web.service") {
		t.Errorf("systemd-analyze: %v: %s", err, out)
	}
}

func TestThePrintedStatementsMakeATableAQueue(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, s *site) {
		s.ask(t, "migrate")
		s.exec(t, `CREATE TABLE mails (id text PRIMARY KEY NOT NULL, status text, customer text NOT NULL)`)
		ddl := printed(t, "ddl", "-store", s.store, "-queue", "mails", "-ready", "status = 'queued'", "-order", "status, id",
			"-columns", "attempts, not_before=run_at,requested,expires,limit,token=fence,per_key=customer")
		if !strings.Contains(ddl, ` (status, id) WHERE "session" IS NULL AND (status = 'queued')`) {
			t.Errorf("an index has other rows, or another order:\n%s", ddl)
		}
		if !strings.Contains(ddl, ` (customer) WHERE "session" IS NOT NULL`) && !strings.Contains(ddl, ` ("customer") WHERE "session" IS NOT NULL`) {
			t.Errorf("the index of PerKey is missing:\n%s", ddl)
		}
		s.exec(t, ddl)
		queue, err := claims.NewQueue(s.open(t), claims.QueueConfig{
			Table: "mails", Attempts: "attempts", NotBefore: "run_at", Requested: "requested", Expires: "expires", Limit: "limit", Token: "fence",
			Ready: "status = 'queued'", OrderBy: "status, id", Exhausted: "status = 'failed'", Deadline: soon,
		})
		if err == nil {
			err = queue.Check(t.Context())
		}
		if err != nil {
			t.Error(err)
		}
	})
}

// Each line of a document that begins with tenure is one that the command accepts.
func TestCommandLinesInTheDocumentsAreValid(t *testing.T) {
	t.Setenv(storeEnv, "postgres://host/db")
	pages, err := filepath.Glob("../../docs/*.md")
	if err != nil || len(pages) == 0 {
		t.Fatal(pages, err)
	}
	pages = append(pages, "README.md", "../../README.md", "../../stores/natstenure/README.md", "../../stores/etcdtenure/README.md")
	dump := filepath.Join(t.TempDir(), "tenure")
	if err := os.WriteFile(dump, []byte("#!/bin/sh\nprintf '%s\\0' \"$@\"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?ms)^```sh\n(.*?)^```$")
	lines := 0
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, block := range blocks.FindAllStringSubmatch(string(text), -1) {
			for line := range strings.SplitSeq(block[1], "\n") {
				if !strings.HasPrefix(line, "tenure ") {
					continue
				}
				lines++
				line, _, _ = strings.Cut(line, " >/etc/")
				shell := exec.Command("sh", "-c", line)
				shell.Env = append(os.Environ(), "PATH="+filepath.Dir(dump)+":"+os.Getenv("PATH"))
				out, err := shell.Output()
				if err != nil {
					t.Errorf("%s: %s: %v", page, line, err)
				}
				if err := checkOnly(strings.Split(strings.TrimSuffix(string(out), "\x00"), "\x00")); err != nil {
					t.Errorf("%s: %s: %v", page, line, err)
				}
			}
		}
		if !strings.HasSuffix(page, "/command.md") && page != "README.md" {
			continue
		}
		all := flag.NewFlagSet("", flag.ContinueOnError)
		new(options).define(all)
		for _, found := range regexp.MustCompile("`-([a-z][a-z-]*)[` ]").FindAllStringSubmatch(string(text), -1) {
			if all.Lookup(found[1]) == nil {
				t.Errorf("%s names -%s, which is no flag", page, found[1])
			}
		}
	}
	if lines < 20 {
		t.Errorf("only %d command lines were found", lines)
	}
}

// checkOnly returns why a command line is invalid. The program that it runs need not exist.
func checkOnly(args []string) error {
	if args[0] == "-h" {
		return nil
	}
	for _, c := range commands() {
		if c.name != args[0] {
			continue
		}
		o := &options{given: map[string]bool{}}
		flags := o.flagSet(c)
		if err := flags.Parse(args[1:]); err != nil {
			return err
		}
		flags.Visit(func(f *flag.Flag) { o.given[f.Name] = true })
		if c.name == runCommand.name || c.name == unitCommand.name {
			o.given["replica"], o.replica = true, "a"
			program := flags.Args()
			if len(program) > 0 {
				program = []string{"true"}
			}
			_, err := o.validate(program)
			return err
		}
		if c.check != nil {
			return c.check(o)
		}
		return nil
	}
	return usageError("no command %s", args[0])
}
