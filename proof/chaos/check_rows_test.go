package main

import (
	"strings"
	"testing"
)

func TestWhatIsWrongWithARowIsFound(t *testing.T) {
	entryOf := func(line string) entry { // kind, claim, token, note
		f := strings.Fields(line)
		e := entry{kind: "row " + f[0], term: f[1] + "." + f[2] + ".7", token: int64(f[2][0] - '0'), tx: f[1] + f[2]}
		if len(f) > 3 {
			e.note = f[3]
		}
		return e
	}
	for name, test := range map[string]struct {
		ledger string
		want   int
	}{
		"finished":                           {"begin a 1 1; done a 1; effect a 1", 0},
		"finished, in another order":         {"begin a 1 1; effect a 1; done a 1", 0},
		"released, and finished":             {"begin a 1 1; free a 1; begin b 2 2; done b 2; effect b 2", 0},
		"a late effect":                      {"begin a 1 1; free a 1; begin b 2 2; done b 2; effect b 2; effect a 1", 1},
		"a late effect alone":                {"begin a 1 1; free a 1; effect a 1", 1},
		"twice":                              {"begin a 1 1; done a 1; effect a 1; effect a 1", 1},
		"no effect":                          {"begin a 1 1; done a 1", 1},
		"taken from its owner":               {"begin a 1 1; begin b 2 2; done b 2; effect b 2", 1},
		"taken after it was done":            {"begin a 1 1; done a 1; effect a 1; begin b 2 2", 1},
		"a token that does not rise":         {"begin a 2 1; free a 2; begin b 2 2", 1},
		"an attempt that was not counted":    {"begin a 1 1; free a 1; begin b 2 1", 1},
		"an attempt that was counted twice":  {"begin a 1 2", 1},
		"freed by a claim that is not it":    {"begin a 1 1; free b 2", 1},
		"finished by a claim that is not it": {"begin a 1 1; done b 2; effect b 2", 1},
	} {
		var ledger []entry
		for line := range strings.SplitSeq(test.ledger, "; ") {
			ledger = append(ledger, entryOf(line))
		}
		r := &result{}
		r.checkRowLedger(ledger)
		if len(r.violations) != test.want {
			t.Errorf("%s: got %q, want %d", name, r.violations, test.want)
		}
	}
}
