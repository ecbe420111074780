package docs_test

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/internal/testkit"
)

// A reader climbs the packages in one direction: internal is the ground, and what only tests import stands beside.
func TestPackagesImportInOneDirection(t *testing.T) {
	const root = "github.com/tenurelib/tenure"
	out, err := exec.Command("go", "list", "-f", `{{.ImportPath}} {{join .Imports " "}}`, "./...").Output()
	require.NoError(t, err)
	packages := 0
	for line := range strings.Lines(string(out)) {
		imports := strings.Fields(line)
		importer := imports[0]
		packages++
		for _, imported := range imports[1:] {
			if strings.HasPrefix(importer, root+"/internal/") && !strings.HasPrefix(importer, root+"/internal/testkit") {
				require.False(t, strings.HasPrefix(imported, root) && !strings.HasPrefix(imported, root+"/internal/"), "%s imports %s", importer, imported)
			}
			if !strings.HasPrefix(importer, root+"/internal/testkit") {
				require.False(t, strings.HasPrefix(imported, root+"/internal/testkit"), "%s imports %s", importer, imported)
			}
		}
	}
	require.Greater(t, packages, 20)
}

func TestNoPackageHasAnInit(t *testing.T) {
	files := 0
	require.NoError(t, filepath.WalkDir(".", func(path string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		files++
		for _, decl := range file.Decls {
			f, ok := decl.(*ast.FuncDecl)
			require.False(t, ok && f.Recv == nil && f.Name.Name == "init" && file.Name.Name != "main", "%s has an init", path)
		}
		return nil
	}))
	require.Greater(t, files, 200)
}

// A package that programs can import is frozen at 1.0, and the rule must list it.
func TestEachPackageIsInTheRuleOfCompatibility(t *testing.T) {
	testkit.Docs(t)
	rule, err := os.ReadFile("docs/compatibility.md")
	require.NoError(t, err)
	_, rule, _ = bytes.Cut(rule, []byte("\nThe packages are "))
	rule, _, _ = bytes.Cut(rule, []byte("\n\n"))
	packages := []string{"tenure"}
	out, err := exec.Command("go", "list", "./...").Output()
	require.NoError(t, err)
	for _, path := range strings.Fields(string(out)) {
		if _, path, nested := strings.Cut(path, "/tenure/"); nested {
			packages = append(packages, path)
		}
	}
	modules, err := filepath.Glob("stores/*tenure")
	require.NoError(t, err)
	packages = append(packages, "oteltenure", "proof")
	for _, path := range append(packages, modules...) {
		first, _, _ := strings.Cut(path, "/")
		if first == "internal" || first == "proof" || first == "examples" {
			path = first
		}
		require.Contains(t, string(rule), "`"+path+"`")
	}
	require.Greater(t, len(packages), 20)
}
