package main

import (
	"testing"
	"time"

	"github.com/tenurelib/tenure"
)

func TestTwoTermsOfOneLeaseAtATimeAreFound(t *testing.T) {
	const s = time.Second
	term := func(replica, lease string, from, to time.Duration) event {
		return event{Kind: held, Replica: replica, Note: lease, From: from, At: to}
	}
	moved := &fault{kind: clockMoved, from: 1 * s, to: 20 * s}
	for name, test := range map[string]struct {
		events []event
		faults []*fault
		expiry tenure.ExpiryPolicy
		want   int
	}{
		"by turns":            {[]event{term("a", "x", 1*s, 2*s), term("b", "x", 2*s, 3*s)}, nil, tenure.StoreClock, 0},
		"of two leases":       {[]event{term("a", "x", 1*s, 3*s), term("b", "y", 2*s, 3*s)}, nil, tenure.StoreClock, 0},
		"at a time":           {[]event{term("a", "x", 1*s, 3*s), term("b", "x", 2*s, 4*s)}, nil, tenure.StoreClock, 1},
		"one within another":  {[]event{term("a", "x", 1*s, 9*s), term("b", "x", 2*s, 3*s), term("c", "x", 4*s, 5*s)}, nil, tenure.StoreClock, 2},
		"the clock was moved": {[]event{term("a", "x", 1*s, 3*s), term("b", "x", 2*s, 4*s)}, []*fault{moved}, tenure.StoreClock, 0},
		"and nobody cares":    {[]event{term("a", "x", 1*s, 3*s), term("b", "x", 2*s, 4*s)}, []*fault{moved}, tenure.Observed, 1},
	} {
		r := &result{}
		r.checkCrowd(&phase{ttl: ttl, expiry: test.expiry, record: &record{events: test.events, faults: test.faults}}, &audit{})
		if len(r.violations) != test.want {
			t.Errorf("%s: got %q, want %d", name, r.violations, test.want)
		}
	}
}

func TestTermsThatBeganTogetherAreCounted(t *testing.T) {
	r := &result{}
	r.countTogether([]entry{{kind: ledgerBegin, tx: "1"}, {kind: ledgerFenced, tx: "1"}, {kind: ledgerBegin, tx: "2"}, {kind: ledgerBegin, tx: "2"}})
	if r.together != 2 {
		t.Errorf("got %d, want 2", r.together)
	}
}
