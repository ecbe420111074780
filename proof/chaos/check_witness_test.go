package main

import (
	"testing"
	"time"
)

func TestWitnessesThatReleaseTooEarlyOrNotAtAllAreReported(t *testing.T) {
	const s = time.Second
	begins := func(replica, term string, at time.Duration, note string) event {
		return event{Kind: jobStarted, Replica: replica, Term: term, At: at, Note: note}
	}
	dies := event{Kind: killed, Replica: "a", At: 10 * s}
	for name, test := range map[string]struct {
		events []event
		also   string // another fault at the time
		want   int
	}{
		"it is released":                 {[]event{begins("a", "x", 1*s, ""), dies, begins("b", "y", 10*s+s/10, "")}, "", 0},
		"it expires":                     {[]event{begins("a", "x", 1*s, ""), dies, begins("b", "y", 14*s, "")}, "", 1},
		"it expires as the server hangs": {[]event{begins("a", "x", 1*s, ""), dies, begins("b", "y", 14*s, "")}, "network hangs", 0},
		"it is released too early":       {[]event{begins("a", "x", 1*s, ""), dies, begins("b", "y", 10*s+s/10, notFree)}, "", 1},
		"it has expired while a runs on": {[]event{begins("a", "x", 1*s, ""), begins("b", "y", 9*s, notFree), {Kind: jobStopped, Replica: "a", Term: "x", At: 9*s + s/2}}, "", 0},
		"the record names no witness":    {[]event{begins("a", "x", 1*s, notWitnessed)}, "", 1},
	} {
		r := &result{}
		p := &phase{ttl: 6 * s, task: useWitness, record: newRecord()}
		for _, e := range test.events {
			p.record.add(e)
		}
		p.record.faults = []*fault{{kind: killedAlone, target: "a", from: 10 * s, begun: 11 * s, to: 10 * s}}
		if test.also != "" {
			p.record.faults = append(p.record.faults, &fault{kind: test.also, from: 10 * s, begun: 10 * s, to: 12 * s})
		}
		if r.checkWitnessed(p, p.record.jobs()); len(r.violations) != test.want {
			t.Errorf("%s: got %q, want %d", name, r.violations, test.want)
		}
	}
}
