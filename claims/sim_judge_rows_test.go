package claims_test

import (
	"context"
	"errors"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/testkit"
)

// This part of the judge checks the rows that remote workers take and finish by value.

// remoteRecord is what the judge knows of the session of a worker.
type remoteRecord struct {
	worker *remote
	leaves bool // the worker has stopped all its work
}

// serving is a call of TakeFor.
type serving struct {
	life  *life
	since time.Time
}

// workBegins is called when a worker was given a claim.
func (j *judge) workBegins(p *remote, c claims.Claim) {
	j.a.line.Say(p.name, "works on %s: %d", c, c.Token)
	if c.Session != p.session.id {
		j.violated("R1", "%s is given a claim of another session", p.name)
	}
}

func (j *judge) jobTaken(ctx context.Context, job *memJob) {
	s, by := j.sessions[job.Session], lifeOf(ctx)
	testkit.Count(&j.rows, "taken")
	j.a.line.Say(by.name, "%s is taken for session %.4s: %d", job.ID, job.Session, job.Token)
	for _, p := range j.remotes {
		for c, works := range p.have {
			if c.Key.ID == job.ID && works && !p.dead() && time.Now().Before(p.trusted) && !j.mayLookExpired(j.sessions[c.Session]) {
				j.violated("R1", "%s takes %s for %s, while %s works on it with token %d", by.name, job.ID, s.who(), p.name, c.Token)
			}
		}
	}
	if token := j.jobTokens[job.ID]; job.Token <= token {
		j.violated("R3", "%s gets token %d after %d", job.ID, job.Token, token)
	}
	j.jobTokens[job.ID] = job.Token
	if claimed := j.claimedOf(job.key); j.a.perKey > 0 && claimed > j.a.perKey {
		j.violated("K", "%s takes %s, so that %d rows of key %s are claimed, of %d", by.name, job.ID, claimed, job.key, j.a.perKey)
	}
	if full, _ := j.a.rows.isFull(job); full {
		testkit.Count(&j.rows, "the last of a key")
	}
	if !s.stands() { // it is free again within a TTL
		testkit.Count(&j.rows, "taken for a session that was gone")
	}
}

func (j *judge) claimedOf(key string) (claimed int) {
	for _, job := range j.a.rows.jobs {
		if job.key == key && job.Session != "" {
			claimed++
		}
	}
	return claimed
}

func (j *judge) jobFreed(ctx context.Context, before objects.Claim, how *objects.Ending) {
	s, by := j.sessions[before.Session], lifeOf(ctx)
	switch {
	case how == nil:
		testkit.Count(&j.rows, "freed")
		j.a.line.Say(by.name, "frees %s of session %.4s", before.ID, before.Session)
		if s.stands() {
			j.violated("R6", "%s frees %s, although %s stands", by.name, before.ID, s.who())
		}
	case how.Done:
		testkit.Count(&j.rows, "finished")
		if !s.stands() {
			testkit.Count(&j.rows, "finished after the session was gone") // and before anybody took the row
		}
		j.a.line.Say(by.name, "FINISHES %s of session %.4s: %d", before.ID, before.Session, before.Token)
		if by, twice := j.doneBy[before.ID]; twice {
			j.violated("R2", "%s is finished twice, with tokens %d and %d", before.ID, by.Token, before.Token)
		}
		j.doneBy[before.ID] = before
	default:
		testkit.Count(&j.rows, "released")
		j.a.line.Say(by.name, "releases %s of session %.4s", before.ID, before.Session)
	}
}

// finishAnswered is called with the answer of Finish.
func (j *judge) finishAnswered(l *life, done []claims.Claim, err error) {
	for _, c := range done {
		row := j.a.rows.jobs[c.Key.ID]
		switch {
		case err == nil && j.doneBy[c.Key.ID] != rowOf(c):
			j.violated("R2", "%s accepts a finish of %s with token %d, whose claim has ended; the row has %+v", l.name, c, c.Token, row.Claim)
		case errors.Is(err, tenure.ErrLost):
			testkit.Count(&j.rows, "late finishes refused")
			if row.Claim == rowOf(c) {
				j.violated("R2", "%s refuses a finish of %s with token %d, whose claim stands", l.name, c, c.Token)
			}
		}
	}
}

// remoteDeleted is recordDeleted for the session of a worker.
func (j *judge) remoteDeleted(by *life, s *session, r *remoteRecord) {
	age := time.Since(s.renewed)
	if r.leaves {
		testkit.Count(&j.rows, "workers that left")
		return
	}
	testkit.Count(&j.rows, "workers' sessions removed")
	j.a.line.Say(by.name, "REMOVES worker %s's session %.4s", r.worker.name, s.id)
	if j.mayLookExpired(s) {
		return
	}
	if age < s.ttl-time.Millisecond {
		j.violated("R4", "%s removes the session of %s, which was renewed %v ago", by.name, r.worker.name, age)
	}
	if p := r.worker; !p.dead() && p.session.id == s.id && time.Now().Before(p.trusted) {
		j.violated("R4", "%s removes the session of %s, which trusts it", by.name, p.name)
	}
}

// looksAtRows checks that the rows of workers that are gone are free in time, and that workers get rows.
func (j *judge) looksAtRows() {
	for _, job := range j.a.rows.jobs {
		if s := j.sessions[job.Session]; job.Session != "" {
			j.isRowFreed(job, s)
		} else if j.a.rows.isReady(job) {
			j.isRowTaken(job)
		}
	}
}

func (j *judge) isRowFreed(job *memJob, s *session) {
	from, sweeps := s.gone, 1
	if s.stands() {
		from, sweeps = s.renewed.Add(s.ttl), 2 // one removes it, at the latest
		if j.a.expiry == tenure.ExpiryObserved {
			from = from.Add(s.ttl)
		}
		if j.a.clockJumps {
			return
		}
	}
	for _, h := range j.a.hosts {
		since, ok := h.life.isRested()
		if !ok {
			continue
		}
		if took := time.Since(later(later(since, from), job.since)); took > time.Duration(sweeps)*h.ttl*102/100+10*time.Second+h.limitOfOthers() {
			j.violated("R6", "%s names a session that has ended %v ago, and %s is well", job.ID, took, h.life.name)
			job.since = time.Now() // report it once
			return
		}
	}
}

// limitOfOthers is what the statements of other processes, which may be in the way, can take.
func (h *host) limitOfOthers() time.Duration { return 2 * h.a.longestTTL() / 6 }

func (j *judge) isRowTaken(job *memJob) {
	full, roomSince := j.a.rows.isFull(job)
	if full {
		return
	}
	for w := range j.servings {
		since, ok := w.life.isRested()
		if !ok {
			continue
		}
		ready := time.Now().Add(-j.a.db.now().Sub(job.readyAt))
		if job.readyAt.IsZero() {
			ready = job.since
		}
		if j.a.perKey > 0 {
			ready = later(ready, roomSince)
		}
		if took := time.Since(later(later(since, w.since), later(ready, job.since))); took > 2*j.a.patience() {
			j.violated("liveness", "%s waits for rows, and %s has been ready for %v", w.life.name, job.ID, took)
			job.since = time.Now()
		}
	}
}
