package sim

import (
	"slices"
	"strings"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

// This part of the judge checks liveness, and stability as far as acquires are concerned.
//
// A candidate is a standby that nothing is wrong with: it is not paused, its link
// is clear, it is fit, and it need not stay away. The bounds count from the last write
// of the record or from when the standby became a candidate, whichever is later. A
// new candidate gets some slack: the time until a call and a check that began in bad
// weather end (TTL/6 each), and one pause after each (TTL/6).
//
// A candidate that relies on hints looks when the record that it saw can expire, and at least
// once in its own TTL. If that record was replaced without a hint, it does not know by when the
// new one expires. So nothing is due before it must look, which is a TTL after its last look. A record of another
// program expires by what the candidate has observed from that look on.

// release is a release that must wake a candidate.
type release struct {
	at   time.Time
	life *life
}

// candidateSince returns since when a process has been a candidate, or false if it is
// not one.
func (j *judge) candidateSince(l *life) (time.Time, bool) {
	if l == nil || l.dead() || l.stopping || !l.r.good || j.refuses(l) {
		return time.Time{}, false
	}
	status := l.coordinator.Status()
	if status.Role != tenure.RoleStandby {
		return time.Time{}, false
	}
	since := l.goodSince()
	if l.drain != nil {
		if l.takes.IsZero() {
			return time.Time{}, false
		}
		since = later(since, l.takes)
	}
	if !l.refused.IsZero() { // it pauses after a refusal
		since = later(since, l.refused.Add(l.ttl()+time.Minute))
	}
	if status.Terms > 0 {
		away := l.ttl() / 3 // as long as after a request through the store
		own := func(past tenure.PastTerm) bool { return past.Holder == l.r.name }
		if i := slices.IndexFunc(status.Recent, own); i >= 0 && strings.Contains(status.Recent[i].Reason, tenure.ErrUnhealthy.Error()) {
			away = 4 * l.ttl()
		}
		if back := status.Since.Add(away); back.After(since) {
			since = back
		}
	}
	return since, !since.After(time.Now())
}

// slack is the time for what a process was doing when it became a candidate.
func (l *life) slack() time.Duration { return l.ttl()*5/6 + l.ttl()/50 }

func (w *world) watchLiveness() {
	for w.sleep(w.ttl / 12) {
		w.locked(w.judge.somebodyHolds)
	}
}

// noteRefusals notes which processes may refuse the store's tokens now. It is called from time to time, and
// when that has changed: a clock that is hardly behind has caught up before the next time.
func (j *judge) noteRefusals() {
	for _, r := range j.w.replicas {
		if l := r.life; l != nil && j.refuses(l) {
			l.refused = time.Now()
		}
	}
}

func (j *judge) somebodyHolds() {
	now := time.Now()
	for _, t := range j.running {
		if t.alive() && t.valid() {
			j.workedAt = now
		}
	}
	j.noteRefusals()
	for _, r := range j.w.replicas {
		l := r.life
		j.followsDrains(l)
		since, ok := j.candidateSince(l)
		if !ok {
			continue
		}
		from := later(since, j.writtenAt)
		bound := j.recordTTL(l)*103/100 + l.ttl()/6 + l.ttl()/50
		if j.writtenAt.Sub(since) < l.slack() {
			bound += l.slack()
		}
		if t := j.standing; t != nil && (!t.rules || t.life == nil && t.restored) {
			bound += l.ttl() // it does not expect such a record, and has to observe it from its next read on
		}
		if j.w.clockJumps { // the standby goes by what it has observed since its next read
			bound += 2 * l.ttl()
		}
		due := from.Add(bound)
		if j.w.wakes && j.w.expiry == tenure.ExpiryStoreClock { // otherwise it polls, or is told of every change
			must := l.mustLook.Add(l.ttl() / 50)
			if t := j.standing; t != nil && t.life == nil {
				must = must.Add(bound)
			}
			due = later(due, must)
		}
		if now.After(due) {
			j.violated("liveness", "%s could hold the lease, but nobody has for %v, longer than %v", r.name, now.Sub(from), due.Sub(from))
			j.writtenAt = now // report it once
		}
		// A replica that writes but can't hold, because it is too slow or rejects the
		// token, must not keep the record young. Each takeover costs its confirmations, too.
		patience := 4 * j.w.longestTTL() * time.Duration(3+j.w.confirmations) / 3
		if from := later(since, j.workedAt); now.Sub(from) > bound+patience {
			j.violated("liveness", "%s could hold the lease, but nobody has worked for %v", r.name, now.Sub(from))
			j.workedAt = now
		}
		// The record may be its own orphan: it does not know that the record landed, or
		// could not delete it. It recognizes the record as its own for a TTL.
		if t := j.standing; t != nil && t.life == l && t == l.newest && !t.late && !t.offer && !t.copied && !t.restored {
			own := l.ttl()/3 + l.ttl()/20
			if now.Sub(from) > own && from.Add(own).Sub(j.writtenAt) < l.ttl() {
				j.violated("stability", "%s's own record of term %d is current, but it has not reclaimed it for %v", r.name, t.token, now.Sub(from))
				j.writtenAt = now
			}
		}
	}
	j.wokeInTime(nil)
}

// untold notes that the record was changed and no hint was given.
func (j *judge) untold() {
	j.untoldAt = time.Now()
	for _, r := range j.w.replicas {
		if l := r.life; l != nil {
			l.mustLook = l.looked.Add(l.ttl())
		}
	}
}

// looks notes that a standby has read the record, by a call that was sent at some time.
func (j *judge) looks(l *life, sent time.Time) {
	l.looked = time.Now()
	if !sent.After(j.untoldAt) { // it may have read what stood before
		l.mustLook = l.looked.Add(l.ttl())
	} else if l.mustLook.After(l.looked) {
		l.mustLook = l.looked
	}
}

// recordTTL returns the TTL of the current record.
func (j *judge) recordTTL(l *life) time.Duration {
	if j.standing == nil || j.standing.life == nil {
		return l.ttl() // the record was deleted without a hint, or is another program's
	}
	return j.standing.life.ttl()
}

// expectWake returns the candidate that a release of the lease must wake, if any.
func (j *judge) expectWake(by *handle) *release {
	if !j.w.wakes {
		return nil
	}
	now := time.Now()
	for _, r := range j.w.replicas {
		since, ok := j.candidateSince(r.life)
		if !ok || r.life == by.life || now.Sub(since) <= r.life.slack() {
			continue
		}
		if now.Sub(j.floodedUntil) > 2*r.life.ttl() { // it may ignore hints for one TTL, and for longer if requests come meanwhile
			return &release{now, r.life}
		}
	}
	return nil
}

// hinted notes a hint that may tell nothing new, such as that of a release whose answers are lost
// again and again. A standby follows the first few of these, and then one per interval.
func (j *judge) hinted() {
	const few = 5
	now := time.Now()
	j.hints = slices.DeleteFunc(append(j.hints, now), func(at time.Time) bool { return now.Sub(at) > j.w.longestTTL() })
	if len(j.hints) >= few {
		j.floodedUntil = later(j.floodedUntil, now)
	}
}

// wokeInTime checks whether the last release woke its candidate in time. It is called
// when a term begins, and with nil from time to time.
func (j *judge) wokeInTime(begun *term) {
	r := j.released
	if r == nil {
		return
	}
	took := time.Since(r.at)
	if begun != nil {
		testkit.Count(&j.judged, "releases that woke")
	}
	if took <= 8*j.w.latency+50*time.Millisecond {
		return
	}
	j.released = nil
	if time.Since(r.life.goodSince()) < took || !j.floodedUntil.Before(r.at) || r.life.stopping || r.life.last.After(r.at) {
		return
	}
	j.violated("liveness", "%s was not woken: no term had begun %v after a release", r.life.r.name, took)
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

func (w *world) longestTTL() (longest time.Duration) {
	for _, r := range w.replicas {
		longest = max(longest, r.ttl)
	}
	return longest
}
