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

// requestsKey is where a session is woken when one of its keys is requested.
func requestsKey(session string) tenure.Key {
	return tenure.Key{Type: "tenure.claims", ID: "session " + session}
}

// RequestRelease asks the owners of keys to give them back, in whatever process they are. It
// returns when the requests are stored, and does not wait until the keys are free: [Keys.Claim]
// does. An owner's func of [Keys.Do] is told to return, with the cause [tenure.ErrResigned];
// for other claims [SessionConfig.ReleaseRequested] decides. The owner learns of it at once, or
// within a TTL if the hint was lost.
//
// Keys without an owner need no request, and are left out. A request is for the claim that
// stands, and the next owner is not asked. A detached claim is not given back. Fenced
// writes under a claim delay no request for it.
func (k *Keys) RequestRelease(ctx context.Context, ids ...string) error {
	err := k.s.validKeys(k.name, ids)
	if err == nil {
		err = inGroups(k.s.table.groups, ids, func(ids []string) error { return k.request(ctx, ids) }, nil)
	}
	return opError("request release of "+k.name, err)
}

func (k *Keys) request(ctx context.Context, ids []string) error {
	requested, err := k.s.claims.Request(ctx, k.name, ids, k.s.limit)
	if err != nil {
		return err
	}
	woken := make(map[string]bool)
	for _, r := range requested {
		if !woken[r.Session] {
			woken[r.Session] = true
			k.s.wake(requestsKey(r.Session))
		}
	}
	return nil
}

// serveRequests releases the keys that other sessions request, until the term is over.
func (s *Session) serveRequests(ctx context.Context, t *term) {
	hints := s.watch(requestsKey(t.id))
	defer hints.Stop()
	for {
		select {
		case <-t.ended:
			return
		case <-hints.C():
		case <-t.requested:
		}
		if err := s.readRequests(ctx, t); err != nil && ctx.Err() == nil {
			s.retries.Log(s.cfg.Logger, slog.LevelWarn, "failed to read requests for keys; retrying within a TTL", err)
		}
		select { // a flood of hints costs no more than this
		case <-t.ended:
			return
		case <-time.After(coalesce):
		}
	}
}

// recheckRequests has the requests read again.
func (t *term) recheckRequests() { notify(t.requested) }

// readRequests reads all requests for claims of a term, and tells their funcs to return.
func (s *Session) readRequests(ctx context.Context, t *term) error {
	for last := (objects.Claim{}); ; {
		var rows []objects.Claim
		n, err := s.table.groups.page(ctx, perStatement, func(n int) (err error) {
			rows, err = s.claims.Wanted(ctx, t.id, last, n, s.limit)
			return err
		})
		if err != nil {
			return err
		}
		for _, r := range rows {
			if s.isFirstRequest(t, r) && s.cfg.ReleaseRequested != nil {
				c := claimOf(r.Kind, t.id, r)
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

// isFirstRequest notes a request for a claim, and tells its func to return. It reports whether
// the claim has none, and this is the first request for it.
func (s *Session) isFirstRequest(t *term, r objects.Claim) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.kinds[r.Kind]
	if k == nil || k.ledger == nil || k.ledger.term != t || !k.ledger.request(r) {
		return false
	}
	if call := k.running[r.ID]; call != nil {
		call.cancel(errRequested)
		return false
	}
	return true
}
