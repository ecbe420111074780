package main

import (
	"strings"
	"testing"
	"time"

	"github.com/tenurelib/tenure/internal/testkit"
)

// The safe scenarios are explored only in part: go -C proof run ./model goes further.
func TestEachRuleThatIsLeftOutIsMissed(t *testing.T) {
	testkit.Slow(t)
	for _, sc := range scenarios() {
		t.Run(sc.name, func(t *testing.T) {
			states := 5_000
			if !strings.Contains(sc.name, "/safe/") {
				states = 2_000_000
			}
			if f := sc.explore(states); !sc.ok(f) {
				t.Errorf("after %d states: %q\n%s", f.states, f.bad, strings.Join(f.story, "\n"))
			}
		})
	}
}

func TestNothingBreaksUnderAllFaultsAtOnce(t *testing.T) {
	for _, w := range walks {
		if f := w.walk(time.Second); f.bad != "" {
			t.Errorf("%s: %q\n%s", w.name, f.bad, strings.Join(f.story, "\n"))
		}
	}
}
