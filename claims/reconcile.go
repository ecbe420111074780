package claims

import (
	"context"
	"iter"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
)

// A session compares what it believes with what the rows say. A row that names it and that it
// neither holds nor frees, nor has passed on, and for which no func of it runs, is unknown: a
// statement took it whose answer was lost, the database refused to free it, or a failover has
// undone its release. Unknown rows are freed. A claim that is held although its row says otherwise
// has ended.

const (
	// compareEvery is how often a session compares all its rows although nothing is in doubt.
	compareEvery = time.Hour

	// lookShare is the greatest share of time that looks at all rows of a session take, as a divisor.
	lookShare = 20
)

// doubt is why a session looks at rows again.
type doubt struct {
	soon  time.Time // until then a statement whose answer was lost lands, if it does not land late; zero: there is none
	until time.Time // a look that begins later, and finds nothing, ends the doubt
}

func (d doubt) and(other doubt) doubt {
	if other.soon.After(d.soon) {
		d.soon = other.soon
	}
	if other.until.After(d.until) {
		d.until = other.until
	}
	return d
}

// doubts are the rows of one kind that a session has to look at. The session's mu guards them.
type doubts struct {
	rows   map[string]doubt // of single rows
	all    doubt            // of any row; a zero until: there is none
	rowsAt time.Time        // when to look at the rows
	allAt  time.Time        // when to look at all that the session owns
	looked time.Time        // when that was done last
	looks  bool             // a goroutine looks
	kick   chan struct{}    // receives when it is to look earlier
}

func newDoubts() doubts { return doubts{rows: make(map[string]doubt), kick: make(chan struct{}, 1)} }

// lateBy is how long after a statement was sent it may take rows although nobody has heard of it.
// One that waits in the buffers of a server that hangs may land at any time; the regular looks find
// those that land still later.
func (s *Session) lateBy() time.Duration { return max(time.Hour, 10*s.cfg.TTL) }

// lostAnswer notes that a statement may have taken rows, or may yet: these, or, if none are given,
// any.
func (k *Keys) lostAnswer(h *holdings, ids ...string) {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	now := time.Now()
	k.doubt(h, doubt{now.Add(2*k.s.limit + k.s.cfg.TTL), now.Add(k.s.lateBy())}, ids...)
}

// doubt has rows looked at, or, if none are given, all. The caller holds the mutex.
func (k *Keys) doubt(h *holdings, why doubt, ids ...string) {
	if h.term.over != nil { // then all rows are freed
		return
	}
	d, now := &h.doubts, time.Now()
	settled := 2 * k.s.limit // a statement has ended by then, unless it was on its way for long
	if len(ids) == 0 {
		at := now
		if !why.soon.IsZero() {
			at = now.Add(settled)
		}
		if next := d.looked.Add(k.s.cfg.TTL); next.After(at) {
			at = next
		}
		if d.all.until.IsZero() || at.Before(d.allAt) {
			d.allAt = at
		}
		d.all = d.all.and(why)
	} else {
		at := now.Add(k.s.cfg.TTL)
		if !why.soon.IsZero() {
			at = now.Add(settled)
		}
		if len(d.rows) == 0 || at.Before(d.rowsAt) {
			d.rowsAt = at
		}
		for _, id := range ids {
			d.rows[id] = d.rows[id].and(why)
		}
	}
	if !d.looks {
		d.looks = true
		h.term.busy.Go(func() { k.reconcile(h) })
		return
	}
	select {
	case d.kick <- struct{}{}:
	default:
	}
}

// due returns when to look; zero: nothing is in doubt.
func (d *doubts) due() (at time.Time) {
	if len(d.rows) > 0 {
		at = d.rowsAt
	}
	if !d.all.until.IsZero() && (at.IsZero() || d.allAt.Before(at)) {
		at = d.allAt
	}
	return at
}

