package sim

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/tenurelib/tenure"
)

// judge sees each write of the lease's record as it lands, and each begin and end
// of a job, and holds the replicas to the invariants. All methods but violated are
// called under the world's lock.
//
// I1 is judged twice. When a record is taken over, the term that it had must not
// be valid any more in the eyes of its holder. And when a job begins, no job of
// another term may run. Both are excused, for the term with the lower token, where
//
//   - somebody wrote over its record, or deleted it, who is bound by no rule
//     ("by hand");
//   - the database's clock was set forward since its last renewal, and the
//     takeover may have gone by that clock ("clock"): I1 is for clocks whose rates
//     differ by less than Margin/TTL. It holds all the same where Expiry is
//     Observed, and for another program's record;
//
// and an overlap of jobs also where
//
//   - the job was told to return longer ago than TTL − Margin − RenewDeadline
//     ("late job"). A job of a paused replica is late too: its context ends in
//     time, and it cannot see that.
//
// A crash ends the jobs of its replica at that instant. Nothing else is excused.
type judge struct {
	w *world
	tally
	until string // the timeline to the first fault

	terms   map[string]*term // all that ever began, by the ID in their record
	running []*term          // those whose jobs run

	standing  *term // whose record is stored; nil: there is none
	payload   []byte
	version   int64
	writtenAt time.Time     // when it last landed, or was deleted
	shift     time.Duration // of the database's clock at that time
	newest    int64         // the greatest version that a record ever had
	released  *release      // since the last term; nil: none that wakes
	vainUntil time.Time     // for as long somebody wakes all in vain
}

// term is what the judge knows of one holding.
type term struct {
	id     string
	who    string
	life   *life // nil: another program's
	rules  bool  // whether who wrote it keeps to the rules of the lease
	token  int64
	before *term // whose record it took over; nil: there was none

	valid    func() bool // in the eyes of its holder; nil: it has not heard of it
	late     bool        // landed when its holder had given up
	renewals int         // that landed
	cutOff   bool        // its predecessor was
	running  int         // of the job's funcs
	told     time.Time   // when the job was told to return; zero: it was not
	excuse   string      // why an overlap with a later term would be no fault
}

func (j *judge) violated(rule, format string, args ...any) {
	count(&j.broken, rule)
	j.w.line.say("JUDGE", rule+": "+format, args...)
	if j.until == "" {
		j.until = j.w.line.String()
	}
	j.w.t.Errorf("seed %d: "+rule+": "+format, append([]any{j.w.seed}, args...)...)
}

// written is told that the lease's record was written; late: when its writer had
// given up.
func (j *judge) written(h *handle, obj tenure.Object, late bool) {
	now, shift := time.Now(), j.w.journal.clock.shifted()
	if obj.Version <= j.newest {
		j.violated("I3", "a record got version %d after one had %d", obj.Version, j.newest)
	}
	j.newest, j.version = obj.Version, obj.Version
	old := j.standing
	if old != nil && bytes.Equal(obj.Payload, j.payload) {
		old.renewals++
		j.renewed++
		j.w.line.say(old.who, "renewal of %d lands", old.token)
		j.writtenAt, j.shift = now, shift
		return
	}
	var record struct{ Term string }
	_ = json.Unmarshal(obj.Payload, &record) // by hand anything may be written
	begun := &term{id: record.Term, who: h.who, life: h.life, token: obj.Version, rules: h.rules, before: old, late: late}
	if h.life == nil {
		begun.id = foreignID(h.who, obj.Version)
	}
	j.w.line.say(h.who, "term %d lands", begun.token)
	if j.terms[begun.id] != nil {
		j.violated("I3", "%s's term %d stands again", h.who, j.terms[begun.id].token)
	}
	switch {
	case old == nil:
	case h.rules:
		j.takenOver(old, begun, shift > j.shift)
	default:
		old.excuse = "by hand"
	}
	if h.life != nil {
		j.tally.terms++
		h.life.newest = begun
		h.life.r.resignedFor = 0
		j.wokeInTime(begun)
	}
	j.terms[begun.id] = begun
	j.standing, j.payload, j.released = begun, obj.Payload, nil
	j.writtenAt, j.shift = now, shift
}

