package claims

import (
	"context"
	"fmt"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
)

// errGivenBack is the cause with which a func's context ends when the replica is drained, and why nothing is claimed then.
var errGivenBack = fmt.Errorf("%w: %w", tenure.ErrResigned, objects.ErrDrained)

// setDrained drains the session, or lets it take part again. It is for [tenure.Drain.Follow].
func (s *Session) setDrained(drained bool) (givenBack func(context.Context) error) {
	s.update(func() {
		s.drained = drained
		if s.term != nil && !drained {
			s.term.asks = nil
		}
		for _, k := range s.kinds {
			if drained {
				k.giveBack()
			}
		}
	})
	return s.givenBack
}

// giveBack tells the funcs of all claims to return, and has the other claims released. The caller holds the
// session's mu.
func (k *kind) giveBack() {
	l := k.ledger
	if l == nil || l.term.over != nil {
		return
	}
	for id, call := range k.running { // even if its claim has ended
		call.cancel(errGivenBack)
		if token, held := l.held[id]; held && l.spent[id] == token { // don't keep it for the rest of its pause
			call.kept = false
		}
	}
	var idle []objects.Claim
	for id, token := range l.held {
		r := objects.Claim{Kind: k.name, ID: id, Session: l.term.id, Token: token}
		switch {
		case k.running[id] != nil:
		case k.s.cfg.ReleaseRequested == nil || l.spent[id] == token || !k.ofRows() && isOwnKind(k.name):
			idle = append(idle, r)
		case !l.requested[id]:
			l.term.asks = append(l.term.asks, claimOf(k.name, l.term.id, r, k.ofRows()))
			l.term.recheckRequests()
		}
	}
	k.free(l, true, idle...)
}

// givenBack waits until the session holds nothing and no func runs, or the replica takes part again. Detached
// claims don't count.
func (s *Session) givenBack(ctx context.Context) error {
	for _, k := range s.allKinds() { // await the answers to statements that were sent before
		select {
		case k.turn <- struct{}{}:
			<-k.turn
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return s.until(ctx, func() bool {
		for _, k := range s.kinds {
			if len(k.running) > 0 || k.ledger.size() > 0 || s.term != nil && len(k.ledger.freeing) > 0 {
				return !s.drained
			}
		}
		return true
	})
}

// noteGivenBack wakes the calls of givenBack. The caller holds mu.
func (s *Session) noteGivenBack() {
	if s.drained {
		s.signal()
	}
}

// untilUndrained returns when the replica takes part, or when the session closes.
func (s *Session) untilUndrained(ctx context.Context) error {
	return s.until(ctx, func() bool { return s.closed || !s.drained })
}
