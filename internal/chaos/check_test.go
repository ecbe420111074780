package main

import (
	"testing"
	"time"
)

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

func TestOnlyAPauseExcusesAnOverlapAndForNoLonger(t *testing.T) {
	const ms = time.Millisecond
	first, second := span{"a", 1000 * ms, 3000 * ms}, span{"a", 3002 * ms, 8000 * ms}
	stop := func(s span) *fault { return &fault{kind: "pause", target: s.replica, from: s.from, to: s.to} }
	for name, test := range map[string]struct {
		overlap span
		pauses  []span
		faults  []*fault
		want    string
	}{
		"no pause":                {span{"a", 2000 * ms, 2500 * ms}, nil, nil, ""},
		"another's":               {span{"b", 2000 * ms, 2500 * ms}, []span{first}, []*fault{stop(first)}, ""},
		"stopped":                 {span{"a", 2000 * ms, 3400 * ms}, []span{first}, []*fault{stop(first)}, excusePause},
		"stalled":                 {span{"a", 2000 * ms, 3400 * ms}, []span{first}, nil, excuseStall},
		"too long after":          {span{"a", 2000 * ms, 3500 * ms}, []span{first}, []*fault{stop(first)}, ""},
		"begun before":            {span{"a", 900 * ms, 2500 * ms}, []span{first}, []*fault{stop(first)}, ""},
		"stopped again":           {span{"a", 2000 * ms, 8400 * ms}, []span{second, first}, []*fault{stop(first), stop(second)}, excusePause},
		"stopped and stalled":     {span{"a", 2000 * ms, 8400 * ms}, []span{first, second}, []*fault{stop(first)}, excuseStall},
		"stalled again and again": {span{"a", 2000 * ms, 8400 * ms}, []span{first, second}, nil, ""},
	} {
		p := &phase{ttl: 1500 * ms, record: &record{pauses: test.pauses, faults: test.faults}}
		if got := p.excuse(0, test.overlap); got != test.want {
			t.Errorf("%s: got %q, want %q", name, got, test.want)
		}
	}
}

func TestALeaseThatNobodyHoldsAfterAFaultIsFound(t *testing.T) {
	const s = time.Second
	jobs := func(spans ...span) (jobs []job) {
		for _, span := range spans {
			jobs = append(jobs, job{span: span})
		}
		return jobs
	}
	cut := &fault{kind: "network cut", from: 9 * s, to: 10 * s, episode: 1}
	next := &fault{kind: "network cut", from: 12 * s, to: 13 * s, episode: 2}
	stall := func(replica string) span { return span{replica, 11 * s, 12 * s} }
	for name, test := range map[string]struct {
		jobs   []job
		faults []*fault
		pauses []span
		want   int
	}{
		"held on":                     {jobs(span{"a", 1 * s, 99 * s}), []*fault{cut}, nil, 0},
		"held soon":                   {jobs(span{"a", 1 * s, 9 * s}, span{"b", 12 * s, 99 * s}), []*fault{cut}, nil, 0},
		"held too late":               {jobs(span{"a", 1 * s, 9 * s}, span{"b", 13 * s, 99 * s}), []*fault{cut}, nil, 1},
		"never":                       {jobs(span{"a", 1 * s, 9 * s}), []*fault{cut}, nil, 1},
		"ends for it, held soon":      {jobs(span{"a", 1 * s, 11 * s}, span{"b", 13 * s, 99 * s}), []*fault{cut}, nil, 0},
		"ends for it, held too late":  {jobs(span{"a", 1 * s, 11 * s}, span{"b", 14 * s, 99 * s}), []*fault{cut}, nil, 1},
		"but another fault came":      {jobs(span{"a", 1 * s, 11 * s}, span{"b", 14 * s, 99 * s}), []*fault{cut, next}, nil, 0},
		"the machine stalled":         {jobs(span{"a", 1 * s, 9 * s}, span{"b", 13 * s, 99 * s}), []*fault{cut}, []span{stall("a")}, 0},
		"all at once is not for long": {jobs(span{"a", 1 * s, 9 * s}, span{"b", 14 * s, 99 * s}), []*fault{cut}, []span{stall("a"), stall("b")}, 1},
	} {
		r := &result{}
		r.checkRecoveries(&phase{ttl: 1500 * time.Millisecond, record: &record{faults: test.faults, pauses: test.pauses}}, test.jobs)
		if len(r.violations) != test.want {
			t.Errorf("%s: got %q, want %d", name, r.violations, test.want)
		}
	}
}
