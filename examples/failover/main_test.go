package main

import (
	"bytes"
	"flag"
	"os"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
)

var draw = flag.Bool("draw", false, "draw docs/failover.svg")

// In virtual time each run is the same, apart from the tokens and a few milliseconds.
func TestTheWorkNeverOverlapsAndTheDocumentsShowIt(t *testing.T) {
	var printed bytes.Buffer
	var drawn []byte
	synctest.Test(t, func(t *testing.T) {
		timeline := newTimeline(&printed)
		if err := run(t.Context(), timeline); err != nil {
			t.Fatal(err)
		}
		drawn = timeline.svg()
	})

	const picture = "../../docs/failover.svg"
	if *draw {
		if err := os.WriteFile(picture, drawn, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if shown, err := os.ReadFile(picture); err != nil || !bytes.Equal(shown, drawn) {
		t.Errorf("%s is not what the example draws (%v): go test ./examples/failover -draw", picture, err)
	}

	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	number := regexp.MustCompile(`\.\d+s|\d{6,}`)
	lines := number.ReplaceAllString(printed.String(), "N")
	if first := strings.Join(strings.SplitAfter(lines, "\n")[:8], ""); !strings.Contains(number.ReplaceAllString(string(readme), "N"), first) {
		t.Errorf("README.md does not show the first lines that the example prints:\n%s", first)
	}
}
