package claims

import (
	"maps"
	"slices"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
)

// ledger is what one term of a session knows about the claims of one kind. It does no I/O. The
// session's mu guards it. Its maps are by key.
type ledger struct {
	term      *term
	held      map[string]int64 // the tokens of held claims
	requested map[string]bool  // held claims that another process has asked for
	early     map[string]int64 // the tokens of claims that were requested before they were held
	freeing   map[string]int   // how many claims are being freed: a key may be taken again before the answer
	detached  map[string]int64 // the tokens of detached claims, whose rows still name the session
	spent     map[string]int64 // the tokens of held claims whose attempts are used
	doubts    doubts

	late     bool  // the statement under way was sent before a failover, and its claims were not compared
	newest   int64 // the greatest token of a claim that was held: no caller had a row with a greater one
	forgetAt int   // the number of detached claims at which to compare, which forgets the ended ones

	toFree    []*batch // in this order
	freesRows bool     // a goroutine frees them
}

// batch is a set of rows that one statement frees.
type batch struct {
	rows []objects.Claim
	how  objects.Freeing
	asks bool          // other sessions have asked for the rows
	done chan struct{} // closed when the rows are free, or the session is lost
}

func newLedger(t *term, pause time.Duration) *ledger {
	return &ledger{
		term: t, held: make(map[string]int64), requested: make(map[string]bool), early: make(map[string]int64),
		freeing: make(map[string]int), detached: make(map[string]int64), spent: make(map[string]int64), forgetAt: perStatement,
		doubts: doubts{pause: pause, changed: make(chan struct{}, 1)},
	}
}

// size returns the number of held claims.
func (l *ledger) size() int {
	if l == nil || l.term.over != nil {
		return 0
	}
	return len(l.held)
}

// holds reports whether a claim is held.
func (l *ledger) holds(id string, token int64) bool {
	now, held := l.held[id]
	return held && now == token
}

// owns reports whether a row is that of a held or detached claim.
func (l *ledger) owns(r objects.Claim) bool {
	return r.Session == l.term.id && (l.holds(r.ID, r.Token) || l.detached[r.ID] == r.Token)
}

// knows reports whether the term still has a use for a row that names it.
func (l *ledger) knows(r objects.Claim) bool {
	_, held := l.held[r.ID]
	return held || l.freeing[r.ID] > 0 || l.detached[r.ID] == r.Token
}

// claims returns the tokens of the held and the detached claims, by their keys.
func (l *ledger) claims() map[string]int64 {
	claims := maps.Clone(l.held)
	maps.Copy(claims, l.detached)
	return claims
}

// compare compares claims with rows that name the session and were read later. It returns the rows of claims that the
// session has neither had then nor has now, and removes from unseen the claims whose rows stand. What is left in unseen
// after the last row has ended, or ends, if the session still has it.
func (l *ledger) compare(unseen map[string]int64, rows []objects.Claim) (others []objects.Claim) {
	for _, r := range rows {
		if token, had := unseen[r.ID]; had && token == r.Token {
			delete(unseen, r.ID)
		} else if !l.owns(r) {
			others = append(others, r)
		}
	}
	return others
}

// stillOwned returns those of the claims that the session still has.
func (l *ledger) stillOwned(claims map[string]int64) (owned []objects.Claim) {
	for id, token := range claims {
		if r := (objects.Claim{ID: id, Session: l.term.id, Token: token}); l.owns(r) {
			owned = append(owned, r)
		}
	}
	return owned
}

// claimable returns the keys that are neither held nor being freed.
func (l *ledger) claimable(ids []string) (claimable []string) {
	for _, id := range ids {
		if _, held := l.held[id]; !held && l.freeing[id] == 0 {
			claimable = append(claimable, id)
		}
	}
	return claimable
}

// add notes rows that were taken. It reports whether another process has already asked for one of them.
func (l *ledger) add(rows []objects.Claim) (requested bool) {
	for _, r := range rows {
		l.drop(r.ID) // what was known of an earlier claim
		l.held[r.ID] = r.Token
		l.newest = max(l.newest, r.Token)
		delete(l.detached, r.ID)
		if l.early[r.ID] == r.Token {
			delete(l.early, r.ID)
			requested = true
		}
	}
	return requested
}

