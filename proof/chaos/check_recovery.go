package main

import (
	"iter"
	"slices"
	"strings"
	"time"
)

// alone reports whether a fault was the only one at its time, and the one before it ended
// long enough ago that its consequences are over.
func (p *phase) alone(f *fault) bool {
	return !slices.ContainsFunc(p.record.faults, func(g *fault) bool {
		return g != f && (g.episode == f.episode || g.from < f.from && f.from < g.to+p.ttl/2)
	})
}

// unanswered reports whether the holder, at about the time of a fault, had sent a renewal
// whose success was not reported to it.
func (p *phase) unanswered(f *fault) bool {
	return slices.ContainsFunc(p.record.sorted(), func(e event) bool {
		return e.Kind == notRenewed && strings.Contains(f.target, e.Term) && f.from-p.ttl/2 < e.At && e.At < f.to+p.ttl/2
	})
}

// checkRecoveries checks that a replica held the lease in time after each fault.
func (r *result) checkRecoveries(p *phase, jobs []job) {
	for f := range p.lastFaults() {
		jobs, what := jobs, "nobody held the lease"
		if f.kind == renewedByCopy {
			if !p.alone(f) || p.unanswered(f) { // the holder may take the copy's write for its own
				continue
			}
			jobs = slices.DeleteFunc(slices.Clone(jobs), func(j job) bool { return strings.Contains(f.target, j.term) })
			what = "nobody else held the lease"
		}
		if took := r.checkRecovery(p, f, jobs, what); took != forever {
			r.recoveries = append(r.recoveries, took)
		}
	}
}

// lastFaults yields each fault that did not end before another of its episode.
func (p *phase) lastFaults() iter.Seq[*fault] {
	return func(yield func(*fault) bool) {
		for _, f := range p.record.faults {
			if !slices.ContainsFunc(p.record.faults, func(g *fault) bool { return g.episode == f.episode && f.to < g.to }) && !yield(f) {
				return
			}
		}
	}
}

// allowedAfter returns how soon after faults a lease must be held again, or a claim have ended.
func (p *phase) allowedAfter(faults ...*fault) time.Duration {
	allowed := p.ttl + p.patient(max(time.Second, 3*p.began)) // the latter on a busy machine
	if slices.ContainsFunc(faults, func(f *fault) bool { return f.kind == clockMoved }) {
		allowed += p.ttl // as promised if the clock is set back
	}
	return allowed
}

// patient returns a limit that holds on this machine, of one that holds on a quiet machine.
func (p *phase) patient(limit time.Duration) time.Duration {
	return limit * time.Duration(max(1, p.patience))
}

// checkRecovery checks that a job ran in time after a fault, and returns after what time it did.
func (r *result) checkRecovery(p *phase, f *fault, jobs []job, what string) time.Duration {
	allowed := p.allowedAfter(f)
	free, took := p.recovery(f, jobs, allowed)
	allowed += p.stalledFor(free, free+allowed)
	if took > allowed && (took < forever || p.record.ended() > free+allowed) { // or the phase has ended before
		r.violate("after %s of %s %s for %v, more than %v\n%s", f.kind, f.target, what, took, allowed, p.around(f.from, free+allowed))
	}
	return took
}

// recovery returns for how long nobody held the lease after a fault, and from when on. A
// job that is running when the fault ends may be about to end because of it: then the time
// after that job counts, unless another fault comes in between.
func (p *phase) recovery(f *fault, jobs []job, allowed time.Duration) (free, took time.Duration) {
	free = f.to
	for _, j := range jobs {
		switch {
		case j.to <= free:
		case j.from > free:
			if free > f.to && slices.ContainsFunc(p.record.faults, func(g *fault) bool {
				return g.episode != f.episode && f.to < g.from && g.from < j.from
			}) {
				return f.to, 0
			}
			return free, j.from - free
		case j.to >= f.to+allowed:
			return free, 0
		default:
			free = j.to
		}
	}
	if free > f.to { // the end of the phase
		return f.to, 0
	}
	return free, forever
}

// stalledFor returns for how long this machine kept some process from running.
func (p *phase) stalledFor(from, to time.Duration) (stalled time.Duration) {
	until := from
	for _, pause := range p.record.sortedPauses() {
		if from < pause.from && pause.from < to && !p.stopped(pause) {
			stalled += max(0, pause.to-max(until, pause.from))
			until = max(until, pause.to)
		}
	}
	return stalled
}
