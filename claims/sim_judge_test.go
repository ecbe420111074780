package claims_test

import (
	"context"
	"encoding/json"
	"slices"
	"strconv"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/testkit"
)

// judge sees each write of a record and of a row as it lands, and each start and end of a
// func, and checks what TestSimulation lists. All methods except violated must be called
// with the database's mutex.
type judge struct {
	a *arena
	tally
	until string // the timeline up to the first violation

	sessions map[string]*session
	keys     map[string]*key
	waits    map[*waiting]bool
	released map[*life]map[claims.Claim]bool // what the application has released
	offers   map[objects.Claim]*offer        // by the claims that others wish for
	handed   objects.Claim                   // the last one that its owner has offered and that was taken
	moved    map[objects.Claim]bool          // claims that others have moved to themselves; true: the notice of it was pruned

	remotes        []*remote // that run
	remoteSessions map[string]*remoteRecord
	servings       map[*serving]bool
	jobTokens      map[string]int64         // the greatest so far
	doneBy         map[string]objects.Claim // the claims under which rows were finished

	back       time.Duration // how far the database's clock is behind what it said before
	restoredAt time.Time
	calmSince  time.Time
	calmSent   map[*life]map[string]int // statements since then
	calmBegun  int                      // sessions before
}

// session is what the judge knows of a session.
type session struct {
	id      string
	life    *life
	ttl     time.Duration
	renewed time.Time     // when its record was last written
	shift   time.Duration // how far the database's clock had been set ahead then
	gone    time.Time     // when its record was deleted; zero: it stands
	aged    bool          // the database's clock made it look expired when its record was deleted
	tainted bool          // the tables were restored since it began
	lost    bool          // and its record was not among them
	back    time.Time     // when it was written again after that
	late    bool          // that it was removed late was reported
}

func (s *session) stands() bool { return s != nil && s.gone.IsZero() }

// key is what the judge knows of a key.
type key struct {
	token   int64     // the greatest so far
	claims  []claimed // the last of them
	changed time.Time // when its row last changed
	locked  time.Time // when it was last seen locked
	known   time.Time // when its owner was last seen to know of it, or to be unwell
	runs    []*run    // of processes that are alive
	last    run       // that returned
	ended   time.Time // when it did
	ran     int64     // the greatest token for which a func began
	tainted bool      // the tables were restored since its row changed
	wished  bool      // processes have attached to it
}

// claimed is a claim, and the process that has made it.
type claimed struct {
	objects.Claim
	life   *life
	denied time.Time // since when its row has said otherwise, although it is held; zero: it has not
}

// waiting is a call of Claim, or of Take for a slot.
type waiting struct {
	life  *life
	ids   []string // nil: any slot
	since time.Time
}

// wants returns the keys for which the call waits.
func (w *waiting) wants() []string {
	if w.ids == nil {
		return w.life.h.a.slotIDs(claims.LimitOf(w.life.slots))
	}
	return w.ids
}

func newJudge(a *arena) *judge {
	j := &judge{a: a, sessions: map[string]*session{}, keys: map[string]*key{}, waits: map[*waiting]bool{}, released: map[*life]map[claims.Claim]bool{}, moved: map[objects.Claim]bool{}, offers: map[objects.Claim]*offer{}}
	j.remoteSessions, j.servings = map[string]*remoteRecord{}, map[*serving]bool{}
	j.jobTokens, j.doneBy = map[string]int64{}, map[string]objects.Claim{}
	for _, id := range slices.Concat(a.keys, a.slotIDs(a.slots)) {
		j.keys[id] = &key{changed: time.Now()}
	}
	j.tally.arenas, j.tally.hours = 1, map[time.Duration]float64{a.ttl: float64(a.hostCount) * (arenaTTLs * a.ttl).Hours()}
	return j
}

