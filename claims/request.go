package claims

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
)

// errRequested is the cause with which a func's context ends when another process asks for its key.
var errRequested = fmt.Errorf("%w: on request", tenure.ErrResigned)

// requestsKey returns the key that is woken when a key of a session is requested.
func requestsKey(session string) tenure.Key {
	return tenure.Key{Type: "tenure.claims", ID: "session " + session}
}

// RequestRelease asks the owners of keys to release them, whichever processes they are in. It returns when the
// requests are stored. Whichever session is quickest gets the keys; [Keys.Attach] takes one for this session. If a func of [Keys.Do] runs for a
// key, it is told to return, with the cause [tenure.ErrResigned]. For other claims
// [SessionConfig.ReleaseRequested] decides. The owner learns of a request at once, or within a TTL if the hint
// was lost.
//
// Keys without an owner are skipped. A request is for the present claim only; the next owner is not asked. A
// detached claim is not released. Fenced writes under a claim do not delay requests. Claims that are not
// requested cost nothing extra.
func (k *Keys) RequestRelease(ctx context.Context, ids ...string) error {
	err := k.s.table.validKeys(k.name, ids)
	if err == nil {
		err = k.s.table.request(ctx, k.s.store, k.name, ids)
	}
	return opError("request release of "+k.name, err)
}

// serveRequests releases the keys that other sessions request, until the term is over.
func (s *Session) serveRequests(ctx context.Context, t *term) {
	hints := s.watch(requestsKey(t.id))
	defer hints.Stop()
	var spurious pace.Limiter
	took := time.Duration(0)
	for found := true; ; {
		if rest := spurious.IgnoreFor(!found, followed(took)); rest > 0 {
			select {
			case <-t.ended:
				return
			case <-time.After(rest):
			}
		}
		select {
		case <-t.ended:
			return
		case <-hints.C():
		case <-t.requested:
		}
		var err error
		began := time.Now()
		found, err = s.readRequests(ctx, t)
		if took = time.Since(began); err != nil && ctx.Err() == nil {
			s.retries.Log(s.cfg.Logger, slog.LevelWarn, "failed to read requests for keys; retrying within a TTL", err)
			s.doubtMoves(t)
		}
	}
}

// followed returns how often a hint is followed by a look that takes so long, if hints keep leading to nothing. On a SQLite
// file, each write is a hint for all.
func followed(took time.Duration) time.Duration {
	return min(max(10*time.Millisecond, 4*took), coalesce)
}

// recheckRequests has the term's requests read again.
func (t *term) recheckRequests() { notify(t.requested) }

// readRequests reads all requests for claims of a term, and tells the funcs of these claims to return. It reports whether
// there were new ones.
func (s *Session) readRequests(ctx context.Context, t *term) (found bool, err error) {
	s.mu.Lock()
	asks := t.asks
	t.asks = nil
	s.mu.Unlock()
	found = len(asks) > 0
	for _, c := range asks {
		s.askToRelease(c)
	}
	for _, table := range s.tables() {
		if table.requests {
			some, failed := s.readRequestsIn(ctx, t, table)
			found, err = found || some, cmp.Or(err, failed)
		}
	}
	return found, err
}

func (s *Session) readRequestsIn(ctx context.Context, t *term, table *ownerTable) (found bool, err error) {
	for last := (objects.Claim{}); ; {
		var rows []objects.Claim
		n, err := table.groups.page(ctx, perStatement, func(n int) (err error) {
			rows, err = table.rows.Wanted(ctx, t.id, last, n, s.limit)
			return err
		})
		if err != nil {
			return found, err
		}
		s.endMoved(t, rows)
		for _, r := range rows {
			isNew, idle := s.noteRequest(t, r)
			found = found || isNew
			if idle && s.cfg.ReleaseRequested != nil {
				s.askToRelease(claimOf(r.Kind, t.id, r, table != s.table))
			}
		}
		if len(rows) < n {
			return found, nil
		}
		last = rows[len(rows)-1]
	}
}

func (s *Session) askToRelease(c Claim) {
	if err := guarded(func() error { s.cfg.ReleaseRequested(c); return nil }); err != nil {
		s.cfg.Logger.Error("ReleaseRequested has failed", "kind", c.Key.Type, "key", c.Key.ID, "error", err)
	}
}

// endMoved ends the claims of a term that other sessions have moved to themselves, as requests for them say:
// see [Keys.Move].
func (s *Session) endMoved(t *term, rows []objects.Claim) {
	ended := make(map[string][]objects.Claim)
	for _, r := range rows {
		if r.Gone {
			ended[r.Kind] = append(ended[r.Kind], r)
		}
	}
	for _, k := range s.allKinds() {
		s.mu.Lock()
		l := k.ledger
		s.mu.Unlock()
		if moved := ended[k.name]; len(moved) > 0 && l != nil && l.term == t {
			k.endMoved(l, moved)
		}
	}
}

// doubtMoves has all claims compared with their rows. The answer that was lost may have said that some were
// moved, and the database says so only once.
func (s *Session) doubtMoves(t *term) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range s.kinds {
		if k.table == s.table && k.ledger != nil && k.ledger.term == t && k.ledger.size() > 0 {
			k.doubt(k.ledger, 0, 0)
		}
	}
}

// noteRequest notes a request for a claim, and tells the claim's func to return. It reports whether this is the
// first request, and whether no func runs for the claim then.
func (s *Session) noteRequest(t *term, r objects.Claim) (isNew, idle bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.kinds[r.Kind]
	if k == nil || k.ledger == nil || k.ledger.term != t || !k.ledger.request(r) {
		return r.Gone, false
	}
	if call := k.running[r.ID]; call != nil {
		call.cancel(errRequested)
		return true, false
	}
	return true, true
}
