package main

import (
	"cmp"
	"slices"
	"time"
)

// checkCrowd checks the leases that many workers hold in turn: the ledger must agree with
// what the workers were told, and no two workers may see valid terms of the same lease at
// the same time.
func (r *result) checkCrowd(p *phase, a *audit) {
	r.checkTold(p, a)
	r.checkHeld(p)
	if a.groups && r.crowd > 100 && r.together == 0 {
		r.violate("none of %d terms began or ended together with others, so groups were not tested", r.crowd)
	}
}

func (r *result) checkHeld(p *phase) {
	each := map[string][]job{}
	for _, e := range p.record.sorted() {
		if e.Kind == held {
			r.crowd++
			each[e.Note] = append(each[e.Note], job{span: span{e.Replica, e.From, e.At}, token: e.Token})
		}
	}
	for lease, terms := range each {
		slices.SortFunc(terms, func(a, b job) int { return cmp.Compare(a.from, b.from) })
		r.checkValid(p, lease+" was held", terms, crowdTTL)
	}
}

// checkTold compares what the workers were told with what was committed. A release is not
// yet durable when it is answered.
func (r *result) checkTold(p *phase, a *audit) {
	begins, ends, writes := map[string][]entry{}, map[string]int{}, map[string]int{}
	for _, e := range a.ledger {
		switch e.kind {
		case ledgerBegin:
			begins[e.term] = append(begins[e.term], e)
			writes[e.tx]++
		case ledgerEnd:
			ends[e.term]++
			writes[e.tx]++
		}
	}
	for _, e := range p.record.sorted() {
		if !a.promised(e.At) {
			continue
		}
		switch e.Kind {
		case held:
			if b := begins[e.Term]; len(b) != 1 || b[0].lease != e.Note || b[0].token != e.Token {
				r.violate("%s was told that it holds %s, term %s with token %d; the ledger has %v", e.Replica, e.Note, e.Term, e.Token, b)
			}
		case released:
			if ends[e.Term] != 1 && !p.serverStopped(e.At) {
				r.violate("%s was told at %v that term %s of %s was released; the ledger has %d ends of it", e.Replica, e.At, e.Term, e.Note, ends[e.Term])
			}
		case notReleased:
			if ends[e.Term] != 0 {
				r.violate("%s was told at %v that term %s of %s was lost, although it was released", e.Replica, e.At, e.Term, e.Note)
			}
		}
	}
	for tx, n := range writes {
		if tx != "" && n > 1 {
			r.together += n
		}
	}
}

// serverStopped reports whether the server soon afterwards lost what it had not written.
func (p *phase) serverStopped(at time.Duration) bool {
	return slices.ContainsFunc(p.record.faults, func(f *fault) bool {
		return (f.kind == stoppedImmediate || f.kind == tombstonesCrashed) && f.from-time.Second < at && at < f.to
	})
}
