package claims

import (
	"context"
	"errors"
	"iter"
	"maps"
	"slices"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
)

// A session compares what it believes with what the rows say. A row that names the session is unknown if
// the session does not hold it, is not freeing it, has not detached it, and runs no func for it. There
// are three reasons: the answer to the statement that took the row was lost, the database refused to
// free it, or a failover has undone its release. A take of a queue first adopts rows that an unanswered take may
// have taken, see adoptable. A claim of a key that is unknown frees it first, see reclaim. All others are freed by
// the next look at them, see freeUnknown. A claim that is held has ended if its row says otherwise.

const (
	// compareEvery is how often a session compares all its rows when nothing is in doubt.
	compareEvery = time.Hour

	// lookShare bounds the share of the time that looks at all rows of a session take: one part in lookShare.
	lookShare = 20
)

// lateBy is how long a statement whose answer was lost may take rows after it was sent. A statement in
// the buffers of a server that hangs may land at any time. The regular looks find what lands even later.
func (k *kind) lateBy() time.Duration { return max(time.Hour, 10*k.s.cfg.TTL) }

// lostAnswer notes that a statement may have taken the rows with these IDs, or may yet take them.
func (k *kind) lostAnswer(l *ledger, ids ...string) {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	l.namedUntil = time.Now().Add(2*k.s.limit + k.s.cfg.TTL)
	k.lostAnswerLocked(l, ids...)
}

// lostTake is lostAnswer for a take, which has no IDs: it may take rows of one queue, by one filter. The next take of the same
// source may adopt them (adoptable).
func (k *kind) lostTake(l *ledger, of *source) {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	if now := time.Now(); l.doubts.unsure(now) && !l.lostBy.is(of) || now.Before(l.namedUntil) {
		of = nil // another statement is unanswered, too, and its rows can't be told from those of this take
	}
	l.lostBy = of
	k.lostAnswerLocked(l)
}

// lostAnswerLocked is lostAnswer for a caller that holds the session's mu. With no IDs, it means any rows.
func (k *kind) lostAnswerLocked(l *ledger, ids ...string) {
	now := time.Now()
	k.doubt(l, doubt{landed: now.Add(2*k.s.limit + k.s.cfg.TTL), until: now.Add(k.lateBy())}, ids...)
}

// doubt schedules a look at rows; with no IDs, at all rows. The caller holds the session's mu.
func (k *kind) doubt(l *ledger, why doubt, ids ...string) {
	if l.term.over == nil { // otherwise all rows are freed
		l.doubts.add(time.Now(), why, ids...)
	}
}

// reconcile looks at rows in doubt until the term has ended. Then windDown frees all rows.
func (k *kind) reconcile(l *ledger) {
	for !l.term.hasEnded() {
		k.s.mu.Lock()
		rows, all, at := l.doubts.due(time.Now())
		k.s.mu.Unlock()
		var err error
		switch {
		case rows:
			err = k.lookAtDoubtful(l)
		case all:
			err = k.lookAtAll(l)
		default:
			var due <-chan time.Time
			if !at.IsZero() {
				due = time.After(time.Until(at))
			}
			select {
			case <-l.term.ended:
			case <-l.doubts.changed:
			case <-due:
			}
		}
		if err != nil && l.term.ctx.Err() == nil && !errors.Is(err, tenure.ErrMoved) {
			k.s.cfg.Logger.Warn("failed to compare claims with their rows; retrying within a TTL", "kind", k.name, "error", err)
		}
	}
}

// lookAtDoubtful looks at the single rows in doubt.
func (k *kind) lookAtDoubtful(l *ledger) (err error) {
	began := time.Now()
	k.s.mu.Lock()
	ids := slices.Collect(maps.Keys(l.doubts.rows))
	k.s.mu.Unlock()
	for some := range slices.Chunk(ids, perStatement) {
		if l.term.hasEnded() {
			return nil
		}
		if err = k.freeUnknown(l, some, began); err != nil {
			break
		}
	}
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	l.doubts.again(began, time.Now())
	return err
}

