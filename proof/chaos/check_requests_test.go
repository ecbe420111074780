package main

import (
	"testing"
	"time"
)

func TestABrokenPromiseOfARequestIsFound(t *testing.T) {
	const ms = time.Millisecond
	ask := func(id, outcome string, token int64, number int, from, to time.Duration) request {
		return request{id: id, tenant: tenant(1), outcome: outcome, token: token, number: number, from: from, to: to}
	}
	again := ask("a", answered, 1, 2, 0, 1)
	again.idempotent = true
	fence := func(session, note string) entry {
		return entry{kind: ledgerClaimFenced, term: session + ".1." + tenant(1), note: note}
	}
	for name, test := range map[string]struct {
		asked  []request
		runs   map[string][]int64
		fault  fault
		pauses []span
		ledger []entry
		want   int
	}{
		"answered":                      {asked: []request{ask("a", answered, 1, 1, 0, 1)}, runs: map[string][]int64{"a": {1}}},
		"answered without a run":        {asked: []request{ask("a", answered, 1, 1, 0, 1)}, want: 1},
		"answered, and ran twice":       {asked: []request{ask("a", answered, 1, 1, 0, 1)}, runs: map[string][]int64{"a": {1, 1}}, want: 1},
		"idempotent, and ran twice":     {asked: []request{again}, runs: map[string][]int64{"a": {1, 1}}},
		"answered under another token":  {asked: []request{ask("a", answered, 1, 1, 0, 1)}, runs: map[string][]int64{"a": {2}}, want: 1},
		"refused":                       {asked: []request{ask("a", refused, 0, 0, 0, 1)}},
		"refused, and ran":              {asked: []request{ask("a", refused, 0, 0, 0, 1)}, runs: map[string][]int64{"a": {1}}, want: 1},
		"ran, and nobody asked":         {runs: map[string][]int64{"a": {1}}, want: 1},
		"unknown at a kill":             {asked: []request{ask("a", unknown, 0, 0, 0, 1)}, fault: fault{kind: "kill -9"}},
		"unknown, ran, at a kill":       {asked: []request{ask("a", unknown, 0, 0, 0, 1)}, runs: map[string][]int64{"a": {1}}, fault: fault{kind: "kill -9"}},
		"unknown, ran twice, at a kill": {asked: []request{ask("a", unknown, 0, 0, 0, 1)}, runs: map[string][]int64{"a": {1, 1}}, fault: fault{kind: "kill -9"}, want: 1},
		"unknown when a process stalls": {asked: []request{ask("a", unknown, 0, 0, 5, 6)}, fault: fault{from: 10}, pauses: []span{{"a", 4, 5}}},
		"unknown without a fault":       {asked: []request{ask("a", unknown, 0, 0, 5, 6)}, fault: fault{from: 10}, want: 1},
		"unknown long after a kill":     {asked: []request{ask("a", unknown, 0, 0, 5000*ms, 5001*ms)}, fault: fault{kind: "kill -9"}, want: 1},
		"unknown at a shutdown":         {asked: []request{ask("a", unknown, 0, 0, 0, 1)}, fault: fault{kind: inOrder}, want: 1},
		"unknown at a handover":         {asked: []request{ask("a", unknown, 0, 0, 0, 1)}, fault: fault{kind: handedOver}, want: 1},
		"in order": {asked: []request{ask("b", answered, 2, 4, 3, 4), ask("a", answered, 1, 3, 0, 1)},
			runs: map[string][]int64{"a": {1}, "b": {2}}},
		"at the same time": {asked: []request{ask("a", answered, 2, 4, 0, 4), ask("b", answered, 1, 3, 3, 5)},
			runs: map[string][]int64{"a": {2}, "b": {1}}},
		"a token falls": {asked: []request{ask("a", answered, 2, 0, 0, 1), ask("b", answered, 1, 9, 3, 4)},
			runs: map[string][]int64{"a": {2}, "b": {1}}, want: 1},
		"a token falls after a long request": {asked: []request{ask("a", answered, 2, 0, 0, 1), ask("c", answered, 2, 0, 0, 8), ask("b", answered, 1, 9, 3, 4)},
			runs: map[string][]int64{"a": {2}, "b": {1}, "c": {2}}, want: 1},
		"a number falls": {asked: []request{ask("a", answered, 1, 4, 0, 1), ask("b", answered, 1, 3, 3, 4)},
			runs: map[string][]int64{"a": {1}, "b": {1}}, want: 1},
		"a number twice": {asked: []request{ask("a", answered, 1, 4, 0, 1), ask("b", answered, 1, 4, 3, 4)},
			runs: map[string][]int64{"a": {1}, "b": {1}}, want: 1},
		"numbers rise":                   {ledger: []entry{fence("s", "000000009 a"), fence("t", "000000010 b")}},
		"a number is committed twice":    {ledger: []entry{fence("s", "000000009 a"), fence("t", "000000009 a")}, want: 1},
		"a late write of the same owner": {ledger: []entry{fence("s", "000000010 b"), fence("s", "000000009 a"), fence("t", "000000011 c")}},
		"a number goes back":             {ledger: []entry{fence("s", "000000009 a"), fence("s", "000000010 b"), fence("t", "000000010 c")}, want: 1},
	} {
		rec := &record{runs: test.runs, faults: []*fault{&test.fault}, pauses: test.pauses}
		r := &result{}
		r.checkRequests(&phase{ttl: ttl, record: rec, doors: &doors{asked: test.asked}}, &audit{ledger: test.ledger})
		if len(r.violations) != test.want {
			t.Errorf("%s: got %q, want %d", name, r.violations, test.want)
		}
	}
}
