package sim

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/tenurelib/tenure"
)

// What the judge holds jobs to: when they begin, overlap, are told to return, and
// why.

// jobBegins is told that a func of a job begins.
func (j *judge) jobBegins(l *life, ctx context.Context, tm *tenure.Term) {
	t := j.terms[tm.ID()]
	if t == nil {
		j.violated("I3", "%s works for term %d, which nobody has written", l.r.name, tm.Token())
		return
	}
	t.running++
	if t.running > 1 || l.dead() {
		return
	}
	j.begins(t, tm.Valid)
	if tm.Token() <= l.token {
		j.violated("I3", "%s's term has token %d after one had %d", t.who, tm.Token(), l.token)
	}
	l.token = tm.Token()
	if tm.Token() != t.token {
		j.violated("I3", "%s's term has token %d, and its record began at %d", t.who, tm.Token(), t.token)
	}
	if !tm.Valid() {
		j.violated("I1", "%s's job begins after its term's trust has ended", t.who)
	}
	j.confirmed(t)
	context.AfterFunc(ctx, func() { j.w.locked(func() { j.jobTold(t, tm, context.Cause(ctx)) }) })
}

// confirmed judges whether a job may begin after a takeover. Where a replica takes
// up its own record, it need not be one.
func (j *judge) confirmed(t *term) {
	if len(j.predecessors(t)) == 0 {
		return
	}
	if t.renewals < j.w.confirmations {
		j.violated("confirmations", "%s's job begins after %d renewals, not %d", t.who, t.renewals, j.w.confirmations)
	}
	if j.w.fences && !t.cutOff {
		j.violated("fence predecessor", "%s's job begins before the holder before it was cut off", t.who)
	}
}

// predecessors names who may be at work when a term begins: whose record it took
// over, and of whom that one was not sure; but never the replica that takes it over.
func (j *judge) predecessors(t *term) (names []string) {
	b := t.before
	if b == nil {
		return nil
	}
	released := b.offer
	if released {
		b = b.before
	}
	if b.valid == nil && !j.sure(b) { // its job has not begun
		names = j.predecessors(b)
	}
	if !released {
		names = append(names, b.who)
	}
	return slices.DeleteFunc(names, func(name string) bool { return name == t.who })
}

// sure reports whether a term's takeover is confirmed.
func (j *judge) sure(t *term) bool {
	return t.renewals >= j.w.confirmations && (t.cutOff || !j.w.fences)
}

// begins notes that somebody works for a term.
func (j *judge) begins(t *term, valid func() bool) {
	t.valid = valid
	j.w.line.say(t.who, "JOB of %d begins", t.token)
	for _, other := range j.running {
		switch {
		case other.life != nil && other.life == t.life:
			j.violated("I5", "%s's jobs of terms %d and %d run at once", t.who, other.token, t.token)
		case other.token < t.token, other.at.Before(j.restoredAt) && t.at.After(j.restoredAt):
			j.overlap(other, t)
		default:
			j.overlap(t, other)
		}
	}
	j.running = append(j.running, t)
}

func (j *judge) overlap(older, newer *term) {
	why := older.excuse
	if why == "" && older.life != nil && !older.told.IsZero() && time.Since(older.told) >= older.life.allowed() {
		why = "late job"
	}
	if why == "" {
		j.violated("I1", "%s's job of term %d overlaps with %s's of %d", older.who, older.token, newer.who, newer.token)
		return
	}
	count(&j.excused, why)
	j.w.line.say("judge", "%s's job of %d overlaps with %s's of %d, excused: %s", older.who, older.token, newer.who, newer.token, why)
}

// jobReturns is told that a func of a job returns.
func (j *judge) jobReturns(l *life, tm *tenure.Term) {
	if t := j.terms[tm.ID()]; t != nil && !l.dead() {
		if t.running--; t.running == 0 {
			j.ends(t)
		}
	}
}

func (j *judge) ends(t *term) {
	j.w.line.say(t.who, "JOB of %d has returned", t.token)
	for i, other := range j.running {
		if other == t {
			j.running = append(j.running[:i], j.running[i+1:]...)
			return
		}
	}
}

// jobTold is told that a job's context has ended, and judges whether that was in
// time and whether its cause is the truth.
func (j *judge) jobTold(t *term, tm *tenure.Term, cause error) {
	l := t.life
	if l.dead() {
		return
	}
	t.told = time.Now()
	j.w.line.say(t.who, "job of %d is told to return: %v", t.token, cause)
	// A wall clock that is set ahead takes trust away at once.
	if left := tm.Deadline().Sub(l.r.clocks.now().Mono); left < l.allowed()-time.Millisecond && time.Since(l.r.wallSetAt) > l.ttl() {
		j.violated("I1", "%s's job is told to return with %v of trust left, less than %v", t.who, left, l.allowed())
	}
	count(&j.judged, "jobs told to return")
	good := time.Since(l.goodSince())
	switch {
	case errors.Is(cause, tenure.ErrJobEnded):
		count(&j.tally.ends, "job ended")
	case errors.Is(cause, tenure.ErrResigned):
		count(&j.tally.ends, "resigned")
		if l.r.resignedFor == 0 && !t.asked {
			j.violated("cause", "%s's term ended by a resignation that nobody asked for", t.who)
		}
	case errors.Is(cause, tenure.ErrShutdown):
		count(&j.tally.ends, "shutdown")
		if !l.stopping {
			j.violated("cause", "%s's term ended by a shutdown that nobody asked for", t.who)
		}
	case errors.Is(cause, tenure.ErrUnhealthy):
		count(&j.tally.ends, "unhealthy")
		if good > l.ttl()/3 {
			j.violated("cause", "%s's term ended as unhealthy, and it was fit for %v", t.who, good)
		}
	case errors.Is(cause, tenure.ErrLost):
		count(&j.tally.ends, "lost")
		if j.standing == t && !t.copied {
			j.violated("I7", "%s's term %d counts as lost while its record stands", t.who, t.token)
		}
	case errors.Is(cause, tenure.ErrDeadline):
		count(&j.tally.ends, "deadline")
		// A call that hung when all was well again ends within TTL/6, and the next
		// follows within as long.
		if good > l.ttl()*2/5 && t.excuse != "restored" {
			j.violated("I7", "%s's term %d was not renewed, though all had been well for %v", t.who, t.token, good)
		}
	default:
		j.violated("cause", "%s's term ended by %v", t.who, cause)
	}
}

// crashed is told that a life ended, and with it its jobs.
func (j *judge) crashed(l *life) {
	for i := len(j.running) - 1; i >= 0; i-- {
		if t := j.running[i]; t.life == l {
			j.running = append(j.running[:i], j.running[i+1:]...)
		}
	}
}
