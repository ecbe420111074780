package tenure

import (
	"sync"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/record"
)

// position is where a term's record stands in the store, as far as the term's holder knows. It does no I/O, and is safe for
// concurrent use.
type position struct {
	mu       sync.Mutex
	version  int64   // of the record; 0: there is none, because a failover has lost it
	greatest int64   // the greatest version that the record had in this term
	inDoubt  int     // writes that expect this version and have no answer, or none yet
	on       Lineage // where the record was last seen
	vouched  Lineage // of the term's last answered write: Server and Mark
	moved    bool    // a renewal was the first one in its lineage, and takeFailover has not said so
	rewrote  bool    // the record was lost before that
}

// acquired notes the answer to the write that begins the term.
func (p *position) acquired(version int64, on Lineage) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.version, p.greatest, p.inDoubt, p.on, p.vouched = version, version, 0, on, on
}

// startRenewal notes that a renewal is being sent. It returns the version that the renewal expects, the lineage in which the record was
// last seen, and the condition for the write. If the store refuses the renewal, the caller calls refused; otherwise the
// renewal may have landed, or may still land.
func (p *position) startRenewal() (version int64, on Lineage, cond WriteCondition) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.inDoubt++
	cond = IfVersion(p.version)
	if p.version == 0 {
		cond = WriteCondition{objects.Condition{Kind: objects.IfAbsent, Again: true}}
	}
	return p.version, p.on, cond.OnServer(p.on.Server, p.greatest)
}

// refused notes that a renewal which expected this version has changed nothing.
func (p *position) refused(version int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.version == version {
		p.inDoubt--
	}
}

// advance notes the version that a renewal has written. Writes that expected an earlier version can no longer land.
func (p *position) advance(version int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.advanceTo(version)
}

// confirmRenewal notes that a renewal counts, by the lineage in which it was written.
func (p *position) confirmRenewal(version int64, on Lineage) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.advanceTo(version)
	p.moved, p.vouched = p.moved || p.vouched.Mark != on.Mark, on
}

// advanceTo is advance for a caller that holds the mutex.
func (p *position) advanceTo(version int64) {
	p.greatest = max(p.greatest, version)
	if version > p.version {
		p.version, p.inDoubt = version, 0
	}
}

// noteLost notes that a failover has lost the record, and which version stands in its place; 0: none.
func (p *position) noteLost(version int64, on Lineage) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.version, p.inDoubt, p.on, p.rewrote = version, 0, on, true
}

// takeFailover reports whether the last renewal was the first one since a failover, and whether the record was
// lost. It reports each failover once.
func (p *position) takeFailover() (happened, recordLost bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	happened, recordLost = p.moved, p.rewrote
	p.moved, p.rewrote = false, false
	return happened, recordLost
}

// seenIn notes in which lineage the record was seen.
func (p *position) seenIn(on Lineage) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.on = on
}

// last returns the version of the record, and the lineage in which it was last seen.
func (p *position) last() (version int64, on Lineage) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.version, p.on
}

// vouchedBy returns the lineage of the term's last answered write. The one in which the record was last seen proves nothing: what
// was seen may be a record that a failover has brought back.
func (p *position) vouchedBy() Lineage {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.vouched
}

// vouchedIn reports whether the term's last answered write was in that lineage.
func (p *position) vouchedIn(on Lineage) bool { return p.vouchedBy().Mark == on.Mark }

// recognise reports whether this term, or a request to it, can have written a version of the
// record that has this term's payload. If so, it is the term's version from now on. Any other
// version is a copy's: a machine was restored from a snapshot while the original keeps running,
// and each would take the other's renewals for its own.
//
// Known is the version that the term had when the read was sent. A version below it means that
// the database has lost the last renewal, as it may in a failover.
func (p *position) recognise(known, version int64, resumed bool, request *record.Request) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if version < known && p.version == known {
		p.version, p.inDoubt = version, 0
	}
	// In a resumed term an unanswered write proves nothing, because yet another process may
	// have resumed the term. Its rightful owner can resume it again.
	inDoubt := p.inDoubt > 0 && !resumed
	ours := version <= p.version || inDoubt || request != nil && request.Version <= p.version
	if ours {
		p.advanceTo(version)
	}
	return ours
}
