package main

import "testing"

func TestAFencedWriteOutsideItsTermIsFound(t *testing.T) {
	term := func(kind, term string, token int64) entry { return entry{kind: kind, term: term, token: token} }
	for name, test := range map[string]struct {
		ledger []entry
		want   int
	}{
		"in its term":        {[]entry{term(ledgerBegin, "a", 1), term(ledgerFenced, "a", 1), term(ledgerEnd, "a", 1), term(ledgerBegin, "b", 2), term(ledgerFenced, "b", 2)}, 0},
		"after the next":     {[]entry{term(ledgerBegin, "a", 1), term(ledgerBegin, "b", 2), term(ledgerFenced, "a", 1)}, 1},
		"after its end":      {[]entry{term(ledgerBegin, "a", 1), term(ledgerEnd, "a", 1), term(ledgerFenced, "a", 1)}, 1},
		"a token that falls": {[]entry{term(ledgerBegin, "a", 2), term(ledgerEnd, "a", 2), term(ledgerBegin, "b", 2)}, 1},
		"unfenced":           {[]entry{term(ledgerBegin, "a", 1), term(ledgerBegin, "b", 2), term(ledgerUnfenced, "a", 1)}, 0},
	} {
		r := &result{}
		r.checkLedger(test.ledger)
		if len(r.violations) != test.want {
			t.Errorf("%s: got %q, want %d", name, r.violations, test.want)
		}
	}
}
