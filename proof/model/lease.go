package main

import (
	"fmt"
	"slices"

	"github.com/tenurelib/tenure/proof/model/lease"
)

// This model is of one lease for which processes compete by the rules of package lease. Time is in ticks. It adds what
// may go wrong, and looks for what is promised.

const (
	most    = 3 // processes
	leaseIs = 3 // the TTL
	margin  = 1 // covers a clock that loses a tick in a TTL
	longAgo = noon - 2*leaseIs
)

// leaseRules are the rules and the faults of a scenario.
type leaseRules struct {
	lease.Rules
	processes int
	ttls      [most]int32 // of each process; 0: leaseIs
	leaseFaults
	onlySlow lease.Kind // the kind of statements that may be under way; 0: each
	handover bool       // a release may offer the lease to another process
	fences   bool       // jobs make fenced writes
}

// leaseFaults are how often each fault may still happen.
type leaseFaults struct {
	slow    int8 // a statement is under way for a while
	lost    int8 // it, or its answer, is lost, or it is given up and runs later
	crashes int8
	drifts  int8 // a process's clock loses a tick
	jumps   int8 // the database's clock jumps ahead by a TTL
	lates   int8 // a job does not return when it is told to
	asks    int8 // somebody requests the release
	resets  int8 // the table is made anew while no term is trusted
}

type leaseState struct {
	now       int32
	record    lease.Record
	processes [most]lease.Process
	calls     [most]lease.Statement // that each has under way
	stray     lease.Statement       // was given up by a process, and is still on its way
	strayOf   int32                 // that process
	open      [most]int32           // the term with which a transaction has passed the fence
	begun     int32                 // the term that began last
	greatest  int32                 // token
	leaseFaults
}

func (r *leaseRules) ttl(k int) int32 {
	if r.ttls[k] != 0 {
		return r.ttls[k]
	}
	return leaseIs
}

// run runs a statement of process k. It returns what is violated.
func (r *leaseRules) run(s *leaseState, k int, c *lease.Statement) (bad string) {
	before := s.record
	r.Run(&s.record, c, s.record.Version+1, s.now)
	if c.Kind != lease.Begin || c.Done == 0 {
		return ""
	}
	if before.Offer > 0 && int(before.Offer) != k+1 && s.now-before.Renewed < before.TTL {
		bad = fmt.Sprintf("P%d takes what is offered to P%d", k+1, before.Offer)
	}
	if c.Version <= s.greatest {
		bad = fmt.Sprintf("token %d follows %d", c.Version, s.greatest)
	}
	s.begun, s.greatest = c.Term, c.Version
	return bad
}

// hear gives process k the answer to its statement. It returns what is violated.
func (r *leaseRules) hear(s *leaseState, k int) (bad string) {
	p, c := &s.processes[k], s.calls[k]
	s.calls[k] = lease.Statement{}
	seen := p.Newest
	r.Hear(p, &c, s.now)
	if c.Kind == lease.Begin && p.Term == c.Term && p.Token <= seen {
		return fmt.Sprintf("P%d uses token %d after it has seen %d", k+1, p.Token, seen)
	}
	return ""
}

// locked reports whether a transaction that has passed the fence keeps others from writing the record.
func (r *leaseRules) locked(s *leaseState) bool {
	return s.open != [most]int32{} && !r.FenceWithoutLock
}

// overlap returns which two processes both trust their terms, or both work.
func (r *leaseRules) overlap(s *leaseState) string {
	trusts, works := 0, 0
	for k := range s.processes {
		p := &s.processes[k]
		if p.Trusts(s.now) {
			if trusts != 0 {
				return fmt.Sprintf("P%d and P%d trust their terms", trusts, k+1)
			}
			trusts = k + 1
		}
		if p.Job != 0 {
			if works != 0 && r.lates == 0 {
				return fmt.Sprintf("the jobs of P%d and P%d overlap", works, k+1)
			}
			works = k + 1
		}
	}
	return ""
}

