package sim

import (
	"bytes"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

// copy lets a copy of the holder's machine, restored from a snapshot, renew the
// record of the same term for a while. The copy takes whatever version it finds for its
// own, which no replica should do.
func (w *world) copy() {
	by := w.journal.handle("copy", nil, true)
	first := w.journal.mustGet()
	if first.Version == 0 {
		return
	}
	w.running.Go(func() {
		for range 2 + 3*2 {
			obj := w.journal.mustGet()
			if !bytes.Equal(obj.Payload, first.Payload) {
				return
			}
			delete(obj.Labels, "tenure.release") // as each renewal does
			_, _ = by.PutIf(w.t.Context(), obj, tenure.IfVersion(obj.Version))
			if !w.sleep(w.ttl / 3) {
				return
			}
		}
	})
}

// backup is the table's content at some time; the zero value is an empty table.
type backup struct {
	record tenure.Object
	term   *term
}

// backUp must be called under the world's lock.
func (w *world) backUp() { w.backup = backup{w.journal.mustGet(), w.judge.standing} }

// restore restores the table from a backup. The database's clock may be behind
// afterwards; then all replicas that have seen greater tokens refuse to begin a term,
// and one of them is restarted.
func (w *world) restore(r *replica) string {
	kind := "table restored"
	behind := w.rng.IntN(2) == 0
	w.locked(func() {
		if behind {
			kind = "table restored, and its clock set back"
			w.journal.clock.Jump(-w.upTo(10 * w.ttl))
		}
		w.line.Say("store", "%s, to version %d", kind, w.backup.record.Version)
		w.journal.restore(w.backup.record)
		w.judge.restored(w.backup)
	})
	w.later(w.upTo(w.ttl), func() { w.locked(w.backUp) })
	if behind {
		r.crash()
		w.later(time.Millisecond, r.start)
	}
	return kind
}

// restored is called when the table was restored from a backup.
func (j *judge) restored(to backup) {
	j.witnessed = max(j.witnessed, j.newest)
	j.restoredAt = time.Now()
	for _, t := range j.terms {
		t.restored = true
		if t.excuse == "" {
			t.excuse = "restored"
		}
	}
	j.standing, j.payload, j.released = to.term, to.record.Payload, nil
	j.newest, j.version = to.record.Version, to.record.Version
	j.writtenAt, j.workedAt = time.Now(), time.Now()
	j.untold()
	j.noteRefusals()
}

// refuses reports whether a process may have seen greater tokens than the store assigns
// now.
func (j *judge) refuses(l *life) bool {
	return l.started.Before(j.restoredAt) && j.w.journal.clock.Now().UnixMicro() <= j.witnessed
}

// copied is called when a copy of a term's process renews the record. The holder
// notices at its next renewal, unless an earlier renewal of its own was not answered:
// then it may take the copy's for that one, once. After a restore the version of a copy's renewal
// may be below its own, as if the database had lost its last renewals.
func (j *judge) copied(t *term) {
	t.copied, j.workedAt = true, time.Now()
	j.w.line.Say("copy", "renewal of %d lands", t.token)
	testkit.Count(&j.judged, "renewals by a copy")
	if t.life == nil || !t.told.IsZero() || t.restored || time.Since(t.life.goodSince()) < t.life.ttl()/2 {
		t.copiedAt = time.Time{} // a renewal of its own may be unanswered, or it may renew no longer
		return
	}
	if t.copiedAt.Before(t.life.goodSince()) {
		t.copiedAt = time.Now()
	}
	if since := time.Since(t.copiedAt); since > t.life.ttl()/2 && t.valid != nil && t.valid() {
		j.violated("copy", "%s's term %d is still valid although a copy has renewed it for %v", t.who, t.token, since)
	}
}
