package claims

import (
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

	lostBy     *source   // of the take whose answer was lost; nil: none was, or other statements are unanswered, too
	namedUntil time.Time // by then an unanswered statement that named its keys has landed, unless it is very late
	newest     int64     // the greatest token of a claim that was held, or of a row that was freed as unknown
	changes    int       // how often a held claim was added or dropped
	forgetAt   int       // the number of detached claims at which to forget the ended ones

	toFree    []*batch // in this order
	freesRows bool     // a goroutine frees them
}

// batch is a set of rows that one statement frees.
type batch struct {
	rows []objects.Claim
	how  objects.Freeing
	done chan struct{} // closed when the rows are free, or the session is lost
}

func newLedger(t *term, mayRun, ttl time.Duration) *ledger {
	return &ledger{
		term: t, held: make(map[string]int64), requested: make(map[string]bool), early: make(map[string]int64),
		freeing: make(map[string]int), detached: make(map[string]int64), spent: make(map[string]int64), forgetAt: perStatement,
		doubts: doubts{mayRun: mayRun, ttl: ttl, rows: make(map[string]doubt), changed: make(chan struct{}, 1)},
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
		l.changes++
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
		l.changes++
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
// their attempts are taken back, unless they are spent.
func (l *ledger) startFreeing(unused bool, rows []objects.Claim) (batches []*batch) {
	for _, r := range rows {
		how := objects.Freeing{Unused: unused && l.spent[r.ID] != r.Token}
		l.drop(r.ID)
		l.freeing[r.ID]++
		b := lastBatch(l.toFree, func(b *batch) bool { return b.how == how })
		if b == nil || len(b.rows) == perStatement {
			b = &batch{how: how, done: make(chan struct{})}
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

// doubt says how long a row may differ from what the session believes. If an answer was lost, the first look comes
// after mayRun. Until landed, the next take may adopt the rows; until the later time until, looks go on.
type doubt struct {
	landed time.Time // by then a statement whose answer was lost has landed, unless it is very late; zero: there is none
	until  time.Time // a look that begins after this time ends the doubt
}

func (d doubt) and(other doubt) doubt {
	return doubt{later(d.landed, other.landed), later(d.until, other.until)}
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// doubts say which rows of one kind a session has to look at, and when.
type doubts struct {
	mayRun time.Duration // how long a statement may run after its answer was lost, unless it was delayed: twice its limit
	ttl    time.Duration

	rows     map[string]doubt // about single rows
	any      doubt            // about rows whose IDs are unknown; a zero until: there is none
	rowsAt   time.Time        // when to look at the single rows
	anyAt    time.Time        // when to look at all rows that the session owns
	lookedAt time.Time        // when all were last looked at
	changed  chan struct{}    // receives when a doubt was added
}

// add schedules a look at rows; with no IDs, at all rows that the session owns.
func (d *doubts) add(now time.Time, why doubt, ids ...string) {
	at := now
	switch {
	case !why.landed.IsZero():
		at = now.Add(d.mayRun)
	case len(ids) > 0:
		at = now.Add(d.ttl)
	}
	if len(ids) == 0 {
		if at = later(at, d.lookedAt.Add(d.ttl)); d.any.until.IsZero() || at.Before(d.anyAt) {
			d.anyAt = at
		}
		d.any = d.any.and(why)
	} else if len(d.rows) == 0 || at.Before(d.rowsAt) {
		d.rowsAt = at
	}
	for _, id := range ids {
		d.rows[id] = d.rows[id].and(why)
	}
	notify(d.changed)
}

// due returns which looks are due now, and the time of the next look; zero: nothing is in doubt.
func (d *doubts) due(now time.Time) (rows, all bool, at time.Time) {
	if len(d.rows) > 0 {
		rows, at = !now.Before(d.rowsAt), d.rowsAt
	}
	if !d.any.until.IsZero() {
		all = !now.Before(d.anyAt)
		if at.IsZero() || d.anyAt.Before(at) {
			at = d.anyAt
		}
	}
	return rows, all, at
}

// unsure reports whether a statement whose answer was lost may land at any moment, on rows whose IDs
// are unknown.
func (d *doubts) unsure(now time.Time) bool { return now.Before(d.any.landed) }

// looked ends the doubts about rows, if they were over when a look at these rows began.
func (d *doubts) looked(began time.Time, ids []string) {
	for _, id := range ids {
		if why, doubtful := d.rows[id]; doubtful && !why.until.After(began) {
			delete(d.rows, id)
		}
	}
}

// again sets when to look at the single rows again, after a look that has just ended.
func (d *doubts) again(began, now time.Time) {
	pause := d.ttl
	for _, why := range d.rows {
		if why.landed.After(began) {
			pause = d.mayRun
			break
		}
	}
	d.rowsAt = now.Add(pause)
}

// lookedAtAll notes a look at all rows that the session owns, and whether it was complete.
func (d *doubts) lookedAtAll(began, now time.Time, complete bool) {
	if d.lookedAt = now; complete && !d.any.until.After(began) {
		d.any = doubt{}
	}
	d.anyAt = now.Add(max(d.ttl, lookShare*now.Sub(began)))
}

// notify sends to a channel with room for one value, unless it is full.
func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