// request notes that another process asks for a claim. It reports whether the claim is held and this is
// its first request. A row that is Gone is one whose claim has ended.
func (l *ledger) request(r objects.Claim) (first bool) {
	if l.requested[r.ID] {
		return false
	}
	delete(l.early, r.ID)
	if r.Gone {
		return false
	}
	if !l.holds(r.ID, r.Token) { // it is detached, or being freed, or its statement is not answered yet
		l.early[r.ID] = r.Token
		return false
	}
	l.requested[r.ID] = true
	return true
}

// drop notes that the claim of a key is no longer held.
func (l *ledger) drop(id string) {
	if _, held := l.held[id]; held {
		delete(l.held, id)
		delete(l.requested, id)
		delete(l.spent, id)
	}
}

// detach notes that held claims are no longer used. Their rows still name the session.
func (l *ledger) detach(claims []Claim) {
	for _, c := range claims {
		l.drop(c.Key.ID)
		l.detached[c.Key.ID] = c.Token
	}
}

// end notes that a claim has ended, whether it was held or detached.
func (l *ledger) end(id string, token int64) {
	if l.holds(id, token) {
		l.drop(id)
	}
	if l.detached[id] == token {
		delete(l.detached, id)
	}
}

// startFreeing puts rows that are to be freed into batches, and returns these batches. unused says that
// their attempts are taken back, unless they are spent; counts says that attempts are counted. A row whose attempt was used is
// not offered to another session, whose attempt would not be counted.
func (l *ledger) startFreeing(unused, counts bool, rows []objects.Claim) (batches []*batch) {
	for _, r := range rows {
		how := objects.Freeing{Unused: counts && unused && l.spent[r.ID] != r.Token}
		asks := l.requested[r.ID] && l.holds(r.ID, r.Token) && (how.Unused || !counts)
		l.drop(r.ID)
		l.freeing[r.ID]++
		b := lastBatch(l.toFree, func(b *batch) bool { return b.how == how && b.asks == asks })
		if b == nil || len(b.rows) == perStatement {
			b = &batch{how: how, asks: asks, done: make(chan struct{})}
			l.toFree = append(l.toFree, b)
		}
		b.rows = append(b.rows, r)
		if lastBatch(batches, func(other *batch) bool { return other == b }) == nil {
			batches = append(batches, b)
		}
	}
	return batches
}

// lastBatch returns the last batch for which is returns true, or nil. It searches from the end, because there
// may be a thousand batches when a million keys are released.
func lastBatch(batches []*batch, is func(*batch) bool) *batch {
	for _, b := range slices.Backward(batches) {
		if is(b) {
			return b
		}
	}
	return nil
}

// nextBatch returns the next batch to free, or nil.
func (l *ledger) nextBatch() (b *batch) {
	if len(l.toFree) > 0 {
		b, l.toFree = l.toFree[0], l.toFree[1:]
	}
	return b
}

// freed notes that rows are free, or are no longer being freed.
func (l *ledger) freed(rows []objects.Claim) {
	for _, r := range rows {
		if l.freeing[r.ID]--; l.freeing[r.ID] == 0 {
			delete(l.freeing, r.ID)
		}
	}
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// doubts say when a session compares its claims of one kind with their rows.
type doubts struct {
	pause    time.Duration // the least time between two comparisons
	at       time.Time     // of the next comparison; zero: nothing is in doubt
	until    time.Time     // a comparison that begins after this time ends the doubts
	compared time.Time     // when the last comparison ended
	changed  chan struct{} // receives when a doubt was added
}

// add schedules comparisons, the first at a given time, until one begins after another.
func (d *doubts) add(at, until time.Time) {
	if at = later(at, d.compared.Add(d.pause)); d.at.IsZero() || at.Before(d.at) {
		d.at = at
	}
	d.until = later(d.until, until)
	notify(d.changed)
}

// ended notes a comparison, and whether it was complete.
func (d *doubts) ended(began, now time.Time, complete bool) {
	d.compared, d.at = now, now.Add(max(d.pause, lookShare*now.Sub(began)))
	if complete && !d.until.After(began) {
		d.at = time.Time{}
	}
}

// notify sends to a channel with room for one value, unless it is full.
func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
