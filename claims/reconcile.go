package claims

import (
	"context"
	"iter"
	"maps"
	"slices"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
)

// A session compares what it believes with what the rows say. A row that names it and that it neither
// holds nor frees, nor has detached, and for which none of its funcs runs, is unknown: the answer to
// the statement that took it was lost, the database refused to free it, or a failover has undone its
// release. Unknown rows are freed. A claim that is held although its row says otherwise has ended.

const (
	// compareEvery is how often a session compares all its rows although nothing is in doubt.
	compareEvery = time.Hour

	// lookShare is the greatest share of time that looks at all rows of a session take, as a divisor.
	lookShare = 20
)

// lateBy is how long after a statement was sent it may take rows although its answer was lost. One
// that waits in the buffers of a server that hangs may land at any time; the regular looks find what
// lands still later.
func (s *Session) lateBy() time.Duration { return max(time.Hour, 10*s.cfg.TTL) }

// lostAnswer notes that a statement may have taken rows, or may yet: these, or, if none are given, any.
func (k *kind) lostAnswer(l *ledger, ids ...string) {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	now := time.Now()
	k.doubt(l, doubt{now.Add(2*k.s.limit + k.s.cfg.TTL), now.Add(k.s.lateBy())}, ids...)
}

// doubt has rows looked at, or, if none are given, all. The caller holds the mutex.
func (k *kind) doubt(l *ledger, why doubt, ids ...string) {
	if l.term.over == nil { // otherwise all rows are freed
		l.doubts.add(time.Now(), why, ids...)
	}
}

// reconcile looks at rows that are in doubt, until the term has ended. Then all rows are freed.
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
		if err != nil && l.term.ctx.Err() == nil {
			k.s.cfg.Logger.Warn("failed to compare claims with their rows; retrying within a TTL", "kind", k.name, "error", err)
		}
	}
}

// lookAtDoubtful looks at the single rows that are in doubt.
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

// freeUnknown frees those of the rows that are unknown. It ends the doubts about the others that were
// over at a time.
func (k *kind) freeUnknown(l *ledger, ids []string, began time.Time) error {
	k.turn <- struct{}{} // what a statement takes meanwhile is not known yet
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
		// While one claim of a row is being freed, or its func runs, the row may be another's. It is
		// judged when that is over.
		k.doubt(l, doubt{until: time.Now()}, r.ID)
	}
	for _, r := range k.unknown(l, rows) {
		// The claim may have ended since the row was read. Then this frees nothing. A statement whose
		// answer is lost may free the row late, so it is not adopted any more.
		l.newest = max(l.newest, r.Token)
		k.free(l, r)
	}
	return nil
}

// unknown returns those of the rows with which the session has nothing to do although they name it.
// The caller holds the mutex.
func (k *kind) unknown(l *ledger, rows []objects.Claim) []objects.Claim {
	return slices.DeleteFunc(rows, func(r objects.Claim) bool {
		return l.knows(r) || k.running[r.ID] != nil || k.isKnownByAnotherName(r)
	})
}

// isKnownByAnotherName reports whether a row is claimed by another name of its table: that may be a
// partition of it, for example. The caller holds the mutex.
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
		pace.Sleep(l.term.ctx, time.Since(sent)) // others have as much time
	}
	s.mu.Lock()
	compared := confirmed == len(l.held) && changes == l.changes // so each of these rows was seen
	s.mu.Unlock()
	if err == nil && !compared {
		err = k.endDenied(l)
	}
	if err == nil {
		err = k.forgetDetached(l)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	l.doubts.lookedAtAll(began, time.Now(), err == nil)
	return err
}

// endDenied ends the claims whose rows say otherwise.
func (k *kind) endDenied(l *ledger) error {
	denied, err := k.denied(l, l.held)
	if err != nil || len(denied) == 0 {
		return err
	}
	select {
	case <-l.term.ended:
		return nil
	case <-time.After(2 * k.s.limit): // a statement that ends a claim may not have been answered yet
	}
	k.s.mu.Lock()
	maps.DeleteFunc(denied, func(id string, token int64) bool { return !l.holds(id, token) })
	k.s.mu.Unlock()
	denied, err = k.denied(l, denied)
	lost := 0
	for id, token := range denied {
		c := claimOf(k.name, l.term.id, objects.Claim{ID: id, Token: token})
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

// forgetDetached forgets detached claims that have ended since, which no other process tells this one.
func (k *kind) forgetDetached(l *ledger) error {
	ended, err := k.denied(l, l.detached)
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	for id, token := range ended {
		l.end(id, token)
	}
	l.forgetAt = perStatement + 2*len(l.detached)
	return err
}

// denied returns those of a ledger's claims whose rows say otherwise, until the term has ended.
func (k *kind) denied(l *ledger, claims map[string]int64) (denied map[string]int64, err error) {
	denied = make(map[string]int64)
	k.s.mu.Lock()
	next, stop := iter.Pull2(maps.All(claims)) // they may change between two calls of next
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
		ended, _, err := k.table.standing(l.term.ctx, k.name, some)
		if err != nil {
			return denied, err
		}
		for _, c := range ended {
			denied[c.ID] = c.Token
		}
		pace.Sleep(l.term.ctx, time.Since(sent)) // others have as much time
	}
	return denied, nil
}

// adoptable returns at most n rows of a statement whose answer was lost. The caller has the turn, so
// no other is under way. A row whose token is no greater than one that was given before may have been
// given itself; it is freed, so that the next claim gets a token of its own.
func (k *kind) adoptable(ctx context.Context, l *ledger, n int) (rows []objects.Claim, err error) {
	k.s.mu.Lock()
	unsure := l.doubts.unsure(time.Now())
	k.s.mu.Unlock()
	for after, more := "", unsure; more && len(rows) < n; {
		var some []objects.Claim
		if some, more, err = k.table.owned(ctx, k.name, l.term.id, after); err != nil || len(some) == 0 {
			return rows, err
		}
		after = some[len(some)-1].ID
		k.s.mu.Lock()
		some = slices.DeleteFunc(k.unknown(l, some), func(r objects.Claim) bool { return r.Token <= l.newest })
		k.s.mu.Unlock()
		// The claim of such a row may have ended after the row was read. Then it does not stand any more.
		_, stand, err := k.table.standing(ctx, k.name, some)
		if err != nil {
			return rows, err
		}
		rows = append(rows, stand...)
	}
	return rows[:min(n, len(rows))], nil
}

// compare has rows looked at again if a look at a table does not find the session there although it
// holds claims. It has all rows looked at if the database may not be what it was, because it is
// another server, was started again, or could not be reached; and once an hour. A failover to a
// server that lacks the last commits brings back claims that were released, and undoes others.
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
