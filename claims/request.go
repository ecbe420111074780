package claims

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
)

// errRequested is why a func's context ends if another process asks for its key.
var errRequested = fmt.Errorf("%w: on request", tenure.ErrResigned)

// requestsKey is where a session is woken when somebody asks for one of its keys.
func requestsKey(session string) tenure.Key {
	return tenure.Key{Type: "tenure.claims", ID: "session " + session}
}

// RequestRelease asks the owners of keys to give them back, in whatever process they are. It
// returns when the requests are stored, and does not wait until the keys are free: [Keys.Wait]
// does. An owner's func of [Keys.Do] is told to return, with the cause [tenure.ErrResigned];
// for other claims [SessionConfig.ReleaseRequested] decides. The owner hears of it at once, or
// within a TTL if the hint was lost.
//
// Keys that nobody owns need no request, and are left out. A request is for the claim that
// stands, and the next owner is not asked. A claim that was passed on is not given back. Fenced
// writes under a claim delay no request for it. This process need not have a session.
func (k *Keys) RequestRelease(ctx context.Context, ids ...string) error {
	err := k.valid(ids)
	if err == nil {
		err = inGroups(k.groups, ids, func(ids []string) error { return k.request(ctx, ids) }, nil)
	}
	if err != nil {
		return fmt.Errorf("tenure: request release of %s: %w", k.kind, err)
	}
	return nil
}

func (k *Keys) request(ctx context.Context, ids []string) error {
	wanted, err := k.s.table.Request(ctx, k.kind, ids, k.s.limit)
	if err != nil {
		return err
	}
	told := make(map[string]bool)
	for _, r := range wanted {
		if !told[r.Session] {
			told[r.Session] = true
			k.s.hint(requestsKey(r.Session))
		}
	}
	return nil
}

// heed gives back what others ask for, until the term is over.
func (s *Session) heed(ctx context.Context, t *term) {
	hints := s.hints(requestsKey(t.id))
	defer hints.Stop()
	for {
		select {
		case <-t.ended:
			return
		case <-hints.C():
		case <-t.wanted:
		}
		if err := s.giveBack(ctx, t); err != nil && ctx.Err() == nil {
			s.retries.Log(s.cfg.Logger, slog.LevelWarn, "requests cannot be read, trying again within a TTL", err)
		}
		select { // a flood of hints costs no more than this
		case <-t.ended:
			return
		case <-time.After(coalesce):
		}
	}
}

// wanted wakes heed.
func (s *Session) wanted(session string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.term != nil && s.term.id == session {
		s.term.heedAgain()
	}
}

func (t *term) heedAgain() {
	select {
	case t.wanted <- struct{}{}:
	default:
	}
}

func (s *Session) giveBack(ctx context.Context, t *term) error {
	for last := (objects.Claim{}); ; {
		n := s.groups.size()
		rows, err := s.table.Wanted(ctx, t.id, last, n, s.limit)
		if isTooSlow(err) && n > 1 {
			s.groups.tooSlow(n)
			continue
		}
		if err != nil {
			return err
		}
		for _, r := range rows {
			if s.asked(t, r) && s.cfg.ReleaseRequested != nil {
				c := Claim{Key: tenure.Key{Type: r.Kind, ID: r.ID}, Session: t.id, Token: r.Token}
				if err := guarded(func() error { s.cfg.ReleaseRequested(c); return nil }); err != nil {
					s.cfg.Logger.Error("ReleaseRequested has failed", "kind", r.Kind, "key", r.ID, "error", err)
				}
			}
		}
		if len(rows) < n {
			return nil
		}
		last = rows[len(rows)-1]
	}
}

// asked notes that somebody asks for a claim, and tells its func to return. It reports whether
// the claim has none, and this is the first request for it.
func (s *Session) asked(t *term, r objects.Claim) (idle bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.kinds[r.Kind]
	if k == nil || k.now == nil || k.now.term != t || k.now.asked[r.ID] {
		return false
	}
	delete(k.now.early, r.ID)
	if r.Gone {
		return false
	}
	if token, held := k.now.tokens[r.ID]; !held || token != r.Token { // it was passed on, is being freed, or is not answered yet
		k.now.early[r.ID] = r.Token
		return false
	}
	k.now.asked[r.ID] = true
	if call := k.running[r.ID]; call != nil {
		call.cancel(errRequested)
		return false
	}
	return true
}
