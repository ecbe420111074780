package sim

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

// judge sees each write of the lease's record as it lands and each start and end
// of a job, and checks the invariants that the package documentation lists. All
// methods except violated must be called under the world's lock.
//
// Exclusion is checked twice. When a record is taken over, the previous term must no
// longer be valid from its holder's point of view. And when a job begins, no job of
// another term may be running. A violation by the term with the lower token is excused
// if
//
//   - a user that is not bound by the rules overwrote or deleted its record
//     ("by hand");
//   - the table was restored from a backup after the term began ("restored");
//   - the database's clock was set forward since its last renewal, and the
//     takeover may have gone by that clock ("clock"): exclusion is promised for clocks
//     whose rates differ by less than Margin/TTL. This is no excuse if Expiry is
//     ExpiryObserved, or for another program's record.
//
// An overlap of jobs is also excused if
//
//   - the older job was told to return longer ago than TTL − Margin − RenewDeadline
//     ("late job"). This includes the job of a paused replica: its context ends in
//     time, but the job can't see that.
//
// A crash ends the jobs of its replica at that instant. Nothing else is excused.
type judge struct {
	w *world
	tally
	until string // the timeline up to the first violation

	terms   map[string]*term // every term so far, by the ID in its record
	running []*term          // those whose jobs are running

	standing  *term // the term whose record is stored; nil if there is none
	payload   []byte
	version   int64
	writtenAt time.Time     // when the record was last written or deleted
	shift     time.Duration // how far the database's clock had been set ahead at that time
	newest    int64         // the greatest version that a record ever had
	released  *release      // the release since the last term; nil if none that must wake a standby
	vacant    time.Time     // since when no job has run, or the last one was told to return; zero if one runs
	vacator   *term         // its term
	workedAt  time.Time     // when a job last ran, or could have begun
	untoldAt  time.Time     // when the record was last changed without a hint

	restoredAt   time.Time // when the table was last restored
	witnessed    int64     // the greatest version that a record had before that
	floodedUntil time.Time // until then there are spurious hints
	hints        []time.Time
}

// term is what the judge knows about one term, or about an offer.
type term struct {
	id     string
	who    string
	life   *life // nil if it is another program's
	rules  bool  // whether its writer follows the lease's rules
	token  int64
	at     time.Time     // when its record landed
	offer  bool          // not a term: the previous holder gave up the lease and offers it
	to     string        // the replica that an offer is made to
	lasts  time.Duration // how long an offer lasts
	asked  bool          // whether the holder was asked through the store to release
	wished *life         // the last one that asked for the lease itself, because it outranks this holder
	before *term         // the term whose record it took over; nil if there was none

	valid    func() bool // from its holder's point of view; nil if the holder doesn't know of it yet
	late     bool        // its record landed after its holder had given up
	renewals int         // how many landed
	cutOff   bool        // whether its predecessor was fenced
	running  int         // how many of the job's funcs are running
	told     time.Time   // when the job was told to return; zero if it was not
	returned time.Time   // when it has
	restored bool        // the table has been restored since it began
	excuse   string      // why an overlap with a later term would be excused
	copied   bool        // a copy of its process has renewed it
	copiedAt time.Time   // when that first happened since its holder is well
}

func (j *judge) violated(rule, format string, args ...any) {
	if j.w.trace != nil { // the rules of the lease judge this run
		return
	}
	testkit.Count(&j.broken, rule)
	j.w.line.Say("JUDGE", rule+": "+format, args...)
	if j.until == "" {
		j.until = j.w.line.String()
	}
	j.w.t.Errorf("seed %d: "+rule+": "+format, append([]any{j.w.seed}, args...)...)
}

