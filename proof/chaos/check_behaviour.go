package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/proof/model/lease"
)

// recordWrite is what the ledger notes of each write of a lease's record.
type recordWrite struct {
	By      string // the replica, if the database knows it
	At      int64  // in Unix microseconds, by this host's clock
	Over    int64  // the version before; 0: there was no record
	Stamp   int64  // in Unix milliseconds, by the database's clock
	Payload string // empty: the record is deleted
	Request string // to release
}

// checkBehaviour checks that what happened to each lease is a behaviour of the rules in package lease: the writes of its
// record and the fenced writes, in the order of the commits, and what the replicas said of their jobs and of their trust.
// Nobody knows when a statement was sent, what its process had read, or which answers it heard. So each process is given the
// benefit of the doubt: it has read the record at the best moment, hears each answer at once, and has ended its term when it
// begins another. The rules have neither failovers nor witnesses, so those phases are left out.
func (r *result) checkBehaviour(p *phase, a *audit) {
	if !a.versions || p.task == useWitness {
		return
	}
	since := time.Duration(time.Now().UnixNano()) - monotonic()
	leases, of := map[string]*behaviour{}, map[string]*behaviour{} // by key, and by term
	for i, e := range a.ledger {
		var w recordWrite
		if e.kind == ledgerVersion {
			if err := json.Unmarshal([]byte(e.note), &w); err != nil {
				r.violate("the ledger notes a write of %s as %q: %v", e.lease, e.note, err)
				return
			}
			if w.At -= since.Microseconds(); !a.promised(time.Duration(w.At) * time.Microsecond) {
				break
			}
			if leases[e.lease] == nil {
				leases[e.lease] = newBehaviour(p, a, e.lease, w)
			}
			of[e.term] = leases[e.lease]
		}
		b, why := of[e.term], ""
		switch {
		case b == nil || b.refused:
		case e.kind == ledgerVersion:
			why = b.writes(w, e.token)
		case e.kind == ledgerFenced:
			why = b.fences(e.term)
		}
		if why != "" {
			b.refused = true
			before := slices.DeleteFunc(slices.Clone(a.ledger[:i+1]), func(e entry) bool { return e.kind != ledgerVersion || of[e.term] != b })
			r.violate("the rules refuse what happens to %s after %v: %s\n%s%s", b.key, b.at, why, lines(before[max(0, len(before)-6):]), p.around(b.at, b.at))
		}
	}
	for _, b := range leases {
		if why := b.hears("", forever); why != "" && !b.refused {
			r.violate("the rules refuse what happens to %s: %s", b.key, why)
		}
		r.allowed += b.steps
	}
	if r.allowed == 0 {
		r.violate("the ledger has no write of a lease")
	}
}

// behaviour follows what happens to one lease. Payloads and versions have numbers in the order in which they appear, and
// the times of the rules are in milliseconds since the first write.
type behaviour struct {
	p       *phase
	key     string
	first   recordWrite
	rules   lease.Rules
	told    map[string][]event // by each replica, and not yet followed
	doubted map[string]bool    // the terms with a renewal whose answer was lost
	steps   int
	refused bool

	record      lease.Record
	term        string // that the record names
	payload     string
	version     int64 // of the record in the database; 0: there is none
	newest      int64
	at, renewed time.Duration             // when the record was last written, and last renewed
	minds       map[string]*lease.Process // by holder
	numbers     map[string]int32          // of terms and offers, by ID
	holders     map[int32]string          // by term
	tokens      map[int32]int64           // by term
}

// rounding is how far two clocks of this host may differ where both have noted a time.
const rounding = 10 * time.Millisecond

func newBehaviour(p *phase, a *audit, key string, first recordWrite) *behaviour {
	b := &behaviour{p: p, key: key, first: first, told: map[string][]event{}, doubted: map[string]bool{}, minds: map[string]*lease.Process{},
		numbers: map[string]int32{}, holders: map[int32]string{}, tokens: map[int32]int64{}}
	b.rules.Observed = p.expiry == tenure.ExpiryObserved
	for _, e := range p.record.sorted() {
		of := e.Note
		switch e.Kind {
		case jobStarted, jobStopped, killed:
			of = "singleton"
		case notRenewed:
			b.doubted[e.Term] = true
			continue
		case renewed, held:
		default:
			continue
		}
		if of == key && a.promised(e.At) {
			b.told[e.Replica] = append(b.told[e.Replica], e)
		}
	}
	return b
}

