package claims

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/logtext"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
	"github.com/tenurelib/tenure/internal/record"
	"github.com/tenurelib/tenure/internal/sighting"
)

// A failover of the database may lose a claim even if the session that has it lives and is trusted.
// [tenure.Lineage] says when the first replica came to the new primary. For a TTL from then on, nothing is
// claimed, whatever the rows say. By the end of that time each session has either ended, or renewed its record
// on the new primary. The first such renewal counts only once the session has compared its claims with their
// rows there, and has written lost ones again. A claim that could not be written has ended: it was trusted for
// no longer than the session was before the failover.

// unsettled is the error of a call that would claim something before a failover has settled.
type unsettled struct{ in time.Duration }

func (u *unsettled) Error() string {
	return fmt.Sprintf("the database has failed over: nothing is claimed for another %v", u.in.Round(time.Millisecond))
}

// longestTTL is a TTL that no session exceeds, unless all do. Once a lineage is that old, no session looks for
// the longest TTL.
const longestTTL = time.Hour

// settlesIn returns for how long nothing may be claimed, if that is why a call has failed.
func settlesIn(err error) (in time.Duration) {
	var u *unsettled
	if errors.As(err, &u) {
		in = u.in
	}
	return in
}

// settling knows when sessions may claim in a store.
type settling struct {
	store  tenure.Store
	ttl    time.Duration
	limit  time.Duration // of a statement
	expiry tenure.ExpiryPolicy
	logger *slog.Logger

	longest atomic.Pointer[longestIn]
	told    atomic.Pointer[string] // the mark of the last lineage that was logged as not settled
}

// longestIn is the longest TTL of a session whose record stood in a lineage.
type longestIn struct {
	mark string
	ttl  time.Duration
}

// on returns a context for statements that claim. It names the server on which they may run. If a failover has
// not settled, the error is an [*unsettled].
func (s *settling) on(ctx context.Context) (context.Context, error) {
	looking, cancel := context.WithTimeout(ctx, s.limit)
	defer cancel()
	on, err := s.store.Lineage(looking)
	if err != nil {
		return nil, err
	}
	in := s.in(on, s.ttl)
	if longest := s.longest.Load(); in <= 0 && on.Age < longestTTL && (longest == nil || longest.mark != on.Mark) {
		if err := s.list(ctx, on); err != nil {
			return nil, err
		}
	}
	if longest := s.longest.Load(); longest != nil {
		in = max(in, s.in(on, longest.ttl))
	}
	if in <= 0 {
		return objects.OnServer(ctx, on.Server), nil
	}
	if told := s.told.Swap(&on.Mark); told == nil || *told != on.Mark {
		s.logger.Info("nothing is claimed before a failover of the database has settled", "in", in.Round(time.Millisecond))
	}
	return nil, &unsettled{in}
}

func (s *settling) in(on tenure.Lineage, ttl time.Duration) time.Duration {
	return sighting.SettlesIn(objects.Lineage(on), "", ttl, s.expiry == tenure.Observed)
}

// list looks for the longest TTL of a session.
func (s *settling) list(ctx context.Context, on tenure.Lineage) error {
	lister, ok := objects.As[tenure.Lister](s.store)
	if !ok || on.Mark == "" {
		return nil
	}
	longest := longestIn{mark: on.Mark}
	for after, more := "", true; more; {
		listing, cancel := context.WithTimeout(objects.WithLeaseCall(ctx), s.limit)
		sessions, err := lister.List(listing, objects.SessionType, after, perStatement)
		cancel()
		if err != nil {
			return err
		}
		for _, o := range sessions {
			h, _ := record.Read(record.Object{Labels: o.Labels, Payload: o.Payload, Version: o.Version}, s.ttl)
			longest.ttl, after = max(longest.ttl, h.TTL), o.Key.ID
		}
		more = len(sessions) == perStatement
	}
	s.longest.Store(&longest)
	return nil
}