func (j *judge) violated(rule, format string, args ...any) {
	testkit.Count(&j.broken, rule)
	j.a.line.Say("JUDGE", rule+": "+format, args...)
	if j.until == "" {
		j.until = j.a.line.String()
	} else if len(j.broken) > 3 {
		return // more would only hide the first
	}
	j.a.t.Errorf("seed %d: "+rule+": "+format, append([]any{j.a.seed}, args...)...)
}

// who names a session for people to read.
func (s *session) who() string {
	if s == nil || s.life == nil {
		return "a session that has no record"
	}
	return s.life.name + "'s session " + s.id[:4]
}

// mayLookExpired reports whether the database's clock, which was set ahead, makes a session
// look expired.
func (j *judge) mayLookExpired(s *session) bool {
	return j.a.expiry == tenure.ExpiryStoreClock && (s.aged || j.a.clock.Shifted() > s.shift)
}

// mayBeOutwaited reports whether others may not have waited for a session: the failover has
// lost the only record that said that its TTL is longer than theirs. It takes the session a
// while to see which of its claims they have taken.
func (j *judge) mayBeOutwaited(s *session) bool {
	shorter := slices.ContainsFunc(j.a.hosts, func(h *host) bool { return h.ttl < s.ttl })
	return shorter && (s.lost || time.Since(s.back) < s.ttl)
}

func (j *judge) recordPut(ctx context.Context, o tenure.Object) {
	s := j.sessions[o.Key.ID]
	if s == nil {
		var record struct {
			TTLMS int64 `json:"ttl_ms"`
		}
		_ = json.Unmarshal(o.Payload, &record)
		s = &session{id: o.Key.ID, life: lifeOf(ctx), ttl: time.Duration(record.TTLMS) * time.Millisecond}
		j.sessions[s.id] = s
		j.begun++
		j.a.line.Say(s.life.name, "session %s begins", s.id[:4])
	} else {
		j.renewed++
	}
	if !s.stands() && !s.lost {
		j.violated("S1", "%s has come back", s.who())
	}
	if s.lost {
		s.back = time.Now()
	}
	s.gone, s.lost = time.Time{}, false
	s.renewed, s.shift = time.Now(), j.a.clock.Shifted()
}

// recordDeleted is called when a session has ended or was removed.
func (j *judge) recordDeleted(ctx context.Context, id string) {
	s, by := j.sessions[id], lifeOf(ctx)
	age := time.Since(s.renewed)
	own := by == s.life && age < s.ttl && !j.mayLookExpired(s)
	s.gone = time.Now()
	s.aged = j.mayLookExpired(s) // though the clock may be set back again
	if r := j.remoteSessions[id]; r != nil {
		j.remoteDeleted(by, s, r)
		return
	}
	if own {
		j.a.line.Say(by.name, "session %s ends", id[:4])
		testkit.Count(&j.judged, "sessions that ended")
		if by.taking[id] > 0 && !by.dead() {
			j.violated("S6", "%s ends while it claims", s.who())
		}
		for name, k := range j.keys {
			for _, r := range k.runs {
				if r.Session == id {
					j.violated("S5", "%s ends while its func for %s runs", s.who(), name)
				}
			}
		}
		return
	}
	j.a.line.Say(by.name, "REMOVES %s", s.who())
	testkit.Count(&j.judged, "burials")
	if age < s.ttl-time.Millisecond && !j.mayLookExpired(s) && !s.tainted {
		j.violated("S4", "%s removes %s, which was renewed %v ago", by.name, s.who(), age)
	}
	if !s.life.dead() && s.life.session.ID() == id && s.life.session.Valid() && !j.mayLookExpired(s) && !s.tainted {
		j.violated("S4", "%s removes %s, which trusts itself", by.name, s.who())
	}
	j.removedInTime(s)
	if j.a.removersCrash && by.h.life == by && by.h.dice.One(2) {
		testkit.Count(&j.faults, "crash of a remover")
		by.h.crashes()
		h := by.h
		j.a.running.Go(func() {
			by.shutdown()
			j.a.later(h.dice.UpTo(2*h.ttl), h.start)
		})
	}
}

