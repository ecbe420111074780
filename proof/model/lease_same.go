package main

import (
	"slices"

	"github.com/tenurelib/tenure/proof/model/lease"
)

const fresh = 1 << 10 // a term or an offer that is just being made; same gives it a name

// same moves a state to noon, and gives terms the names of their order of appearance, and versions those of their
// order, so that as many states as possible are one.
func (r *leaseRules) same(s leaseState) leaseState {
	shift := s.now - noon
	s.now = noon
	var terms []int32
	var versions []*int32
	term := func(of *int32) {
		if *of != 0 {
			if !slices.Contains(terms, *of) {
				terms = append(terms, *of)
			}
			*of = int32(1 + slices.Index(terms, *of))
		}
	}
	version := func(of *int32) {
		if *of != 0 {
			versions = append(versions, of)
		}
	}
	moved := func(at *int32) { *at = max(*at-shift, longAgo) }
	record := func(of *lease.Record) {
		term(&of.Payload)
		version(&of.Version)
		version(&of.Asked)
		if of.Payload != 0 {
			moved(&of.Renewed)
		} else {
			of.Renewed = 0
		}
	}
	statement := func(c *lease.Statement) {
		if c.Kind == 0 {
			*c = lease.Statement{}
			return
		}
		moved(&c.Sent)
		term(&c.Term)
		term(&c.Payload)
		version(&c.Expects)
		version(&c.Version)
		record(&c.Seen)
		c.Seen.Renewed = 0
		if c.Age < leaseIs {
			c.Age = 0
		}
	}
	record(&s.record)
	statement(&s.stray)
	s.stray.Sent = 0 // nobody waits for its answer
	for k := range s.processes[:r.processes] {
		statement(&s.calls[k])
		p := &s.processes[k]
		if term(&p.Term); p.Term != 0 {
			moved(&p.End)
		}
		term(&p.Job)
		version(&p.Token)
		version(&p.Version)
		if version(&p.Newest); r.resets == 0 { // then all versions rise
			p.Newest = 0
		}
		record(&p.Seen)
		p.Seen.Renewed = 0 // Age and Since say all
		if moved(&p.Since); p.Seen.Payload == 0 {
			p.Since, p.Age = 0, 0
		}
		if p.Age < leaseIs {
			p.Age = 0 // not expired
		}
		p.Unanswered = min(p.Unanswered, 3)
		term(&s.open[k])
	}
	for k := range s.processes[:r.processes] { // a term that is over matters if its record may still be found
		p := &s.processes[k]
		if slices.Contains(terms, p.Over) {
			term(&p.Over)
			version(&p.OverVersion)
		} else {
			p.Over, p.OverVersion = 0, 0
		}
	}
	if slices.Contains(terms, s.begun) {
		term(&s.begun)
	} else {
		s.begun = 0
	}
	s.greatest = max(s.greatest, s.record.Version) // which is lost only with the rule or the table
	version(&s.greatest)
	slices.SortFunc(versions, func(a, b *int32) int { return int(*a - *b) })
	rank, last := int32(0), int32(0)
	for _, v := range versions {
		if *v != last {
			rank, last = rank+1, *v
		}
		*v = rank
	}
	return s
}

// recovers lets all go well from a state on, and reports whether somebody then holds the lease in time: within a TTL
// for the record of a holder that is gone, one for an offer, and some for tokens that are refused (L5).
func (r *leaseRules) recovers(s leaseState) bool {
	s.open, s.stray = [most]int32{}, lease.Statement{}
	for range 6 * leaseIs {
		for k := range r.processes {
			p := &s.processes[k]
			if s.calls[k].Kind != 0 {
				if s.calls[k].Ran == 0 {
					r.run(&s, k, &s.calls[k])
				}
				r.hear(&s, k)
			}
			if p.Term != 0 && !p.Trusts(s.now) {
				p.Ends()
			}
			if p.Job != 0 && p.Job != p.Term {
				p.Job = 0
			}
			if p.Trusts(s.now) {
				return true
			}
			s.calls[k] = lease.Statement{Kind: lease.Read}
			r.run(&s, k, &s.calls[k])
			r.hear(&s, k)
			for _, c := range r.statements(&s, k) {
				if c.Kind == lease.Begin {
					p.Send(&c, s.now)
					s.calls[k] = c
					r.run(&s, k, &s.calls[k])
					r.hear(&s, k)
				}
			}
			if p.Trusts(s.now) {
				return true
			}
			s = r.same(s) // names the term
		}
		s.now++
	}
	return false
}

func (r *leaseRules) model() *model[leaseState] {
	first := leaseState{now: noon, leaseFaults: r.leaseFaults}
	for k := range r.processes {
		first.processes[k] = lease.Process{ID: int32(k + 1), TTL: r.ttl(k), Margin: margin}
	}
	return &model[leaseState]{first, r.next, r.same, r.recovers}
}