func (b *behaviour) ms(at time.Duration) int32 { return int32(at.Milliseconds() - b.first.At/1000) }

func (b *behaviour) mind(holder string) *lease.Process {
	if b.minds[holder] == nil {
		b.minds[holder] = &lease.Process{ID: int32(len(b.minds) + 1)}
	}
	return b.minds[holder]
}

func (b *behaviour) number(id string) int32 {
	b.numbers[id] = int32(len(b.numbers) + 1)
	return b.numbers[id]
}

// writes follows a write of the record, and returns why the rules do not allow it.
func (b *behaviour) writes(w recordWrite, version int64) (why string) {
	var is struct {
		Term, Holder string
		Offered      bool
		TTLMS        int32 `json:"ttl_ms"`
	}
	_ = json.Unmarshal([]byte(w.Payload), &is) // nothing if it is deleted
	s := &lease.Statement{Term: b.record.Payload, Expects: b.record.Version, TTL: is.TTLMS}
	holder := b.holders[s.Term]
	switch {
	case w.Over != b.version:
		return fmt.Sprintf("compare-and-swap: a write over version %d of a record with version %d", w.Over, b.version)
	case w.Payload != "" && version <= b.newest:
		return fmt.Sprintf("I4: version %d comes after %d", version, b.newest)
	case w.Payload == "":
		s.Kind = lease.Release
	case w.Payload == b.payload && w.Request != "":
		s.Kind = lease.Ask
	case w.Payload == b.payload:
		s.Kind = lease.Renew
	case b.numbers[is.Term] != 0:
		return fmt.Sprintf("no two terms have the same payload, nor has one term two: %s", w.Payload)
	case is.Offered:
		s.Kind, s.Payload, s.Offer = lease.Release, b.number(is.Term), lease.Anyone
		if is.Holder != "" {
			s.Offer = b.mind(is.Holder).ID
		}
	default:
		s.Kind, s.Term, holder = lease.Begin, b.number(is.Term), is.Holder
		b.holders[s.Term], b.tokens[s.Term] = holder, version
	}
	if b.version == 0 {
		s.Expects = 0
	}
	p, at, clock := b.mind(holder), time.Duration(w.At)*time.Microsecond, int32(w.Stamp-b.first.Stamp)
	s.Holder = p.ID
	byProcess := s.Kind != lease.Ask && !slices.Contains(b.p.record.copied, version)
	if byProcess {
		if s.Kind == lease.Begin {
			p.TTL, p.Margin = is.TTLMS, is.TTLMS/30
		}
		if why := b.maySend(p, s, holder, w.By, at, clock); why != "" {
			return why
		}
		p.Send(s, b.ms(at))
	}
	b.steps++
	if b.rules.Run(&b.record, s, int32(b.steps), clock); s.Done == 0 {
		return fmt.Sprintf("compare-and-swap: a %v takes effect on %+v", s.Kind, b.record)
	}
	if byProcess {
		b.rules.Hear(p, s, b.ms(at-rounding))
	}
	if b.at = at; s.Kind != lease.Ask {
		b.renewed = at
	}
	b.term, b.payload, b.version, b.newest = is.Term, w.Payload, version, version
	if w.Payload == "" {
		b.version = 0
	}
	return ""
}

