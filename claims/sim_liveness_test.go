package claims_test

import (
	"slices"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

// This part of the judge checks what must happen in time: S4, S6 and S7, that a call that
// waits gets a key, and that each row is known to its owner.

func (a *arena) watchLiveness() {
	for a.sleep(a.ttl / 12) {
		a.locked(a.judge.looksAround)
	}
}

// slack is the time for what a process was doing when the last fault ended.
func (l *life) slack() time.Duration { return 4*l.h.limit() + 10*time.Second + l.h.ttl/6 }

// isRested is isWell, except that it counts from when the process has no call left that began
// in bad weather.
func (l *life) isRested() (since time.Time, ok bool) {
	if since, ok = l.isWell(); ok {
		since = since.Add(l.slack())
	}
	return since, ok
}

func (j *judge) looksAround() {
	named := make(map[*session]bool)
	for id, k := range j.keys {
		r := j.a.db.rows[rowKey{kindOf(id), id}]
		if r == nil {
			j.isConfirmed(k, &memRow{})
			continue
		}
		j.isConfirmed(k, r)
		if r.isLocked() || j.a.db.refused[id] {
			k.locked = time.Now()
		}
		if r.Session != "" {
			named[j.sessions[r.Session]] = true
			j.isKnown(r, k)
		}
	}
	for w := range j.waits {
		for _, id := range w.wants() {
			j.isServed(w, id)
		}
	}
	for _, h := range j.a.hosts {
		if h.life != nil {
			j.givesBack(h.life)
		}
	}
	if j.a.rows != nil {
		j.looksAtRows()
	}
	delete(named, nil)
	for s := range named {
		j.removedInTime(s)
	}
}

// isServed checks that a call that waits gets a key that is free.
func (j *judge) isServed(w *waiting, id string) {
	k, r := j.keys[id], j.a.db.rows[rowKey{kindOf(id), id}]
	since, ok := w.life.isRested()
	if _, drained := w.life.isDrained(); drained || !ok {
		return
	}
	since = later(since, w.life.undrained)
	for _, run := range k.runs {
		if run.life == w.life {
			return
		}
	}
	free := k.changed
	if k.last.life == w.life { // its own func, of a session that it has lost
		free = later(free, k.ended)
	}
	if r != nil && r.Session != "" {
		s := j.sessions[r.Session]
		if s.stands() {
			return
		}
		if s != nil {
			free = later(free, s.gone)
		}
	}
	if !j.restoredAt.IsZero() { // nothing is claimed before the failover has settled
		if j.a.db.marked.IsZero() {
			return
		}
		seen := j.a.db.marked
		if j.a.expiry == tenure.ExpiryObserved { // a process counts from when it has first seen the mark
			seen = later(seen, since)
		}
		free = later(free, seen.Add(j.a.longestTTL()))
	}
	from := later(later(since, w.since), later(free, k.locked))
	bound := w.life.h.ttl + w.life.h.ttl/3 + 10*time.Second
	if took := time.Since(from); took > bound {
		j.violated("liveness", "%s waits for %s, which has been free for %v", w.life.name, id, took)
		k.changed = time.Now() // report it once
	}
}

// givesBack checks that a drained process holds only claims whose funcs have not returned.
func (j *judge) givesBack(l *life) {
	at, drained := l.isDrained()
	since, ok := l.isRested()
	if !drained {
		if !l.wasDrained.IsZero() {
			l.undrained, l.wasDrained = time.Now(), time.Time{}
		}
		return
	}
	l.wasDrained = at
	if !ok || time.Since(later(at, since)) < l.slack() {
		return
	}
	for _, k := range l.session.Status().Kinds {
		if k.Claims > k.Running {
			j.violated("D", "%s has been drained for %v, and still holds %d claims of %s without a func", l.name, time.Since(at), k.Claims-k.Running, k.Kind)
			l.drained.Store(time.Now().UnixNano())
		}
	}
}

// isKnown checks that a row is free, or another's, if its session is gone or does not know
// of it.
func (j *judge) isKnown(r *memRow, k *key) {
	s := j.sessions[r.Session]
	if !s.stands() {
		if s != nil {
			j.isFreed(r, k, later(k.changed, s.gone))
		} else {
			j.isFreed(r, k, k.changed)
		}
		return
	}
	l := s.life
	since, ok := l.isRested()
	if !ok || l.session.ID() != r.Session || l.holds(claimOf(r.Claim)) ||
		slices.ContainsFunc(k.runs, func(run *run) bool { return run.life == l }) {
		k.known = time.Now()
		return
	}
	from := later(later(since, k.known), later(k.changed, k.locked))
	if took := time.Since(from); took > knownWithin*l.h.ttl+l.slack() {
		j.violated("liveness", "%s owns %s and does not know of it for %v", s.who(), r.ID, took)
		k.changed = time.Now()
	}
}

// knownWithin is the number of TTLs, after a row was written or the tables were restored, within which a
// session learns what the row says.
const knownWithin = 2

// isConfirmed checks that no process holds a claim for long that the row contradicts.
func (j *judge) isConfirmed(k *key, r *memRow) {
	for i := range k.claims {
		c := &k.claims[i]
		since, ok := c.life.isRested()
		if !ok || r.Claim == c.Claim || !c.life.holds(claimOf(c.Claim)) {
			c.denied = time.Time{}
			continue
		}
		if c.denied.IsZero() {
			c.denied = time.Now()
		}
		within := knownWithin * c.life.h.ttl
		if j.moved[c.Claim] { // only the regular comparison finds it
			within = max(within, time.Hour+c.life.h.ttl)
		}
		if took := time.Since(later(since, c.denied)); took > within+c.life.slack() {
			j.violated("liveness", "%s holds %s with token %d, and its row has said otherwise for %v", c.life.name, c.ID, c.Token, took)
			c.denied = time.Now()
		}
	}
}

// isFreed checks that the row of a session that is gone is freed.
func (j *judge) isFreed(r *memRow, k *key, gone time.Time) {
	for _, h := range j.a.hosts {
		since, ok := h.life.isRested()
		if !ok {
			continue
		}
		from := later(later(since, gone), k.locked)
		if took := time.Since(from); took > h.ttl*102/100+10*time.Second {
			j.violated("S6", "%s names a session that has been gone for %v, and %s is well", r.ID, took, h.life.name)
			k.changed = time.Now()
			return
		}
	}
}

// removedInTime checks that a session is removed as soon as it has expired, if a process waits for what it
// owns.
func (j *judge) removedInTime(s *session) {
	if s.tainted || s.late || j.a.clockJumps || !s.gone.IsZero() && s.gone != time.Now() {
		return
	}
	expired := s.renewed.Add(s.ttl)
	took := time.Since(expired)
	if took <= 0 {
		return
	}
	bound := 20*time.Millisecond + 10*j.a.latency*time.Duration(1+len(j.a.hosts))
	if j.a.expiry == tenure.ExpiryObserved {
		bound += s.ttl
	}
	if took <= bound {
		return
	}
	deadline := s.renewed.Add(s.ttl * 2 / 3) // a claim that lands later was sent long before, and is not expected
	for w := range j.waits {
		since, ok := w.life.isRested()
		_, drained := w.life.isDrained()
		if since = later(since, w.life.undrained); !ok || drained || w.life == s.life || since.After(expired) || w.since.After(expired) {
			continue
		}
		for _, id := range w.wants() {
			if s.ttl < w.life.h.ttl && !w.life.looked.After(j.keys[id].changed) { // it does not know of the session
				continue
			}
			k, r := j.keys[id], j.a.db.rows[rowKey{kindOf(id), id}]
			if r != nil && r.Session == s.id && k.changed.Before(deadline) {
				s.late = true
				j.violated("S4", "%s has expired, and %v later it is not removed, although %s waits for %s", s.who(), took, w.life.name, id)
				return
			}
		}
	}
}

// sent is called for each statement that a process sends.
func (j *judge) sent(l *life, op string) {
	j.statements++
	if op == "claims.look" {
		l.looked = time.Now()
	}
	if j.calmSince.IsZero() || l.dead() {
		return
	}
	if j.calmSent[l] == nil {
		j.calmSent[l] = make(map[string]int)
	}
	j.calmSent[l][op]++
	j.a.line.Say(l.name, "sends %s", op)
}

// calmBegins is called when nothing has happened for a while.
func (j *judge) calmBegins() {
	j.calmSince, j.calmSent, j.calmBegun = time.Now(), make(map[*life]map[string]int), j.begun
}

// calmEnds checks what was sent since: S7.
func (j *judge) calmEnds() {
	shortest := j.a.ttl
	for _, h := range j.a.hosts {
		shortest = min(shortest, h.ttl)
	}
	length := calmTTLs * j.a.ttl
	for l, sent := range j.calmSent {
		if since, ok := l.isRested(); !ok || since.After(j.calmSince) {
			continue
		}
		testkit.Count(&j.judged, "calm processes")
		for op, most := range map[string]int{
			"put": int(length/(l.h.ttl/3)) + 1, "claims.sessions": int(length/(shortest*3/4)) + 1 + j.begun - j.calmBegun,
			"claims.take": 0, "claims.move": 0, "claims.look": 0, "list": int(length/(shortest*3/4)) + 1,
			"settle": 2 * (int(length/l.h.ttl) + 1), // of either kind, after a lost answer
			// To free the rows of those that it removes, and to compare its own, for an hour after a lost answer once per TTL.
			"claims.owned": 4 + 2*sent["delete"] + 2*(int(length/l.h.ttl)+1),
		} {
			if sent[op] > most {
				j.violated("S7", "%s sends %d statements %q in %v, at most %d are needed", l.name, sent[op], op, length, most)
			}
		}
	}
	for _, h := range j.a.hosts {
		if h.life != nil {
			j.calmClaims += h.life.keys.Len()
		}
	}
}