// written is called when the lease's record was written; late means that its writer
// had given up by then.
func (j *judge) written(h *handle, obj tenure.Object, late bool) {
	now, shift := time.Now(), j.w.journal.clock.Shifted()
	if !h.rules {
		j.untold()
	}
	if obj.Version <= j.newest {
		j.violated("tokens", "a record got version %d after version %d", obj.Version, j.newest)
	}
	j.newest, j.version = obj.Version, obj.Version
	old := j.standing
	if old != nil && bytes.Equal(obj.Payload, j.payload) {
		if isRequest(obj) {
			old.asked = true
			j.w.line.Say(h.who, "asks %s to release %d", old.who, old.token)
			return
		}
		if h.who == "copy" {
			j.copied(old)
		} else {
			old.renewals++
			j.renewed++
			j.w.line.Say(old.who, "renewal of %d lands", old.token)
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
	_ = json.Unmarshal(obj.Payload, &record) // an operator may have written anything
	begun := &term{id: record.Term, who: h.who, life: h.life, token: obj.Version, at: now, rules: h.rules, offer: record.Offered, before: old, late: late}
	if begun.offer {
		begun.to, begun.lasts = record.Holder, time.Duration(record.TTLMS)*time.Millisecond
	}
	if h.life == nil {
		begun.id = foreignID(h.who, obj.Version)
	}
	j.w.line.Say(h.who, "%s %d lands", map[bool]string{true: "offer", false: "term"}[begun.offer], begun.token)
	// A restore may undo an offer, and bring back the record for which it was made. Then it is
	// made again. What an operator writes has no ID but the version, which a restore may bring back.
	repeats := begun.life == nil
	known := j.terms[begun.id]
	if known != nil && known.restored && known.life != nil && known.life == begun.life && !known.offer && !begun.offer {
		// A renewal that was under way has found the version again that it follows. Its term may be over.
		if old != nil && old.excuse == "" {
			old.excuse = "restored"
		}
		known.excuse = cmp.Or(known.excuse, "restored")
		j.standing, j.payload, j.released = known, obj.Payload, nil
		j.writtenAt, j.shift = now, shift
		return
	}
	if known != nil && !(known.restored && (repeats || begun.offer && known.offer)) {
		j.violated("tokens", "%s's term %d has come back", h.who, known.token)
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
		h.life.forgetsInterval()
		h.life.newest = begun
		h.life.r.resigned = false
		j.wokeInTime(begun)
	}
	if h.life == nil || h.life.r.good && !j.refuses(h.life) {
		j.workedAt = now
	}
	j.terms[begun.id] = begun
	j.standing, j.payload, j.released = begun, obj.Payload, nil
	j.writtenAt, j.shift = now, shift
}

// foreignID returns an ID for a term whose record has none.
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
	if clockSet && j.w.expiry == tenure.ExpiryStoreClock && begun.life != nil && old.life != nil && old.excuse == "" {
		old.excuse = "clock"
	}
	testkit.Count(&j.judged, "takeovers")
	if early := old.lasts*97/100 - time.Since(j.writtenAt); old.offer && old.to != "" && old.to != begun.who && early > 0 && !clockSet && !old.restored { // its age counts from before the restore
		j.violated("handover", "%s takes what is offered to %s for %v more", begun.who, old.to, early)
	}
	if old.alive() && old.valid != nil && old.valid() {
		if old.excuse == "" {
			j.violated("exclusion", "%s took over from %s, whose term %d was still valid", begun.who, old.who, old.token)
			return
		}
		testkit.Count(&j.excused, "valid: "+old.excuse)
	}
}

// alive reports whether its process is alive.
func (t *term) alive() bool { return t.life == nil || !t.life.dead() }

// deleted is called when the lease's record was deleted.
func (j *judge) deleted(h *handle, wakes bool) {
	old := j.standing
	j.w.line.Say(h.who, "record of %s's term %d is deleted", old.who, old.token)
	switch {
	case !h.rules:
		old.excuse = "by hand"
	default:
		j.givenUp(old)
	}
	j.standing, j.payload = nil, nil
	j.writtenAt = time.Now()
	j.released = nil
	if !wakes {
		j.untold()
	} else if h.rules {
		j.released = j.expectWake(h)
	}
}

// givenUp is called when a term's record was deleted or replaced by an offer.
func (j *judge) givenUp(t *term) {
	if t.running > 0 && t.alive() {
		j.violated("release", "%s's term %d is released while its job runs", t.who, t.token)
	}
}

// fencedWrite is called with the result of a write that is fenced by a term.
func (j *judge) fencedWrite(t *tenure.Term, err error) {
	switch {
	case err == nil && (j.standing == nil || j.standing.id != t.ID()):
		j.violated("fencing", "a fenced write of term %d landed although the term is over", t.Token())
	case err == nil:
		testkit.Count(&j.fenced, "landed")
	case errors.Is(err, tenure.ErrLost):
		testkit.Count(&j.fenced, "refused")
	}
}
