package main

import (
	"strings"
	"testing"
	"time"
)

// The safe scenarios are explored only in part: go run ./proof/model goes further.
func TestEachRuleThatIsLeftOutIsMissed(t *testing.T) {
	for _, sc := range scenarios {
		t.Run(sc.name, func(t *testing.T) {
			states := 5_000
			if !strings.HasPrefix(sc.name, "safe/") {
				states = 2_000_000
			}
			if f, ok := sc.explore(states); !ok {
				t.Errorf("after %d states: %q\n%s", f.states, f.bad, strings.Join(f.story, "\n"))
			}
		})
	}
}

func TestNothingBreaksUnderAllFaultsAtOnce(t *testing.T) {
	if f := everything.model().walk(2 * time.Second); f.bad != "" {
		t.Errorf("%q\n%s", f.bad, strings.Join(f.story, "\n"))
	}
}
