package main

import "fmt"

// This model is of one lease over failovers: servers of which one is promoted although it lacks what the old primary
// acknowledged last (docs/protocol.md, F1 to F4). Package lease has the rules within a lineage; here they are
// simpler, and without handovers. Time is in ticks. A server's clock has clk units in a tick, and a version is at least
// that clock.

// failoverRules are the rules of the protocol and the faults of a scenario.
type failoverRules struct {
	processes, servers int
	failoverFaults
	behind       int32 // by how much the clock of the second server is
	ahead        int32 // by how much the first version is ahead of the clocks
	longTTL      bool  // the first process has a TTL that is twice as long as the others'
	oldGoesOn    bool  // the old primary accepts writes after the new one is marked
	observed     bool  // a process waits from when it has first seen a mark
	olderLibrary bool  // the last process knows no lineages
	without      withoutFailover
}

// withoutFailover are rules, each left out.
type withoutFailover struct {
	wait, waitForMissing, waitForOld bool
	waitFromMark                     bool // but from the record's age
	beginNames, renewNames           bool // the server
	recovery                         bool // a server in recovery tells nothing
	markAge                          bool // a process that is new goes by it
	start                            bool // what a process knows holds for a start, not for a timeline
	aboveOwn                         bool // what is written again is above all versions of its term
	validVouches                     bool // a term that is over proves nothing
	requestProves                    bool // a request proves nothing
	fenceNames                       bool // the server
}

// failoverFaults are how often each may still happen.
type failoverFaults struct {
	slow, strays, crashes, drifts, promotions, restarts, rejoins, asks, begins int32
}

type (
	failoverRecord struct {
		holder, term, version int32 // holder 0: there is none, or it was released
		token                 int32 // of the term
		ttl, mark, renewed    int32
	}
	failoverServer struct {
		role, lineage, started int32
		marked, mark, markedAt int32 // the lineage that the mark names
		record                 failoverRecord
	}
	failoverCall struct {
		kind                    callKind
		ran, did                bool
		server, ranOn, mark     int32 // the server's start that it names, and the mark that its sender knows
		term, token, ttl, sent  int32
		expects, above, version int32 // expects 0: there must be no record; of a mark: the mark before
	}
	failoverProcess struct {
		term, over, token, version, end int32
		server, mark, settled           int32 // which start it knows, and until when records of older lineages have to wait
		answered                        int32 // the start on which the last answered write of the term, or of the one before, was
		call                            failoverCall
	}
	failoverState struct {
		now       int32
		servers   [3]failoverServer
		processes [most]failoverProcess
		stray     failoverCall
		terms     int32
		marks     int32
		greatest  int32 // token
		failoverFaults
	}
)

// The roles of a server.
const (
	standby = iota
	primary
	dead
)

type callKind int32

const (
	callBegin callKind = 1 + iota
	callRenew
	callReassert
	callRelease
	callMark
)

func (k callKind) String() string {
	return [...]string{"", "begin", "renewal", "re-assert", "release", "mark"}[k]
}

func (r *failoverRules) clock(s *failoverState, i int) int32 {
	if i == 1 {
		return s.now - r.behind
	}
	return s.now
}

// start names what a statement is compared with: a start of a server.
func (r *failoverRules) start(s *failoverState, i int) int32 {
	if r.without.start {
		return 100 + s.servers[i].lineage
	}
	return int32(1+i) + 3*s.servers[i].started
}

func (r *failoverRules) ttl(k int) int32 {
	if r.longTTL && k == 0 {
		return 2 * leaseIs
	}
	return leaseIs
}

func (r *failoverRules) knowsNoLineages(k int) bool { return r.olderLibrary && k == r.processes-1 }

func (s *failoverState) trusts(k int) bool {
	p := &s.processes[k]
	return p.term != 0 && s.now < p.end
}

// ends ends a term. Nothing remains of it but its name.
func (p *failoverProcess) ends() {
	p.over, p.term, p.end, p.token, p.version = p.term, 0, 0, 0, 0
}

// run runs a statement on a server, which is a primary.
func (r *failoverRules) run(s *failoverState, c *failoverCall, i int) {
	v := &s.servers[i]
	c.ran, c.ranOn = true, r.start(s, i)
	named := !(c.kind == callBegin && r.without.beginNames || c.kind == callRenew && r.without.renewNames)
	if c.server != 0 && c.server != c.ranOn && named { // F1
		return
	}
	now := r.clock(s, i)
	next := max(v.record.version+1, now*clk, c.above)
	held := failoverRecord{1, c.term, next, c.token, c.ttl, c.mark, now}
	if c.kind == callBegin {
		held.token = next
	}
	is := v.record.holder != 0 && v.record.version == c.expects
	switch c.kind {
	case callBegin, callReassert:
		if !is && (c.expects != 0 || v.record.holder != 0) {
			return
		}
		if c.kind == callReassert && c.expects == 0 && v.record.version >= c.above && c.above > 0 {
			return // another term has been there, and has been released
		}
		v.record = held
	case callRenew:
		if !is {
			return
		}
		v.record = held
	case callRelease:
		if !is {
			return
		}
		v.record = failoverRecord{version: next, mark: c.mark}
	case callMark:
		if v.mark != c.expects {
			return
		}
		s.marks++
		v.marked, v.mark, v.markedAt = v.lineage, s.marks, now
		for j := range s.servers[:r.servers] {
			if j != i && s.servers[j].role == primary && !r.oldGoesOn {
				s.servers[j].role = dead
			}
		}
	}
	c.did, c.version = true, next
}

