package claims

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
	"github.com/tenurelib/tenure/internal/record"
	"github.com/tenurelib/tenure/internal/sighting"
)

// pruneEvery is the time between two deletions of rows that were not claimed for a day.
const pruneEvery = time.Hour

// sweeper finds sessions that have expired, removes them, and frees the rows of sessions that are
// gone.
type sweeper struct {
	s *Session

	waiting atomic.Int32                    // callers that wait for keys or rows
	takers  sync.Map                        // the callers that can take what a removed session owned; a key is unique, a value has Wake
	kick    chan struct{}                   // receives when a caller begins to wait, or notes an owner
	known   atomic.Pointer[map[string]bool] // the sessions that the last looks found
	unknown atomic.Bool                     // a caller has noted an owner that is not among them

	// The goroutine of run owns the fields below.

	named   map[*ownerTable]map[string]bool // the sessions that the last look at a table found
	looking map[*ownerTable]bool            // tables of the user that a goroutine is looking at
	looked  chan look                       // what these goroutines find

	seen     map[string]*seenSession   // the records of sessions, by their IDs
	shortest time.Duration             // the shortest TTL of a session
	orphans  map[string]time.Time      // sessions without a record that rows of the user still name, and since when
	told     map[*ownerTable]time.Time // when owners of its rows were last said to be no sessions
	expiry   time.Time                 // the next sweep need not come earlier: no session expires before
	after    string                    // where the next list of sessions begins, see collect
	round    int                       // how many times collect has gone through all sessions
	server   int64                     // the server that answered the last sweep, see [objects.Session]; 0: none
	live     bool                      // whether hints could be expected at the last sweep
	compared time.Time                 // when compare last had all rows looked at
	sweeps   int
	failures int         // since the last sweep that succeeded
	pruned   time.Time   // when prune last began
	pruning  atomic.Bool // whether prune is under way

	frees   sync.WaitGroup // the goroutines beside that of run
	freeing sync.Map       // of [namedRows]: the rows that are being freed
	slots   sync.Map       // by table: a chan struct{} that the goroutines that free its rows share

	removed, freed, errors atomic.Int64 // see Status
}

// seenSession is the record of a session, and the round in which it was last seen.
type seenSession struct {
	sighting.Sighting
	round int
}

func (w *sweeper) init(s *Session) {
	w.compared = time.Now()
	w.s, w.kick, w.seen = s, make(chan struct{}, 1), make(map[string]*seenSession)
	w.orphans, w.told = make(map[string]time.Time), make(map[*ownerTable]time.Time)
	w.named, w.looking, w.looked = make(map[*ownerTable]map[string]bool), make(map[*ownerTable]bool), make(chan look)
	w.shortest = s.cfg.TTL
}

// addWaiter notes that a caller waits for keys or rows, until it calls remove. Meanwhile the sweeper looks
// whenever a session can expire, and not only once per TTL. A caller that can take keys before they are free
// passes its hints, and is woken as soon as this process has removed a session.
func (w *sweeper) addWaiter(hints tenure.Subscription) (remove func()) {
	w.waiting.Add(1)
	notify(w.kick)
	taker, ok := hints.(waker)
	if ok {
		w.takers.Store(&taker, taker) // by a pointer, because a store's own subscription need not be comparable
	}
	return func() {
		w.waiting.Add(-1)
		w.takers.Delete(&taker)
	}
}

// wakeTakers wakes the callers of this process that can take the keys of a session that it has removed. Callers
// in other processes are woken when the first rows are free, so that not all come at once.
func (w *sweeper) wakeTakers() {
	for _, taker := range w.takers.Range {
		taker.(waker).Wake()
	}
}

// waker is a subscription that can be woken within the process, as those of this library's stores can.
type waker interface{ Wake() }

// noteOwner records the session that owns a requested key. If the last sweep did not see that session,
// because it owned nothing then, it may expire before the next sweep: its TTL may be shorter.
func (w *sweeper) noteOwner(session string) {
	known := w.known.Load()
	if w.waiting.Load() == 0 || known != nil && (*known)[session] {
		return
	}
	w.unknown.Store(true)
	notify(w.kick)
}

