package docs_test

import (
	"go/format"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/internal/testkit"
)

// On a fresh clone, a broken link often points to a file that was never added.
func TestLinksInTheDocumentsLeadSomewhere(t *testing.T) {
	testkit.Docs(t)
	link := regexp.MustCompile(`\]\(([^)#\s]*)(?:#([^)\s]*))?\)`)
	links := 0
	texts := documents(t)
	for path, text := range texts {
		for _, found := range link.FindAllStringSubmatch(text, -1) {
			file, anchor := found[1], found[2]
			if strings.Contains(file, "://") {
				continue
			}
			to := filepath.Join(filepath.Dir(path), file)
			if file == "" {
				to = path
			}
			links++
			if _, err := os.Stat(to); err != nil {
				t.Errorf("%s links to %s: %v", path, to, err)
			} else if anchor != "" && !slices.Contains(anchors(texts[to]), anchor) {
				t.Errorf("%s links to %s, which has no heading #%s", path, to, anchor)
			}
		}
	}
	require.NotZero(t, links)
}

// What a reader copies must compile, so each block of Go is also part of a file that does; a
// block that begins with a package clause is the whole file.
func TestGoInTheDocumentsIsCompiledCode(t *testing.T) {
	testkit.Docs(t)
	files := []string{"example_test.go", "storetest/example_test.go", "storetest/example_job_test.go", "schedule/example_test.go", "claims/example_test.go", "claims/example_queue_test.go", "claims/example_slots_test.go", "claims/example_faults_test.go", "claims/example_outage_test.go", "claims/canceled_test.go", "shards/example_test.go", "route/example_test.go", "witness/example_test.go"}
	for _, others := range []string{"examples/*/*.go", "*tenure/example_test.go", "stores/*/example_test.go"} { // some are modules of their own
		programs, err := filepath.Glob(others)
		require.NoError(t, err)
		files = append(files, programs...)
	}
	var compiled []string
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		compiled = append(compiled, "\n"+withoutIndents(string(text)))
	}

	block := regexp.MustCompile("(?ms)^```go\n(.*?)^```$")
	blocks := 0
	for path, text := range documents(t) {
		for _, found := range block.FindAllStringSubmatch(text, -1) {
			blocks++
			formatted, err := format.Source([]byte(found[1]))
			require.NoError(t, err, "in %s:\n%s", path, found[1])
			require.Equal(t, string(formatted), found[1], "in %s", path)
			if filepath.Dir(path) == "docs" && strings.HasPrefix(found[1], "package ") {
				continue // it is built and run: see programs_test.go
			}
			isIn := strings.Contains
			if strings.HasPrefix(found[1], "package ") {
				isIn = strings.HasSuffix
			}
			if !slices.ContainsFunc(compiled, func(file string) bool { return isIn(file, "\n"+withoutIndents(found[1])) }) {
				t.Errorf("no example has this block of %s:\n%s", path, found[1])
			}
		}
	}
	require.NotZero(t, blocks)
}

// The README is the first ten minutes; everything else has a page in docs.
func TestTheREADMEIsShortAndBeginsWithWhatANewcomerCopies(t *testing.T) {
	testkit.Docs(t)
	readme := documents(t)["README.md"]
	require.LessOrEqual(t, len(strings.Fields(strings.ReplaceAll(readme, "|", " "))), 1400, "words")
	first := strings.Join(strings.SplitN(readme, "\n", 26)[:25], "\n")
	for _, command := range []string{"git clone https://github.com/tenurelib/tenure", "\nmake failover", "\nmake test", "\ngo get github.com/tenurelib/tenure"} {
		require.Contains(t, first, command, "the first 25 lines")
	}
}

var diagrams = regexp.MustCompile("(?ms)^```mermaid$.*?^```$")

// limits has the most words that a page may have: what it had when it was last shortened. A new page needs two that go.
var limits = map[string]int{
	"docs/README.md":            300,
	"docs/agent-sessions.md":    740,
	"docs/alerts.md":            370,
	"docs/benchmarks.md":        650,
	"docs/choose.md":            610,
	"docs/claims.md":            1090,
	"docs/command.md":           1190,
	"docs/compatibility.md":     520,
	"docs/connections.md":       780,
	"docs/deploy.md":            880,
	"docs/failovers.md":         1100,
	"docs/faults-found.md":      1440,
	"docs/fencing.md":           1030,
	"docs/formats.md":           1000,
	"docs/guarantees.md":        870,
	"docs/kubernetes-leases.md": 590,
	"docs/maintenance.md":       1010,
	"docs/mysql.md":             955,
	"docs/operate.md":           950,
	"docs/operations.md":        4410,
	"docs/postgres.md":          910,
	"docs/protocol.md":          1590,
	"docs/queues.md":            1200,
	"docs/remote-workers.md":    930,
	"docs/routing.md":           950,
	"docs/schedules.md":         840,
	"docs/settings.md":          1000,
	"docs/shards.md":            940,
	"docs/sqlite.md":            630,
	"docs/start.md":             690,
	"docs/testing.md":           670,
	"docs/verification.md":      500,
	"docs/witness.md":           790,
}

