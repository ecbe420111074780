package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
)

// What is done to a claim, besides get, which asks who owns the key. The outcomes are those of
// a register.
const (
	claim   = "claim"
	release = "release"
	fenced  = "fenced write"
	end     = "end" // of a session, with all that it owns
)

// claimOp is one operation on a key.
type claimOp struct {
	Do      string
	Session string // that claims, releases, writes or ends; the owner that was found
	Token   int64  // that a claim gets, and that is released or written under
	Outcome string // refused: a claim that got nothing, or a fenced write
}

func (o claimOp) String() string {
	return fmt.Sprintf("%s by %.4s with %d: %s", o.Do, o.Session, o.Token, o.Outcome)
}

// ownership is a possible state of one key according to its history.
type ownership struct {
	owner string
	token int64 // of the owner, or of the last one; if unsure, the actual one is greater
	// unsure says that the owner does not know it: its claim was never answered. It may free
	// the key at any time.
	unsure bool
}

// after returns the possible states after an operation with that outcome; none if the outcome
// is impossible.
func (s ownership) after(o claimOp) (states []any) {
	if s.unsure {
		states = ownership{token: s.token}.after(o)
	}
	mine := s.owner == o.Session && (s.token == o.Token || s.unsure && o.Token > s.token)
	switch o.Do {
	case claim:
		return append(states, s.claimed(o)...)
	case get:
		if s.owner == o.Session {
			states = append(states, s)
		}
	case fenced:
		switch {
		case mine && o.Outcome == done:
			states = append(states, ownership{owner: s.owner, token: o.Token})
		case !mine && o.Outcome == refused, s.unsure && o.Outcome == refused:
			states = append(states, s)
		}
	case release:
		if mine {
			states = append(states, ownership{token: o.Token})
		}
		if o.Outcome == unknown {
			states = append(states, s)
		}
	case end:
		if s.owner == o.Session {
			s = ownership{token: s.token}
		}
		states = append(states, s)
	}
	return states
}

func (s ownership) claimed(o claimOp) (states []any) {
	switch o.Outcome {
	case done:
		// A session is also given what a claim took for it whose answer was lost.
		if o.Token > s.token && (s.owner == "" || s.unsure && s.owner == o.Session) {
			return []any{ownership{owner: o.Session, token: o.Token}}
		}
	case refused:
		if s.owner != "" {
			return []any{s}
		}
	case unknown:
		states = append(states, s)
		if s.owner == "" {
			states = append(states, ownership{owner: o.Session, token: s.token, unsure: true})
		}
	}
	return states
}

var ownershipModel = (&porcupine.NondeterministicModel{
	Init: func() []any { return []any{ownership{}} },
	Step: func(state, _, output any) []any { return state.(ownership).after(output.(claimOp)) },
}).ToModel()

// judgeClaims checks whether the history of one key is linearizable.
func judgeClaims(history []porcupine.Operation) porcupine.CheckResult {
	return porcupine.CheckOperationsTimeout(ownershipModel, history, 30*time.Second)
}

// claimHistory records what some sessions do with keys.
type claimHistory struct {
	mu   sync.Mutex
	keys map[string][]porcupine.Operation
	ends map[string]porcupine.Operation // of the sessions
	seen map[string]time.Duration       // when each session was last seen to stand
}

func newClaimHistory() *claimHistory {
	return &claimHistory{keys: map[string][]porcupine.Operation{}, ends: map[string]porcupine.Operation{}, seen: map[string]time.Duration{}}
}

// note records operations on keys that have just been answered, or given up.
func (h *claimHistory) note(client int, called time.Duration, op func(id string) claimOp, ids ...string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	returned := monotonic()
	for _, id := range ids {
		o := porcupine.Operation{ClientId: client, Call: int64(called), Output: op(id), Return: int64(returned)}
		if op(id).Outcome == unknown {
			o.Return = int64(forever)
		}
		h.keys[id] = append(h.keys[id], o)
	}
}

// stands notes that a session stands.
func (h *claimHistory) stands(session string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.seen[session] = monotonic()
}

