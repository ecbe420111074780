package sim

import (
	"errors"
	"time"

	"github.com/tenurelib/tenure"
)

// The liveness half of the judge, I6 and what of I7 is about acquires.
//
// A candidate is a process that nothing is wrong with: it is not paused, its link
// is clear, it is fit, it is a standby and need not stay away. The bounds count
// from the last write of the record or from when the candidate became one,
// whichever is later. Slack is for one that has only just become one: what a call
// and a check that began in bad weather may take until they end (TTL/6 each), and
// one pause after each (TTL/6).

// release is one that wakes, and a candidate who waits for it.
type release struct {
	at   time.Time
	life *life
}

// candidateSince returns since when a process has been one; false where it is none.
func (j *judge) candidateSince(l *life) (time.Time, bool) {
	if l == nil || l.dead() || l.stopping || !l.r.good || j.refuses(l) {
		return time.Time{}, false
	}
	status := l.coordinator.Status()
	if status.Role != tenure.RoleStandby {
		return time.Time{}, false
	}
	since := l.goodSince()
	if status.Terms > 0 {
		away := l.ttl() / 3 // also where it was asked through the store
		if errors.Is(l.lastCause, tenure.ErrUnhealthy) {
			away = 4 * l.ttl()
		}
		if back := status.Since.Add(max(away, l.r.resignedFor)); back.After(since) {
			since = back
		}
	}
	return since, !since.After(time.Now())
}

// slack is for what a process was about to do when it became a candidate.
func (l *life) slack() time.Duration { return l.ttl()*5/6 + l.ttl()/50 }

func (w *world) watchLiveness() {
	for w.sleep(w.ttl / 12) {
		w.locked(w.judge.somebodyHolds)
	}
}

func (j *judge) somebodyHolds() {
	now := time.Now()
	for _, t := range j.running {
		if t.alive() && t.valid() {
			j.workedAt = now
		}
	}
	for _, r := range j.w.replicas {
		l := r.life
		since, ok := j.candidateSince(l)
		if !ok {
			continue
		}
		from := later(since, j.writtenAt)
		bound := j.recordTTL(l)*103/100 + l.ttl()/6 + l.ttl()/50
		if j.writtenAt.Sub(since) < l.slack() {
			bound += l.slack()
		}
		if j.standing != nil && !j.standing.rules {
			bound += l.ttl() // until it looks, for it expects no such record, and it must watch it from then on
		}
		if j.w.clockJumps { // only what a standby has watched counts, from its next look on
			bound += 2 * l.ttl()
		}
		if now.Sub(from) > bound {
			j.violated("I6", "%s could hold, and nobody has for %v, more than %v", r.name, now.Sub(from), bound)
			j.writtenAt = now // say it once
		}
		// Nor may those that write and can't hold keep the record young: one that is too
		// slow, or that refuses what it gets.
		if from := later(since, j.workedAt); now.Sub(from) > bound+4*j.w.longestTTL() {
			j.violated("I6", "%s could hold, and nobody has worked for %v", r.name, now.Sub(from))
			j.workedAt = now
		}
		// Its own record, of which it does not know that it landed, or that it could
		// not delete. For a TTL it knows it for its own.
		if t := j.standing; t != nil && t.life == l && t == l.newest && !t.late && !t.offer && !t.copied && t.excuse != "restored" {
			own := l.ttl()/3 + l.ttl()/20
			if now.Sub(from) > own && from.Add(own).Sub(j.writtenAt) < l.ttl() {
				j.violated("I7", "%s's own record of term %d stands, and it has not taken it up for %v", r.name, t.token, now.Sub(from))
				j.writtenAt = now
			}
		}
	}
	j.wokeInTime(nil)
}

// recordTTL returns for how long the record that stands counts.
func (j *judge) recordTTL(l *life) time.Duration {
	if j.standing == nil || j.standing.life == nil {
		return l.ttl() // of one that was deleted without a hint, and of another program's
	}
	return j.standing.life.ttl()
}

// expectWake returns who must begin a term, now that the lease was released.
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
		if now.Sub(j.vainUntil) > 2*r.life.ttl() { // it may be deaf for one, and requests that come meanwhile add to it
			return &release{now, r.life}
		}
	}
	return nil
}

// wokeInTime judges, when a term begins or none has, whether the last release woke
// whom it had to.
func (j *judge) wokeInTime(begun *term) {
	r := j.released
	if r == nil {
		return
	}
	took := time.Since(r.at)
	if begun != nil {
		count(&j.judged, "releases that woke")
	}
	if took <= 8*j.w.latency+50*time.Millisecond {
		return
	}
	j.released = nil
	if time.Since(r.life.goodSince()) < took || !j.vainUntil.Before(r.at) || r.life.stopping {
		return
	}
	j.violated("I6", "%s was not woken: %v after a release nobody had begun a term", r.life.r.name, took)
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
