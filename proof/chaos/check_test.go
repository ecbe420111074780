package main

import (
	"strconv"
	"testing"
	"time"

	"github.com/tenurelib/tenure"
)

func TestAFencedWriteOutsideItsTermIsFound(t *testing.T) {
	term := func(kind, term string, token int64) entry { return entry{kind: kind, term: term, token: token} }
	restored := func(term string) entry { return entry{kind: ledgerRestored, term: term} }
	for name, test := range map[string]struct {
		ledger []entry
		want   int
	}{
		"in its term":                            {[]entry{term(ledgerBegin, "a", 1), term(ledgerFenced, "a", 1), term(ledgerEnd, "a", 1), term(ledgerBegin, "b", 2), term(ledgerFenced, "b", 2)}, 0},
		"after the next began":                   {[]entry{term(ledgerBegin, "a", 1), term(ledgerBegin, "b", 2), term(ledgerFenced, "a", 1)}, 1},
		"after its end":                          {[]entry{term(ledgerBegin, "a", 1), term(ledgerEnd, "a", 1), term(ledgerFenced, "a", 1)}, 1},
		"a token that falls":                     {[]entry{term(ledgerBegin, "a", 2), term(ledgerEnd, "a", 2), term(ledgerBegin, "b", 2)}, 1},
		"a restored record is deleted":           {[]entry{term(ledgerBegin, "a", 1), term(ledgerBegin, "b", 2), restored("a"), term(ledgerEnd, "a", 1), term(ledgerBegin, "c", 3)}, 0},
		"another is deleted":                     {[]entry{term(ledgerBegin, "a", 1), term(ledgerBegin, "b", 2), restored("a"), term(ledgerEnd, "b", 2)}, 1},
		"a restored one is deleted too late":     {[]entry{term(ledgerBegin, "a", 1), restored("a"), term(ledgerBegin, "c", 3), term(ledgerEnd, "a", 1)}, 1},
		"after a snapshot was restored":          {[]entry{term(ledgerBegin, "a", 1), term(ledgerBegin, "b", 2), restored("a"), term(ledgerFenced, "b", 2)}, 1},
		"of a term that a snapshot brought back": {[]entry{term(ledgerBegin, "a", 1), term(ledgerBegin, "b", 2), restored("a"), term(ledgerFenced, "a", 1)}, 1},
		"unfenced":                               {[]entry{term(ledgerBegin, "a", 1), term(ledgerBegin, "b", 2), term(ledgerUnfenced, "a", 1)}, 0},
	} {
		r := &result{}
		r.checkLedger(test.ledger, nil)
		if len(r.violations) != test.want {
			t.Errorf("%s: got %q, want %d", name, r.violations, test.want)
		}
	}
}