// run sweeps until ctx is done: at once, then once per TTL at a random moment, and when a session
// begins. While a caller waits, it also sweeps when a session can expire and when one was noted.
func (w *sweeper) run(ctx context.Context) {
	defer w.frees.Wait()
	hints := w.s.watch(sessionsKey)
	defer hints.Stop()
	var spurious pace.Limiter
	next, hinted := time.Now(), false
	for ctx.Err() == nil {
		regular := time.Until(next) <= 0
		w.sweep(ctx, hints, regular)
		if regular {
			next = time.Now().Add(pace.Jitter(w.shortest))
		}
		hinted = w.await(ctx, hints, spurious.IgnoreFor(hinted, w.s.cfg.RenewInterval), next)
	}
}

// await returns when it is time for the next sweep, and reports whether a hint is the reason.
func (w *sweeper) await(ctx context.Context, hints tenure.Subscription, ignoreFor time.Duration, next time.Time) (hinted bool) {
	ignored := time.Now().Add(ignoreFor)
	for {
		due := next
		if w.waiting.Load() > 0 && w.expiry.Before(due) {
			due = w.expiry
		}
		c := hints.C()
		if time.Now().Before(ignored) {
			c = nil
			if ignored.Before(due) {
				due = ignored
			}
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(max(time.Until(due), time.Millisecond)):
			return false
		case l := <-w.looked:
			w.judgeNamed(ctx, l)
		case <-c:
			return true
		case <-w.kick: // a caller waits now, so the expiry counts
			if w.unknown.Swap(false) && w.failures == 0 {
				return false
			}
		}
	}
}

// sweep looks at the sessions that rows name, see judgeNamed. It does not wait for tables of the user.
func (w *sweeper) sweep(ctx context.Context, hints tenure.Subscription, regular bool) {
	s := w.s
	// A session that owns nothing yet can claim until its RenewDeadline.
	w.expiry = time.Now().Add(s.cfg.TTL - s.cfg.RenewDeadline)
	if regular {
		w.shortest = s.cfg.TTL
	}
	tables := s.tables()
	for _, table := range tables[1:] {
		w.lookBeside(ctx, table, regular)
	}
	l := w.look(ctx, s.table, regular)
	if w.judgeNamed(ctx, l); l.err != nil {
		w.canExpire(time.Now().Add(pace.Retry(s.cfg.RenewInterval, longestRetryPause, w.failures)))
		w.failures++
		return
	}
	live := hints.Live()
	w.scheduleLooks(l, w.failures > 0 || w.live && !live)
	w.failures, w.live = 0, live
	if !regular {
		return
	}
	known := *w.known.Load()
	for id, seen := range w.seen { // forgets the sessions that have ended
		if !known[id] && seen.round+1 < w.round {
			delete(w.seen, id)
		}
	}
	w.collect(ctx)
	w.sweeps++
	if w.sweeps > 1 && time.Since(w.pruned) > pruneEvery { // also in a process that lives for less than an hour
		w.pruned = time.Now()
		w.prune(ctx)
	}
}

// look says which sessions the rows of a table name.
type look struct {
	table           *ownerTable
	regular         bool // it came at a random moment
	asked, answered time.Time
	sessions        []objects.Session
	err             error
}

// look looks at a table.
func (w *sweeper) look(ctx context.Context, table *ownerTable, regular bool) look {
	l := look{table: table, regular: regular, asked: time.Now()}
	l.sessions, l.err = table.rows.Sessions(ctx, w.s.limit)
	l.answered = time.Now()
	return l
}

// lookBeside looks at a table of the user in a goroutine, so that a table that is locked or slow delays
// neither the other tables nor the judging of sessions. It does nothing while an earlier look at the
// table is under way.
func (w *sweeper) lookBeside(ctx context.Context, table *ownerTable, regular bool) {
	if w.looking[table] {
		return
	}
	w.looking[table] = true
	w.frees.Go(func() {
		l := w.look(ctx, table, regular)
		select {
		case w.looked <- l:
		case <-ctx.Done():
		}
	})
}

