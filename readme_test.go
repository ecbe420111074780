package tenure_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// On a fresh clone a link that leads nowhere is one to a file that was never added.
func TestLinksInTheDocumentsLeadSomewhere(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)#]+)[^)]*\)`)
	links := 0
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".md" {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, found := range link.FindAllStringSubmatch(string(text), -1) {
			if strings.Contains(found[1], "://") {
				continue
			}
			to := filepath.Join(filepath.Dir(path), found[1])
			if _, err := os.Stat(filepath.Dir(to)); err != nil {
				continue // a module of its own, which does not come with this one
			}
			links++
			if _, err := os.Stat(to); err != nil {
				t.Errorf("%s links to %s: %v", path, found[1], err)
			}
		}
		return nil
	})
	wantErr(t, err, nil)
	if links == 0 {
		t.Error("no link was found")
	}
}
