package sim

import (
	"encoding/json"
	"flag"
	"fmt"
	"testing"
	"time"

	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/proof/model/lease"
)

var eventsFlag = flag.Int("sim.events", 30_000, "how many events of recorded runs the rules of the lease must allow")

// Each run is a behaviour of the rules in package lease: each statement is one that its process may send, has the effect
// that it has by the rules, and no process trusts a term for longer than they allow. The runs are without what lies outside
// of the rules: other programs, operators, copies, restores, witnesses, and a database whose clock jumps.
func TestEachRunIsABehaviourOfTheRules(t *testing.T) {
	began, total, worlds := time.Now(), 0, 0
	of := map[what]int{}
	for seed := *flags.First; total < *eventsFlag && !t.Failed(); seed++ {
		command := fmt.Sprintf("go -C proof test ./sim -run %s -sim.first=%d -sim.events=1 -count=50", t.Name(), seed)
		testkit.Simulate(t, command, func(t *testing.T) {
			rng := testkit.RNG(seed, 0)
			traits := newTraits(seed, rng)
			traits.gateway, traits.operator, traits.copies, traits.restores, traits.clockJumps = false, false, false, false, false
			traits.reclaims, traits.witnesses, traits.tellsChanges, traits.rates = false, false, false, false
			w := newWorld(t, traits, rng)
			w.trace = &trace{w: w}
			runIn(t, w, &tally{})
			for _, s := range w.trace.steps {
				of[s.what]++
			}
			total, worlds = total+len(w.trace.steps), worlds+1
			if i, why := w.trace.refused(); why != "" {
				t.Errorf("seed %d: the rules refuse event %d: %s\n%s", seed, i, why, w.trace.tell(i))
			}
		})
	}
	t.Logf("%d events of %d runs in %v: %v", total, worlds, time.Since(began).Round(time.Second), of)
}

// refused returns the first step that the rules do not allow, and why; empty: they allow the whole run.
func (t *trace) refused() (at int, why string) {
	b := behaviour{w: t.w, minds: map[*life]*mind{}, calls: map[*sent]*lease.Statement{}, payloads: map[string]int32{},
		versions: map[int64]int32{}, wrote: map[int32]int32{}}
	b.rules.Observed = t.w.expiry != 0
	for i, s := range t.steps {
		if why := b.allows(s); why != "" {
			return i, why
		}
	}
	return 0, ""
}

// behaviour follows a run by the rules. Payloads and versions have numbers in the order in which they appear.
type behaviour struct {
	w        *world
	rules    lease.Rules
	record   lease.Record
	minds    map[*life]*mind
	calls    map[*sent]*lease.Statement
	payloads map[string]int32 // by the ID of the term or offer
	versions map[int64]int32
	wrote    map[int32]int32 // the payload that each version has
	newest   int64           // version
	writes   int32
}

// mind is what a process knows. It may go by anything that it has read, since a statement names the version, and may
// remove the record of any of its terms.
type mind struct {
	lease.Process
	reads map[int32]lease.Process // when it had read this version
	own   map[int32]int32         // the version that each of its terms has, as far as it was told
}

// rounding is what is lost where times are whole milliseconds.
const rounding = 2

func (b *behaviour) ms(at time.Time) int32 { return int32(at.Sub(b.w.began).Milliseconds()) }

func (b *behaviour) mind(l *life) *mind {
	if b.minds[l] == nil {
		cfg := l.lease.Config()
		process := lease.Process{ID: b.replica(l.r.name), TTL: int32(cfg.TTL.Milliseconds()), Margin: int32(cfg.Margin.Milliseconds())}
		b.minds[l] = &mind{process, map[int32]lease.Process{}, map[int32]int32{}}
	}
	return b.minds[l]
}

// replica returns the number of a replica.
func (b *behaviour) replica(name string) int32 {
	for i, r := range b.w.replicas {
		if r.name == name {
			return int32(i + 1)
		}
	}
	return lease.Anyone
}

func (b *behaviour) payload(id string) int32 {
	if b.payloads[id] == 0 {
		b.payloads[id] = int32(len(b.payloads) + 1)
	}
	return b.payloads[id]
}

