package main

import (
	"fmt"
	"slices"
)

// This model is of sessions that claim one key, on servers of which one is promoted although it lacks
// what the old primary acknowledged last. Time is in ticks. A server's clock has clk units in a tick, as
// a token is at least the time in microseconds.
const (
	processes, servers, sessions = 2, 3, 6

	ttl   = 3 // of a session's record, and how long a failover takes to settle
	trust = 2 // of a session: the TTL less the margin, which covers a clock that loses a tick
	clk   = 16

	noon = 20           // the tick that each state is moved to: only differences of time count
	past = noon - 4*ttl // and whatever is older than this is as old as this
)

// claimRules are the rules of the protocol and the faults of a scenario.
type claimRules struct {
	servers                                             int
	promotions, slow, strays, crashes, restarts, begins uint8
	behind                                              int8  // by how much the clock of the second server is
	onlySlow                                            uint8 // the kind of statements that may be under way; 0: each
	oldGoesOn                                           bool  // the old primary accepts writes after the new one is marked
	reassert, reassertSession                           bool  // what the failover has lost is written again
	without                                             drops // rules that are left out
}

// drops are rules, each left out.
type drops struct {
	wait, takeNamesServer, compare, turn, greater bool
}

type (
	sessionRecord struct {
		stands  bool
		mark    uint8 // that its writer knew
		renewed int8
	}
	keyRow struct {
		session uint8 // 0: none, so the key is free
		token   uint16
	}
	server struct {
		primary, dead bool
		lineage       uint8
		started       uint8 // how often
		marked        uint8 // the lineage that the mark names
		mark          uint8
		markedAt      int8
		records       [sessions + 1]sessionRecord // by session
		row           keyRow
	}
	statement struct {
		kind          uint8 // 0: none is under way
		answered, did bool
		server, mark  uint8 // the server's start that it names, and the mark that its sender knows
		ranOn         uint8
		session       uint8
		expects       int8 // when a record was renewed, or the mark
		row           keyRow
		token         uint16 // that was assigned, or is to be
		sent          int8
	}
	process struct {
		session  uint8
		end      int8   // of its trust
		token    uint16 // of its claim; 0: it has none
		compared uint8  // the mark of the lineage in which its claim was compared with the row
		renewed  int8   // until when a renewal would trust that was answered in another lineage; 0: none
		in       uint8  // the mark of that lineage
		calls    [2]statement
	}
	claimState struct {
		now                                                int8
		servers                                            [servers]server
		processes                                          [processes]process
		stray                                              statement
		promotions, slow, strays, crashes, restarts, begun uint8
		marks                                              uint8
		greatest                                           uint16 // of the tokens
	}
)

// The kinds of statements. A process has one under way about sessions, and one about the key.
const (
	begin = 1 + iota
	renew
	reassertSession
	bury
	mark
	take
	free
	reassert
)

var kinds = []string{"", "begin", "renewal", "re-assert of its session", "burial", "mark", "take", "release", "re-assert of its claim"}

func channel(kind uint8) int {
	if kind >= take {
		return 1
	}
	return 0
}

func (s *claimState) start(i int) uint8 { return uint8(1 + i + servers*int(s.servers[i].started)) }

func (r *claimRules) clock(s *claimState, i int) int8 {
	if i == 1 {
		return s.now - r.behind
	}
	return s.now
}

func (s *claimState) valid(p *process) bool { return p.session != 0 && s.now < p.end }

// run executes a statement on a server, which is a primary.
func (r *claimRules) run(s *claimState, c *statement, i int) {
	v := &s.servers[i]
	c.answered, c.ranOn = true, s.start(i)
	if c.server != c.ranOn && c.kind != free && !(c.kind == take && r.without.takeNamesServer) {
		return // what its sender has no use for may be freed wherever it stands
	}
	now := r.clock(s, i)
	record := &v.records[c.session]
	switch c.kind {
	case begin, reassertSession:
		if record.stands {
			return
		}
		*record = sessionRecord{true, c.mark, now}
	case renew:
		if !record.stands {
			return
		}
		*record = sessionRecord{true, c.mark, now}
	case bury:
		if !record.stands || record.renewed != c.expects {
			return
		}
		*record = sessionRecord{}
	case mark:
		if int8(v.mark) != c.expects {
			return
		}
		s.marks++
		v.marked, v.mark, v.markedAt = v.lineage, s.marks, now
		for j := range s.servers {
			if j != i && s.servers[j].primary && !r.oldGoesOn {
				s.servers[j].primary, s.servers[j].dead = false, true
			}
		}
	case take:
		if v.row != c.row {
			return
		}
		v.row = keyRow{c.session, max(v.row.token+1, uint16(now)*clk)}
		c.token = v.row.token
	case free:
		if v.row != c.row {
			return
		}
		v.row.session = 0
	case reassert:
		if v.row.token >= c.token && !r.without.greater {
			return
		}
		v.row = keyRow{c.session, c.token}
	}
	c.did = true
}

