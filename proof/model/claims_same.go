package main

// recovers lets all go well from a state on, and reports whether somebody then owns the key in time: within
// a TTL for the failover, one for the record of an owner that is gone, and one for the trust in a claim.
func (r *claimRules) recovers(s claimState) bool {
	generous := *r
	generous.begins = 255
	r = &generous
	s.begun = min(s.begun, sessions-1)
	live := -1
	for i := range s.servers[:r.servers] {
		if s.servers[i].primary && (live < 0 || s.servers[i].lineage > s.servers[live].lineage) {
			live = i
		}
	}
	for i := range s.servers[:r.servers] {
		if live < 0 && !s.servers[i].dead {
			live, s.servers[i].primary, s.servers[i].lineage = i, true, s.servers[i].lineage+1
		}
	}
	if live < 0 {
		return true // no server is left
	}
	for i := range s.servers {
		s.servers[i].primary = i == live
	}
	for range 3*ttl + 3 {
		for k := range s.processes {
			p := &s.processes[k]
			for range 6 {
				if p.session != 0 && s.now >= p.end {
					p.drop()
				}
				for ch := range p.calls {
					if c := &p.calls[ch]; c.kind != 0 {
						if !c.answered {
							r.run(&s, c, live)
						}
						r.hear(&s, k, ch)
					}
				}
				r.compare(&s, k, live)
				if p.token != 0 && s.valid(p) {
					return true
				}
				calls := r.look(&s, k, live)
				if len(calls) == 0 {
					break
				}
				c := calls[0]
				if c.kind == begin { // a name that no record and no process has
					for id := uint8(1); id <= sessions; id++ {
						used := s.servers[live].records[id].stands || s.servers[live].row.session == id
						for j := range s.processes {
							used = used || s.processes[j].session == id
						}
						if !used {
							c.session = id
							break
						}
					}
				}
				p.calls[channel(c.kind)] = c
			}
		}
		s.now++
	}
	return false
}

// same moves a state to noon, and gives marks, sessions and tokens the names of their order: a token
// that all clocks have passed is less than any that is yet to come.
func (r *claimRules) same(s claimState) claimState {
	shift := s.now - noon
	s.now = noon
	var marks, names [256]uint8
	var markCount, nameCount uint8
	name := func(of *uint8, names *[256]uint8, count *uint8) {
		if *of != 0 && names[*of] == 0 {
			*count++
			names[*of] = *count
		}
		*of = names[*of]
	}
	ofMark := func(mark *uint8) { name(mark, &marks, &markCount) }
	ofSession := func(session *uint8) { name(session, &names, &nameCount) }
	moved := func(at *int8) { *at = max(*at-shift, past) }
	var tokens []*uint16
	ofToken := func(token *uint16) {
		if *token != 0 {
			tokens = append(tokens, token)
		}
	}
	ofStatement := func(c *statement) {
		if c.kind == 0 {
			*c = statement{}
			return
		}
		if c.kind == mark {
			expects := uint8(c.expects)
			ofMark(&expects)
			c.expects = int8(expects)
		} else if c.kind == bury {
			moved(&c.expects)
		}
		moved(&c.sent)
		ofMark(&c.mark)
		ofMark(&c.writes.mark)
		ofSession(&c.session)
		ofSession(&c.row.session)
		ofToken(&c.row.token)
		ofToken(&c.token)
	}
	for k := range s.processes {
		p := &s.processes[k]
		if ofSession(&p.session); p.session != 0 {
			moved(&p.end)
		}
		if p.renewed != 0 {
			moved(&p.renewed)
		}
		ofToken(&p.token)
		ofMark(&p.compared.mark)
		ofMark(&p.in.mark)
		ofStatement(&p.calls[0])
		ofStatement(&p.calls[1])
	}
	ofStatement(&s.stray)
	for i := range s.servers {
		v := &s.servers[i]
		if v.dead { // nobody reads it any more
			*v = server{dead: true}
			continue
		}
		if v.mark == 0 {
			continue
		}
		ofMark(&v.mark)
		moved(&v.markedAt)
		ofSession(&v.row.session)
		ofToken(&v.row.token)
		v.isOwned = v.isOwned && v.row.session != 0
		old := v.records
		v.records = [sessions + 1]sessionRecord{}
		for id, record := range old {
			if id := uint8(id); record.stands {
				ofSession(&id)
				ofMark(&record.mark)
				moved(&record.renewed)
				v.records[id] = record
			}
		}
	}
	s.marks, s.begun = markCount, nameCount
	ofToken(&s.greatest)
	closeUp(tokens, int(shift)*clk, int(noon-r.behind)*clk)
	return s
}

func (r *claimRules) model() *model[claimState] {
	first := claimState{
		now: noon, promotions: r.promotions, slow: r.slow, strays: r.strays, crashes: r.crashes, restarts: r.restarts, marks: 1,
	}
	for i := range first.servers[:r.servers] {
		first.servers[i] = server{primary: i == 0, lineage: 1, marked: 1, mark: 1, row: keyRow{token: clk}}
	}
	first.greatest = clk
	return &model[claimState]{first, r.next, r.same, r.recovers}
}
