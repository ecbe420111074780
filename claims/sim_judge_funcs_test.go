package claims_test

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/testkit"
)

// This part of the judge checks funcs: when they begin, overlap, and are told to return.

// run is one run of a func.
type run struct {
	objects.Claim
	life *life
	told time.Time // when it was told to return; zero: it was not
}

// begins judges the beginning of a func.
func (j *judge) begins(l *life, ctx context.Context, c claims.Claim) *run {
	k, s := j.keys[c.Key.ID], j.sessions[c.Session]
	r := &run{Claim: rowOf(c), life: l}
	if l.dead() {
		return r
	}
	j.runs++
	j.a.line.Say(l.name, "FUNC for %s begins: %d", c, c.Token)
	if since, drained := l.isDrained(); drained && ctx.Err() == nil && time.Now().After(since) {
		j.violated("D", "%s's func for %s begins, and is not told that it is drained", l.name, c)
	}
	if ctx.Err() == nil && !l.holds(c) {
		j.violated("S1", "%s's func for %s begins without a claim", l.name, c)
	}
	_, moved := j.moved[r.Claim] // and its owner does not know yet
	if row := j.a.db.rows[rowKey{c.Key.Type, c.Key.ID}]; s.stands() && !s.tainted && !moved && (row == nil || row.Claim != r.Claim) {
		j.violated("S1", "%s's func for %s begins with token %d, and the row has %+v", l.name, c, c.Token, row.Claim)
	}
	if c.Token <= k.ran && !s.tainted && !moved && !j.mayLookExpired(s) {
		j.violated("S3", "%s's func for %s has token %d after %d", l.name, c, c.Token, k.ran)
	}
	k.ran = max(k.ran, c.Token)
	for _, other := range k.runs {
		if other.life == l {
			j.violated("S5", "%s runs two funcs for %s", l.name, c)
		} else {
			j.overlap(other, r)
		}
	}
	k.runs = append(k.runs, r)
	context.AfterFunc(ctx, func() { j.a.locked(func() { j.isTold(r, context.Cause(ctx)) }) })
	return r
}

func (j *judge) overlap(older, newer *run) {
	if older.Token > newer.Token {
		older, newer = newer, older
	}
	s, why := j.sessions[older.Session], ""
	_, moved := j.moved[older.Claim]
	switch {
	case !older.told.IsZero() && time.Since(older.told) >= older.life.allowed():
		why = "late func"
	case moved: // isConfirmed checks when it is told
		why = "moved"
	case j.mayBeOutwaited(s):
		why = "longer TTL"
	case j.mayLookExpired(s):
		why = "clock"
	default:
		j.violated("S1", "%s's func for %s with token %d overlaps with %s's with %d", older.life.name, older.ID, older.Token, newer.life.name, newer.Token)
		return
	}
	testkit.Count(&j.excused, why)
	j.a.line.Say("judge", "%s's func for %s overlaps with %s's, excused: %s", older.life.name, older.ID, newer.life.name, why)
}

// returns notes that a func has returned.
func (j *judge) returns(r *run) {
	k := j.keys[r.ID]
	if r.life.dead() {
		return
	}
	k.runs = slices.DeleteFunc(k.runs, func(other *run) bool { return other == r })
	k.last, k.ended = *r, time.Now()
	j.a.line.Say(r.life.name, "FUNC for %s has returned: %d", r.ID, r.Token)
}

// releasing notes that an application is about to release claims.
func (j *judge) releasing(l *life, got []claims.Claim) {
	j.a.line.Say(l.name, "releases %v", got)
	if j.released[l] == nil {
		j.released[l] = make(map[claims.Claim]bool)
	}
	for _, c := range got {
		j.released[l][c] = true
	}
}

// isTold is called when a func's context has ended, and checks whether the cause is true.
func (j *judge) isTold(r *run, cause error) {
	l, s := r.life, j.sessions[r.Session]
	if l.dead() || !slices.Contains(j.keys[r.ID].runs, r) { // Do ends the context of one that has returned, too
		return
	}
	r.told = time.Now()
	j.a.line.Say(l.name, "func for %s is told to return: %v", r.ID, cause)
	well, isWell := l.isWell()
	switch {
	case errors.Is(cause, tenure.ErrResigned):
		testkit.Count(&j.ends, "released")
		if errors.Is(cause, objects.ErrDrained) { // perhaps before the judge is told of the drain, at the same moment
			testkit.Count(&j.judged, "funcs told by a drain")
			if time.Since(l.h.drained) > l.h.ttl {
				j.violated("cause", "%s's claim of %s ends by an unrequested drain", l.name, r.ID)
			}
		} else if !j.released[l][claimOf(r.Claim)] && !j.keys[r.ID].wished { // a request may come after the claim that it was meant for
			j.violated("cause", "%s's claim of %s ends by an unrequested release", l.name, r.ID)
		}
	case errors.Is(cause, tenure.ErrShutdown):
		testkit.Count(&j.ends, "shutdown")
		if !l.stopping {
			j.violated("cause", "%s's claim of %s ends by an unrequested shutdown", l.name, r.ID)
		}
	case errors.Is(cause, tenure.ErrLost):
		testkit.Count(&j.ends, "lost")
		if _, moved := j.moved[r.Claim]; s.stands() && !s.tainted && !moved {
			j.violated("cause", "%s counts as lost although its record stands", s.who())
		}
		row := j.a.db.rows[rowKey{r.Kind, r.ID}]
		if row == nil || row.Claim != r.Claim {
			testkit.Count(&j.judged, "claims that a failover has lost")
		} else if s.tainted && isWell && well.Before(j.restoredAt) && !j.mayBeOutwaited(s) {
			j.violated("failover", "%s has lost %s by it, although its row stands", s.who(), r.ID)
		}
	case errors.Is(cause, tenure.ErrDeadline):
		testkit.Count(&j.ends, "deadline")
		// A call that was hanging when the last fault ended takes at most another TTL/6, and
		// the next one follows within another.
		if isWell && time.Since(well) > l.h.ttl*2/5 && !s.tainted {
			j.violated("cause", "%s was not renewed, although nothing had been wrong for %v", s.who(), time.Since(well))
		}
	default:
		j.violated("cause", "%s's claim of %s ends by %v", l.name, r.ID, cause)
	}
}
