package main

import "time"

// tokens returns the token of each term whose job began, where a record may be written again with a higher version.
func (p *phase) tokens(a *audit) map[string]int64 {
	if len(a.lost) == 0 {
		return nil
	}
	tokens := map[string]int64{}
	for _, j := range p.record.jobs() {
		tokens[j.term] = j.token
	}
	return tokens
}

// mayBeLost reports whether what a replica says at the time of an event to have been acknowledged may be gone: the
// answer came from a primary that was lost, after its standbys were cut off.
func (p *phase) mayBeLost(a *audit, e event) bool {
	const slack = 500 * time.Millisecond // from the answer to the event
	for _, lost := range a.lost {
		if lost.from <= e.At && (e.At <= lost.to+slack || !p.ran(e.Replica, lost.to, e.At)) {
			return true
		}
	}
	return false
}

// checkTokens checks that tokens rise from job to job where the ledger does not have all terms, and counts the jobs that went on
// over a failover.
func (r *result) checkTokens(p *phase, a *audit, jobs []job) {
	if len(a.lost) == 0 {
		return
	}
	for i, j := range jobs {
		for _, before := range jobs[:i] {
			// A process may be stopped between the beginning of its term and that of its job.
			late := j.token < before.token && !p.ran(j.replica, before.from-p.ttl, j.from)
			if j.token <= before.token && !late {
				r.violate("the job of %s with token %d began at %v, after that of %s with token %d at %v\n%s",
					j.replica, j.token, j.from, before.replica, before.token, before.from, p.around(before.from, j.from))
				break
			}
		}
		for _, lost := range a.lost {
			if j.from < lost.from && lost.to+p.ttl < j.to {
				r.wentOn++
			}
		}
	}
}
