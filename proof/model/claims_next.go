package main

import "fmt"

// look has process k read server i, and returns the statements that it may send then. compared says that
// its claim is compared with the row.
func (r *claimRules) look(s *claimState, k, i int) (calls []statement) {
	p, v := &s.processes[k], &s.servers[i]
	call := statement{server: s.start(i), sent: s.now, session: p.session, mark: v.mark, writes: p.compared}
	if p.session == 0 || v.mark == p.compared.mark {
		call.writes = place{call.server, call.mark} // until its claim is compared, the record keeps what it says
	}
	may := func(kind uint8, change func(*statement)) {
		if p.calls[channel(kind)].kind == 0 {
			c := call
			c.kind = kind
			change(&c)
			calls = append(calls, c)
		}
	}
	if v.marked != v.lineage {
		may(mark, func(c *statement) { c.expects = int8(v.mark) })
		return calls
	}
	settled := r.clock(s, i)-v.markedAt >= ttl
	if p.session == 0 {
		if s.begun < r.begins {
			may(begin, func(c *statement) { c.session = s.begun + 1 })
		}
	} else if v.records[p.session].stands {
		if s.valid(p) && s.now+trust > max(p.end, p.renewed) {
			may(renew, func(*statement) {})
		}
	} else if r.reassertSession && v.mark != p.compared.mark && s.valid(p) {
		may(reassertSession, func(*statement) {})
	} else if p.calls[0].kind == 0 {
		p.drop()
	}
	for id, record := range v.records {
		expired := record.stands && r.clock(s, i)-record.renewed >= ttl
		if expired && uint8(id) != p.session && (settled || record.mark == v.mark) {
			may(bury, func(c *statement) { c.session, c.expects = uint8(id), record.renewed })
		}
	}
	if !s.valid(p) {
		return calls
	}
	row := v.row
	switch {
	case row.session == p.session && row.token != p.token:
		if settled || p.isComparing(v) { // taken by a statement without an answer, or its release is undone
			may(free, func(c *statement) { c.row = row })
		}
	case p.token == 0 && (row.session == 0 || !v.records[row.session].stands) && (settled || r.without.wait):
		may(take, func(c *statement) { c.row = row })
	}
	return calls
}

// compare compares the claim of process k with the row on server i, once a renewal there is answered. It
// reports whether it did.
func (r *claimRules) compare(s *claimState, k, i int) bool {
	p, v := &s.processes[k], &s.servers[i]
	if !p.isComparing(v) || p.in.server != s.start(i) || p.calls[1].kind != 0 && !r.without.turn || !s.valid(p) {
		return false
	}
	if v.row.session == p.session && v.row.token != p.token && !r.without.undone {
		return false // it has to be freed first
	}
	if v.row != (keyRow{p.session, p.token}) {
		p.token = 0 // its func is told to return
	}
	p.end, p.compared, p.renewed, p.in = max(p.end, p.renewed), p.in, 0, place{}
	return true
}

// isComparing reports whether a renewal on v only counts once the claim is compared.
func (p *process) isComparing(v *server) bool { return p.renewed != 0 && p.in.mark == v.mark }

func (r *claimRules) next(s claimState, emit func(func() string, claimState, string)) {
	put := func(to claimState, bad, format string, args ...any) {
		holder := -1
		for k := range to.processes {
			if p := &to.processes[k]; p.session != 0 && to.now >= p.end {
				p.drop()
			} else if p.token != 0 {
				if holder >= 0 && bad == "" {
					bad = fmt.Sprintf("P%d and P%d own the key", holder+1, k+1)
				}
				holder = k
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
	// send sends a statement that is answered at once, or one that is under way.
	send := func(n claimState, k int, c statement) {
		if c.kind == begin {
			n.begun++
		}
		ch := channel(c.kind)
		if n.slow > 0 && c.kind != mark && (r.onlySlow == 0 || r.onlySlow == c.kind) {
			l := n
			l.slow--
			l.processes[k].calls[ch] = c
			put(l, "", "P%d sends a %s, for server %d", k+1, kinds[c.kind], c.server)
		}
		for i := range n.servers {
			if n.servers[i].primary {
				l := n
				l.processes[k].calls[ch] = c
				r.run(&l, &l.processes[k].calls[ch], i)
				did := said(l.processes[k].calls[ch])
				bad := r.hear(&l, k, ch)
				put(l, bad, "P%d's %s on S%d: %s", k+1, kinds[c.kind], i+1, did)
			}
		}
	}
	for k := range s.processes {
		p := &s.processes[k]
		for i := range s.servers {
			if !s.servers[i].primary {
				continue
			}
			n := s
			calls := r.look(&n, k, i)
			if n != s {
				put(n, "", "P%d looks at S%d", k+1, i+1)
			}
			for _, c := range calls {
				send(n, k, c)
			}
			n = s
			if r.compare(&n, k, i) {
				put(n, "", "P%d compares its claim with the row on S%d", k+1, i+1)
			}
		}
		if p.token != 0 && p.calls[1].kind == 0 { // its func has returned
			n := s
			n.processes[k].token = 0
			send(n, k, statement{kind: free, session: p.session, row: keyRow{p.session, p.token}, sent: s.now})
		}
		for ch, c := range p.calls {
			if c.kind == 0 {
				continue
			}
			if c.answered {
				n := s
				bad := r.hear(&n, k, ch)
				put(n, bad, "P%d hears of its %s: %s", k+1, kinds[c.kind], said(c))
			} else {
				for i := range s.servers {
					if s.servers[i].primary {
						n := s
						r.run(&n, &n.processes[k].calls[ch], i)
						put(n, "", "P%d's %s comes to S%d: %s", k+1, kinds[c.kind], i+1, said(n.processes[k].calls[ch]))
					}
				}
				if s.strays > 0 && s.stray.kind == 0 {
					n := s
					n.strays--
					n.stray, n.processes[k].calls[ch] = c, statement{}
					put(n, "", "P%d gives up its %s, which is still on its way", k+1, kinds[c.kind])
				}
			}
			n := s
			n.processes[k].calls[ch] = statement{}
			put(n, "", "P%d's %s, or its answer, is lost", k+1, kinds[c.kind])
		}
		if s.crashes > 0 {
			n := s
			n.crashes--
			n.processes[k] = process{}
			put(n, "", "P%d crashes and starts again", k+1)
		}
	}
	if s.stray.kind != 0 {
		for i := range s.servers {
			if s.servers[i].primary {
				n := s
				r.run(&n, &n.stray, i)
				did := said(n.stray)
				n.stray = statement{}
				put(n, "", "the %s that was given up comes to S%d: %s", kinds[s.stray.kind], i+1, did)
			}
		}
	}
	for i := range s.servers[:r.servers] {
		v := s.servers[i]
		switch {
		case v.dead:
		case v.primary && s.restarts > 0:
			n := s
			n.restarts--
			n.servers[i].started++
			put(n, "", "S%d restarts", i+1)
		case !v.primary:
			for j, from := range s.servers {
				if from.primary && from.lineage == v.lineage {
					caught := from
					caught.primary, caught.started = false, v.started
					if caught != v {
						n := s
						n.servers[i] = caught
						put(n, "", "S%d catches up with S%d", i+1, j+1)
					}
				}
			}
			if s.promotions > 0 {
				n := s
				n.promotions--
				n.servers[i].primary = true
				n.servers[i].lineage++
				put(n, "", "S%d is promoted", i+1)
			}
		}
	}
}

func said(c statement) string {
	switch {
	case !c.did:
		return "refused"
	case c.kind == take:
		return fmt.Sprintf("done, token %d", c.token)
	}
	return "done"
}
