package sim

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

// This part of the judge checks jobs: when they begin, overlap and are told to return,
// and with which cause.

// jobBegins is called when a func of a job begins.
func (j *judge) jobBegins(l *life, ctx context.Context, tm *tenure.Term) {
	t := j.terms[tm.ID()]
	if t == nil {
		j.violated("tokens", "%s works for term %d, whose record was never written", l.r.name, tm.Token())
		return
	}
	t.running++
	if t.running > 1 || l.dead() {
		return
	}
	j.w.trace.add(step{what: begins, life: l, term: tm.ID(), token: tm.Token()})
	j.begins(t, tm.Valid)
	j.mayTake(l, "begins its job")
	if tm.Token() <= l.token {
		j.violated("tokens", "%s's term has token %d after one had %d", t.who, tm.Token(), l.token)
	}
	l.token = tm.Token()
	if tm.Token() != t.token {
		j.violated("tokens", "%s's term has token %d, and its record began at %d", t.who, tm.Token(), t.token)
	}
	if !tm.Valid() {
		j.violated("exclusion", "%s's job begins after its term's trust has ended", t.who)
	}
	j.confirmed(t)
	context.AfterFunc(ctx, func() { j.w.locked(func() { j.jobTold(t, tm, context.Cause(ctx)) }) })
}

// confirmed checks whether a job may begin after a takeover. If a replica reclaims its
// own record, the takeover need not be confirmed.
func (j *judge) confirmed(t *term) {
	if len(j.predecessors(t)) == 0 {
		return
	}
	if t.renewals < j.w.confirmations {
		j.violated("confirmations", "%s's job begins after %d renewals, not %d", t.who, t.renewals, j.w.confirmations)
	}
	if j.w.fences && !t.cutOff {
		j.violated("fence predecessor", "%s's job begins before its predecessor was fenced", t.who)
	}
}

// predecessors returns the names of the holders that may still be working when a term
// begins: the one whose record it took over, and those that this one had not confirmed
// to be gone; but never the replica that takes over.
func (j *judge) predecessors(t *term) (names []string) {
	b := t.before
	if b == nil {
		return nil
	}
	released := b.offer
	if released {
		b = b.before
	}
	if b.valid == nil && !j.sure(b) { // its job never began
		names = j.predecessors(b)
	}
	if !released {
		names = append(names, b.who)
	}
	return slices.DeleteFunc(names, func(name string) bool { return name == t.who })
}

// sure reports whether a term's takeover has been confirmed.
func (j *judge) sure(t *term) bool {
	return t.renewals >= j.w.confirmations && (t.cutOff || !j.w.fences)
}

// begins notes that work for a term begins.
func (j *judge) begins(t *term, valid func() bool) {
	t.valid = valid
	j.occupied()
	j.w.line.Say(t.who, "JOB of %d begins", t.token)
	for _, other := range j.running {
		switch {
		case other.life != nil && other.life == t.life:
			j.violated("one job", "%s's jobs of terms %d and %d run at the same time", t.who, other.token, t.token)
		case other.at.Before(t.at), other.at.Equal(t.at) && other.token < t.token: // after a restore, tokens may be smaller
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
		j.violated("exclusion", "%s's job of term %d overlaps with %s's of %d", older.who, older.token, newer.who, newer.token)
		return
	}
	testkit.Count(&j.excused, why)
	j.w.line.Say("judge", "%s's job of %d overlaps with %s's of %d, excused: %s", older.who, older.token, newer.who, newer.token, why)
}

// jobReturns is called when a func of a job returns.
func (j *judge) jobReturns(l *life, tm *tenure.Term) {
	if t := j.terms[tm.ID()]; t != nil && !l.dead() {
		if t.running--; t.running == 0 {
			j.w.trace.add(step{what: returns, life: l, term: tm.ID()})
			l.held = max(l.held, time.Since(tm.AcquiredAt())+l.ttl()/3) // as the process measures it, with its release
			j.ends(t)
		}
	}
}

func (j *judge) ends(t *term) {
	t.returned = time.Now()
	j.w.line.Say(t.who, "JOB of %d has returned", t.token)
	for i, other := range j.running {
		if other == t {
			j.running = append(j.running[:i], j.running[i+1:]...)
			return
		}
	}
}

// jobTold is called when a job's context has ended, and checks whether that was early
// enough and whether the cause is true.
func (j *judge) jobTold(t *term, tm *tenure.Term, cause error) {
	l := t.life
	if l.dead() {
		return
	}
	t.told = time.Now()
	j.vacated(t)
	j.w.line.Say(t.who, "job of %d is told to return: %v", t.token, cause)
	// A wall clock that is set ahead shortens trust immediately.
	if left := tm.Deadline().Sub(l.r.clocks.Now().Mono); left < l.allowed()-time.Millisecond && time.Since(l.r.wallSetAt) > l.ttl() {
		j.violated("exclusion", "%s's job is told to return with %v of trust left, less than %v", t.who, left, l.allowed())
	}
	testkit.Count(&j.judged, "jobs told to return")
	good := time.Since(l.goodSince())
	switch {
	case errors.Is(cause, tenure.ErrJobEnded):
		testkit.Count(&j.tally.ends, "job ended")
	case errors.Is(cause, tenure.ErrResigned):
		testkit.Count(&j.tally.ends, "resigned")
		if !l.r.resigned && !t.asked {
			j.w.later(time.Millisecond, func() { // the judge may be told of a drain a moment after the job
				j.w.locked(func() {
					if l.since.IsZero() && !l.last.After(t.at) {
						j.violated("cause", "%s's term ended by an unrequested resignation", t.who)
					}
				})
			})
		}
	case errors.Is(cause, tenure.ErrShutdown):
		testkit.Count(&j.tally.ends, "shutdown")
		if !l.stopping {
			j.violated("cause", "%s's term ended by an unrequested shutdown", t.who)
		}
	case errors.Is(cause, tenure.ErrUnhealthy):
		testkit.Count(&j.tally.ends, "unhealthy")
		if good > l.ttl()/3 {
			j.violated("cause", "%s's term ended as unhealthy, although it had been fit for %v", t.who, good)
		}
	case errors.Is(cause, tenure.ErrLost):
		testkit.Count(&j.tally.ends, "lost")
		if j.standing == t && !t.copied {
			j.violated("stability", "%s's term %d counts as lost although its record is current", t.who, t.token)
		}
	case errors.Is(cause, tenure.ErrDeadline):
		testkit.Count(&j.tally.ends, "deadline")
		// A call that was hanging when the last fault ended takes at most another TTL/6,
		// and the next one follows within another.
		if good > l.ttl()*2/5 && !t.restored {
			j.violated("stability", "%s's term %d was not renewed, although nothing had been wrong for %v", t.who, t.token, good)
		}
	default:
		j.violated("cause", "%s's term ended by %v", t.who, cause)
	}
}

// crashed is called when a life, and with it its jobs, ended in a crash.
func (j *judge) crashed(l *life) {
	j.w.trace.add(step{what: crashed, life: l})
	for i := len(j.running) - 1; i >= 0; i-- {
		if t := j.running[i]; t.life == l {
			j.running = append(j.running[:i], j.running[i+1:]...)
			j.vacated(t)
		}
	}
}
