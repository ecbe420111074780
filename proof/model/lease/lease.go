// Package lease states the protocol of leases: which statement a process may send, what the statement does in the
// database, and what the process learns from the answer. It has the rules of docs/protocol.md, L1 to L5, in a form
// that can be run. Command model visits the states that the rules allow, nearest first, and proof/sim checks that
// what the real code does is a behaviour of the rules.
//
// Times are numbers of any unit. A process is asked by its own clock, and a record ages by the database's.
package lease

import "cmp"

// Record is the row of a lease. A release leaves its version behind.
type Record struct {
	Payload int32 // of the term, which no other term has; 0: there is no record
	Holder  int32 // the process whose term it is
	Version int32 // of the last write
	TTL     int32
	Renewed int32 // when it was, by the database's clock
	Offer   int32 // 0: this is a term; Anyone or a process: a release has put it there for that one
	Asked   int32 // the version that the first request to release follows; 0: nobody asks
}

// Anyone is to whom an offer is made that names no process.
const Anyone = -1

// Kind is the kind of a statement.
type Kind int32

const (
	Read Kind = 1 + iota
	Begin
	Renew
	Release // deletes the record, or puts an offer in its place
	Ask     // writes a request to release into the record
	Fence   // the last statement of a transaction before its COMMIT
)

func (k Kind) String() string {
	return [...]string{"nothing", "read", "begin", "renewal", "release", "request", "fenced write"}[k]
}

// Statement is a message to the database and, once it has run, the answer.
type Statement struct {
	Kind    Kind
	Term    int32 // whose payload it writes, releases or compares
	Expects int32 // the version that the record must have; 0: there must be none
	TTL     int32 // that it writes
	Holder  int32 // that it writes
	Offer   int32 // of a release; 0: it deletes the record
	Payload int32 // of the offer
	Sent    int32 // when, by the clock of the process

	Ran, Done int32  // 0 or 1: whether it has run, and whether it had an effect
	Version   int32  // of its write
	Seen      Record // by a read
	Age       int32  // of that record
}

// Process is what one process knows.
type Process struct {
	ID, TTL, Margin int32

	Term, Token int32 // its term, and the version of the write that began it; 0: it has none
	Version     int32 // that its term's last write had, as far as it knows
	Unanswered  int32 // writes that expect that version and have no answer
	End         int32 // of its trust in the term
	Job         int32 // the term for which its job runs; 0: none runs
	Over        int32 // a term of its own that is over, and whose record may stand
	OverVersion int32 // that its last write had, as far as the process knows; 0: it knows nothing

	Seen   Record // the record as it was last read
	Age    int32  // it had then
	Since  int32  // the first answer that showed it so
	Newest int32  // the greatest version that was seen
}

// Rules are the rules of a lease. The zero value has all of them: each field leaves one out, or weakens it.
type Rules struct {
	Observed bool // the database's clock decides nothing (an option, and no weaker)

	TrustForTTL      bool // L1: trust lasts for the whole TTL, without a margin
	TrustFromAnswer  bool // L1: trust is counted from the answer
	StealAtOnce      bool // L2: nobody waits for the TTL
	StealByOwnTTL    bool // L2: the TTL in the record does not count
	SinceSent        bool // L2: a record is seen from when the read was sent
	SinceEver        bool // L2: a record is seen from when any record was seen
	TakeAnyOffer     bool // L2: an offer to another process is taken
	ReleaseEarly     bool // L3: the release is sent while the job runs
	TakeForOwn       bool // L4: any record that is found counts as the term's own
	RepeatTokens     bool // L5: a token that is not above all that were seen is used
	BlindRenew       bool // a renewal does not compare the version
	BlindRelease     bool // a release does not compare the version
	BlindBegin       bool // a begin does not compare the version
	NoTombstone      bool // a deletion leaves no version behind
	FenceNothing     bool // a fenced write does not compare the payload
	FenceWithoutLock bool // a fence does not lock the record until COMMIT
}

// Trusts reports whether the process believes in its term (L1).
func (p *Process) Trusts(now int32) bool { return p.Term != 0 && now < p.End }

// MaySend reports whether a process may send a statement.
func (l *Rules) MaySend(p *Process, s *Statement, now int32) bool {
	switch s.Kind {
	case Begin:
		return !p.Trusts(now) && p.Job == 0 && l.mayTake(p, s.Expects, now)
	case Renew: // L1
		return p.Trusts(now) && s.Term == p.Term && s.Expects == p.Version
	case Release: // L3
		if p.Job == s.Term && !l.ReleaseEarly {
			return false
		}
		known := s.Term == p.Term && s.Expects == p.Version || s.Term == p.Over && s.Expects == p.OverVersion
		return known || s.Term == p.Over && (p.isSeen(s.Term) || l.TakeForOwn) && s.Expects == p.Seen.Version
	case Ask:
		return p.Seen.Payload != 0 && p.Seen.Offer == 0 && s.Expects == p.Seen.Version
	}
	return true // a read; and a fence, of which no clock decides
}

func (p *Process) isSeen(payload int32) bool { return p.Seen.Payload == payload }

