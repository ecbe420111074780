package main

import (
	"fmt"
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
	reassertSession                                     bool  // the record that the failover has lost is written again
	without                                             drops // rules that are left out
}

// drops are rules, each left out.
type drops struct {
	wait, takeNamesServer, compare, turn, undone, fenceNames bool
}

type (
	sessionRecord struct {
		stands  bool
		mark    uint8 // of the lineage in which its writer last had its claim compared
		server  uint8 // the server's start that it names, which a fence asks for
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
		isOwned       bool // a process was told that the row's claim is its own
	}
	statement struct {
		kind          uint8 // 0: none is under way
		answered, did bool
		server, mark  uint8 // the server's start that it names, and the mark that its sender knows
		writes        place // what a session's record is to say
		ranOn         uint8
		session       uint8
		expects       int8 // when a record was renewed, or the mark
		row           keyRow
		token         uint16 // that was assigned
		sent          int8
	}
	process struct {
		session  uint8
		end      int8   // of its trust
		token    uint16 // of its claim; 0: it has none
		compared place  // where its session was last renewed, of the lineage in which its claim was compared with the row
		renewed  int8   // until when a renewal would trust that was answered in another lineage; 0: none
		in       place  // where that was
		calls    [2]statement
	}
	place      struct{ server, mark uint8 } // a server's start, and the mark of its lineage
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
)

var kinds = []string{"", "begin", "renewal", "re-assert of its session", "burial", "mark", "take", "release"}

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
		*record = sessionRecord{true, c.writes.mark, c.writes.server, now}
	case renew:
		if !record.stands {
			return
		}
		*record = sessionRecord{true, c.writes.mark, c.writes.server, now}
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
		v.row, v.isOwned = keyRow{c.session, max(v.row.token+1, uint16(now)*clk)}, false
		c.token = v.row.token
	case free:
		if v.row != c.row {
			return
		}
		v.row.session = 0
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
			p.session, p.end, p.compared = c.session, end, place{c.server, c.mark}
		}
	case renew, reassertSession:
		if !c.did || c.session != p.session {
			break
		}
		on := place{c.server, c.mark}
		if c.mark == p.compared.mark || r.without.compare {
			p.end, p.compared.server = max(p.end, end), c.server
		} else {
			p.renewed, p.in = end, on
		}
	case take:
		if !c.did || c.session != p.session || !s.valid(p) {
			break
		}
		p.token = c.token
		for i := range s.servers {
			if v := &s.servers[i]; v.row == (keyRow{c.session, c.token}) {
				v.isOwned = true
			}
		}
		if c.token <= s.greatest {
			return fmt.Sprintf("token %d of P%d's claim follows %d", c.token, k+1, s.greatest)
		}
		s.greatest = c.token
	}
	return ""
}

// drop ends what a process has of its session.
func (p *process) drop() {
	p.session, p.end, p.token, p.compared, p.renewed, p.in = 0, 0, 0, place{}, 0, place{}
}

// late reports whether a server accepts a fenced write of a claim after a later claim has been answered. The process that
// made the claim may be paused, and its func may go on, so it can write at any time.
func (r *claimRules) late(s *claimState) bool {
	for i := range s.servers {
		v := &s.servers[i]
		if v.primary && v.row.session != 0 && v.isOwned && v.row.token < s.greatest {
			record := v.records[v.row.session]
			if record.stands && record.server == s.start(i) || r.without.fenceNames { // F4
				return true
			}
		}
	}
	return false
}