// allows follows one step, and returns why the rules do not allow it.
func (b *behaviour) allows(s step) (why string) {
	if s.what == runs {
		return b.runs(s.sent, b.ms(s.store))
	}
	now, who := b.ms(s.at), s.life.r.name
	p, c := b.mind(s.life), b.calls[s.sent]
	switch s.what {
	case sends:
		c = b.statement(p, s.sent)
		b.calls[s.sent] = c
		slack := map[lease.Kind]int32{lease.Begin: rounding, lease.Renew: -rounding}[c.Kind]
		if !b.rules.MaySend(&p.Process, c, now+slack) {
			return fmt.Sprintf("%s must not send this %v now, at %d: %+v; it knows %+v", who, c.Kind, now, *c, p.Process)
		}
		p.Send(c, now)
	case hears:
		b.rules.Hear(&p.Process, c, now)
		switch {
		case c.Kind == lease.Read:
			p.reads[c.Seen.Version] = p.Process
		case c.Done != 0 && (c.Kind == lease.Begin || c.Kind == lease.Renew):
			p.own[c.Term] = max(p.own[c.Term], c.Version)
		}
		for l, other := range b.minds {
			if other != p && p.Trusts(now) && other.Trusts(now+rounding) {
				return fmt.Sprintf("%s and %s trust their terms", who, l.r.name)
			}
		}
	case givesUp:
		p.GivesUp(c)
	case trusts, begins:
		if p.Term != b.payloads[s.term] || !p.Trusts(now-rounding) {
			return fmt.Sprintf("%s trusts its term %d at %d; it knows %+v", who, b.payloads[s.term], now, p.Process)
		}
		if s.what == begins {
			if p.Job != 0 || b.versions[s.token] != p.Token {
				return fmt.Sprintf("%s's job begins with token %d; it knows %+v", who, b.versions[s.token], p.Process)
			}
			p.Job = p.Term
		}
	case returns:
		p.Job = 0
	case writes:
		c := lease.Statement{Kind: lease.Fence, Term: b.payloads[s.term]}
		if b.rules.Run(&b.record, &c, 0, 0); s.done && c.Done == 0 {
			return fmt.Sprintf("a fenced write of %s's term %d takes effect; the record is %+v", who, c.Term, b.record)
		}
	case crashed:
		delete(b.minds, s.life)
	}
	return ""
}

// statement returns what a process sends.
func (b *behaviour) statement(p *mind, c *sent) *lease.Statement {
	s := &lease.Statement{Expects: b.versions[c.expects], Holder: p.ID}
	var record struct {
		Term, Holder string
		Offered      bool
		TTLMS        float64 `json:"ttl_ms"`
	}
	_ = json.Unmarshal(c.Object.Payload, &record) // none if it is no write
	s.TTL = int32(record.TTLMS)
	term := b.payloads[record.Term]
	switch {
	case c.Op == "get":
		s.Kind = lease.Read
		return s
	case c.Op == "delete":
		s.Kind, s.Term = lease.Release, b.wrote[s.Expects]
	case isRequest(c.Object):
		s.Kind = lease.Ask
	case record.Offered:
		s.Kind, s.Term, s.Payload, s.Offer = lease.Release, b.wrote[s.Expects], b.payload(record.Term), b.replica(record.Holder)
	case term != 0:
		s.Kind, s.Term = lease.Renew, term
	default:
		s.Kind, s.Term = lease.Begin, b.payload(record.Term)
		p.own[s.Term] = 0
	}
	if read, ok := p.reads[s.Expects]; ok {
		p.Seen, p.Age, p.Since = read.Seen, read.Age, read.Since
	}
	if s.Kind == lease.Release || s.Kind == lease.Renew {
		if version, ok := p.own[s.Term]; ok && s.Term != p.Term {
			p.Over, p.OverVersion = s.Term, version
		} else if s.Expects != p.Version {
			b.rules.Recognises(&p.Process)
		}
	}
	return s
}

// runs follows a statement that runs in the database, and returns how it differs from what the rules say.
func (b *behaviour) runs(c *sent, clock int32) (why string) {
	s := b.calls[c]
	b.rules.Run(&b.record, s, b.writes+1, clock)
	if s.Kind == lease.Read {
		if (c.err == nil) != (s.Seen.Payload != 0) || c.err == nil && b.versions[c.obj.Version] != s.Seen.Version {
			return fmt.Sprintf("a read finds version %d, %v; the record is %+v", b.versions[c.obj.Version], c.err, b.record)
		}
		if age := int32(c.obj.Age.Milliseconds()); c.err == nil && s.Seen.Asked == 0 && max(age-s.Age, s.Age-age) > rounding {
			return fmt.Sprintf("a read finds a record that is %d old, not %d", age, s.Age)
		}
		return ""
	}
	switch {
	case (c.err == nil) != (s.Done != 0):
		return fmt.Sprintf("a %v %+v gets %v; the record is %+v", s.Kind, *s, c.err, b.record)
	case s.Done == 0:
		return ""
	case c.Op != "delete" && c.obj.Version <= b.newest:
		return fmt.Sprintf("a %v gets version %d after version %d", s.Kind, c.obj.Version, b.newest)
	}
	if b.writes++; c.Op == "delete" { // nobody can read the version that is left behind
		return ""
	}
	b.newest, b.versions[c.obj.Version], b.wrote[b.writes] = c.obj.Version, b.writes, b.record.Payload
	return ""
}
