package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// checkRequests checks what clients were told of their requests against what the handlers noted when they ran, past all
// faults: an answered request has run, and once if it is not idempotent, under the token that was told; a refused one has
// not; an unknown one at most once. Of a tenant, no token and no number falls in the order in which clients saw them, nor
// in the order of the commits. A request is unknown only because of a fault.
func (r *result) checkRequests(p *phase, a *audit) {
	if p.doors == nil {
		return
	}
	r.requests = map[string]int{}
	known := map[string]bool{}
	each := map[string][]request{} // answered, by tenant
	for _, q := range p.doors.asked {
		known[q.id] = true
		r.requests[q.outcome]++
		runs, wrong := p.record.runs[q.id], ""
		switch {
		case len(runs) > 1 && !q.idempotent:
			wrong = "is not idempotent"
		case q.outcome == refused && len(runs) > 0:
			wrong = "was refused"
		case q.outcome == answered && len(runs) == 0:
			wrong = "was answered"
		case q.outcome == answered && !slices.Contains(runs, q.token):
			wrong = "was answered under another token"
		case q.outcome == unknown && !p.isBad(q.from, q.to):
			wrong = "is unknown, without a fault"
		}
		if wrong != "" {
			r.violate("request %s: it %s: it ran under %v\n%s", q, wrong, runs, p.around(q.from, q.to))
		}
		if q.outcome == answered {
			each[q.tenant] = append(each[q.tenant], q)
			r.waits = append(r.waits, q.to-q.from)
		}
	}
	for id := range p.record.runs {
		if !known[id] {
			r.violate("request %s ran, and no client has sent it", id)
		}
	}
	for _, all := range each {
		r.checkOrder(p, all)
	}
	r.checkNumbers(a.ledger)
}

func (q request) String() string {
	return fmt.Sprintf("%s of %s at %s, from %v to %v: %s %q, token %d", q.id, q.tenant, q.entry, q.from, q.to, q.outcome, q.said, q.token)
}

// isBad reports whether something was killed, cut, paused or broken at that time, or a moment before: a fault's end takes a
// while. Replicas that shut down or give tenants back in order make no request unknown.
func (p *phase) isBad(from, to time.Duration) bool {
	return slices.ContainsFunc(p.record.faults, func(f *fault) bool {
		return f.kind != inOrder && f.kind != handedOver && f.from <= to && from <= max(f.to, f.ending)+p.ttl
	}) || slices.ContainsFunc(p.record.pauses, func(s span) bool { return s.from <= to && from <= s.to+p.ttl })
}

// checkOrder looks for answers of one tenant that were asked for after another had come, and are older than that.
func (r *result) checkOrder(p *phase, sent []request) {
	came := slices.Clone(sent)
	slices.SortFunc(sent, func(a, b request) int { return cmp.Compare(a.from, b.from) })
	slices.SortFunc(came, func(a, b request) int { return cmp.Compare(a.to, b.to) })
	var token, number request // the greatest so far
	for _, q := range sent {
		for len(came) > 0 && came[0].to < q.from {
			if came[0].token > token.token {
				if token.token != 0 {
					r.moved++
				}
				token = came[0]
			}
			if came[0].number > number.number {
				number = came[0]
			}
			came = came[1:]
		}
		switch {
		case q.token < token.token:
			r.violate("the token of request %s is less than that of\n%s\n%s", q, token, p.around(token.from, q.to))
		case q.number != 0 && q.number <= number.number:
			r.violate("the number of request %s is not above that of\n%s\n%s", q, number, p.around(number.from, q.to))
		}
	}
}

// checkNumbers looks for owners that have not seen what others had committed. Writes of one owner that have failed may land
// after later ones.
func (r *result) checkNumbers(ledger []entry) {
	greatest, before := map[string]entry{}, map[string]entry{} // of all owners, and of all but the last
	for _, e := range ledger {
		if tenant := e.term[strings.LastIndex(e.term, ".")+1:]; e.kind == ledgerClaimFenced && strings.HasPrefix(tenant, actor+"t") {
			if e.term != greatest[tenant].term {
				before[tenant] = greatest[tenant]
			}
			if last := before[tenant].note; last != "" && e.note[:9] <= last[:9] {
				r.violate("a number of %s does not rise:\n%s", tenant, lines([]entry{before[tenant], e}))
			}
			if e.term != greatest[tenant].term || e.note > greatest[tenant].note {
				greatest[tenant] = e
			}
		}
	}
}
