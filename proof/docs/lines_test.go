package docs_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/internal/testkit"
)

// Each text that the library or the command logs as a warning or an error has a row on the page that explains texts, at
// least up to its first colon or semicolon.
func TestEachWarningIsOnThePageThatExplainsTexts(t *testing.T) {
	testkit.Docs(t)
	page := documents(t)["docs/operations.md"]
	found := 0
	for _, text := range warnings(t) {
		found++
		if head, _, _ := strings.Cut(strings.ReplaceAll(text, ";", ":"), ":"); !strings.Contains(page, text) && !strings.Contains(page, "`"+head) {
			t.Errorf("docs/operations.md has no row `%s`", text)
		}
	}
	require.Greater(t, found, 100)
}

// warnings returns the texts that the product logs as warnings or errors.
func warnings(t *testing.T) (texts []string) {
	t.Helper()
	err := filepath.WalkDir(".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() && (path == "proof" || path == "examples" || path == "internal/testkit" || path == "storetest" || path != "." && strings.HasPrefix(entry.Name(), ".")) {
			return filepath.SkipDir
		}
		if entry.IsDir() || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.CallExpr:
				if slices.Contains([]string{"Warn", "Error", "logFailure", "warn"}, nameOf(n.Fun)) || isLoud(n.Args) {
					texts = append(texts, firstText(n.Args)...)
				}
			case *ast.AssignStmt:
				if isLoud(n.Rhs) {
					texts = append(texts, firstText(n.Rhs)...)
				}
			}
			return true
		})
		return nil
	})
	require.NoError(t, err)
	return texts
}

func isLoud(of []ast.Expr) bool {
	return slices.ContainsFunc(of, func(e ast.Expr) bool { return nameOf(e) == "LevelWarn" || nameOf(e) == "LevelError" })
}

func nameOf(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.SelectorExpr:
		if nameOf(e.X) == "http" { // http.Error logs nothing
			return ""
		}
		return e.Sel.Name
	case *ast.Ident:
		return e.Name
	}
	return ""
}

// firstText returns the first text of several words.
func firstText(of []ast.Expr) []string {
	for _, e := range of {
		if sum, ok := e.(*ast.BinaryExpr); ok {
			e = sum.X
		}
		if literal, ok := e.(*ast.BasicLit); ok && literal.Kind == token.STRING {
			if text, err := strconv.Unquote(literal.Value); err == nil && strings.Contains(text, " ") {
				return []string{text}
			}
		}
	}
	return nil
}