// mayTake is L2: whether a term may begin on the record that has this version.
func (l *Rules) mayTake(p *Process, version, now int32) bool {
	seen := &p.Seen
	switch {
	case version == 0: // there is no record, or the statement does nothing
		return true
	case version != seen.Version:
		return false
	case seen.Offer == Anyone || seen.Offer == p.ID || seen.Offer != 0 && l.TakeAnyOffer || l.StealAtOnce:
		return true
	}
	ttl := seen.TTL
	if l.StealByOwnTTL {
		ttl = p.TTL
	}
	return !l.Observed && p.Age >= ttl || now-p.Since >= ttl
}

// Send notes that a process sends a statement.
func (p *Process) Send(s *Statement, now int32) {
	s.Sent = now
	switch s.Kind {
	case Renew:
		p.Unanswered++
	case Release:
		if s.Term == p.Term {
			p.Ends()
		}
	}
}

// Ends ends the term of the process, which may do so at any time.
func (p *Process) Ends() {
	p.Over, p.OverVersion = p.Term, p.Version
	p.Term, p.Token, p.Version, p.Unanswered, p.End = 0, 0, 0, 0, 0
}

// Run runs a statement in the database, at one instant. A write gets the version next, which is above all that
// the key ever had.
func (l *Rules) Run(r *Record, s *Statement, next, clock int32) {
	s.Ran = 1
	stands := r.Payload != 0
	same := stands && s.Expects == r.Version
	written := Record{s.Term, s.Holder, next, s.TTL, clock, 0, 0}
	switch s.Kind {
	case Read:
		s.Seen, s.Age, s.Done = *r, clock-r.Renewed, 1
		return
	case Fence:
		if r.Payload == s.Term || l.FenceNothing {
			s.Done = 1
		}
		return
	case Begin:
		if !same && !l.BlindBegin && (stands || s.Expects != 0) {
			return
		}
	case Renew:
		if !same && !(stands && l.BlindRenew) {
			return
		}
	case Ask: // it is no renewal: the record remains as old as it is
		if !same {
			return
		}
		written = *r
		written.Version = next
		if r.Asked == 0 {
			written.Asked = r.Version
		}
	case Release:
		if !same && !(stands && l.BlindRelease) {
			return
		}
		written = Record{Version: next}
		if s.Offer != 0 {
			written = Record{s.Payload, s.Holder, next, s.TTL, clock, s.Offer, 0}
		} else if l.NoTombstone {
			written = Record{}
		}
	}
	*r, s.Version, s.Done = written, next, 1
}

// Hear gives a process the answer to its statement.
func (l *Rules) Hear(p *Process, s *Statement, now int32) {
	end := s.Sent + p.TTL - p.Margin
	if l.TrustForTTL {
		end = s.Sent + p.TTL
	}
	if l.TrustFromAnswer {
		end += now - s.Sent
	}
	switch s.Kind {
	case Read:
		if !p.seesAgain(&s.Seen) && !(l.SinceEver && p.Seen != Record{}) {
			p.Since = now
			if l.SinceSent {
				p.Since = s.Sent
			}
		}
		p.Seen, p.Age, p.Newest = s.Seen, s.Age, max(p.Newest, s.Seen.Version)
	case Begin:
		switch {
		case s.Done == 0:
		case now >= end || s.Version <= p.Newest && !l.RepeatTokens: // L1, L5
			p.Over, p.OverVersion = s.Term, s.Version
		default:
			p.Term, p.Token, p.Version, p.Unanswered, p.End = s.Term, s.Version, s.Version, 0, end
		}
		p.Newest = max(p.Newest, s.Version)
	case Renew:
		if s.Term != p.Term {
			break
		}
		if s.Done == 0 {
			if s.Expects == p.Version {
				p.Unanswered--
			}
			break
		}
		p.Version, p.Unanswered, p.Newest = max(p.Version, s.Version), 0, max(p.Newest, s.Version)
		if p.Trusts(now) { // L1
			p.End = max(p.End, end)
		}
	}
}

// seesAgain reports whether a record is the one that was seen. A request is no change.
func (p *Process) seesAgain(r *Record) bool {
	return p.Seen.Payload == r.Payload && p.Seen.renewal() == r.renewal()
}

// renewal returns the version of the last renewal.
func (r *Record) renewal() int32 { return cmp.Or(r.Asked, r.Version) }

// GivesUp notes that a process waits no longer for an answer, although the statement may still run.
func (p *Process) GivesUp(s *Statement) {
	if s.Kind == Begin { // L4
		p.Over, p.OverVersion = s.Term, 0
	}
}

// Recognises reports whether the process may take the record that it has read for that of its own term (L4),
// and goes on from there if so: a write of its own that was not answered has landed, or a request has.
func (l *Rules) Recognises(p *Process) bool {
	seen := &p.Seen
	own := p.isSeen(p.Term) && (seen.Version <= p.Version || p.Unanswered > 0 || seen.Asked != 0 && seen.Asked <= p.Version)
	if p.Term == 0 || !own && !l.TakeForOwn {
		return false
	}
	if p.Version != seen.Version {
		p.Version, p.Unanswered = seen.Version, 0
	}
	return true
}

// MayWork reports whether the job of a process may begin.
func (p *Process) MayWork(now int32) bool { return p.Trusts(now) && p.Job == 0 }