// claiming calls claim when the session may claim: there is a term, it is the kind's turn, and a failover has
// settled. The context of claim names the server on which it has; if the database has moved since then, claim
// is called once more.
func (k *kind) claiming(ctx context.Context, claim func(ctx context.Context, l *ledger) error) error {
	return againIfMoved(func() error {
		l, done, err := k.begin(ctx)
		if err != nil {
			return err
		}
		defer done()
		on, err := k.s.settling.on(ctx)
		if err != nil {
			return err
		}
		return claim(on, l)
	})
}

// againIfMoved calls a func once more if the database has moved to another server since the func decided on one.
func againIfMoved(call func() error) error {
	err := call()
	if errors.Is(err, tenure.ErrMoved) {
		err = call()
	}
	return err
}

// compareAll compares the claims of a term with their rows, after a renewal that was the first one in a
// lineage. If ctx ends first, the next renewal waits for the same comparison.
func (s *Session) compareAll(ctx context.Context, t *term, on objects.Lineage) error {
	s.mu.Lock()
	c := t.comparison
	if c == nil || c.on.Mark != on.Mark || isClosed(c.done) && c.err != nil {
		c = &comparison{on: on, done: make(chan struct{})}
		t.comparison = c
		if t.ctx != nil {
			t.comparing.Go(func() { c.run(s, t) })
		} else { // the term has not begun to claim
			close(c.done)
		}
	}
	s.mu.Unlock()
	select {
	case <-c.done:
		return c.err
	case <-ctx.Done():
		return fmt.Errorf("comparing claims with their rows after a failover: %w", context.Cause(ctx))
	}
}

