package main

import (
	"testing"
	"time"

	"github.com/tenurelib/tenure"
)

func TestOverlappingTermsOfOneLeaseAreFound(t *testing.T) {
	const s = time.Second
	term := func(replica, lease string, from, to time.Duration) event {
		return event{Kind: held, Replica: replica, Note: lease, From: from, At: to}
	}
	moved := &fault{kind: clockMoved, from: 1 * s, begun: 1 * s, ending: 20 * s, to: 20 * s}
	slowly := &fault{kind: clockMoved, from: 1 * s, begun: 2500 * time.Millisecond, ending: 20 * s, to: 20 * s}
	for name, test := range map[string]struct {
		events []event
		faults []*fault
		expiry tenure.ExpiryPolicy
		want   int
	}{
		"in turn":                    {[]event{term("a", "x", 1*s, 2*s), term("b", "x", 2*s, 3*s)}, nil, tenure.ExpiryStoreClock, 0},
		"of two leases":              {[]event{term("a", "x", 1*s, 3*s), term("b", "y", 2*s, 3*s)}, nil, tenure.ExpiryStoreClock, 0},
		"at the same time":           {[]event{term("a", "x", 1*s, 3*s), term("b", "x", 2*s, 4*s)}, nil, tenure.ExpiryStoreClock, 1},
		"one within another":         {[]event{term("a", "x", 1*s, 9*s), term("b", "x", 2*s, 3*s), term("c", "x", 4*s, 5*s)}, nil, tenure.ExpiryStoreClock, 2},
		"the clock was moved":        {[]event{term("a", "x", 1*s, 3*s), term("b", "x", 2*s, 4*s)}, []*fault{moved}, tenure.ExpiryStoreClock, 0},
		"it moved slowly":            {[]event{term("a", "x", 2*s, 4*s), term("b", "x", 3*s, 4*s)}, []*fault{slowly}, tenure.ExpiryStoreClock, 0},
		"with ExpiryObserved expiry": {[]event{term("a", "x", 1*s, 3*s), term("b", "x", 2*s, 4*s)}, []*fault{moved}, tenure.ExpiryObserved, 1},
		"the file was removed":       {[]event{term("a", "x", 1*s, 3*s), term("b", "x", 2*s, 4*s)}, []*fault{{kind: fileRemoved, from: 1 * s, to: 2 * s}}, tenure.ExpiryStoreClock, 0},
		"removed later":              {[]event{term("a", "x", 1*s, 3*s), term("b", "x", 2*s, 4*s)}, []*fault{{kind: fileRemoved, from: 5 * s, to: 6 * s}}, tenure.ExpiryStoreClock, 1},
		"moved before both":          {[]event{term("a", "x", 2*s, 4*s), term("b", "x", 3*s, 4*s)}, []*fault{moved}, tenure.ExpiryStoreClock, 1},
	} {
		r := &result{}
		r.checkHeld(&phase{ttl: ttl, expiry: test.expiry, record: &record{events: test.events, faults: test.faults}})
		if len(r.violations) != test.want {
			t.Errorf("%s: got %q, want %d", name, r.violations, test.want)
		}
	}
}

func TestAReportThatTheLedgerContradictsIsFound(t *testing.T) {
	const s = time.Second
	ledger := []entry{{kind: ledgerBegin, lease: "x", term: "1", token: 1, tx: "a"}, {kind: ledgerEnd, lease: "x", term: "1", tx: "b"}, {kind: ledgerBegin, lease: "y", term: "2", token: 2, tx: "b"}}
	stopped := []*fault{{kind: stoppedImmediate, from: 5 * s, to: 6 * s}}
	for name, test := range map[string]struct {
		told   event
		faults []*fault
		want   int
	}{
		"holds":                             {event{Kind: held, Note: "x", Term: "1", Token: 1}, nil, 0},
		"holds another lease":               {event{Kind: held, Note: "y", Term: "1", Token: 1}, nil, 1},
		"holds with another token":          {event{Kind: held, Note: "x", Term: "1", Token: 2}, nil, 1},
		"holds what was never written":      {event{Kind: held, Note: "x", Term: "3", Token: 3}, nil, 1},
		"released":                          {event{Kind: released, Note: "x", Term: "1"}, nil, 0},
		"released but not ended":            {event{Kind: released, Note: "y", Term: "2", At: 4 * s}, nil, 1},
		"... and the server was stopped":    {event{Kind: released, Note: "y", Term: "2", At: 4500 * time.Millisecond}, stopped, 0},
		"... in a crash without tombstones": {event{Kind: released, Note: "y", Term: "2", At: 4500 * time.Millisecond}, []*fault{{kind: tombstonesCrashed, from: 5 * s, to: 6 * s}}, 0},
		"... but stopped later":             {event{Kind: released, Note: "y", Term: "2", At: 3 * s}, stopped, 1},
		"lost":                              {event{Kind: notReleased, Note: "y", Term: "2"}, nil, 0},
		"lost after its release":            {event{Kind: notReleased, Note: "x", Term: "1"}, nil, 1},
	} {
		r := &result{}
		r.checkTold(&phase{record: &record{events: []event{test.told}, faults: test.faults}}, &audit{ledger: ledger})
		if len(r.violations) != test.want || r.together != 2 {
			t.Errorf("%s: got %q, want %d; %d writes together, want 2", name, r.violations, test.want, r.together)
		}
	}
}
