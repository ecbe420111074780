package sim

import (
	"bytes"
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
//   - the table was restored from a backup after it began ("restored");
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
	workedAt  time.Time     // when somebody last worked, or might have begun to

	restoredAt time.Time // when the table last was
	witnessed  int64     // the greatest version that a record had before
	vainUntil  time.Time // for as long somebody wakes all in vain
}

// term is what the judge knows of one holding.
type term struct {
	id     string
	who    string
	life   *life // nil: another program's
	rules  bool  // whether who wrote it keeps to the rules of the lease
	token  int64
	at     time.Time     // when its record landed
	offer  bool          // not a term: its holder has given up the one before, and leaves the lease to a replica
	to     string        // an offer's
	lasts  time.Duration // an offer
	asked  bool          // to release, through the store
	before *term         // whose record it took over; nil: there was none

	valid    func() bool // in the eyes of its holder; nil: it has not heard of it
	late     bool        // landed when its holder had given up
	renewals int         // that landed
	cutOff   bool        // its predecessor was
	running  int         // of the job's funcs
	told     time.Time   // when the job was told to return; zero: it was not
	excuse   string      // why an overlap with a later term would be no fault
	copied   bool        // a copy of its process has renewed it
	copiedAt time.Time   // for the first time since when nothing was wrong with its holder
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
		if isRequest(obj) {
			old.asked = true
			j.w.line.say(h.who, "asks %s to release %d", old.who, old.token)
			return
		}
		if h.who == "copy" {
			j.copied(old)
		} else {
			old.renewals++
			j.renewed++
			j.w.line.say(old.who, "renewal of %d lands", old.token)
		}
		j.writtenAt, j.shift = now, shift
		return
	}
	var record struct {
		Term    string
		Offered bool
		Holder  string
		TTLMS   float64 `json:"ttl_ms"`
	}
	_ = json.Unmarshal(obj.Payload, &record) // by hand anything may be written
	begun := &term{id: record.Term, who: h.who, life: h.life, token: obj.Version, at: now, rules: h.rules, offer: record.Offered, before: old, late: late}
	if begun.offer {
		begun.to, begun.lasts = record.Holder, time.Duration(record.TTLMS)*time.Millisecond
	}
	if h.life == nil {
		begun.id = foreignID(h.who, obj.Version)
	}
	j.w.line.say(h.who, "%s %d lands", map[bool]string{true: "offer", false: "term"}[begun.offer], begun.token)
	if j.terms[begun.id] != nil {
		j.violated("I3", "%s's term %d stands again", h.who, j.terms[begun.id].token)
	}
	switch {
	case old == nil:
	case begun.offer:
		j.givenUp(old)
	case h.rules:
		j.takenOver(old, begun, shift > j.shift)
	default:
		old.excuse = "by hand"
	}
	if h.life != nil && !begun.offer {
		j.tally.terms++
		h.life.newest = begun
		h.life.r.resignedFor = 0
		j.wokeInTime(begun)
	}
	if h.life == nil || h.life.r.good && !j.refuses(h.life) {
		j.workedAt = now
	}
	j.terms[begun.id] = begun
	j.standing, j.payload, j.released = begun, obj.Payload, nil
	j.writtenAt, j.shift = now, shift
}

// foreignID stands for the ID that a term has whose record does not tell.
func foreignID(who string, version int64) string { return fmt.Sprint(who, "@", version) }

// isRequest reports whether the record asks its holder to release.
func isRequest(obj tenure.Object) bool {
	_, asked := obj.Labels["tenure.release"]
	return asked
}

// isOffer reports whether the record gives the lease up.
func isOffer(obj tenure.Object) bool {
	var record struct{ Offered bool }
	return json.Unmarshal(obj.Payload, &record) == nil && record.Offered
}

func (j *judge) takenOver(old, begun *term, clockSet bool) {
	if clockSet && j.w.expiry == tenure.StoreClock && begun.life != nil && old.life != nil && old.excuse == "" {
		old.excuse = "clock"
	}
	count(&j.judged, "takeovers")
	if early := old.lasts*97/100 - time.Since(j.writtenAt); old.offer && old.to != "" && old.to != begun.who && early > 0 && !clockSet {
		j.violated("handover", "%s takes what is left to %s for %v more", begun.who, old.to, early)
	}
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
	default:
		j.givenUp(old)
	}
	j.standing, j.payload = nil, nil
	j.writtenAt = time.Now()
	j.released = nil
	if wakes && h.rules {
		j.released = j.expectWake(h)
	}
}

// givenUp is told that a term's record was deleted, or an offer put in its place.
func (j *judge) givenUp(t *term) {
	if t.running > 0 && t.alive() {
		j.violated("I4", "%s's term %d is released while its job runs", t.who, t.token)
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
