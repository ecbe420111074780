package main

import "slices"

// same moves a state to noon, and gives terms and marks the names of their order of appearance. A version that all
// clocks have passed is less than any that is yet to come, so only the order of these counts.
func (r *failoverRules) same(s failoverState) failoverState {
	shift := s.now - noon
	s.now = noon
	var terms, marks []int32
	name := func(of *int32, known *[]int32) {
		if *of != 0 {
			if !slices.Contains(*known, *of) {
				*known = append(*known, *of)
			}
			*of = int32(1 + slices.Index(*known, *of))
		}
	}
	moved := func(at *int32) { *at = max(*at-shift, noon-3*leaseIs) }
	var versions []*int32
	version := func(of *int32) {
		if *of != 0 {
			versions = append(versions, of)
		}
	}
	call := func(c *failoverCall) {
		if c.kind == 0 {
			*c = failoverCall{}
			return
		}
		moved(&c.sent)
		name(&c.term, &terms)
		name(&c.mark, &marks)
		if c.kind == callMark {
			name(&c.expects, &marks)
		} else {
			version(&c.expects)
		}
		version(&c.token)
		version(&c.above)
		version(&c.version)
	}
	for i := range s.servers[:r.servers] {
		v := &s.servers[i]
		if v.role == dead { // nobody reads it any more
			*v = failoverServer{role: dead, started: v.started}
			continue
		}
		name(&v.mark, &marks)
		moved(&v.markedAt)
		record := &v.record
		version(&record.version)
		name(&record.mark, &marks)
		if record.holder == 0 {
			record.term, record.ttl, record.renewed, record.token = 0, 0, 0, 0
		} else {
			version(&record.token)
			name(&record.term, &terms)
			moved(&record.renewed)
		}
	}
	for k := range s.processes[:r.processes] {
		p := &s.processes[k]
		if name(&p.term, &terms); p.term != 0 {
			moved(&p.end)
		}
		version(&p.token)
		version(&p.version)
		name(&p.mark, &marks)
		p.settled = max(p.settled-shift, noon)
		call(&p.call)
	}
	call(&s.stray)
	for k := range s.processes[:r.processes] { // a term that is over matters if its record may still be found
		p := &s.processes[k]
		if slices.Contains(terms, p.over) {
			name(&p.over, &terms)
		} else {
			p.over = 0
		}
		if p.term == 0 && p.over == 0 {
			p.answered = 0
		}
	}
	s.terms, s.marks = int32(len(terms)), int32(len(marks))
	version(&s.greatest)
	closeUp(versions, int(shift)*clk, int(noon-r.behind)*clk)
	return s
}

// recovers lets all go well from a state on, and reports whether somebody then holds in time: within a TTL for the
// failover, and one for the record of a holder that is gone.
func (r *failoverRules) recovers(s failoverState) bool {
	s.begins = 255
	live := -1
	for i, v := range s.servers[:r.servers] {
		if v.role == primary && (live < 0 || v.lineage > s.servers[live].lineage) {
			live = i
		}
	}
	for i := range s.servers[:r.servers] {
		if v := &s.servers[i]; live < 0 && v.role == standby {
			live, v.role, v.lineage = i, primary, v.lineage+1
		}
	}
	if live < 0 {
		return true // no server is left
	}
	for i := range s.servers[:r.servers] {
		if i != live && s.servers[i].role == primary {
			s.servers[i].role = dead
		}
	}
	for range 2*leaseIs + 3 {
		for k := range r.processes {
			p := &s.processes[k]
			answer := func() {
				if !p.call.ran {
					r.run(&s, &p.call, live)
				}
				r.hear(&s, k)
				if p.term != 0 && !s.trusts(k) {
					p.ends()
				}
			}
			if p.call.kind != 0 {
				answer()
			}
			if p.term != 0 && !s.trusts(k) {
				p.ends()
			}
			for range 4 {
				c, ok := r.look(&s, k, live)
				if !ok {
					break
				}
				if c.kind == callBegin {
					s.terms++
					c.term = s.terms
				}
				p.call = c
				answer()
			}
			if s.trusts(k) {
				return true
			}
		}
		s.now++
	}
	return false
}

func (r *failoverRules) model() *model[failoverState] {
	first := failoverState{now: noon, marks: 1, failoverFaults: r.failoverFaults}
	for i := range first.servers[:r.servers] {
		first.servers[i] = failoverServer{lineage: 1, marked: 1, mark: 1, markedAt: noon - 3*leaseIs, record: failoverRecord{version: noon*clk - 1 + r.ahead, mark: 1}}
	}
	first.servers[0].role = primary
	return &model[failoverState]{first, r.next, r.same, r.recovers}
}