func (j *judge) rowTaken(ctx context.Context, before, after objects.Claim) {
	k, s := j.keys[after.ID], j.sessions[after.Session]
	l := lifeOf(ctx)
	j.taken++
	k.changed, k.tainted = time.Now(), false
	j.a.line.Say(l.name, "%s is claimed by session %s: %d", after.ID, after.Session[:4], after.Token)
	if after.Token <= k.token {
		j.violated("S3", "%s's claim of %s gets the token %d after %d", l.name, after.ID, after.Token, k.token)
	}
	k.token = after.Token
	if after.Kind == slotKind {
		testkit.Count(&j.judged, "slots taken")
		j.slotTaken(l, after)
	}
	if _, moved := j.moved[before]; before.Session != "" && !moved && before != j.handed {
		testkit.Count(&j.judged, "claims of rows of the dead")
		if old := j.sessions[before.Session]; old.stands() {
			j.violated("S1", "%s takes %s from %s, which stands", l.name, after.ID, old.who())
		}
	}
	j.noProcessHolds(k, l.name+" claims "+after.ID)
	if !s.stands() {
		testkit.Count(&j.judged, "claims by the dead")
		if s != nil && !s.tainted && s.gone.Before(senderOf(ctx).called) && l.h.resumedAt.Before(s.gone) && !j.mayLookExpired(s) {
			j.violated("S6", "%s claims %s for session %s, which is gone", l.name, after.ID, s.id[:4])
		}
	}
	if k.claims = append(k.claims, claimed{Claim: after, life: l}); len(k.claims) > 8 {
		k.claims = slices.Delete(k.claims, 0, 1)
	}
}

// slotTaken checks that no more slots are held than there are.
func (j *judge) slotTaken(l *life, c objects.Claim) {
	held := 0
	for id, k := range j.keys {
		if kindOf(id) == slotKind && slices.ContainsFunc(k.claims, func(c claimed) bool {
			return !c.life.dead() && c.life.holds(claimOf(c.Claim)) && !j.mayBeOutwaited(j.sessions[c.Session]) && !j.mayLookExpired(j.sessions[c.Session])
		}) {
			held++
		}
	}
	if n, _ := strconv.Atoi(c.ID); n >= j.a.slots || held >= j.a.slots {
		j.violated("N", "%s takes slot %s while %d are held, of %d", l.name, c.ID, held, j.a.slots)
	}
}

// rowMoved is called when a process has moved a claim to itself.
func (j *judge) rowMoved(ctx context.Context, seen, before, after objects.Claim) {
	testkit.Count(&j.judged, "claims that were moved")
	if l := lifeOf(ctx); before != seen {
		j.violated("move", "%s moves %s with token %d, and has seen %d", l.name, after.ID, before.Token, seen.Token)
	} else if before.Session == after.Session {
		j.violated("move", "%s moves %s from itself", l.name, after.ID)
	}
	switch o := j.offers[before]; {
	case ctx.Value(attachingKey{}) == nil: // Move asks nobody
		j.moved[before] = false
	case o == nil || o.at.IsZero():
		j.violated("attach", "%s takes %s from %s, which has not offered it", lifeOf(ctx).name, after.ID, j.sessions[before.Session].who())
	default:
		j.attached(lifeOf(ctx), o, before, after)
		j.handed = before
	}
	j.rowTaken(ctx, before, after)
}

func (j *judge) noticePruned(c objects.Claim) {
	if _, moved := j.moved[c]; moved {
		j.moved[c] = true
	}
}