// late reports whether a server accepts a fenced write of a term after a later one has begun. The holder of the term may
// be paused, so it can write at any time.
func (r *failoverRules) late(s *failoverState) bool {
	for i, v := range s.servers[:r.servers] {
		if v.role != primary || v.record.holder == 0 || v.record.token >= s.greatest {
			continue
		}
		for k := range r.processes {
			p := &s.processes[k]
			isOf := v.record.term == p.term || p.term == 0 && v.record.term == p.over
			if isOf && (p.answered == r.start(s, i) || r.without.fenceNames) { // F4
				return true
			}
		}
	}
	return false
}

// hear gives process k the answer to its statement. It returns what is violated.
func (r *failoverRules) hear(s *failoverState, k int) (bad string) {
	p := &s.processes[k]
	c := p.call
	p.call = failoverCall{}
	if !c.did {
		if c.server != 0 && c.ranOn != c.server {
			p.server = 0 // it has to look
		}
		return ""
	}
	end := c.sent + c.ttl - margin
	switch c.kind {
	case callBegin:
		if s.now >= end { // a late yes is a no
			return ""
		}
		p.term, p.token, p.version, p.end, p.answered = c.term, c.version, c.version, end, c.ranOn
		if c.version <= s.greatest {
			bad = fmt.Sprintf("the token of P%d's term is not above that of an earlier one", k+1)
		}
		s.greatest = max(s.greatest, c.version)
	case callRenew, callReassert:
		if p.version = c.version; s.trusts(k) && c.term == p.term {
			p.end, p.answered = max(p.end, end), c.ranOn
		}
	}
	return bad
}

// look has process k read server i, and returns the statement that it may then send.
func (r *failoverRules) look(s *failoverState, k, i int) (c failoverCall, ok bool) {
	p, v := &s.processes[k], &s.servers[i]
	record, now := &v.record, r.clock(s, i)
	older := r.knowsNoLineages(k)
	switch {
	case v.role == standby && !r.without.recovery:
		return c, false
	case v.role == primary && v.marked != v.lineage && !older:
		p.server = 0
		return failoverCall{kind: callMark, server: r.start(s, i), expects: v.mark, sent: s.now}, true
	}
	isNew, isFirst := p.server == 0, p.mark != v.mark
	p.server, p.mark = r.start(s, i), v.mark
	switch wait := max(r.ttl(k), record.ttl); { // F2
	case r.observed && isFirst:
		p.settled = s.now + wait
	case r.observed || r.without.start && !isFirst:
	case r.without.markAge && isNew && isFirst:
		p.settled = s.now
	default:
		p.settled = s.now + max(0, wait-(now-v.markedAt))
	}
	c = failoverCall{server: p.server, mark: p.mark, ttl: r.ttl(k), sent: s.now}
	if older {
		c.server, c.mark = 0, 0
	}
	current := record.mark == v.mark // written by one that knew this mark
	if s.trusts(k) {
		c.term, c.token = p.term, p.token
		switch {
		case record.holder != 0 && record.term == p.term: // renewals were lost, or somebody asks: the next renewal goes on from here
			p.version = record.version
			return c, false
		case !current && record.version < p.token && !older: // F3
			if c.kind = callReassert; !r.without.aboveOwn {
				c.above = p.version + 1
			}
			if record.holder != 0 {
				c.expects = record.version
			}
			return c, true
		}
		p.ends() // it is lost
		return c, false
	}
	age, waited := now-record.renewed, s.now >= p.settled
	switch {
	case older || r.without.wait,
		r.without.waitForMissing && record.holder == 0, r.without.waitForOld && record.holder != 0:
		waited = true
	case r.without.waitFromMark:
		waited = record.holder != 0 && age >= record.ttl || record.holder == 0 && now-record.version/clk >= leaseIs
	}
	c.expects = record.version
	switch {
	case record.holder == 0:
		c.expects = 0
	case record.term == p.over && p.over != 0: // its own term, which is over, stands again
		c.kind = callRelease
		return c, r.without.validVouches || current || waited
	case age < record.ttl:
		return c, false
	}
	c.kind = callBegin
	return c, (current || waited) && s.begins > 0
}

func (c *failoverCall) outcome() string {
	if c.did {
		return "done"
	}
	return "refused"
}