func TestAnOverlapIsExcusedOnlyByAPauseOfThatTime(t *testing.T) {
	const ms = time.Millisecond
	first, second := span{"a", 1000 * ms, 3000 * ms}, span{"a", 3002 * ms, 8000 * ms}
	stop := func(s span) *fault { return &fault{kind: paused, target: s.replica, from: s.from, to: s.to} }
	for name, test := range map[string]struct {
		overlap span
		pauses  []span
		faults  []*fault
		want    string
	}{
		"no pause":                {span{"a", 2000 * ms, 2500 * ms}, nil, nil, ""},
		"of another":              {span{"b", 2000 * ms, 2500 * ms}, []span{first}, []*fault{stop(first)}, ""},
		"stopped":                 {span{"a", 2000 * ms, 3400 * ms}, []span{first}, []*fault{stop(first)}, excusePause},
		"stalled":                 {span{"a", 2000 * ms, 3400 * ms}, []span{first}, nil, excuseStall},
		"too long after":          {span{"a", 2000 * ms, 3500 * ms}, []span{first}, []*fault{stop(first)}, ""},
		"began before":            {span{"a", 900 * ms, 2500 * ms}, []span{first}, []*fault{stop(first)}, ""},
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

func TestALeaseWithoutAHolderAfterAFaultIsFound(t *testing.T) {
	const s = time.Second
	jobs := func(spans ...span) (jobs []job) {
		for _, span := range spans {
			jobs = append(jobs, job{span: span})
		}
		return jobs
	}
	cut := &fault{kind: "network cut", from: 9 * s, to: 10 * s, episode: 1}
	next := &fault{kind: "network cut", from: 12 * s, to: 13 * s, episode: 2}
	copied := &fault{kind: renewedByCopy, target: "term x", from: 10 * s, to: 10 * s, episode: 1}
	lost := event{Kind: notRenewed, Term: "z", At: 9500 * time.Millisecond}
	of := func(term string, from, to time.Duration) job {
		return job{span: span{from: from, to: to}, term: term}
	}
	soon, ends := &fault{kind: "network cut", from: 97 * s, to: 98 * s}, event{Kind: ended, At: 99 * s}
	stall := func(replica string) span { return span{replica, 11 * s, 12 * s} }
	for name, test := range map[string]struct {
		jobs   []job
		faults []*fault
		pauses []span
		want   int
	}{
		"the phase ends before":          {jobs(span{"a", 1 * s, 9 * s}), []*fault{soon}, nil, 0},
		"held on":                        {jobs(span{"a", 1 * s, 99 * s}), []*fault{cut}, nil, 0},
		"held soon":                      {jobs(span{"a", 1 * s, 9 * s}, span{"b", 12 * s, 99 * s}), []*fault{cut}, nil, 0},
		"held too late":                  {jobs(span{"a", 1 * s, 9 * s}, span{"b", 13 * s, 99 * s}), []*fault{cut}, nil, 1},
		"never held":                     {jobs(span{"a", 1 * s, 9 * s}), []*fault{cut}, nil, 1},
		"job ends, held soon":            {jobs(span{"a", 1 * s, 11 * s}, span{"b", 13 * s, 99 * s}), []*fault{cut}, nil, 0},
		"job ends, held too late":        {jobs(span{"a", 1 * s, 11 * s}, span{"b", 14 * s, 99 * s}), []*fault{cut}, nil, 1},
		"... but another fault came":     {jobs(span{"a", 1 * s, 11 * s}, span{"b", 14 * s, 99 * s}), []*fault{cut, next}, nil, 0},
		"the machine stalled":            {jobs(span{"a", 1 * s, 9 * s}, span{"b", 13 * s, 99 * s}), []*fault{cut}, []span{stall("a")}, 0},
		"a copy ends the term":           {[]job{of("x", 1*s, 11*s), of("y", 12*s, 99*s)}, []*fault{copied}, nil, 0},
		"a copy ends it too late":        {[]job{of("x", 1*s, 11*s), of("y", 13*s, 99*s)}, []*fault{copied}, nil, 1},
		"a copy does not end it":         {[]job{of("x", 1*s, 99*s)}, []*fault{copied}, nil, 1},
		"an answer was lost":             {[]job{of("z", 1*s, 99*s)}, []*fault{{kind: renewedByCopy, target: "term z", from: 10 * s, to: 10 * s}}, nil, 0},
		"a slow copy after a lost one":   {[]job{of("z", 1*s, 99*s)}, []*fault{{kind: renewedByCopy, target: "term z", from: 7 * s, to: 9 * s}}, nil, 0},
		"an answer may be lost":          {[]job{of("x", 1*s, 99*s)}, []*fault{copied, {kind: "network hangs", from: 9 * s, to: 10 * s, episode: 1}}, nil, 0},
		"simultaneous stalls count once": {jobs(span{"a", 1 * s, 9 * s}, span{"b", 14 * s, 99 * s}), []*fault{cut}, []span{stall("a"), stall("b")}, 1},
	} {
		r := &result{}
		r.checkRecoveries(&phase{ttl: 1500 * time.Millisecond, record: &record{events: []event{lost, ends}, faults: test.faults, pauses: test.pauses}}, test.jobs)
		if len(r.violations) != test.want {
			t.Errorf("%s: got %q, want %d", name, r.violations, test.want)
		}
	}
}

func TestAnUncommittedRenewalIsFound(t *testing.T) {
	const s = time.Second
	since := time.Duration(time.Now().UnixNano()) - monotonic()
	committed := entry{kind: ledgerRenewed, term: "a", note: strconv.FormatInt((since + 10*s).Milliseconds(), 10)}
	for name, test := range map[string]struct {
		term     string
		from, to time.Duration
		until    time.Duration
		want     int
	}{
		"committed":            {"a", 9 * s, 11 * s, 0, 0},
		"before":               {"a", 11 * s, 12 * s, 0, 1},
		"after":                {"a", 8 * s, 9 * s, 0, 1},
		"of another term":      {"b", 9 * s, 11 * s, 0, 1},
		"the file was removed": {"b", 9 * s, 11 * s, 10 * s, 0},
	} {
		r := &result{}
		told := event{Kind: renewed, Term: test.term, From: test.from, At: test.to}
		r.checkRenewed(&phase{record: &record{events: []event{told}}}, &audit{ledger: []entry{committed}, until: int64(test.until)})
		if len(r.violations) != test.want {
			t.Errorf("%s: got %q, want %d", name, r.violations, test.want)
		}
	}
}

func TestALastingSetUpErrorIsFound(t *testing.T) {
	const s = time.Second
	told := func(replica string, at time.Duration) event {
		return event{Kind: setUpError, Replica: replica, At: at}
	}
	dropped := &fault{kind: tombstonesSpoilt + "dropped", from: 5 * s, to: 6 * s}
	again := &fault{kind: tombstonesSpoilt + "dropped", from: 15 * s, to: 16 * s}
	for name, test := range map[string]struct {
		events []event
		faults []*fault
		want   int
	}{
		"without a fault":             {[]event{told("a", 4*s)}, []*fault{dropped}, 1},
		"noticed once":                {[]event{told("a", 6*s), told("a", 7*s), told("b", 8*s), told("b", 9*s)}, []*fault{dropped}, 0},
		"repeatedly":                  {[]event{told("a", 6*s), told("a", 8*s), told("a", 9*s)}, []*fault{dropped}, 1},
		"once per fault":              {[]event{told("a", 6*s), told("a", 16*s)}, []*fault{dropped, again}, 0},
		"with a slow network":         {[]event{told("a", 6*s), told("a", 8*s)}, []*fault{dropped, {kind: networkFault + "slow", from: 5 * s, to: 9 * s}}, 0},
		"while a stream was full":     {[]event{told("a", 6*s)}, []*fault{{kind: streamFull, from: 5 * s, to: 7 * s}}, 0},
		"long after that":             {[]event{told("a", 9*s)}, []*fault{{kind: streamDiskFull, from: 5 * s, to: 7 * s}}, 1},
		"after another kind of fault": {[]event{told("a", 6*s)}, []*fault{{kind: serverFull, from: 5 * s, to: 7 * s}}, 1},
	} {
		r := &result{}
		r.checkSetUp(&phase{record: &record{events: test.events, faults: test.faults}}, &audit{fit: true})
		if len(r.violations) != test.want {
			t.Errorf("%s: got %q, want %d", name, r.violations, test.want)
		}
	}
}

func TestATermThatEndsAlthoughItsConnectionsAreGoodIsFound(t *testing.T) {
	const s = time.Second
	full := func(target string) *fault { return &fault{kind: serverFull, target: target, from: 5 * s, to: 9 * s} }
	late := tenure.ErrDeadline.Error()
	for name, test := range map[string]struct {
		to     time.Duration
		cause  string
		faults []*fault
		pauses []span
		want   int
	}{
		"lost":                       {7 * s, late, []*fault{full("b")}, nil, 1},
		"resigned":                   {7 * s, tenure.ErrResigned.Error(), []*fault{full("b")}, nil, 0},
		"lost later":                 {10 * s, late, []*fault{full("b")}, nil, 0},
		"its connections were cut":   {7 * s, late, []*fault{full("b a")}, nil, 0},
		"it did not run":             {7 * s, late, []*fault{full("b")}, []span{{"a", 6 * s, 7 * s}}, 0},
		"another fault at that time": {7 * s, late, []*fault{full("b"), {kind: "network cut", from: 6 * s, to: 8 * s}}, nil, 0},
		"another fault right before": {7 * s, late, []*fault{full("b"), {kind: "network cut", from: 3 * s, to: 4500 * time.Millisecond, episode: 1}}, nil, 0},
		"another fault long before":  {7 * s, late, []*fault{full("b"), {kind: "network cut", from: 3 * s, to: 4 * s, episode: 1}}, nil, 1},
	} {
		r := &result{}
		p := &phase{ttl: 1500 * time.Millisecond, record: &record{faults: test.faults, pauses: test.pauses}}
		r.checkKept(p, []job{{span: span{"a", 1 * s, test.to}, cause: test.cause}})
		if len(r.violations) != test.want {
			t.Errorf("%s: got %q, want %d", name, r.violations, test.want)
		}
	}
}

func TestTwoFuncsOfAShardAreFound(t *testing.T) {
	const s = time.Second
	begins := func(replica, term string, at time.Duration) event {
		return event{Kind: claimBegun, Replica: replica, Term: term, Note: "actor-1", At: at}
	}
	ends := func(replica, term string, from, to, until time.Duration) event {
		return event{Kind: claimEnded, Replica: replica, Term: term, Note: "actor-1", From: from, At: to, Until: until}
	}
	stop := span{"a", 2 * s, 5 * s}
	for name, test := range map[string]struct {
		events []event
		pauses []span
		faults []*fault
		want   int
	}{
		"one after the other":             {[]event{begins("a", "x", 1*s), ends("a", "x", 1*s, 2*s, 3*s), begins("b", "y", 3*s)}, nil, nil, 0},
		"the first has not returned":      {[]event{begins("a", "x", 1*s), ends("a", "x", 1*s, 2*s, 4*s), begins("b", "y", 3*s)}, nil, nil, 1},
		"it runs again where it is":       {[]event{begins("a", "x", 1*s), ends("a", "x", 1*s, 2*s, 2*s), begins("a", "x", 3*s), ends("a", "x", 3*s, 4*s, 4*s)}, nil, nil, 0},
		"the first was killed":            {[]event{begins("a", "x", 1*s), {Kind: killed, Replica: "a", At: 2 * s}, begins("b", "y", 3*s)}, nil, nil, 0},
		"nobody has told of its end":      {[]event{begins("a", "x", 1*s), begins("b", "y", 3*s)}, nil, nil, 1},
		"the process of the first paused": {[]event{begins("a", "x", 1*s), ends("a", "x", 1*s, 2*s, 5*s), begins("b", "y", 4*s)}, []span{stop}, []*fault{{kind: paused, target: "a", from: 2 * s, to: 5 * s}}, 0},
	} {
		r := &result{overlaps: map[string]int{}, longest: map[string]time.Duration{}}
		p := &phase{ttl: 1500 * time.Millisecond, task: shareShards, record: newRecord()}
		for _, e := range test.events {
			p.record.add(e)
		}
		p.record.pauses, p.record.faults = test.pauses, test.faults
		for shard, runs := range p.record.claimFuncs() {
			r.checkFuncs(p, shard, runs)
		}
		if len(r.violations) != test.want {
			t.Errorf("%s: got %q, want %d", name, r.violations, test.want)
		}
	}
}