// reconcile looks at rows until nothing is in doubt any more.
func (k *Keys) reconcile(h *holdings) {
	for d := &h.doubts; ; {
		k.s.mu.Lock()
		at := d.due()
		d.looks = !at.IsZero()
		rows, all := len(d.rows) > 0 && !time.Now().Before(d.rowsAt), !d.all.until.IsZero() && !time.Now().Before(d.allAt)
		k.s.mu.Unlock()
		var err error
		switch {
		case at.IsZero(), h.term.hasEnded(): // then all rows are freed, and a look does nothing
			return
		case rows:
			err = k.lookAtDoubtful(h)
		case all:
			err = k.lookAtAll(h)
		default:
			select {
			case <-h.term.ended:
			case <-d.kick:
			case <-time.After(time.Until(at)):
			}
		}
		if err != nil && h.term.ctx.Err() == nil {
			k.s.cfg.Logger.Warn("failed to compare claims with their rows; retrying within a TTL", "kind", k.kind, "error", err)
		}
	}
}

// lookAtDoubtful looks at the single rows that are in doubt.
func (k *Keys) lookAtDoubtful(h *holdings) (err error) {
	began := time.Now()
	k.s.mu.Lock()
	ids := slices.Collect(maps.Keys(h.doubts.rows))
	k.s.mu.Unlock()
	for some := range slices.Chunk(ids, perStatement) {
		if h.term.hasEnded() {
			return nil
		}
		if err = k.freeUnknown(h, some, began); err != nil { // the next look tries again
			break
		}
	}
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	pause := k.s.cfg.TTL
	for _, d := range h.doubts.rows {
		if d.soon.After(began) {
			pause = 2 * k.s.limit
			break
		}
	}
	h.doubts.rowsAt = time.Now().Add(pause)
	return err
}

// freeUnknown frees those of the rows that are unknown. Of the others it ends the doubts that were
// over at a time.
func (k *Keys) freeUnknown(h *holdings, ids []string, began time.Time) error {
	k.turn <- struct{}{} // what a statement takes meanwhile is not known yet
	defer func() { <-k.turn }()
	rows, err := k.look(h.term.ctx, ids)
	if err != nil {
		return err
	}
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	if h.term.over != nil {
		return nil
	}
	for _, id := range ids {
		if d, doubtful := h.doubts.rows[id]; doubtful && !d.until.After(began) {
			delete(h.doubts.rows, id)
		}
	}
	for _, r := range rows {
		switch {
		case r.Session != h.term.id || h.passedOn[r.ID] == r.Token || h.tokens[r.ID] == r.Token:
		case k.knows(h, r):
			// While one claim of a row is being freed, or its func runs, the row may be another's. It is
			// judged when that is over.
			k.doubt(h, doubt{until: time.Now()}, r.ID)
		default:
			// The claim may have ended since the row was read. Then this frees nothing. A statement of
			// which nobody hears may free it late, so it is not adopted any more.
			h.newest = max(h.newest, r.Token)
			k.free(h, r)
			k.doubt(h, doubt{until: time.Now()}, r.ID)
		}
	}
	return nil
}

// knows reports whether the session still has to do with a row that names it. Another table of the
// user may be the same under another name, or a partition of it. The caller holds the mutex.
func (k *Keys) knows(h *holdings, r objects.Claim) bool {
	for _, other := range k.s.kinds {
		if other == k || k.table == naming(k.s.table) || other.table == naming(k.s.table) {
			continue
		}
		if other.now != nil && (other.now.tokens[r.ID] == r.Token || other.now.passedOn[r.ID] == r.Token) {
			return true
		}
		if call := other.running[r.ID]; call != nil && call.token == r.Token {
			return true
		}
	}
	_, held := h.tokens[r.ID]
	return held || h.freeing[r.ID] > 0 || h.passedOn[r.ID] == r.Token || k.running[r.ID] != nil
}

