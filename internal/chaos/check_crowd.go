package main

import (
	"cmp"
	"slices"
)

// checkCrowd looks for moments at which two replicas saw a term of the same lease valid,
// of those that many workers hold by turns.
func (r *result) checkCrowd(p *phase, a *audit) {
	r.countTogether(a.ledger)
	each := map[string][]event{}
	for _, e := range p.record.sorted() {
		if e.Kind == held {
			r.crowd++
			each[e.Note] = append(each[e.Note], e)
		}
	}
	for lease, terms := range each {
		slices.SortFunc(terms, func(a, b event) int { return cmp.Compare(a.From, b.From) })
		for i, a := range terms {
			for _, b := range terms[i+1:] {
				if b.From >= a.At {
					break
				}
				if !slices.ContainsFunc(p.record.faults, func(f *fault) bool {
					return p.clockExcuses(f, span{from: b.From, to: min(a.At, b.At)}, crowdTTL)
				}) {
					r.violate("%s is held by %s with token %d from %v to %v, and by %s with token %d from %v to %v\n%s",
						lease, a.Replica, a.Token, a.From, a.At, b.Replica, b.Token, b.From, b.At, p.around(b.From, b.From))
				}
			}
		}
	}
}

// countTogether counts the terms of other leases that began in one transaction.
func (r *result) countTogether(ledger []entry) {
	begun := map[string]int{}
	for _, e := range ledger {
		if e.kind == ledgerBegin && e.tx != "" {
			begun[e.tx]++
		}
	}
	for _, n := range begun {
		if n > 1 {
			r.together += n
		}
	}
}