// statements returns what process k may send.
func (r *leaseRules) statements(s *leaseState, k int) (all []lease.Statement) {
	p := &s.processes[k]
	may := func(c lease.Statement) {
		c.Holder = p.ID
		if r.MaySend(p, &c, s.now) {
			all = append(all, c)
		}
	}
	may(lease.Statement{Kind: lease.Read})
	begin := lease.Statement{Kind: lease.Begin, Term: fresh, TTL: r.ttl(k)}
	if p.Seen.Payload != 0 {
		begin.Expects = p.Seen.Version
	}
	may(begin)
	if s.now+r.ttl(k)-margin > p.End { // it is of some use
		may(lease.Statement{Kind: lease.Renew, Term: p.Term, Expects: p.Version, TTL: r.ttl(k)})
	}
	release := func(term, expects int32) {
		may(lease.Statement{Kind: lease.Release, Term: term, Expects: expects})
		for to := range r.processes {
			if r.handover && to != k {
				may(lease.Statement{Kind: lease.Release, Term: term, Expects: expects, Payload: fresh, Offer: int32(to + 1), TTL: 1})
			}
		}
	}
	if p.Term != 0 {
		release(p.Term, p.Version)
	}
	if p.OverVersion != 0 {
		release(p.Over, p.OverVersion)
	}
	if p.Over != 0 && p.Seen.Payload != 0 && p.Seen.Version != p.OverVersion {
		release(p.Over, p.Seen.Version)
	}
	if s.asks > 0 && p.Seen.Asked == 0 {
		may(lease.Statement{Kind: lease.Ask, Expects: p.Seen.Version})
	}
	return all
}

func (r *leaseRules) next(s leaseState, emit func(func() string, leaseState, string)) {
	put := func(to leaseState, bad, format string, args ...any) {
		for k := range to.processes {
			if p := &to.processes[k]; p.Term != 0 && !p.Trusts(to.now) {
				p.Ends()
			}
		}
		if bad == "" {
			bad = r.overlap(&to)
		}
		emit(func() string { return fmt.Sprintf(format, args...) }, to, bad)
	}
	// Time passes; jobs that must have returned have done so.
	tick := func(n leaseState, misses int, what string) {
		n.now++
		if misses >= 0 {
			p, c := &n.processes[misses], &n.calls[misses]
			p.End, p.Since, c.Sent = p.End+1, p.Since+1, c.Sent+1
		}
		for k := range n.processes {
			if p := &n.processes[k]; p.Job != 0 && p.Job == p.Term && n.now >= p.End {
				if n.lates == 0 {
					return
				}
				n.lates--
			}
		}
		put(n, "", "%s", what)
	}
	tick(s, -1, "a tick passes")
	for k := range r.processes {
		r.steps(s, k, put)
		if s.drifts > 0 {
			n := s
			n.drifts--
			tick(n, k, fmt.Sprintf("a tick passes, which P%d's clock misses", k+1))
		}
	}
	if s.stray.Kind != 0 && (!r.locked(&s) || s.stray.Kind == lease.Read) {
		n := s
		c := n.stray
		n.stray, n.strayOf = lease.Statement{}, 0
		bad := r.run(&n, int(s.strayOf), &c)
		put(n, bad, "the %v that was given up takes effect: %s", c.Kind, outcome(&c))
	}
	if s.jumps > 0 && s.record.Payload != 0 {
		n := s
		n.jumps--
		n.record.Renewed -= leaseIs
		put(n, "", "the database's clock jumps ahead by a TTL")
	}
	if s.resets > 0 && s.stray.Kind == 0 && s.calls == [most]lease.Statement{} && !slices.ContainsFunc(s.processes[:], func(p lease.Process) bool { return p.Term != 0 }) {
		n := s
		n.resets--
		n.record, n.greatest = lease.Record{}, 0
		for k := range n.processes {
			n.processes[k].Seen = lease.Record{}
		}
		put(n, "", "the table is made anew, and all look again")
	}
}

