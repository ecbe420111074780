package claims

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
)

// A session compares what it believes with what the rows say. A row that names the session is unknown if
// the session does not hold it, is not freeing it, has not detached it, and runs no func for it. There
// are three reasons: the answer to the statement that took the row was lost, the database refused to
// free it, or a failover has undone its release. It is freed by the next comparison, or before that by a claim
// of its key, see reclaim. A claim has ended if its row says otherwise.

const (
	// compareEvery is how often a session compares all its rows when nothing is in doubt.
	compareEvery = time.Hour

	// lookShare bounds the share of the time that looks at all rows of a session take: one part in lookShare.
	lookShare = 20
)

// lateBy is how long a statement whose answer was lost may take rows after it was sent. A statement in
// the buffers of a server that hangs may land at any time. The regular looks find what lands even later.
func (k *kind) lateBy() time.Duration { return max(time.Hour, 10*k.s.cfg.TTL) }

// lostAnswer notes that a statement whose answer was lost may have taken rows. At first it may still run for twice its
// limit, and then it has landed or failed, unless it is late.
func (k *kind) lostAnswer(l *ledger) {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	k.doubt(l, 2*k.s.limit, k.lateBy())
}

// doubt schedules comparisons, the first in a while, for as long as the doubt lasts. The caller holds the session's mu.
func (k *kind) doubt(l *ledger, in, lasts time.Duration) {
	if now := time.Now(); l.term.over == nil { // otherwise all rows are freed
		l.doubts.add(now.Add(in), now.Add(lasts))
	}
}

// reconcile compares claims with their rows whenever something is in doubt, until the term has ended. Then windDown
// frees all rows.
func (k *kind) reconcile(l *ledger) {
	for !l.term.hasEnded() {
		k.s.mu.Lock()
		at := l.doubts.at
		k.s.mu.Unlock()
		var due <-chan time.Time
		if !at.IsZero() {
			due = time.After(time.Until(at))
		}
		select {
		case <-l.term.ended:
			return
		case <-l.doubts.changed:
			continue
		case <-due:
		}
		if err := k.lookAtAll(l); err != nil && l.term.ctx.Err() == nil && !errors.Is(err, tenure.ErrMoved) {
			k.s.cfg.Logger.Warn("failed to compare claims with their rows; retrying within a TTL", "kind", k.name, "error", err)
		}
	}
}

// lookAtAll compares all claims with their rows, frees unknown rows, and ends the claims whose rows say otherwise.
func (k *kind) lookAtAll(l *ledger) error {
	began := time.Now()
	err := k.settleDifferences(l)
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	l.doubts.ended(began, time.Now(), err == nil)
	l.forgetAt = perStatement + 2*len(l.detached)
	return err
}

func (k *kind) settleDifferences(l *ledger) error {
	on, err := k.s.store.Lineage(l.term.ctx)
	if err != nil {
		return err
	}
	ctx := objects.OnServer(l.term.ctx, on.Server) // a standby would show what was
	others, unseen, err := k.differences(ctx, l, true)
	if err != nil {
		return err
	}
	if err := k.endDenied(ctx, l, unseen); err != nil { // first, because one of the others may name an earlier claim of its key
		return err
	}
	for some := range slices.Chunk(idsOf(others), perStatement) {
		if err := k.freeUnknown(ctx, l, some); err != nil {
			return err
		}
	}
	return nil
}

// differences compares all claims with the rows that name the session. It returns the rows of which the session has no
// claim, and the claims of which it has found no row. A regular look leaves half of the time to others.
func (k *kind) differences(ctx context.Context, l *ledger, regular bool) (others []objects.Claim, unseen map[string]int64, err error) {
	k.s.mu.Lock()
	unseen = l.claims()
	k.s.mu.Unlock()
	for after, more := "", true; more; {
		if regular && l.term.hasEnded() {
			return nil, nil, nil
		}
		var rows []objects.Claim
		sent := time.Now()
		if rows, more, err = k.table.owned(ctx, k.name, l.term.id, after); err != nil {
			return others, unseen, err
		}
		k.s.mu.Lock()
		others = append(others, l.compare(unseen, rows)...)
		k.s.mu.Unlock()
		if len(rows) > 0 {
			after = rows[len(rows)-1].ID
		}
		if regular {
			pace.Sleep(ctx, time.Since(sent))
		}
	}
	return others, unseen, nil
}

