package main

import "fmt"

func (r *failoverRules) next(s failoverState, emit func(func() string, failoverState, string)) {
	put := func(to failoverState, bad, format string, args ...any) {
		holder := 0
		for k := range r.processes {
			if p := &to.processes[k]; p.term != 0 && to.now >= p.end {
				p.ends()
			} else if p.term != 0 {
				if holder != 0 {
					bad = fmt.Sprintf("P%d and P%d trust their terms", holder, k+1)
				}
				holder = k + 1
			}
		}
		if bad == "" && r.late(&to) {
			bad = "a fenced write would be late"
		}
		emit(func() string { return fmt.Sprintf(format, args...) }, to, bad)
	}
	n := s
	n.now++
	put(n, "", "a tick passes")
	for k := range r.processes {
		r.steps(s, k, put)
	}
	for i, v := range s.servers[:r.servers] {
		if s.stray.kind != 0 && v.role == primary {
			n := s
			r.run(&n, &n.stray, i)
			did := n.stray.outcome()
			n.stray = failoverCall{}
			put(n, "", "the %v that was given up comes to S%d: %s", s.stray.kind, i+1, did)
		}
		if s.asks > 0 && v.role == primary && v.record.holder != 0 {
			n := s
			n.asks--
			record := &n.servers[i].record
			if record.version = max(record.version+1, r.clock(&s, i)*clk); r.without.requestProves {
				record.mark = v.mark
			}
			put(n, "", "somebody requests the release on S%d", i+1)
		}
		r.serverSteps(s, i, put)
	}
}

// steps are those of one process.
func (r *failoverRules) steps(s failoverState, k int, put func(failoverState, string, string, ...any)) {
	p, who := &s.processes[k], k+1
	// send sends a statement that is answered at once, or one that is under way.
	send := func(n failoverState, c failoverCall) {
		if c.kind == callBegin {
			n.begins--
			n.terms++
			c.term = n.terms
		}
		n.processes[k].call = c
		if n.slow > 0 && c.kind != callMark {
			l := n
			l.slow--
			put(l, "", "P%d sends a %v, for server %d", who, c.kind, c.server)
		}
		for i, v := range n.servers[:r.servers] {
			if v.role == primary && (c.kind != callMark || c.server == r.start(&n, i)) {
				l := n
				r.run(&l, &l.processes[k].call, i)
				did := l.processes[k].call.outcome()
				bad := r.hear(&l, k)
				put(l, bad, "P%d's %v on S%d: %s", who, c.kind, i+1, did)
			}
		}
	}
	if c := p.call; c.kind == 0 {
		for i, v := range s.servers[:r.servers] {
			if v.role == dead {
				continue
			}
			n := s
			if c, ok := r.look(&n, k, i); ok {
				send(n, c)
			} else if n != s {
				put(n, "", "P%d looks at S%d", who, i+1)
			}
		}
		if s.trusts(k) && p.server != 0 {
			c := failoverCall{kind: callRenew, server: p.server, mark: p.mark, term: p.term, token: p.token, ttl: r.ttl(k), expects: p.version, sent: s.now}
			if r.knowsNoLineages(k) {
				c.server, c.mark = 0, 0
			}
			if c.sent+c.ttl-margin > p.end {
				send(s, c)
			}
			n := s
			c.kind = callRelease // its job has returned
			n.processes[k].ends()
			send(n, c)
		}
	} else {
		if c.ran {
			n := s
			bad := r.hear(&n, k)
			put(n, bad, "P%d hears of its %v: %s", who, c.kind, c.outcome())
		} else {
			for i, v := range s.servers[:r.servers] {
				if v.role == primary {
					n := s
					r.run(&n, &n.processes[k].call, i)
					put(n, "", "P%d's %v comes to S%d: %s", who, c.kind, i+1, n.processes[k].call.outcome())
				}
			}
			if s.strays > 0 && s.stray.kind == 0 {
				n := s
				n.strays--
				n.stray, n.processes[k].call = c, failoverCall{}
				put(n, "", "P%d gives up its %v, which is still on its way", who, c.kind)
			}
		}
		n := s
		n.processes[k].call = failoverCall{}
		put(n, "", "P%d's %v, or its answer, is lost", who, c.kind)
	}
	if s.crashes > 0 {
		n := s
		n.crashes--
		n.processes[k] = failoverProcess{}
		put(n, "", "P%d crashes and starts again", who)
	}
	if s.drifts > 0 {
		n := s
		n.now++
		n.drifts--
		q := &n.processes[k]
		q.end, q.settled, q.call.sent = q.end+1, q.settled+1, q.call.sent+1
		put(n, "", "a tick passes, which P%d's clock misses", who)
	}
}

// serverSteps are those of one server.
func (r *failoverRules) serverSteps(s failoverState, i int, put func(failoverState, string, string, ...any)) {
	v := s.servers[i]
	for j, from := range s.servers[:r.servers] {
		if from.role != primary || j == i {
			continue
		}
		same := from.record == v.record && from.mark == v.mark && from.marked == v.marked && from.markedAt == v.markedAt && from.lineage == v.lineage
		if v.role == standby && !same && from.lineage >= v.lineage && (from.lineage == v.lineage || s.rejoins > 0) {
			n := s
			n.servers[i] = from
			n.servers[i].role, n.servers[i].started = standby, v.started
			put(n, "", "S%d catches up with S%d", i+1, j+1)
		}
		if v.role == dead && s.rejoins > 0 {
			n := s
			n.rejoins--
			n.servers[i] = from
			n.servers[i].role, n.servers[i].started = standby, v.started+1
			put(n, "", "S%d comes back as a standby of S%d", i+1, j+1)
		}
	}
	if v.role == standby && s.promotions > 0 {
		n := s
		n.promotions--
		n.servers[i].role, n.servers[i].lineage = primary, v.lineage+1
		put(n, "", "S%d is promoted", i+1)
	}
	if v.role == primary && s.restarts > 0 {
		n := s
		n.restarts--
		n.servers[i].started++
		put(n, "", "S%d restarts", i+1)
	}
}
