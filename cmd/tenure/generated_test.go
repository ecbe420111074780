//go:build unix

package main

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

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
	for line, want := range map[string]string{
		"st":                    "status",
		"h":                     "handover help",
		"handover --t":          "--table --to",
		"run --unfence":         "--unfence --unfence-every",
		"list --type x --sto":   "--store",
		"list -type x --sto":    "--store",
		"run --key k -- web --": "",
		"completion ":           "bash fish powershell zsh",
	} {
		args := append([]string{"__completeNoDesc"}, strings.Split(line, " ")...)
		status, stdout, _ := tenureCommand(t, args...)
		words := strings.Fields(stdout)
		if status != 0 || len(words) == 0 || strings.Join(words[:len(words)-1], " ") != want { // the last is for the script
			t.Errorf("%q: exit status %d and %q, want %s", line, status, stdout, want)
		}
	}
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		if script := printed(t, "completion", shell); !strings.Contains(script, "__complete") {
			t.Errorf("the script for %s asks nothing:\n%s", shell, script)
		}
	}
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skip(err)
	}
	dir := t.TempDir()
	if err := os.Symlink(testBinary(t), filepath.Join(dir, "tenure")); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(bash, "-c", `
		_init_completion() { words=("${COMP_WORDS[@]}") cword=$COMP_CWORD cur=${COMP_WORDS[COMP_CWORD]}; } # of the package bash-completion
		compopt() { :; } # which needs a shell that completes
		source <(tenure completion bash)
		COMP_WORDS=(tenure handover --st) COMP_CWORD=2 COMP_TYPE=9
		__start_tenure && echo "${COMPREPLY[@]}"`)
	cmd.Env = append(environ(), asTenure+"=1", "PATH="+dir+":"+os.Getenv("PATH"))
	if out, err := cmd.CombinedOutput(); err != nil || strings.TrimSpace(string(out)) != "--store" {
		t.Errorf("bash: %q, %v", out, err)
	}
}

func TestEachCommandHasAManualPageWithItsFlags(t *testing.T) {
	t.Parallel()
	pages := map[string]string{"": printed(t, "man")}
	for _, c := range newRoot(&output{}).Commands() {
		if c.Hidden {
			continue
		}
		page := printed(t, "man", c.Name())
		c.Flags().VisitAll(func(f *pflag.Flag) {
			if !strings.Contains(page, `\fB--`+f.Name+`\fP`) {
				t.Errorf("the page of %s lacks --%s", c.Name(), f.Name)
			}
		})
		pages[c.Name()] = page
	}
	groff, err := exec.LookPath("groff")
	if err != nil {
		t.Skip(err)
	}
	for name, page := range pages {
		cmd := exec.Command(groff, "-k", "-man", "-Tutf8", "-ww")
		cmd.Stdin = strings.NewReader(page)
		var warnings strings.Builder
		cmd.Stderr = &warnings
		text, err := cmd.Output()
		if err != nil || warnings.Len() > 0 {
			t.Errorf("%s: groff: %v: %s", name, err, &warnings)
		}
		if name != "run" {
			continue
		}
		plain := regexp.MustCompile(`\x1b\[[0-9;]*m|.\x08`).ReplaceAllString(string(text), "") // without bold and underlined
		for _, want := range []string{"--unfence-every", "    tenure run --store STORE --key web --start", "marked with \"…\""} {
			if !strings.Contains(plain, want) {
				t.Errorf("the page does not show %s:\n%s", want, plain)
			}
		}
	}
}

func TestTheUnitRunsTheSameCommandLine(t *testing.T) {
	t.Setenv(storeEnv, "")
	dir := t.TempDir()
	// Systemd wants the program to exist.
	args := []string{"unit", "--key", "web", "--unique-replica", "--ttl", "45s", "--check", `test 5% = "$A" && :`, "--", testBinary(t), "a b", `c\d`, "ü;"}
	unit := printed(t, args...)
	for _, want := range []string{
		"\nEnvironmentFile=/etc/tenure.env\nEnvironment=TENURE_REPLICA_ID=%H\nExecStart=" + testBinary(t) + ` run --key web --unique-replica --ttl 45s --check "test 5%% = \"$$A\" && :" -- ` + testBinary(t) + ` "a b" "c\\d" "ü;"` + "\n",
		"\nKillMode=mixed\nTimeoutStopSec=45\nRestart=always\nRestartSec=1\n",
		"\nStartLimitIntervalSec=0\n\n[Service]\n", // otherwise systemd gives up after five quick failures
	} {
		if !strings.Contains(unit, want) {
			t.Errorf("the unit has no %q:\n%s", want, unit)
		}
	}
	if own := printed(t, "unit", "--key", "web", "--replica", "a", "--store", "/var/lib/web.db", "--", testBinary(t)); strings.Contains(own, "Environment") || !strings.Contains(own, "--store /var/lib/web.db ") {
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
		ddl := printed(t, "ddl", "--store", s.store, "--queue", "mails", "--ready", "status = 'queued'", "--order", "status, id",
			"--columns", "attempts, not_before=run_at,requested,expires,limit,token=fence,per_key=customer")
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
		for _, found := range regexp.MustCompile("`--?([a-z][a-z-]*)[` ]").FindAllStringSubmatch(string(text), -1) {
			if !strings.HasPrefix(found[0], "`--") || !slices.ContainsFunc(newRoot(&output{}).Commands(), func(c *cobra.Command) bool { return c.Flags().Lookup(found[1]) != nil }) {
				t.Errorf("%s names %s, which is no flag", page, found[0])
			}
		}
	}
	if lines < 15 {
		t.Errorf("only %d command lines were found", lines)
	}
}

// checkOnly returns why a command line is invalid. The program that it runs need not exist.
func checkOnly(args []string) error {
	if args[0] == "-h" {
		return nil
	}
	c, args, err := newRoot(&output{stdout: io.Discard, stderr: io.Discard}).Find(args)
	if err == nil {
		err = c.ParseFlags(args)
	}
	if err == nil {
		err = c.ValidateArgs(c.Flags().Args())
	}
	if err == nil {
		err = c.ValidateFlagGroups()
	}
	if err != nil {
		return err
	}
	program := c.Flags().Args()
	if c.Name() == "run" || c.Name() == "unit" {
		c.Flags().Set("replica", "a")
		if len(program) > 0 {
			program = []string{"true"}
		}
	}
	if c.Name() == "unit" { // which connects to nothing
		return c.RunE(c, program)
	}
	if c.PreRunE != nil {
		return c.PreRunE(c, program)
	}
	return nil
}