// foreignID stands for the ID that a term has whose record does not tell.
func foreignID(who string, version int64) string { return fmt.Sprint(who, "@", version) }

func (j *judge) takenOver(old, begun *term, clockSet bool) {
	if clockSet && j.w.expiry == tenure.StoreClock && begun.life != nil && old.life != nil && old.excuse == "" {
		old.excuse = "clock"
	}
	count(&j.judged, "takeovers")
	if old.alive() && old.valid != nil && old.valid() {
		if old.excuse == "" {
			j.violated("I1", "%s took over from %s, whose term %d was still valid", begun.who, old.who, old.token)
			return
		}
		count(&j.excused, "valid: "+old.excuse)
	}
}

// alive reports whether its process is.
func (t *term) alive() bool { return t.life == nil || !t.life.dead() }

// deleted is told that the lease's record was deleted.
func (j *judge) deleted(h *handle, wakes bool) {
	old := j.standing
	j.w.line.say(h.who, "record of %s's term %d is deleted", old.who, old.token)
	switch {
	case !h.rules:
		old.excuse = "by hand"
	case old.running > 0 && old.alive():
		j.violated("I4", "%s's term %d is released while its job runs", old.who, old.token)
	}
	j.standing, j.payload = nil, nil
	j.writtenAt = time.Now()
	j.released = nil
	if wakes && h.rules {
		j.released = j.expectWake(h)
	}
}

// fencedWrite is told that a write landed that depends on a term.
func (j *judge) fencedWrite(t *tenure.Term, err error) {
	switch {
	case err == nil && (j.standing == nil || j.standing.id != t.ID()):
		j.violated("I2", "a fenced write of term %d landed although that is over", t.Token())
	case err == nil:
		count(&j.fenced, "landed")
	case errors.Is(err, tenure.ErrLost):
		count(&j.fenced, "refused")
	}
}

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
	if t.before == nil || t.before.who == t.who {
		return
	}
	if t.renewals < j.w.confirmations {
		j.violated("confirmations", "%s's job begins after %d renewals, not %d", t.who, t.renewals, j.w.confirmations)
	}
	if j.w.fences && !t.cutOff {
		j.violated("fence predecessor", "%s's job begins before %s was cut off", t.who, t.before.who)
	}
}

// begins notes that somebody works for a term.
func (j *judge) begins(t *term, valid func() bool) {
	t.valid = valid
	j.w.line.say(t.who, "JOB of %d begins", t.token)
	for _, other := range j.running {
		switch {
		case other.life != nil && other.life == t.life:
			j.violated("I5", "%s's jobs of terms %d and %d run at once", t.who, other.token, t.token)
		case other.token < t.token:
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
	if left := time.Until(tm.Deadline()); left < l.allowed()-time.Millisecond {
		j.violated("I1", "%s's job is told to return with %v of trust left, less than %v", t.who, left, l.allowed())
	}
	count(&j.judged, "jobs told to return")
	l.r.lastCause = cause
	good := time.Since(l.goodSince())
	switch {
	case errors.Is(cause, tenure.ErrJobEnded):
		count(&j.tally.ends, "job ended")
	case errors.Is(cause, tenure.ErrResigned):
		count(&j.tally.ends, "resigned")
		if l.r.resignedFor == 0 {
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
		if j.standing == t {
			j.violated("I7", "%s's term %d counts as lost while its record stands", t.who, t.token)
		}
	case errors.Is(cause, tenure.ErrDeadline):
		count(&j.tally.ends, "deadline")
		// A call that hung when all was well again ends within TTL/6, and the next
		// follows within as long.
		if good > l.ttl()*2/5 {
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
