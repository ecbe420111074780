package main

import (
	"iter"
	"slices"
	"strings"
	"time"

	"github.com/tenurelib/tenure"
)

// Excuses for an overlap of two jobs, which the README documents.
const (
	excusePause   = "a process was paused"
	excuseStall   = "this machine stalled a process"
	excuseClock   = "the database's clock was moved"
	excuseRemoved = "the file was removed"
)

// overlapping yields each two jobs of which the second began before the end of the first, and the
// time at which the first of them ended. The jobs are in the order in which they began.
func overlapping(jobs []job, end func(job) time.Duration) iter.Seq2[[2]job, time.Duration] {
	return func(yield func([2]job, time.Duration) bool) {
		for i, a := range jobs {
			for _, b := range jobs[i+1:] {
				if b.from >= end(a) {
					continue
				}
				if !yield([2]job{a, b}, min(end(a), end(b))) {
					return
				}
			}
		}
	}
}

// checkOverlaps looks for times at which two jobs ran.
func (r *result) checkOverlaps(p *phase, jobs []job) {
	for two, to := range overlapping(jobs, func(j job) time.Duration { return j.to }) {
		if a, b := two[0], two[1]; a.replica == b.replica {
			r.violate("%s ran two jobs at the same time, from %v to %v: tokens %d and %d", a.replica, b.from, to, a.token, b.token)
			continue
		}
		r.excuse(p, "jobs overlapped", two, to)
	}
}

// excuse counts an overlap of two jobs that has an excuse; any other is a violation.
func (r *result) excuse(p *phase, what string, two [2]job, to time.Duration) {
	a, b := two[0], two[1]
	why := p.excuse(a.from, span{a.replica, b.from, to}, span{b.replica, b.from, to})
	if why == "" {
		r.violate("%s for %v from %v: that of %s, token %d, ran from %v to %v, and that of %s, token %d, from %v to %v\n%s", what,
			to-b.from, b.from, a.replica, a.token, a.from, a.end(), b.replica, b.token, b.from, b.end(), p.around(b.from, to))
		return
	}
	r.overlaps[why]++
	r.longest[why] = max(r.longest[why], to-b.from)
}

// checkValid looks for times at which two terms of a lease, or two claims of a key, were seen valid.
// There is no excuse for that but a clock that was moved or a file that was removed.
func (r *result) checkValid(p *phase, what string, seen []job, ttl time.Duration) {
	for two, to := range overlapping(seen, func(j job) time.Duration { return j.to }) {
		a, b := two[0], two[1]
		both := span{from: b.from, to: to}
		if both.from < both.to && !slices.ContainsFunc(p.record.faults, func(f *fault) bool {
			return p.clockExcuses(f, a.from, both, ttl) || removalExcuses(f, both, ttl)
		}) {
			r.violate("%s by %s with token %d from %v to %v, and by %s with token %d from %v to %v\n%s",
				what, a.replica, a.token, a.from, a.to, b.replica, b.token, b.from, b.to, p.around(b.from, b.from))
		}
	}
}

// excuse returns the excuse for the overlap of two jobs; empty if there is none.
func (p *phase) excuse(earlier time.Duration, overlaps ...span) string {
	// A paused job is told to return when it is resumed, and then may take its time.
	reaction := p.ttl - p.ttl/30 - p.ttl*2/3
	for _, f := range p.record.faults {
		switch {
		case removalExcuses(f, overlaps[0], p.ttl):
			return excuseRemoved
		case p.clockExcuses(f, earlier, overlaps[0], p.ttl):
			return excuseClock
		}
	}
	for _, o := range overlaps {
		if why := p.excusePauses(o, reaction); why != "" {
			return why
		}
	}
	return ""
}

// removalExcuses reports whether an overlap is due to the removal of the file. Such an
// overlap may last until every process that had the old file open has ended and its term
// in the new file has expired.
func removalExcuses(f *fault, o span, ttl time.Duration) bool {
	return f.kind == fileRemoved && (span{from: f.from, to: f.to + ttl}).covers(o.from, o.to)
}

// clockExcuses reports whether an overlap is due to a fault that moved the clock. A clock
// that jumps ahead, when it is set wrong or set right again, makes the record expire. The
// holder, whose term began earlier, notices at its next renewal.
func (p *phase) clockExcuses(f *fault, earlier time.Duration, o span, ttl time.Duration) bool {
	if f.kind != clockMoved || p.expiry != tenure.ExpiryStoreClock {
		return false
	}
	return slices.ContainsFunc([]span{{from: f.from, to: f.begun}, {from: f.ending, to: f.to}}, func(moved span) bool {
		return earlier < moved.to+clockSlack && (span{from: moved.from - clockSlack, to: moved.to + ttl + clockSlack}).covers(o.from, o.to)
	})
}

// clockSlack is how far the noted time of a clock change may be off.
const clockSlack = 500 * time.Millisecond

// excusePauses excuses an overlap that began during a pause of the replica and ended soon
// after it. A replica may be stopped again before it has reacted.
func (p *phase) excusePauses(o span, reaction time.Duration) string {
	for _, pause := range p.record.sortedPauses() {
		stopped := p.stopped(pause)
		switch reacted := pause.to + reaction; {
		case pause.replica != o.replica || o.from < pause.from || reacted < o.from:
		case reacted >= o.to && stopped:
			return excusePause
		case reacted >= o.to:
			return excuseStall
		case stopped:
			o.from = reacted
		}
	}
	return ""
}

// stopped reports whether a pause was one of the injected faults.
func (p *phase) stopped(pause span) bool {
	return slices.ContainsFunc(p.record.faults, func(f *fault) bool {
		return f.kind == paused && strings.Contains(f.target, pause.replica) &&
			pause.from <= f.to && f.from <= pause.to
	})
}