// onCompared returns a context for statements that judge the claims of a term by their rows. It names the
// server. onCompared returns false until the claims have been compared in the store's present lineage: a claim
// that looks lost may still be written again.
func (s *Session) onCompared(t *term) (context.Context, bool) {
	on, err := s.store.Lineage(t.ctx)
	if err != nil {
		return nil, false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	in := t.begunIn
	if c := t.comparison; c != nil {
		if in = c.on.Mark; !isClosed(c.done) || c.err != nil {
			return nil, false
		}
	}
	return objects.OnServer(t.ctx, on.Server), in == on.Mark
}

// terms has a func that renews the term of each session of this process, by the session's ID.
var terms sync.Map // of func(context.Context) error

// reassert renews a session at once, so that it writes again the claims that a failover has lost. It reports
// false if the session is not one of this process, or has ended.
func reassert(ctx context.Context, session string) (bool, error) {
	renew, ok := terms.Load(session)
	if !ok {
		return false, nil
	}
	return true, renew.(func(context.Context) error)(ctx)
}

// renewNow renews a term before its renewal is due, which compares its claims if the database has failed over. It returns
// nil once they are compared, or the term is over.
func (s *Session) renewNow(ctx context.Context, t *term) error {
	s.mu.Lock()
	before := t.comparison
	s.mu.Unlock()
	select {
	case t.renewing <- struct{}{}:
		defer func() { <-t.renewing }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	compared := func() bool { // since this call began
		s.mu.Lock()
		defer s.mu.Unlock()
		c := t.comparison
		return c != before && isClosed(c.done) && c.err == nil
	}
	for tries := 0; t.Valid() && !compared(); tries++ {
		// Not under ctx: a renewal gets none of the caller's values, and must not be cut off.
		renewing, cancel := context.WithTimeout(s.withComparison(context.Background(), t), s.limit)
		err := t.lease.Renew(renewing, t.Term)
		cancel()
		if err == nil {
			break
		}
		if !pace.Sleep(ctx, pace.Retry(s.cfg.RenewInterval, longestRetryPause, tries)) {
			return context.Cause(ctx)
		}
	}
	return nil
}

// renewedHere has the sessions of claims renewed that are of this process, because the store is on another server than at
// their last renewal. It reports whether there are any.
func (q *Queue) renewedHere(ctx context.Context, claims []objects.Claim) (some bool) {
	asked := make(map[string]bool)
	for _, c := range claims {
		if !asked[c.Session] {
			asked[c.Session] = true
			again, err := reassert(ctx, c.Session)
			some = some || again && err == nil
		}
	}
	return some
}

// withComparison returns a context for renewals of a term. Under it, the first renewal in a lineage compares
// the term's claims.
func (s *Session) withComparison(ctx context.Context, t *term) context.Context {
	return objects.WithComparison(ctx, func(ctx context.Context, on objects.Lineage) error { return s.compareAll(ctx, t, on) })
}

// endedOf returns the claims that have ended, after this process's sessions have written again those that a
// failover has lost.
func (q *Queue) endedOf(ctx context.Context, claims []objects.Claim) (ended []objects.Claim, err error) {
	lost, ended, _, err := q.rows.judge(ctx, q.cfg.Table, claims, true)
	if err == nil && len(lost) == 0 {
		return ended, nil
	}
	if err != nil { // perhaps from a connection that the failover has broken
		lost = claims
	}
	asked := make(map[string]bool)
	for _, c := range lost {
		if !asked[c.Session] {
			asked[c.Session] = true
			if _, err := reassert(ctx, c.Session); err != nil {
				return nil, err
			}
		}
	}
	ended, _, err = q.rows.standing(ctx, q.cfg.Table, claims)
	return ended, err
}

// comparison compares all claims of a term with their rows, in one lineage.
type comparison struct {
	on   objects.Lineage
	done chan struct{}
	err  error // set before done is closed
}

func (c *comparison) run(s *Session, t *term) {
	defer close(c.done)
	// Half of the time until the RenewDeadline: a kind whose table is locked or gone must not cost the session.
	patience := (t.Remaining() - (s.cfg.TTL - s.cfg.RenewDeadline)) / 2
	ctx, cancel := context.WithTimeout(objects.OnServer(t.ctx, c.on.Server), patience)
	defer cancel()
	kinds := s.allKinds()
	errs := make([]error, len(kinds))
	var comparing sync.WaitGroup
	for i, k := range kinds {
		comparing.Go(func() { errs[i] = k.compare(ctx, t) })
	}
	comparing.Wait()
	c.err = errors.Join(errs...)
}

// compare compares the claims of a term with their rows. Claims that the failover has lost are written again,
// with their tokens. Claims that have ended otherwise end, and so do claims that can't be compared in time. An
// error says that the database has failed over again.
func (k *kind) compare(ctx context.Context, t *term) error {
	select { // a statement that claims and was sent before the failover is answered first, or given up
	case k.turn <- struct{}{}:
		<-k.turn
	case <-ctx.Done():
	}
	rows, others := k.unseen(ctx, t, k.claimed(t))
	k.freeUndone(ctx, t, others)
	written, ended := 0, []objects.Claim(nil)
	var failed error // of the last try
	for tries := 0; ; tries++ {
		lost, gone, _, err := k.table.judge(ctx, k.name, rows, k.ofRows())
		if err == nil {
			if rows, ended, failed = lost, append(ended, gone...), nil; len(rows) == 0 {
				break
			}
			written = max(written, len(rows))
			gone, err = k.reassert(ctx, t, rows)
			rows, ended = objects.Subtract(rows, gone), append(ended, gone...)
		}
		if errors.Is(err, tenure.ErrMoved) {
			return err
		}
		failed = err
		if tries == 0 && err == nil { // look whether all are written: some may be locked
			continue
		}
		if !pace.Sleep(ctx, pace.Retry(k.s.cfg.RenewInterval, time.Second, tries)) {
			ended = append(ended, rows...)
			break
		}
	}
	if len(ended) > 0 {
		pace.Sleep(ctx, 100*time.Millisecond) // the statement that ends a claim may be unanswered
	}
	k.endLost(t, written, ended, failed)
	return nil
}

// claimed returns the rows of all claims of a term on which callers may rely.
func (k *kind) claimed(t *term) (rows []objects.Claim) {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	add := func(id string, token int64) {
		rows = append(rows, objects.Claim{Kind: k.name, ID: id, Session: t.id, Token: token})
	}
	l := k.ledger
	if l != nil && l.term == t {
		for id, token := range l.held {
			add(id, token)
		}
		for id, token := range l.detached {
			add(id, token)
		}
		// A session that has moved one of them to itself may write that again later than this one looks now.
		k.doubt(l, 0, k.s.cfg.TTL)
	}
	for id, call := range k.running { // while the session closes, for example
		if call.of.term == t && !call.kept && !l.owns(objects.Claim{ID: id, Session: t.id, Token: call.token}) {
			add(id, call.token)
		}
	}
	return rows
}

// unseen returns the claims of a term that no row of its session shows, and the rows that show others. These are few, and
// to read the session's rows in order is far faster than to look at the row of each claim.
func (k *kind) unseen(ctx context.Context, t *term, claims []objects.Claim) (unseen, others []objects.Claim) {
	seen, known := make(map[string]int64, len(claims)), make(map[string]int64, len(claims))
	for _, c := range claims {
		known[c.ID] = c.Token
	}
	for after, more := "", true; more; {
		var rows []objects.Claim
		var err error
		if rows, more, err = k.table.owned(ctx, k.name, t.id, after); err != nil {
			break // the others are looked at
		}
		for _, r := range rows {
			seen[r.ID], after = r.Token, r.ID
			if known[r.ID] != r.Token {
				others = append(others, r)
			}
		}
	}
	return slices.DeleteFunc(claims, func(c objects.Claim) bool { return seen[c.ID] == c.Token }), others
}

// freeUndone frees rows whose release the failover has undone. Once the session's record names the new primary, its
// claims fence writes there, and another session may have claimed these since.
func (k *kind) freeUndone(ctx context.Context, t *term, rows []objects.Claim) {
	if len(rows) == 0 {
		return
	}
	select {
	case k.turn <- struct{}{}:
		defer func() { <-k.turn }()
	case <-ctx.Done():
		return
	}
	k.s.mu.Lock()
	l := k.ledger
	k.s.mu.Unlock()
	if l != nil && l.term == t {
		_, _ = k.reclaim(l, rows) // the next look at all rows finds what can't be freed now
	}
}

// judge divides claims, by their rows, into those that a failover has lost, those that have ended, and those
// that stand.
func (t *ownerTable) judge(ctx context.Context, kind string, claims []objects.Claim, ofRows bool) (lost, ended, stand []objects.Claim, err error) {
	rows, err := t.rowsOf(ctx, kind, claims)
	if err != nil {
		return nil, nil, nil, err
	}
	for _, c := range claims {
		switch r, exists := rows[c.ID]; {
		case exists && r.Session == c.Session && r.Token == c.Token:
			stand = append(stand, c)
		case c.IsUndone(r, exists, ofRows):
			lost = append(lost, c)
		default:
			ended = append(ended, c)
		}
	}
	return lost, ended, stand, nil
}

// reassert writes claims again, and returns those that the database refuses.
func (k *kind) reassert(ctx context.Context, t *term, claims []objects.Claim) (refused []objects.Claim, err error) {
	err = inGroups(k.table.groups, claims, func(claims []objects.Claim) error {
		writing, cancel := k.s.writeContext(ctx)
		defer cancel()
		return k.table.rows.Reassert(writing, t.id, k.name, idsOf(claims), tokensOf(claims), k.s.limit)
	}, func(c objects.Claim, _ error) { refused = append(refused, c) })
	return refused, err
}

// endLost ends claims that were lost in a failover. Up to written claims were written again.
func (k *kind) endLost(t *term, written int, ended []objects.Claim, failed error) {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	lost := 0
	for _, r := range ended {
		c := claimOf(k.name, t.id, r, k.ofRows())
		if l := k.ledger; l != nil && l.term == t && l.owns(r) || k.running[r.ID].isFor(t.id, r.Token) {
			k.end(&EndedError{[]Claim{c}}, c)
			lost++
		}
	}
	if written == 0 && lost == 0 {
		return
	}
	attrs := []any{"kind", k.name, "written_again", max(0, written-lost), "ended", lost}
	if failed != nil {
		attrs = append(attrs, "error", logtext.OneLine(failed))
	}
	k.s.cfg.Logger.Warn("the database has failed over and lost claims", attrs...)
}