// steps are those of one process.
func (r *leaseRules) steps(s leaseState, k int, put func(leaseState, string, string, ...any)) {
	p, c, who := &s.processes[k], s.calls[k], k+1
	if c.Kind == 0 {
		for _, c := range r.statements(&s, k) {
			n := s
			n.processes[k].Send(&c, s.now)
			if n.calls[k] = c; c.Kind == lease.Ask {
				n.asks--
			}
			if s.slow > 0 && (r.onlySlow == 0 || r.onlySlow == c.Kind) {
				l := n
				l.slow--
				put(l, "", "P%d sends a %v", who, c.Kind)
			}
			if c.Kind == lease.Read || !r.locked(&s) {
				bad := r.run(&n, k, &n.calls[k])
				answer := outcome(&n.calls[k])
				if worse := r.hear(&n, k); bad == "" {
					bad = worse
				}
				put(n, bad, "P%d's %v: %s", who, c.Kind, answer)
			}
		}
		n := s
		if r.Recognises(&n.processes[k]) && n != s {
			put(n, "", "P%d takes the record for its own", who)
		}
	} else {
		if c.Ran != 0 {
			n := s
			bad := r.hear(&n, k)
			put(n, bad, "P%d hears of its %v: %s", who, c.Kind, outcome(&c))
		} else if c.Kind == lease.Read || !r.locked(&s) {
			n := s
			bad := r.run(&n, k, &n.calls[k])
			put(n, bad, "P%d's %v takes effect: %s", who, c.Kind, outcome(&n.calls[k]))
		}
		if s.lost > 0 {
			n := s
			n.lost--
			n.processes[k].GivesUp(&c)
			n.calls[k] = lease.Statement{}
			put(n, "", "P%d's %v, or its answer, is lost", who, c.Kind)
			if c.Ran == 0 && s.stray.Kind == 0 && c.Kind != lease.Read {
				n.stray, n.strayOf = c, int32(k)
				put(n, "", "P%d gives up its %v, which is still on its way", who, c.Kind)
			}
		}
	}
	if p.MayWork(s.now) {
		n := s
		n.processes[k].Job = p.Term
		put(n, "", "P%d's job begins", who)
	}
	if p.Job != 0 {
		n := s
		n.processes[k].Job = 0
		put(n, "", "P%d's job has returned", who)
		write := lease.Statement{Kind: lease.Fence, Term: p.Job}
		if r.fences && s.open[k] == 0 {
			if r.Run(&n.record, &write, 0, s.now); write.Done != 0 {
				n = s
				n.open[k] = p.Job
				put(n, "", "a transaction of P%d's job passes the fence", who)
			}
		}
	}
	if s.open[k] != 0 {
		n := s
		n.open[k] = 0
		bad := ""
		if s.open[k] != s.begun {
			bad = fmt.Sprintf("a fenced write of P%d commits after the next term has begun", who)
		}
		put(n, bad, "P%d's transaction commits", who)
	}
	if s.crashes > 0 {
		n := s
		n.crashes--
		n.processes[k] = lease.Process{ID: int32(who), TTL: r.ttl(k), Margin: margin}
		n.calls[k] = lease.Statement{}
		put(n, "", "P%d crashes and starts again", who)
	}
}

// outcome says what a statement has done.
func outcome(c *lease.Statement) string {
	seen := &c.Seen
	switch {
	case c.Done == 0:
		return "refused"
	case c.Kind != lease.Read:
		return "done"
	case seen.Payload == 0:
		return "there is no record"
	}
	what := fmt.Sprintf("P%d's record", seen.Holder)
	if seen.Offer != 0 {
		what = fmt.Sprintf("P%d's offer to P%d", seen.Holder, seen.Offer)
	}
	if c.Age >= seen.TTL {
		return what + ", which has expired"
	}
	return what
}