func TestEachDocumentIsInTheIndexAndIsAPage(t *testing.T) {
	testkit.Docs(t)
	texts := documents(t)
	index := texts["docs/README.md"]
	require.Contains(t, texts["README.md"], "](docs/README.md)")
	pages, err := filepath.Glob("docs/*.md")
	require.NoError(t, err)
	for _, page := range pages {
		if page = filepath.ToSlash(page); page != "docs/README.md" && !strings.Contains(index, "]("+filepath.Base(page)+")") {
			t.Errorf("docs/README.md does not link to %s", page)
		}
		if words, most := len(strings.Fields(strings.ReplaceAll(diagrams.ReplaceAllString(texts[page], ""), "|", " "))), limits[page]; words > most {
			t.Errorf("%s has %d words, more than %d", page, words, most)
		}
	}
}

// Each fault on the page names the test that fails without the fix.
func TestTheTestsOfTheFaultsThatWereFoundExist(t *testing.T) {
	testkit.Docs(t)
	tests := map[string]bool{}
	require.NoError(t, filepath.WalkDir(".", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, found := range regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)`).FindAllStringSubmatch(string(text), -1) {
			tests[found[1]] = true
		}
		return err
	}))
	page := documents(t)["docs/faults-found.md"]
	named := regexp.MustCompile("`((?:Test|Fuzz)\\w+)` \\|").FindAllStringSubmatch(page, -1)
	require.Greater(t, len(named), 60)
	for _, found := range named {
		require.True(t, tests[found[1]], found[1])
	}
	faults := regexp.MustCompile(`(?m)^\|.* \| [0-9a-f]{7} \| .*\|$`).FindAllString(page, -1)
	require.Contains(t, page, "| **in total** | **"+strconv.Itoa(len(faults))+"** |", "the sum is that of the rows")
}

// An alert wakes an operator, who then looks for the page.
func TestEachAlertIsInTheDocuments(t *testing.T) {
	testkit.Docs(t)
	rules, err := os.ReadFile("oteltenure/alerts.yaml")
	require.NoError(t, err)
	page := documents(t)["docs/alerts.md"]
	alerts := regexp.MustCompile(`alert: (\w+)`).FindAllStringSubmatch(string(rules), -1)
	require.NotEmpty(t, alerts)
	for _, alert := range alerts {
		if !strings.Contains(page, "\n| `"+alert[1]+"` |") {
			t.Errorf("docs/alerts.md does not say what to do at %s", alert[1])
		}
	}
}

func TestTheExamplesOfFormatsAreWhatTheLibraryWrites(t *testing.T) {
	testkit.Docs(t)
	page := documents(t)["docs/formats.md"]
	var written []string
	for _, files := range []string{"*/testdata/*.golden", "*/*/testdata/*.golden", "testdata/*.golden"} {
		paths, err := filepath.Glob(files)
		require.NoError(t, err)
		for _, path := range paths {
			text, err := os.ReadFile(path)
			require.NoError(t, err)
			written = append(written, string(text))
			require.Contains(t, page, "](../"+filepath.ToSlash(path)+")", "the page names each file")
		}
	}
	examples := regexp.MustCompile("(?ms)^```[a-z]*\n(.*?)^```$").FindAllStringSubmatch(page, -1)
	require.NotEmpty(t, examples)
	for _, example := range examples {
		require.True(t, slices.ContainsFunc(written, func(text string) bool { return strings.Contains(text, example[1]) }), "not in a golden file:\n%s", example[1])
	}
}

// documents returns the text of each Markdown file, by its path.
func documents(t *testing.T) map[string]string {
	texts := map[string]string{}
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".md" {
			return err
		}
		text, err := os.ReadFile(path)
		texts[path] = string(text)
		return err
	})
	require.NoError(t, err)
	return texts
}

// anchors returns the names that GitHub's links to a document's headings have.
func anchors(text string) (names []string) {
	code := regexp.MustCompile("(?ms)^```.*?^```$")
	heading := regexp.MustCompile(`(?m)^#+ (.*)$`)
	notInNames := regexp.MustCompile(`[^\p{L}\p{N} _-]`)
	for _, found := range heading.FindAllStringSubmatch(code.ReplaceAllString(text, ""), -1) {
		name := notInNames.ReplaceAllString(strings.ToLower(found[1]), "")
		names = append(names, strings.ReplaceAll(name, " ", "-"))
	}
	return names
}

// withoutIndents returns a text as it reads at any depth.
func withoutIndents(text string) string {
	return regexp.MustCompile(`(?m)^[ \t]+`).ReplaceAllString(text, "")
}
