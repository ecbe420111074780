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
// rows there. A claim whose row is gone or says otherwise has ended: it was trusted for no longer than the session
// was before the failover. A row that names the session without a claim is freed, so that nobody writes under a claim
// whose release was lost.

// unsettled is the error of a call that would claim something before a failover has settled.
type unsettled struct{ in time.Duration }

func (u *unsettled) Error() string {
	return fmt.Sprintf("the database has failed over: nothing is claimed for another %v", u.in.Round(time.Millisecond))
}

// longestTTL is a TTL that no session exceeds. Once a lineage is that old, no session looks for
// the longest TTL.
const longestTTL = 24 * time.Hour

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
	return sighting.SettlesIn(objects.Lineage(on), "", ttl, s.expiry == tenure.ExpiryObserved)
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

// renewNow renews a term before its renewal is due, which compares its claims if the database has failed over. It reports
// false if the term is over.
func (s *Session) renewNow(ctx context.Context, t *term) (renewed bool, err error) {
	for tries := 0; ; tries++ {
		renewed, err = t.right.Renew(ctx)
		if !renewed || err == nil || !pace.Sleep(ctx, pace.Retry(s.cfg.RenewInterval, longestRetryPause, tries)) {
			return renewed, err
		}
	}
}

// renewedHere has the sessions of claims renewed that are of this process, because the store is on another server than at
// their last renewal. It reports whether there are any.
func (q *Queue) renewedHere(ctx context.Context, claims []objects.Claim) (some bool) {
	asked := make(map[string]bool)
	for _, c := range claims {
		if !asked[c.Session] {
			asked[c.Session] = true
			renewed, err := q.renewals.Renew(ctx, c.Session)
			some = some || renewed && err == nil
		}
	}
	return some
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
		comparing.Go(func() { errs[i] = k.compareIn(ctx, t) })
	}
	comparing.Wait()
	c.err = errors.Join(errs...)
}

// compareIn compares the claims of a term with their rows in a new lineage: it ends those whose rows say otherwise, and
// frees the rows of others. Claims that can't be compared before ctx is done have ended, too. An error says that the
// database has failed over again.
func (k *kind) compareIn(ctx context.Context, t *term) error {
	k.s.mu.Lock()
	l := k.ledger
	claims := l != nil && l.term == t
	if claims {
		k.doubt(l, k.s.cfg.TTL, k.s.cfg.TTL) // what can't be compared or freed in time is looked at again
	}
	k.s.mu.Unlock()
	if !claims {
		return nil
	}
	deadline, _ := ctx.Deadline()
	answered, cancel := context.WithTimeout(ctx, time.Until(deadline)/2) // the rest of the time is for the claims that are known
	defer cancel()
	select { // a statement that claims and was sent before the failover is answered first
	case k.turn <- struct{}{}:
		<-k.turn
	case <-answered.Done(): // if it is answered later, its claims don't count
		k.s.mu.Lock()
		l.late = true
		k.s.mu.Unlock()
	}
	for tries := 0; ; tries++ {
		others, unseen, err := k.differences(ctx, l, false)
		if errors.Is(err, tenure.ErrMoved) {
			return err
		}
		if err == nil || !pace.Sleep(ctx, pace.Retry(k.s.cfg.RenewInterval, time.Second, tries)) {
			k.endLost(ctx, l, unseen, err)
			freed := make(chan struct{})
			t.comparing.Go(func() { defer close(freed); k.freeUndone(ctx, l, others) })
			select {
			case <-freed:
			case <-ctx.Done(): // a statement that frees is not cut off, and may hang
			}
			return nil
		}
	}
}

// endLost ends claims that a failover has lost, or that could not be compared because of an error.
func (k *kind) endLost(ctx context.Context, l *ledger, claims map[string]int64, failed error) {
	if len(claims) == 0 {
		return
	}
	pace.Sleep(ctx, 100*time.Millisecond) // the statement that ends a claim may be unanswered
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	owned := l.stillOwned(claims)
	for _, r := range owned {
		k.endRow(l, r)
	}
	if len(owned) == 0 {
		return
	}
	attrs := []any{"kind", k.name, "claims", len(owned)}
	if failed != nil {
		k.s.cfg.Logger.Warn("claims have ended, because they could not be compared with their rows in time after a failover", append(attrs, "error", logtext.OneLine(failed))...)
		return
	}
	k.s.cfg.Logger.Warn("claims have ended, because the database has failed over and lost them", attrs...)
}

// freeUndone frees rows whose release the failover has undone. Once the session's record names the new primary, its
// claims fence writes there, and another session may have claimed these since.
func (k *kind) freeUndone(ctx context.Context, l *ledger, rows []objects.Claim) {
	for tries := 0; len(rows) > 0; tries++ {
		select {
		case k.turn <- struct{}{}:
		case <-ctx.Done():
			return
		}
		k.s.mu.Lock()
		rows = slices.DeleteFunc(rows, func(r objects.Claim) bool {
			// A func whose claim has ended, or a later claim's that the failover has lost, was told to return and may run on.
			call := k.running[r.ID]
			return l.owns(r) || call.isFor(r.Session, r.Token) && !call.kept || k.isKnownByAnotherName(r)
		})
		k.s.mu.Unlock()
		ids, _ := k.reclaim(l, rows) // the next look at all rows finds what can't be freed in time
		<-k.turn
		freed := setOf(ids)
		rows = slices.DeleteFunc(rows, func(r objects.Claim) bool { return freed[r.ID] })
		if len(rows) == 0 || !pace.Sleep(ctx, pace.Retry(k.s.cfg.RenewInterval, time.Second, tries)) {
			return
		}
	}
}