// judgeNamed judges the sessions that the rows of a table name. It removes those that have expired, and frees
// their rows. The rows of a session that is already gone are freed only after a look at a random moment: all
// processes with waiting callers look at the same moment, and the one that has removed the session frees its
// rows. A session without a record never gets one again, so each look stands for itself.
func (w *sweeper) judgeNamed(ctx context.Context, l look) {
	s := w.s
	rows := l.table != s.table
	if rows {
		delete(w.looking, l.table)
	}
	if l.err != nil {
		if w.named[l.table] = nil; rows {
			w.logFailure(ctx, "failed to look at rows of the table; retrying within a TTL", l.err)
		} else {
			w.logFailure(ctx, "failed to look at sessions; retrying", l.err)
		}
		return
	}
	own, named := s.ID(), make(map[string]bool, len(l.sessions))
	for _, session := range l.sessions {
		named[session.ID] = true
	}
	w.named[l.table] = named
	w.noteKnown()
	if rows {
		w.scheduleLooks(l, false)
	}
	var unknown []string
	for _, session := range l.sessions {
		if session.ID == own && (session.Wanted || rows && l.regular && l.table.requests) {
			s.recheckRequests(own)
		}
		switch r := session.Record; {
		case r == nil && !w.isGone(session, l.asked):
			unknown = append(unknown, session.ID)
		case r == nil && (l.regular || rows && w.orphaned(session.ID, l.asked)):
			w.free(ctx, session.ID, l.table)
		case r != nil && session.ID != own:
			w.judge(ctx, session.ID, record.Object{
				Labels: objects.DecodeLabels(r.Labels), Payload: r.Payload, Version: r.Version, UpdatedAt: objects.Stamp(r.Updated), Age: r.Age,
			}, l.asked, l.answered)
		}
	}
	w.tellUnknown(l.table, unknown)
}

// isGone reports whether a session without a record was one of this store. What has been found gone stays so, although the
// store need not remember it: a role may lack the right to, and does not for ever.
func (w *sweeper) isGone(session objects.Session, now time.Time) bool {
	_, noted := w.orphans[session.ID]
	gone := session.Gone || w.seen[session.ID] != nil // its record may have been deleted by hand
	if gone && !noted {
		w.orphans[session.ID] = now
	}
	return gone || noted
}

// tellUnknown logs that rows of a table name owners that have never been sessions of this store: those of another system, or of
// another table of objects. They may be at work, so their rows are not freed.
func (w *sweeper) tellUnknown(table *ownerTable, owners []string) {
	if len(owners) == 0 || time.Since(w.told[table]) < time.Hour {
		return
	}
	w.told[table] = time.Now()
	w.s.cfg.Logger.Warn(noSessions,
		"table", table.name, "owners", len(owners), "first", owners[0])
}

// noteKnown notes which sessions the last looks have seen.
func (w *sweeper) noteKnown() {
	known := make(map[string]bool)
	failed := false
	for _, named := range w.named {
		failed = failed || named == nil
		maps.Copy(known, named)
	}
	w.known.Store(&known)
	if failed { // then its rows may name what is not known
		return
	}
	maps.DeleteFunc(w.orphans, func(id string, _ time.Time) bool { return !known[id] })
}

// orphaned reports whether rows of the user's table still name a session some time after isGone has noted it: the
// process that removed its record may not know the table.
func (w *sweeper) orphaned(id string, now time.Time) bool {
	const patience = 50 * time.Millisecond
	if now.Sub(w.orphans[id]) >= patience {
		return true
	}
	w.canExpire(now.Add(patience + rand.N(2*patience)))
	return false
}