// lookAtAll compares all rows that name the session with what it knows, and its claims with the
// rows.
func (k *Keys) lookAtAll(h *holdings) error {
	s, began := k.s, time.Now()
	s.mu.Lock()
	changes := h.changes
	s.mu.Unlock()
	confirmed, err := 0, error(nil)
	for after, more := "", true; more && err == nil; {
		if h.term.hasEnded() { // then all rows are freed
			return nil
		}
		var rows []objects.Claim
		sent := time.Now()
		if rows, more, err = k.owned(h.term.ctx, h.term.id, after); err != nil {
			break
		}
		var doubtful []string
		s.mu.Lock()
		for _, r := range rows {
			if h.tokens[r.ID] == r.Token {
				confirmed++
			} else if h.passedOn[r.ID] != r.Token {
				doubtful = append(doubtful, r.ID)
			}
			after = r.ID
		}
		s.mu.Unlock()
		if len(doubtful) > 0 {
			err = k.freeUnknown(h, doubtful, began)
		}
		pace.Sleep(h.term.ctx, time.Since(sent)) // others have as much time
	}
	s.mu.Lock()
	compared := confirmed == len(h.tokens) && changes == h.changes // so each of these rows was seen
	s.mu.Unlock()
	if err == nil && !compared {
		err = k.endDenied(h)
	}
	if err == nil {
		err = k.forgetPassedOn(h)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	d := &h.doubts
	if d.looked = time.Now(); err == nil && !d.all.until.After(began) {
		d.all = doubt{}
	}
	d.allAt = d.looked.Add(max(s.cfg.TTL, lookShare*d.looked.Sub(began)))
	return err
}

// endDenied ends the claims whose rows say otherwise.
func (k *Keys) endDenied(h *holdings) error {
	s := k.s
	s.mu.Lock()
	next, stop := iter.Pull2(maps.All(h.tokens)) // which may change between two calls of next
	s.mu.Unlock()
	defer stop()
	var denied []objects.Claim
	for more := true; more; {
		var some []objects.Claim
		s.mu.Lock()
		for len(some) < perStatement && more {
			var c objects.Claim
			if c.ID, c.Token, more = next(); more {
				c.Session = h.term.id
				some = append(some, c)
			}
		}
		s.mu.Unlock()
		if h.term.hasEnded() {
			return nil
		}
		sent := time.Now()
		ended, _, err := k.standing(h.term.ctx, some)
		if err != nil {
			return err
		}
		denied = append(denied, ended...)
		pace.Sleep(h.term.ctx, time.Since(sent))
	}
	held := func(c objects.Claim) bool { return h.tokens[c.ID] == c.Token }
	still := func() (some []objects.Claim) {
		s.mu.Lock()
		defer s.mu.Unlock()
		return slices.DeleteFunc(denied, func(c objects.Claim) bool { return h.term.over != nil || !held(c) })
	}
	if denied = still(); len(denied) == 0 {
		return nil
	}
	select {
	case <-h.term.ended:
		return nil
	case <-time.After(2 * s.limit): // a statement that ends a claim may not have been answered yet
	}
	lost := 0
	denied = still()
	for some := range slices.Chunk(denied, perStatement) {
		ended, _, err := k.standing(h.term.ctx, some)
		if err != nil {
			return err
		}
		for _, r := range ended {
			c := Claim{Key: tenure.Key{Type: k.kind, ID: r.ID}, Session: r.Session, Token: r.Token}
			s.mu.Lock()
			if held(r) {
				lost++
				k.ended(&LostError{[]Claim{c}}, c)
			}
			s.mu.Unlock()
		}
	}
	if lost > 0 {
		s.cfg.Logger.Warn("claims have ended, because their rows name another session, another token or none", "kind", k.kind, "claims", lost)
	}
	return nil
}

// hasEnded reports whether nothing more may be claimed under a term.
func (t *term) hasEnded() bool {
	select {
	case <-t.ended:
		return true
	default:
		return false
	}
}

// ended notes that claims have ended. If that is a loss, it tells their funcs to return. The
// caller holds the mutex.
func (k *Keys) ended(lost error, claims ...Claim) {
	for _, c := range claims {
		h, id := k.now, c.Key.ID
		if h != nil && h.term.id == c.Session && h.tokens[id] == c.Token {
			h.drop(id)
		}
		if h != nil && h.term.id == c.Session && h.passedOn[id] == c.Token {
			delete(h.passedOn, id)
		}
		if call := k.running[id]; call != nil && call.of.term.id == c.Session && call.token == c.Token {
			call.kept, k.strays[id] = true, true
			if lost != nil {
				call.cancel(lost)
			}
		}
	}
}

// adoptable returns at most n rows of a statement whose answer was lost. The caller has the turn,
// so no other is under way. A row whose token is no greater than one that was given before may have
// been given itself; it is freed, so that the next claim gets a token of its own.
func (k *Keys) adoptable(ctx context.Context, h *holdings, n int) (rows []objects.Claim, err error) {
	for after, more := "", true; more && len(rows) < n; {
		var some []objects.Claim
		if some, more, err = k.owned(ctx, h.term.id, after); err != nil || len(some) == 0 {
			return rows, err
		}
		after = some[len(some)-1].ID
		k.s.mu.Lock()
		some = slices.DeleteFunc(some, func(r objects.Claim) bool { return r.Token <= h.newest || k.knows(h, r) })
		k.s.mu.Unlock()
		if len(some) == 0 {
			continue
		}
		// The claim of such a row may have ended after the row was read. Then it does not stand any more.
		_, stand, err := k.standing(ctx, some)
		if err != nil {
			return rows, err
		}
		rows = append(rows, stand...)
	}
	return rows[:min(n, len(rows))], nil
}

// owned returns rows of the kind that a session owns, those after another one, and whether there
// may be more.
func (k *Keys) owned(ctx context.Context, session, after string) (rows []objects.Claim, more bool, err error) {
	for {
		n := k.groups.size()
		rows, err = k.table.Owned(ctx, session, k.kind, after, n, k.s.limit)
		if !isTooSlow(err) || n == 1 {
			more = len(rows) == n
			break
		}
		k.groups.tooSlow(n)
	}
	if i := slices.IndexFunc(rows, func(r objects.Claim) bool { return r.Kind != k.kind }); i >= 0 {
		rows, more = rows[:i], false
	}
	return rows, more, err
}

// standing returns which of the claims have ended, and which have not.
func (k *Keys) standing(ctx context.Context, rows []objects.Claim) (ended, stand []objects.Claim, err error) {
	if len(rows) == 0 {
		return nil, nil, nil
	}
	now, err := k.look(ctx, idsOf(rows))
	if err != nil {
		return nil, nil, err
	}
	owners := make(map[string]objects.Claim, len(now))
	for _, row := range now {
		owners[row.ID] = row
	}
	for _, row := range rows {
		if now := owners[row.ID]; now.Session != row.Session || now.Token != row.Token {
			ended = append(ended, row)
		} else {
			stand = append(stand, row)
		}
	}
	return ended, stand, nil
}

// passOn remembers claims that are passed on, whose rows go on naming the session. The caller holds
// the mutex.
func (h *holdings) passOn(k *Keys, claims []Claim) {
	for _, c := range claims {
		h.drop(c.Key.ID)
		h.passedOn[c.Key.ID] = c.Token
	}
	if len(h.passedOn) >= h.forgetAt && h.term.over == nil {
		h.forgetAt = math.MaxInt
		h.term.busy.Go(func() { _ = k.forgetPassedOn(h) })
	}
}

// forgetPassedOn forgets claims that were passed on and have ended since, of which nobody tells
// this session.
func (k *Keys) forgetPassedOn(h *holdings) error {
	s := k.s
	s.mu.Lock()
	rows := make([]objects.Claim, 0, len(h.passedOn))
	for id, token := range h.passedOn {
		rows = append(rows, objects.Claim{ID: id, Session: h.term.id, Token: token})
	}
	s.mu.Unlock()
	var err error
	for some := range slices.Chunk(rows, perStatement) {
		if h.term.hasEnded() {
			break
		}
		var ended []objects.Claim
		if ended, _, err = k.standing(h.term.ctx, some); err != nil {
			break
		}
		s.mu.Lock()
		for _, row := range ended {
			if h.passedOn[row.ID] == row.Token {
				delete(h.passedOn, row.ID)
			}
		}
		s.mu.Unlock()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	h.forgetAt = perStatement + 2*len(h.passedOn)
	return err
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
		if all || k.table == l.table && !own && k.len() > 0 {
			k.doubt(k.now, doubt{until: time.Now()})
		}
	}
}