// ended records the end of a session.
func (h *claimHistory) ended(session string, from time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ends[session] = porcupine.Operation{Call: int64(from), Output: claimOp{Do: end, Session: session, Outcome: done}, Return: int64(monotonic())}
}

// of returns the history of a key, with the ends of the sessions that occur in it. One that
// has crashed, or was lost, ends at any time after it was last seen to stand.
//
// A claim that is refused while another operation has the row locked says nothing: others
// still find the row as it was. Nor does one while the same session releases the key, which is
// free before the session knows.
func (h *claimHistory) of(id string) []porcupine.Operation {
	locks := func(o claimOp) bool { return o.Do != get && o.Outcome != refused }
	history := slices.DeleteFunc(slices.Clone(h.keys[id]), func(o porcupine.Operation) bool {
		c := o.Output.(claimOp)
		return c.Do == claim && c.Outcome == refused && slices.ContainsFunc(h.keys[id], func(other porcupine.Operation) bool {
			return locks(other.Output.(claimOp)) && other.Call < o.Return && o.Call < other.Return
		})
	})
	noted := map[string]bool{"": true}
	for _, o := range h.keys[id] {
		session := o.Output.(claimOp).Session
		if noted[session] {
			continue
		}
		noted[session] = true
		e, ok := h.ends[session]
		if !ok {
			e = porcupine.Operation{Call: int64(h.seen[session]), Output: claimOp{Do: end, Session: session, Outcome: done}, Return: int64(forever)}
		}
		history = append(history, e)
	}
	return history
}

// claimant is a process that has a session.
type claimant struct {
	number  int
	history *claimHistory
	session *claims.Session
	keys    *claims.Keys
	fenced  func(ctx context.Context, c claims.Claim) error // makes a fenced write
}

// claim claims keys, and records what it was answered.
func (p *claimant) claim(ctx context.Context, ids []string) map[string]claims.Claim {
	before, called := p.session.ID(), monotonic()
	answer, err := p.keys.TryClaim(ctx, ids...)
	got := map[string]claims.Claim{}
	for _, c := range answer {
		got[c.Key.ID] = c
		p.history.stands(c.Session)
	}
	after := p.session.ID()
	p.history.note(p.number, called, func(id string) claimOp {
		c, ok := got[id]
		switch {
		case ok:
			return claimOp{claim, c.Session, c.Token, done}
		case err != nil:
			return claimOp{claim, before, 0, unknown}
		}
		return claimOp{claim, after, 0, refused}
	}, ids...)
	if err != nil && after != before && after != "" { // it may have been sent for the next session
		p.history.note(p.number, called, func(string) claimOp { return claimOp{claim, after, 0, unknown} }, ids...)
	}
	return got
}

// release releases claims, and records it. If the session is lost, the keys become free some
// time.
func (p *claimant) release(ctx context.Context, got map[string]claims.Claim) {
	all, called := slices.Collect(maps.Values(got)), monotonic()
	outcome := done
	if err := p.keys.Release(ctx, all...); err != nil || p.session.ID() != all[0].Session || !p.session.Valid() {
		outcome = unknown
	}
	p.history.note(p.number, called, func(id string) claimOp { return claimOp{release, got[id].Session, got[id].Token, outcome} },
		slices.Collect(maps.Keys(got))...)
}

// owner asks who owns a key, and records the answer.
func (p *claimant) owner(ctx context.Context, id string) {
	called := monotonic()
	holding, err := p.keys.Owner(ctx, id)
	if err == nil || errors.Is(err, tenure.ErrNotFound) {
		p.history.note(p.number, called, func(string) claimOp { return claimOp{get, holding.Key.ID, 0, done} }, id)
	}
}

// write makes a write that is fenced by a claim, and records it.
func (p *claimant) write(ctx context.Context, c claims.Claim) {
	called, outcome := monotonic(), done
	switch err := p.fenced(ctx, c); {
	case errors.Is(err, tenure.ErrLost):
		outcome = refused
	case err != nil:
		return
	}
	p.history.note(p.number, called, func(string) claimOp { return claimOp{fenced, c.Session, c.Token, outcome} }, c.Key.ID)
}
