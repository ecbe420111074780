package main

import (
	"testing"
	"time"
)

func TestATokenThatAFailoverGivesAgainIsFound(t *testing.T) {
	const s = time.Second
	of := func(replica string, token int64, from, to time.Duration) job {
		return job{span: span{replica, from, to}, term: replica, token: token}
	}
	lost := []span{{from: 10 * s, to: 12 * s}}
	for name, test := range map[string]struct {
		jobs   []job
		pauses []span
		lost   []span
		want   int
	}{
		"it rises":                     {[]job{of("a", 5, 1*s, 11*s), of("b", 6, 14*s, 20*s)}, nil, lost, 0},
		"it is repeated":               {[]job{of("a", 5, 1*s, 11*s), of("b", 5, 14*s, 20*s)}, nil, lost, 1},
		"it falls":                     {[]job{of("a", 5, 1*s, 11*s), of("b", 4, 14*s, 20*s)}, nil, lost, 1},
		"below one of long ago":        {[]job{of("a", 9, 1*s, 2*s), of("c", 5, 3*s, 11*s), of("b", 6, 14*s, 20*s)}, nil, lost, 2},
		"a job that began late":        {[]job{of("a", 5, 13*s, 15*s), of("b", 4, 14*s, 20*s)}, []span{{"b", 12 * s, 14 * s}}, lost, 0},
		"repeated by one that is late": {[]job{of("a", 5, 13*s, 15*s), of("b", 5, 14*s, 20*s)}, []span{{"b", 12 * s, 14 * s}}, lost, 1},
		"nothing was lost":             {[]job{of("a", 5, 1*s, 11*s), of("b", 5, 14*s, 20*s)}, nil, nil, 0}, // the ledger shows it
	} {
		r := &result{}
		r.checkTokens(&phase{ttl: s, record: &record{pauses: test.pauses}}, &audit{lost: test.lost}, test.jobs)
		if len(r.violations) != test.want {
			t.Errorf("%s: got %q, want %d", name, r.violations, test.want)
		}
	}
}

func TestATermThatIsWrittenAgainWrongfullyIsFound(t *testing.T) {
	tokens := map[string]int64{"a": 1, "b": 3, "c": 20}
	row := func(kind, term string, token int64) entry { return entry{kind: kind, term: term, token: token} }
	for name, test := range map[string]struct {
		ledger []entry
		want   int
	}{
		"its begin was lost":                {[]entry{row(ledgerBegin, "a", 1), row(ledgerBegin, "b", 10), row(ledgerFenced, "b", 3), row(ledgerBegin, "c", 20)}, 0},
		"a fenced write under another term": {[]entry{row(ledgerBegin, "a", 1), row(ledgerBegin, "b", 10), row(ledgerFenced, "a", 1)}, 1},
		"under its version":                 {[]entry{row(ledgerBegin, "a", 1), row(ledgerBegin, "b", 10), row(ledgerFenced, "b", 10)}, 1},
		"over a later term":                 {[]entry{row(ledgerBegin, "a", 1), row(ledgerBegin, "c", 20), row(ledgerBegin, "b", 30)}, 1},
		"the next has a version it had":     {[]entry{row(ledgerBegin, "b", 25), row(ledgerBegin, "c", 20)}, 1},
	} {
		r := &result{}
		r.checkLedger(test.ledger, tokens)
		if len(r.violations) != test.want {
			t.Errorf("%s: got %q, want %d", name, r.violations, test.want)
		}
	}
}

func TestOnlyWhatAFailoverMayHaveLostIsExcused(t *testing.T) {
	const s = time.Second
	lost := []span{{from: 10 * s, to: 12 * s}}
	for name, test := range map[string]struct {
		at     time.Duration
		pauses []span
		times  int
		want   int
	}{
		"before":                    {9 * s, nil, 0, 1},
		"meanwhile":                 {11 * s, nil, 0, 0},
		"after":                     {13 * s, nil, 0, 1},
		"after, but it did not run": {13 * s, []span{{"a", 11 * s, 13 * s}}, 0, 0},
		"another did not run":       {13 * s, []span{{"b", 11 * s, 13 * s}}, 0, 1},
		"written twice":             {11 * s, nil, 2, 1},
	} {
		told := event{At: test.at, Replica: "a", Kind: acknowledge, Note: "fenced x"}
		told2 := event{At: test.at, Replica: "a", Kind: renewed, From: test.at - s/10, Term: "t"}
		p := &phase{ttl: s, record: &record{events: []event{told, told2}, pauses: test.pauses}}
		a := &audit{lost: lost}
		for range test.times {
			a.ledger = append(a.ledger, entry{kind: ledgerFenced, note: "x"})
		}
		r := &result{}
		r.checkAcknowledged(p, a)
		if len(r.violations) != test.want {
			t.Errorf("%s: got %q, want %d", name, r.violations, test.want)
		}
		r = &result{}
		r.checkRenewed(p, a)
		if want := test.want; test.times == 0 && len(r.violations) != want {
			t.Errorf("%s: renewals: got %q, want %d", name, r.violations, want)
		}
	}
}