// freeUnknown frees the unknown ones among rows.
func (k *kind) freeUnknown(ctx context.Context, l *ledger, ids []string) error {
	k.turn <- struct{}{} // a row that a statement has just taken is not yet known
	defer func() { <-k.turn }()
	rows, err := k.table.look(ctx, k.name, ids)
	if err != nil {
		return err
	}
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	if l.term.over != nil {
		return nil
	}
	rows = slices.DeleteFunc(rows, func(r objects.Claim) bool { return r.Session != l.term.id || l.owns(r) })
	if len(rows) > 0 {
		// While a claim on a row is being freed, or a func runs for it, the row may belong to another
		// claim. The next look judges it.
		k.doubt(l, k.s.cfg.TTL, k.s.cfg.TTL)
	}
	for _, r := range k.unknown(l, rows) {
		// If the claim has ended since the row was read, this frees nothing. A caller may have had the claim if its
		// token is smaller: then the attempt stays counted.
		k.free(l, r.Token > l.newest, r)
	}
	return nil
}

// unknown returns the unknown ones among rows that name the session. The caller holds the session's mu.
func (k *kind) unknown(l *ledger, rows []objects.Claim) []objects.Claim {
	return slices.DeleteFunc(rows, func(r objects.Claim) bool {
		return l.knows(r) || k.running[r.ID] != nil || k.s.isOffer(r) || k.isKnownByAnotherName(r)
	})
}

// isKnownByAnotherName reports whether a row is claimed under another name of its table, for example
// that of a partition. The caller holds the session's mu.
func (k *kind) isKnownByAnotherName(r objects.Claim) bool {
	for _, other := range k.s.kinds {
		if other == k || k.table == k.s.table || other.table == k.s.table {
			continue
		}
		if other.ledger != nil && other.ledger.owns(r) || other.running[r.ID].isFor(r.Session, r.Token) {
			return true
		}
	}
	return false
}

// endDenied ends those of the claims whose rows say otherwise.
func (k *kind) endDenied(ctx context.Context, l *ledger, claims map[string]int64) error {
	denied := func() (denied []objects.Claim, err error) {
		k.s.mu.Lock()
		owned := l.stillOwned(claims)
		k.s.mu.Unlock()
		for some := range slices.Chunk(owned, perStatement) {
			if l.term.hasEnded() {
				return nil, nil
			}
			sent := time.Now()
			ended, _, err := k.table.standing(ctx, k.name, some)
			if err != nil {
				return nil, err
			}
			denied = append(denied, ended...)
			pace.Sleep(ctx, time.Since(sent)) // leaves half of the time to others
		}
		return denied, nil
	}
	ended, err := denied()
	if err != nil || len(ended) == 0 {
		return err
	}
	select {
	case <-l.term.ended:
		return nil
	case <-time.After(2 * k.s.limit): // a statement that ends a claim may be unanswered
	}
	if ended, err = denied(); err != nil {
		return err
	}
	lost := 0
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	for _, r := range ended {
		if l.term.over == nil && l.owns(r) {
			if l.holds(r.ID, r.Token) {
				lost++
			}
			k.endRow(l, r)
		}
	}
	if lost > 0 {
		k.s.cfg.Logger.Warn("claims have ended, because their rows name another session, another token or none", "kind", k.name, "claims", lost)
	}
	return nil
}

// scheduleLooks schedules a look at a table's rows if no row of the table names the session although it holds claims
// there. It schedules a look at all rows once an hour, and when the database may have changed: it is another
// server, was restarted, or was out of reach. After a failover the session compares its claims before these looks
// do, with its first renewal: see compareAll.
func (w *sweeper) scheduleLooks(l look, reconnected bool) {
	s := w.s
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.term == nil {
		return
	}
	server, own := w.server, false
	for _, session := range l.sessions {
		if session.Server != 0 {
			server = session.Server
		}
		own = own || session.ID == s.term.id
	}
	all := reconnected || server != w.server || time.Since(w.compared) >= compareEvery
	if all {
		w.server, w.compared = server, time.Now()
	}
	for _, k := range s.kinds {
		if all || k.table == l.table && !own && k.ledger.size() > 0 {
			k.doubt(k.ledger, 0, 0)
		}
	}
}