// given is called when a process was given claims.
func (j *judge) given(l *life, got []claims.Claim) {
	if since, drained := l.isDrained(); drained && len(got) > 0 && time.Now().After(since) {
		j.violated("D", "%s is given %v, and has been drained for %v", l.name, got, time.Since(since))
	}
	for _, c := range got {
		if s := j.sessions[c.Session]; !s.stands() && !s.tainted && !j.mayLookExpired(s) {
			j.violated("S1", "%s is given a claim of %s for session %s, which is gone", l.name, c, c.Session[:4])
		}
	}
}

// noProcessHolds checks that no process holds a claim of a key.
func (j *judge) noProcessHolds(k *key, when string) {
	for _, c := range k.claims {
		if c.life.dead() || !c.life.holds(claimOf(c.Claim)) {
			continue
		}
		s := j.sessions[c.Session]
		_, moved := j.moved[c.Claim]
		switch {
		case moved:
			testkit.Count(&j.excused, "valid: moved")
		case j.mayBeOutwaited(s):
			testkit.Count(&j.excused, "valid: longer TTL")
		case j.mayLookExpired(s):
			testkit.Count(&j.excused, "valid: clock")
		default:
			j.violated("S1", "%s while %s holds it with token %d", when, s.who(), c.Token)
		}
	}
}

func (j *judge) rowFreed(ctx context.Context, before objects.Claim) {
	k, s, by := j.keys[before.ID], j.sessions[before.Session], lifeOf(ctx)
	j.freed++
	j.offerEnds(by, before)
	j.a.line.Say(by.name, "%s of session %s is free", before.ID, before.Session[:4])
	if s.stands() && s.life != by && !s.tainted {
		j.violated("S6", "%s frees %s, which belongs to %s", by.name, before.ID, s.who())
	}
	// The process that has removed a session frees its rows, even if a restore has brought them back meanwhile.
	undone := s.tainted && s.life != by
	if s.stands() && !undone {
		for _, r := range k.runs {
			if r.Session == before.Session && r.Token == before.Token {
				j.violated("S5", "%s is freed while the func of %s runs", before.ID, s.who())
			}
		}
	}
	if !k.tainted { // it is not taken before the failover has settled
		j.noProcessHolds(k, by.name+" frees "+before.ID)
	}
	k.changed, k.tainted = time.Now(), false
}

func (j *judge) fencedWrite(_ context.Context, by objects.Claim, err error) {
	k := j.keys[by.ID]
	_, moved := j.moved[by] // if a failover has lost that, its owner may not have heard of it
	switch {
	case err == nil && by.Token < k.token && !(moved && k.tainted):
		j.violated("S2", "a write under the claim of %s with token %d lands after that with %d began", by.ID, by.Token, k.token)
	case err == nil:
		testkit.Count(&j.fenced, "landed")
	default:
		testkit.Count(&j.fenced, "refused")
	}
}

// restored is called when the tables were restored.
func (j *judge) restored() {
	j.restoredAt = time.Now()
	for id, s := range j.sessions {
		s.tainted = true
		if _, stands := j.a.db.record(id); stands {
			s.gone = time.Time{}
		} else if s.gone.IsZero() {
			s.gone, s.lost = time.Now(), true
		}
		if o, stands := j.a.db.record(id); stands {
			s.renewed, s.shift = time.Now().Add(-o.Age), j.a.clock.Shifted()
		}
	}
	for _, k := range j.keys {
		k.tainted, k.changed = true, time.Now()
	}
}

// crashed is called when a process has crashed, and with it its funcs.
func (j *judge) crashed(l *life) {
	for _, k := range j.keys {
		k.runs = slices.DeleteFunc(k.runs, func(r *run) bool { return r.life == l })
	}
	delete(j.released, l)
}

func claimOf(r objects.Claim) claims.Claim {
	return claims.Claim{Key: tenure.Key{Type: r.Kind, ID: r.ID}, Session: r.Session, Token: r.Token}
}

func rowOf(c claims.Claim) objects.Claim {
	return objects.Claim{Kind: c.Key.Type, ID: c.Key.ID, Session: c.Session, Token: c.Token}
}
