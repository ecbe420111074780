package docs_test

import (
	"bufio"
	"bytes"
	"context"
	"go/parser"
	"go/token"
	"go/types"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/internal/testkit"
)

var (
	goBlock   = regexp.MustCompile("(?ms)^```go\n(.*?)^```$")
	textBlock = regexp.MustCompile("(?ms)^```text\n(.*?)^```$")
	duration  = regexp.MustCompile(`\d+\.\d+s`)
)

// page is a document with a program: its first block of Go, which begins with a package clause.
// The text block after it shows what the program prints.
type page struct {
	name, text      string
	program, output string
	fragments       []string // the other blocks of Go
}

func pages(t *testing.T) (all []page) {
	for path, text := range documents(t) {
		blocks := goBlock.FindAllStringSubmatchIndex(text, -1)
		if filepath.Dir(path) != "docs" && path != "README.md" || len(blocks) == 0 {
			continue
		}
		first := blocks[0]
		p := page{name: strings.TrimSuffix(filepath.Base(path), ".md"), text: text, program: text[first[2]:first[3]]}
		if !strings.HasPrefix(p.program, "package ") {
			continue
		}
		if output := textBlock.FindStringSubmatch(text[first[1]:]); output != nil {
			p.output = output[1]
		}
		for _, block := range blocks[1:] {
			p.fragments = append(p.fragments, text[block[2]:block[3]])
		}
		all = append(all, p)
	}
	return all
}

// A program that a reader pastes into an empty module must build, and do what the page says.
func TestTheProgramsOfTheDocumentsPrintWhatTheySay(t *testing.T) {
	testkit.Docs(t)
	if dir, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "modernc.org/sqlite").Output(); err != nil || len(bytes.TrimSpace(dir)) == 0 {
		t.Skipf("the go command can't resolve modules here, so no other module can be built: %v", err)
	}
	module, all := newModule(t), pages(t)
	names := make(map[string]bool)
	for _, p := range all {
		names[p.name] = true
		file := filepath.Join(module, p.name, "main.go")
		if p.isTest() {
			file = filepath.Join(module, p.name, "main_test.go")
		}
		require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
		require.NoError(t, os.WriteFile(file, []byte(p.program), 0o644))
	}
	for _, name := range []string{"README", "claims", "agent-sessions", "queues", "remote-workers", "shards", "schedules", "fencing", "testing", "start"} {
		require.True(t, names[name], "%s begins with a program", name)
	}
	goCommand(t, module, "build", "-ldflags=-s -w", "-o", "bin"+string(filepath.Separator), "./...") // which links faster
	for _, p := range all {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			program := filepath.Join(module, "bin", p.name)
			switch {
			case p.name == "README":
				runsUntilInterrupted(t, program, " sweeping")
				return
			case p.name == "start":
				runsUntilInterrupted(t, program, "lease acquired", "DATABASE_URL="+testkit.StartPostgres(t).URL(), "LISTEN=127.0.0.1:0")
				return
			case p.isTest():
				goCommand(t, module, "test", "-c", "-o", program, "./"+p.name)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			var printed, logged bytes.Buffer
			run := exec.CommandContext(ctx, program)
			if p.isTest() {
				run.Args = append(run.Args, "-test.v")
			}
			run.Dir, run.Stdout, run.Stderr = t.TempDir(), &printed, &logged
			err := run.Run()
			require.NoError(t, err, "printed:\n%s\nlogged:\n%s", &printed, &logged)
			require.NotEmpty(t, p.output, "no block of text says what it prints")
			require.Equal(t, duration.ReplaceAllString(p.output, "0.00s"), duration.ReplaceAllString(printed.String(), "0.00s"), "logged:\n%s", &logged)
		})
	}
}

func (p page) isTest() bool { return strings.Contains(p.program, "\nfunc Test") }

// newModule returns the directory of a module with the same versions of its dependencies as this
// one, so that it builds without a network.
func newModule(t *testing.T) (dir string) {
	dir = t.TempDir()
	root, err := filepath.Abs(".")
	require.NoError(t, err)
	requires, err := os.ReadFile("go.mod")
	require.NoError(t, err)
	sums, err := os.ReadFile("go.sum")
	require.NoError(t, err)
	const path = "github.com/tenurelib/tenure"
	mod := strings.Replace(string(requires), "module "+path+"\n", "module pages\n", 1) +
		"\nrequire " + path + " v0.0.0\n\nreplace " + path + " => " + root + "\n"
	require.NoError(t, os.WriteFile(filepath.Join(dir, "go.mod"), []byte(mod), 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "go.sum"), sums, 0o644))
	return dir
}

func goCommand(t *testing.T, dir string, args ...string) {
	cmd := exec.Command("go", args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GOFLAGS=-mod=mod", "GOPROXY=off", "GOWORK=off")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "go %s:\n%s", strings.Join(args, " "), out)
}

// runsUntilInterrupted runs a program until a line of its log contains the text, and interrupts it.
func runsUntilInterrupted(t *testing.T, program, text string, env ...string) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	run := exec.CommandContext(ctx, program)
	run.Dir, run.Env = t.TempDir(), append(os.Environ(), env...)
	logged, err := run.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, run.Start())
	interrupted := false
	for lines := bufio.NewScanner(logged); lines.Scan(); {
		if strings.Contains(lines.Text(), text) && !interrupted {
			interrupted = true
			require.NoError(t, run.Process.Signal(os.Interrupt))
		}
	}
	require.NoError(t, run.Wait(), "its exit")
	require.True(t, interrupted)
}

// A fragment uses the names of its page's program, so that a reader who has the program knows what
// each stands for. Any other name is explained in the text.
func TestFragmentsInTheDocumentsUseTheNamesOfTheirProgram(t *testing.T) {
	testkit.Docs(t)
	code := regexp.MustCompile("`[^`\n]+`")
	for _, p := range pages(t) {
		if p.name == "README" { // whose fragments belong to other programs
			continue
		}
		explained := strings.Join(code.FindAllString(goBlock.ReplaceAllString(p.text, ""), -1), " ")
		for _, fragment := range p.fragments {
			file, err := parser.ParseFile(token.NewFileSet(), "", "package p\n"+fragment, 0)
			if err != nil { // then it has statements
				file, err = parser.ParseFile(token.NewFileSet(), "", "package p\nfunc _() {\n"+fragment+"}", 0)
			}
			require.NoError(t, err, "in %s:\n%s", p.name, fragment)
			for _, ident := range file.Unresolved {
				name := regexp.MustCompile(`\b` + ident.Name + `\b`)
				if types.Universe.Lookup(ident.Name) == nil && !name.MatchString(p.program) && !name.MatchString(explained) {
					t.Errorf("%s does not say what %s is in:\n%s", p.name, ident.Name, fragment)
				}
			}
		}
	}
}