// maySend returns why a process must not have sent a statement that took effect at some time; empty: it may have.
func (b *behaviour) maySend(p *lease.Process, s *lease.Statement, holder, by string, at time.Duration, clock int32) (why string) {
	replica, _, _ := strings.Cut(holder, ".")
	if by != "" && by != replica {
		return fmt.Sprintf("L4: %s makes a %v that only %s may make", by, s.Kind, replica)
	}
	until := at - rounding
	for _, e := range b.told[replica] { // a begin or a release was sent after the job had returned
		if s.Kind != lease.Renew && e.At <= at+rounding && (e.Kind == jobStopped || e.Kind == killed) {
			until = max(until, e.At)
		}
	}
	if why := cmp.Or(b.hears("", at-rounding), b.hears(replica, until)); why != "" {
		return why
	}
	now := b.ms(at + rounding)
	p.Seen = b.record
	switch s.Kind {
	case lease.Begin:
		p.Ends()
		p.Age, p.Since = clock-b.record.Renewed+int32(rounding.Milliseconds()), b.ms(b.renewed)
		if b.p.clockMoved(b.renewed, at) {
			p.Age = b.record.TTL
		}
	case lease.Renew: // it was sent after the version that it expects was written
		now = b.ms(b.at - rounding)
	}
	if s.Expects != p.Version && s.Term == p.Term {
		if b.doubted[b.term] {
			p.Unanswered = 1
		}
		b.rules.Recognises(p)
	}
	switch {
	case b.rules.MaySend(p, s, now):
		return ""
	case p.Job != 0 && (s.Kind == lease.Begin || p.Job == s.Term && s.Kind == lease.Release):
		return fmt.Sprintf("L3: a %v of %s, whose job runs", s.Kind, holder)
	case s.Kind == lease.Begin:
		return fmt.Sprintf("L2: a begin of %s over a record that was renewed %v before, with an age of %d ms, a TTL of %d ms and an offer to %d",
			holder, at-b.renewed, p.Age, b.record.TTL, b.record.Offer)
	case s.Kind == lease.Renew && s.Term == p.Term && s.Expects == p.Version:
		return fmt.Sprintf("L1: a renewal of %s, %v after the trust in its term ended", holder, time.Duration(now-p.End)*time.Millisecond)
	}
	return fmt.Sprintf("L4: a %v of %s, which cannot take the record for that of its term", s.Kind, holder)
}

// fences follows a fenced write.
func (b *behaviour) fences(term string) (why string) {
	b.steps++
	s := lease.Statement{Kind: lease.Fence, Term: b.numbers[term]}
	if b.rules.Run(&b.record, &s, 0, 0); s.Done == 0 {
		return fmt.Sprintf("I3: a fenced write of term %s, where the record is of %s", term, b.term)
	}
	return ""
}

// hears follows what a replica told until a time, or what all did if none is named.
func (b *behaviour) hears(of string, until time.Duration) (why string) {
	for replica := range b.told {
		for events := b.told[replica]; why == "" && (of == "" || of == replica) && len(events) > 0 && events[0].At <= until; events = events[1:] {
			b.told[replica] = events[1:]
			why = b.follows(events[0])
		}
	}
	return why
}

func (b *behaviour) follows(e event) (why string) {
	b.steps++
	if e.Kind == jobStopped || e.Kind == killed {
		b.mind(e.Replica).Job = 0
		return ""
	}
	term, until := b.numbers[e.Term], e.Until
	p := b.mind(b.holders[term])
	if e.Kind == held {
		until = e.At
	}
	switch {
	case term == 0 || e.Token != 0 && e.Token != b.tokens[term]:
		return fmt.Sprintf("I4: %s has term %s with token %d, which no write began", e.Replica, e.Term, e.Token)
	case p.Term == term && until != 0 && !p.Trusts(b.ms(until-rounding)):
		return fmt.Sprintf("L1: %s trusts its term %s until %v, %v too long", e.Replica, e.Term, until, time.Duration(b.ms(until)-p.End)*time.Millisecond)
	case e.Kind == jobStarted && (p.Term != term || p.Job != 0):
		return fmt.Sprintf("L3: the job of %s begins outside its term %s, or twice", e.Replica, e.Term)
	case e.Kind == jobStarted:
		p.Job = term
	}
	return ""
}

// clockMoved reports whether the database's clock was moved between two times.
func (p *phase) clockMoved(from, to time.Duration) bool {
	return slices.ContainsFunc(p.record.faults, func(f *fault) bool {
		return f.kind == clockMoved && (f.from-clockSlack < to && from < f.begun+clockSlack || f.ending-clockSlack < to && from < f.to+clockSlack)
	})
}