// freeUnknown frees the unknown ones among rows. It ends the doubts about rows that were over when the
// look began.
func (k *kind) freeUnknown(l *ledger, ids []string, began time.Time) error {
	k.turn <- struct{}{} // a row that a statement has just taken is not yet known
	defer func() { <-k.turn }()
	rows, err := k.table.look(l.term.ctx, k.name, ids)
	if err != nil {
		return err
	}
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	if l.term.over != nil {
		return nil
	}
	l.doubts.looked(began, ids)
	rows = slices.DeleteFunc(rows, func(r objects.Claim) bool { return r.Session != l.term.id || l.owns(r) })
	for _, r := range rows {
		// While a claim on the row is being freed, or a func runs for it, the row may belong to another
		// claim. The next look judges it.
		k.doubt(l, doubt{until: time.Now()}, r.ID)
	}
	newest := l.newest
	for _, r := range k.unknown(l, rows) {
		// If the claim has ended since the row was read, this frees nothing. If the answer is lost, the
		// statement may free the row late, so the row must not be adopted any more.
		l.newest = max(l.newest, r.Token)
		k.free(l, r.Token > newest, r) // a smaller token may be that of a claim that a caller had: the attempt stays counted
	}
	return nil
}

// unknown returns the unknown ones among rows that name the session. The caller holds the session's mu.
func (k *kind) unknown(l *ledger, rows []objects.Claim) []objects.Claim {
	return slices.DeleteFunc(rows, func(r objects.Claim) bool {
		return l.knows(r) || k.running[r.ID] != nil || k.isKnownByAnotherName(r)
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

// lookAtAll compares all rows that name the session with what it knows, and its claims with the rows.
func (k *kind) lookAtAll(l *ledger) error {
	s, began := k.s, time.Now()
	ctx, ok := s.onCompared(l.term)
	if !ok { // the next renewal writes again what a failover has lost
		s.mu.Lock()
		defer s.mu.Unlock()
		l.doubts.lookedAtAll(began, began, false)
		return nil
	}
	s.mu.Lock()
	changes := l.changes
	s.mu.Unlock()
	confirmed, err := 0, error(nil)
	for after, more := "", true; more && err == nil; {
		if l.term.hasEnded() {
			return nil
		}
		var rows []objects.Claim
		sent := time.Now()
		if rows, more, err = k.table.owned(l.term.ctx, k.name, l.term.id, after); err != nil {
			break
		}
		var doubtful []string
		s.mu.Lock()
		for _, r := range rows {
			if l.holds(r.ID, r.Token) {
				confirmed++
			} else if !l.owns(r) {
				doubtful = append(doubtful, r.ID)
			}
			after = r.ID
		}
		s.mu.Unlock()
		if len(doubtful) > 0 {
			err = k.freeUnknown(l, doubtful, began)
		}
		pace.Sleep(l.term.ctx, time.Since(sent)) // leaves half of the time to others
	}
	s.mu.Lock()
	compared := confirmed == len(l.held) && changes == l.changes // so the look has seen the row of each
	s.mu.Unlock()
	if err == nil && !compared {
		err = k.endDenied(ctx, l)
	}
	if err == nil {
		err = k.forgetDetached(ctx, l)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	l.doubts.lookedAtAll(began, time.Now(), err == nil)
	return err
}

// endDenied ends held claims whose rows say otherwise.
func (k *kind) endDenied(ctx context.Context, l *ledger) error {
	denied, err := k.denied(ctx, l, l.held)
	if err != nil || len(denied) == 0 {
		return err
	}
	select {
	case <-l.term.ended:
		return nil
	case <-time.After(2 * k.s.limit): // a statement that ends a claim may be unanswered
	}
	k.s.mu.Lock()
	maps.DeleteFunc(denied, func(id string, token int64) bool { return !l.holds(id, token) })
	k.s.mu.Unlock()
	denied, err = k.denied(ctx, l, denied)
	lost := 0
	for id, token := range denied {
		c := claimOf(k.name, l.term.id, objects.Claim{ID: id, Token: token}, k.ofRows())
		k.s.mu.Lock()
		if l.term.over == nil && l.holds(id, token) {
			lost++
			k.end(&EndedError{[]Claim{c}}, c)
		}
		k.s.mu.Unlock()
	}
	if lost > 0 {
		k.s.cfg.Logger.Warn("claims have ended, because their rows name another session, another token or none", "kind", k.name, "claims", lost)
	}
	return err
}

// forgetDetached forgets detached claims that have ended. The process that ended them does not tell this one.
func (k *kind) forgetDetached(ctx context.Context, l *ledger) error {
	ended, err := k.denied(ctx, l, l.detached)
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	for id, token := range ended {
		l.end(id, token)
	}
	l.forgetAt = perStatement + 2*len(l.detached)
	return err
}

// denied returns the claims whose rows say otherwise. It stops when the term ends.
func (k *kind) denied(ctx context.Context, l *ledger, claims map[string]int64) (denied map[string]int64, err error) {
	denied = make(map[string]int64)
	k.s.mu.Lock()
	next, stop := iter.Pull2(maps.All(claims)) // the map may change between two calls of next
	k.s.mu.Unlock()
	defer stop()
	for more := true; more && !l.term.hasEnded(); {
		var some []objects.Claim
		k.s.mu.Lock()
		for len(some) < perStatement && more {
			c := objects.Claim{Session: l.term.id}
			if c.ID, c.Token, more = next(); more {
				some = append(some, c)
			}
		}
		k.s.mu.Unlock()
		sent := time.Now()
		ended, _, err := k.table.standing(ctx, k.name, some)
		if err != nil {
			return denied, err
		}
		for _, c := range ended {
			denied[c.ID] = c.Token
		}
		pace.Sleep(l.term.ctx, time.Since(sent)) // leaves half of the time to others
	}
	return denied, nil
}

// adoptable returns up to n rows that were taken by a statement whose answer was lost. The caller has the turn,
// so no other such statement is under way. A row is adoptable only if its token is greater than all earlier
// tokens: any other token may have been given to a caller. Rows that may have been taken for callers of another
// source are not adoptable. Once every such statement has landed or failed, except for one that is very late (see
// lateBy), no row is adoptable. Any look at all rows, even one before that time, frees the rows that no take has adopted
// (freeUnknown).
func (k *kind) adoptable(ctx context.Context, l *ledger, of *source, n int) (rows []objects.Claim, err error) {
	k.s.mu.Lock()
	now := time.Now()
	unsure := l.doubts.unsure(now) && l.lostBy.is(of) && now.After(l.namedUntil)
	k.s.mu.Unlock()
	table := &ownerTable{of.q.table, of.q.rows.groups, k.s.limit, false} // it knows how many attempts a row has
	for after, more := "", unsure; more && len(rows) < n; {
		var some []objects.Claim
		if some, more, err = table.owned(ctx, k.name, l.term.id, after); err != nil || len(some) == 0 {
			return rows, err
		}
		after = some[len(some)-1].ID
		k.s.mu.Lock()
		some = slices.DeleteFunc(k.unknown(l, some), func(r objects.Claim) bool { return r.Token <= l.newest })
		k.s.mu.Unlock()
		// The claim on such a row may have ended after the row was read.
		_, stand, err := table.standing(ctx, k.name, some)
		if err != nil {
			return rows, err
		}
		rows = append(rows, stand...)
	}
	return rows[:min(n, len(rows))], nil
}

// compare schedules a look at a table's rows if no row of the table names the session although it holds claims
// there. It schedules a look at all rows once an hour, and when the database may have changed: it is another
// server, was restarted, or was out of reach. A failover to a server that lacks the last commits brings
// released claims back, and undoes others.
func (w *sweeper) compare(l look, reconnected bool) {
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
			k.doubt(k.ledger, doubt{until: time.Now()})
		}
	}
}