// judge removes a session whose record has expired, as a standby would steal a lease. The record was
// read between the times asked and answered.
func (w *sweeper) judge(ctx context.Context, id string, o record.Object, asked, answered time.Time) {
	s := w.s
	h, _ := record.Read(o, s.cfg.TTL) // a record that can't be read expires as well
	seen := w.seen[id]
	if seen == nil || !seen.Of(o) {
		seen = &seenSession{Sighting: sighting.Sighting{Object: o, Since: answered}}
		w.seen[id] = seen
	}
	seen.round = w.round
	in, _ := seen.CanExpireIn(o, h, s.cfg.Expiry == tenure.ExpiryObserved)
	if h.Offered { // the session has ended on a request to hand over, but no session takes over another
		in = 0
	}
	w.shortest = min(w.shortest, max(h.TTL, s.cfg.TTL/10))
	if len(h.Unconfirmed) > 0 { // no session writes such a record, so one look per TTL is enough
		in = max(in, s.cfg.TTL)
	}
	on, err := s.store.Lineage(ctx)
	if err != nil {
		w.logFailure(ctx, "failed to look at the lineage of the database; retrying", err)
		w.canExpire(time.Now().Add(pace.Retry(s.cfg.RenewInterval, longestRetryPause, 0)))
		return
	}
	// A failover may have lost its renewals.
	in = max(in, sighting.SettlesIn(objects.Lineage(on), o.Mark(), max(h.TTL, s.cfg.TTL), s.cfg.Expiry == tenure.ExpiryObserved))
	if in > 0 {
		// A few ms late, so that this does not come just before a renewal, and at random, so that
		// processes do not all come at once. It counts from asked, so a slow answer makes no difference.
		w.canExpire(asked.Add(in + 2*time.Millisecond + rand.N(4*time.Millisecond)))
		return
	}
	deleting, cancel := s.writeContext(objects.WithLeaseCall(ctx))
	defer cancel()
	err = s.store.DeleteIf(deleting, SessionKey(id), tenure.IfVersion(o.Version).OnServer(on.Server, 0))
	switch {
	case err == nil:
		w.removed.Add(1)
		w.wakeTakers()
		s.cfg.Logger.Info("removed expired session", "session", id, "holder", h.Holder)
		delete(w.seen, id)
		w.orphans[id] = asked
		w.free(ctx, id, s.tables()...)
	case errors.Is(err, tenure.ErrNotFound): // another process was faster, and frees the rows
		delete(w.seen, id)
		w.orphans[id] = asked
	default: // it was renewed, or the call failed
		w.canExpire(time.Now().Add(pace.Retry(s.cfg.RenewInterval, longestRetryPause, 0)))
	}
}

// canExpire notes a time at which a session can expire.
func (w *sweeper) canExpire(at time.Time) {
	if at.Before(w.expiry) {
		w.expiry = at
	}
}

// collect judges the next hundred of all sessions, whether rows name them or not: a session that owned
// nothing when its process crashed has left its record behind.
func (w *sweeper) collect(ctx context.Context) {
	const some = 100
	own := w.s.ID()
	lister, ok := objects.As[tenure.Lister](w.s.store)
	if !ok {
		return
	}
	asked := time.Now()
	listing, cancel := context.WithTimeout(objects.WithLeaseCall(ctx), w.s.limit)
	defer cancel()
	sessions, err := lister.List(listing, objects.SessionType, w.after, some)
	answered := time.Now()
	if err != nil {
		w.logFailure(ctx, "failed to list sessions; retrying", err)
		return
	}
	w.after = ""
	if len(sessions) < some {
		w.round++
	}
	for _, o := range sessions {
		if len(sessions) == some {
			w.after = o.Key.ID
		}
		if o.Key.ID != own {
			w.judge(ctx, o.Key.ID, record.Object{Labels: o.Labels, Payload: o.Payload, Version: o.Version, UpdatedAt: o.UpdatedAt, Age: o.Age}, asked, answered)
		}
	}
}

// prune deletes rows that were not claimed for a day, in a goroutine. After each statement it pauses for as
// long as the statement took, which leaves half of the time to others.
func (w *sweeper) prune(ctx context.Context) {
	if !w.pruning.CompareAndSwap(false, true) {
		return
	}
	w.frees.Go(func() {
		defer w.pruning.Store(false)
		var sizes groups // of its own: a statement may be slow because of what it searches, not what it deletes
		for after, pruned, n := int64(0), 0, 0; pruned == n; {
			began := time.Now()
			var next int64
			var err error
			n, err = sizes.page(ctx, perStatement, func(n int) (err error) {
				next, pruned, err = w.s.claims.Prune(ctx, after, n, w.s.limit)
				return err
			})
			if err != nil {
				w.logFailure(ctx, "failed to delete rows that were not claimed for a day; retrying in an hour", err)
				return
			}
			after = next
			pace.Sleep(ctx, time.Since(began))
		}
	})
}

func (w *sweeper) logFailure(ctx context.Context, msg string, err error) {
	if ctx.Err() == nil {
		w.errors.Add(1)
		w.s.retries.Log(w.s.cfg.Logger, slog.LevelWarn, msg, err)
	}
}
