// Package golden compares what the library stores, sends and prints with files of the repository,
// which docs/formats.md explains. It is for the tests of this repository, and makes no promise of
// compatibility.
package golden

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var update = flag.Bool("golden.update", false, "write the golden files instead of comparing with them")

// Compare fails a test unless a text is that of testdata/NAME.golden.
func Compare(t testing.TB, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name+".golden")
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("a format has changed that other programs and other versions rely on, see docs/formats.md.\n"+
			"If it may change, repeat this with -run '^%s$' -golden.update, and change the document too.\n%s:\n%s\nnow:\n%s", t.Name(), path, want, got)
	}
}

// JSON returns values in JSON, each on many lines.
func JSON(t testing.TB, values ...any) string {
	t.Helper()
	var all strings.Builder
	for _, v := range values {
		text, err := json.MarshalIndent(v, "", "  ")
		if err != nil {
			t.Fatal(err)
		}
		all.Write(append(text, '\n'))
	}
	return all.String()
}