// hear gives a process the answer to one of its statements. It returns what is violated.
func (r *claimRules) hear(s *claimState, k, ch int) string {
	p := &s.processes[k]
	c := p.calls[ch]
	p.calls[ch] = statement{}
	end := c.sent + trust
	switch c.kind {
	case begin:
		if c.did && s.now < end {
			p.session, p.end, p.compared = c.session, end, c.mark
		}
	case renew, reassertSession:
		if !c.did || c.session != p.session {
			break
		}
		if c.mark == p.compared || r.without.compare {
			p.end = max(p.end, end)
		} else {
			p.renewed, p.in = end, c.mark
		}
	case take:
		if !c.did || c.session != p.session || !s.valid(p) {
			break
		}
		p.token = c.token
		if c.token <= s.greatest {
			return fmt.Sprintf("token %d of P%d's claim follows %d", c.token, k+1, s.greatest)
		}
		s.greatest = c.token
	case reassert:
		if c.session == p.session && c.token == p.token && c.ranOn == c.server && !c.did {
			p.token = 0 // the row has a greater token, so the claim has ended
		}
	}
	return ""
}

// drop ends what a process has of its session.
func (p *process) drop() {
	p.session, p.end, p.token, p.compared, p.renewed, p.in = 0, 0, 0, 0, 0, 0
}

// look has process k read server i, and returns the statements that it may send then. compared says that
// its claim is compared with the row.
func (r *claimRules) look(s *claimState, k, i int) (calls []statement) {
	p, v := &s.processes[k], &s.servers[i]
	call := statement{server: s.start(i), sent: s.now, session: p.session, mark: v.mark}
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
	} else if r.reassertSession && v.mark != p.compared && s.valid(p) {
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
		if settled { // taken by a statement without an answer, or its release is undone
			may(free, func(c *statement) { c.row = row })
		}
	case p.token == 0 && (row.session == 0 || !v.records[row.session].stands) && (settled || r.without.wait):
		may(take, func(c *statement) { c.row = row })
	}
	return calls
}

// compare compares the claim of process k with the row on server i, once a renewal there is answered. It
// returns the statement that it sends.
func (r *claimRules) compare(s *claimState, k, i int) (c statement, ok bool) {
	p, v := &s.processes[k], &s.servers[i]
	if p.renewed == 0 || p.in != v.mark || p.calls[1].kind != 0 && !r.without.turn || !s.valid(p) {
		return c, false
	}
	switch {
	case p.token == 0, v.row == keyRow{p.session, p.token}:
	case r.reassert && v.row.token < p.token && p.calls[1].kind == 0: // and then compares again
		return statement{kind: reassert, server: s.start(i), mark: v.mark, session: p.session, token: p.token, sent: s.now}, true
	default:
		p.token = 0 // its func is told to return
	}
	p.end, p.compared, p.renewed, p.in = max(p.end, p.renewed), p.in, 0, 0
	return c, true
}

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
			if c, ok := r.compare(&n, k, i); ok && c.kind == 0 {
				put(n, "", "P%d compares its claim with the row on S%d", k+1, i+1)
			} else if ok {
				send(n, k, c)
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
	case c.kind == take || c.kind == reassert:
		return fmt.Sprintf("done, token %d", c.token)
	}
	return "done"
}

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
				if c, ok := r.compare(&s, k, live); ok && c.kind != 0 {
					p.calls[1] = c
					continue
				}
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
		ofMark(&p.compared)
		ofMark(&p.in)
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
	limit := uint16(noon-r.behind) * clk
	var low []uint16
	for _, token := range tokens {
		if int(*token)-int(shift)*clk < int(limit) {
			low = append(low, *token)
		}
	}
	slices.Sort(low)
	low = slices.Compact(low)
	for _, token := range tokens {
		if at, ok := slices.BinarySearch(low, *token); ok {
			*token = limit - uint16(len(low)-at)
		} else {
			*token -= uint16(shift) * clk
		}
	}
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
