package claims

import (
	"context"
	"errors"
	"log/slog"
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

const (
	// collectEvery is how many sweeps there are between two looks for expired sessions that no
	// row names.
	collectEvery = 8

	// pruneEvery is how often rows are deleted that were not claimed for a day.
	pruneEvery = time.Hour

	// freeAtMost is how many sessions have their rows of a table freed at the same time.
	freeAtMost = 2
)

// sweeper finds the sessions that have expired, removes them, and frees the rows of those that
// are gone. run's goroutine owns the fields without a comment.
type sweeper struct {
	s       *Session
	waiting atomic.Int32                    // calls of Claim
	kick    chan struct{}                   // receives when a call of Claim begins, or notes an owner
	known   atomic.Pointer[map[string]bool] // the sessions that the last looks have seen
	unknown atomic.Bool                     // a call of Claim has noted one that is not among them

	named   map[*ownerTable]map[string]bool // the sessions that the last look at a table has seen
	looking map[*ownerTable]bool            // tables of the user at which a goroutine looks
	looked  chan look                       // what it finds

	seen     map[string]*seenSession // the records of sessions, by their IDs
	shortest time.Duration           // the shortest TTL of a session
	orphans  map[string]time.Time    // sessions that were gone when rows of the user named them, and since when
	expiry   time.Time               // until then no session expires that the next sweep does not know of
	after    string                  // where the next look for sessions that no row names begins
	round    int                     // of these looks, each of which comes to all sessions
	server   int64                   // that the last sweep has seen, see [objects.Session]; 0: none
	live     bool                    // hints could be expected at the last sweep
	compared time.Time               // when all sessions' rows were last looked at because of that, or of the time
	sweeps   int
	failures int         // since a sweep has succeeded
	pruned   time.Time   // when that was last begun
	pruning  atomic.Bool // it is under way

	frees   sync.WaitGroup // what runs beside run
	freeing sync.Map       // the rows that are being freed, as a [namedRows]
	slots   sync.Map       // of a table: chan struct{}, held by the goroutines that free its rows

	removed, freed, errors atomic.Int64 // see Status
}

// seenSession is the record of a session, and the last round in which it was seen.
type seenSession struct {
	sighting.Sighting
	round int
}

func (w *sweeper) init(s *Session) {
	w.compared = time.Now()
	w.s, w.kick, w.seen = s, make(chan struct{}, 1), make(map[string]*seenSession)
	w.orphans = make(map[string]time.Time)
	w.named, w.looking, w.looked = make(map[*ownerTable]map[string]bool), make(map[*ownerTable]bool), make(chan look)
	w.shortest = s.cfg.TTL
}

// addWaiter notes that a caller waits for keys, until it calls remove. Meanwhile the sweeper looks when
// a session can expire, and not only once per TTL.
func (w *sweeper) addWaiter() (remove func()) {
	w.waiting.Add(1)
	notify(w.kick)
	return func() { w.waiting.Add(-1) }
}

// noteOwner records the session that owns a requested key. A session that the last sweep has not seen,
// because it owned nothing then, may expire before the next one: its TTL may be shorter.
func (w *sweeper) noteOwner(session string) {
	known := w.known.Load()
	if w.waiting.Load() == 0 || known != nil && (*known)[session] {
		return
	}
	w.unknown.Store(true)
	notify(w.kick)
}

// run sweeps until ctx is done: at first, once per TTL at a random moment, when a session
// begins, and, while a caller waits, when one can expire or was noted.
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

// await returns when it is time for the next sweep, and whether a hint is why.
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
			w.take(ctx, l)
		case <-c:
			return true
		case <-w.kick: // a caller waits, so the expiry counts
			if w.unknown.Swap(false) && w.failures == 0 {
				return false
			}
		}
	}
}

// sweep looks at the sessions that rows name, see take. It waits for no table of the user.
func (w *sweeper) sweep(ctx context.Context, hints tenure.Subscription, regular bool) {
	s := w.s
	// A session that owned nothing yet claims until its RenewDeadline.
	w.expiry = time.Now().Add(s.cfg.TTL - s.cfg.RenewDeadline)
	if regular {
		w.shortest = s.cfg.TTL
	}
	tables := s.tables()
	for _, table := range tables[1:] {
		w.lookBeside(ctx, table, regular)
	}
	l := w.look(ctx, s.table, regular)
	if w.take(ctx, l); l.err != nil {
		w.canExpire(time.Now().Add(pace.Retry(s.cfg.RenewInterval, longestRetryPause, w.failures)))
		w.failures++
		return
	}
	live := hints.Live()
	w.compare(l, w.failures > 0 || w.live && !live)
	w.failures, w.live = 0, live
	if !regular {
		return
	}
	own, known := s.ID(), *w.known.Load()
	for id, seen := range w.seen { // of sessions that have ended
		if !known[id] && seen.round+1 < w.round {
			delete(w.seen, id)
		}
	}
	if w.sweeps++; w.sweeps%collectEvery == 0 {
		w.collect(ctx, own)
	}
	if w.sweeps > 1 && time.Since(w.pruned) > pruneEvery { // also in a process that lives for less than that
		w.pruned = time.Now()
		w.prune(ctx)
	}
}

// orphaned reports whether rows of the user's table still name a session that was gone some time
// before: the process that removed its record may not know the table. It notes the others, to look again.
func (w *sweeper) orphaned(id string, now time.Time) bool {
	const patience = 50 * time.Millisecond
	since, noted := w.orphans[id]
	if !noted {
		w.orphans[id], since = now, now
	}
	if now.Sub(since) >= patience {
		return true
	}
	w.canExpire(now.Add(patience + rand.N(2*patience)))
	return false
}

// prune deletes the rows that were not claimed for a day, in a goroutine. It pauses for as long as
// each statement takes, so the database has as much time for others.
func (w *sweeper) prune(ctx context.Context) {
	if !w.pruning.CompareAndSwap(false, true) {
		return
	}
	w.frees.Go(func() {
		defer w.pruning.Store(false)
		var sizes groups // of its own: it may be slow because of what it searches, and not of what it deletes
		for after, pruned, n := int64(0), 0, 0; pruned == n; {
			began := time.Now()
			var next int64
			var err error
			n, err = sizes.page(ctx, perStatement, func(n int) (err error) {
				next, pruned, err = w.s.claims.Prune(ctx, after, n, w.s.limit)
				return err
			})
			if err != nil {
				w.failed(ctx, "failed to delete rows that were not claimed for a day; retrying in an hour", err)
				return
			}
			after = next
			pace.Sleep(ctx, time.Since(began))
		}
	})
}

// judge removes a session whose record has expired, as a standby would steal a lease. The record
// was asked for at one time and answered at another.
func (w *sweeper) judge(ctx context.Context, id string, o record.Object, asked, answered time.Time) {
	s := w.s
	h, _ := record.Read(o, s.cfg.TTL) // a record that can't be read expires, too
	seen := w.seen[id]
	if seen == nil || !seen.Of(o) {
		seen = &seenSession{Sighting: sighting.Sighting{Object: o, Since: answered}}
		w.seen[id] = seen
	}
	seen.round = w.round
	in, _ := seen.CanExpireIn(o, h, s.cfg.Expiry == tenure.Observed)
	if h.Offered { // the session has ended, and was asked to hand over what no session takes over
		in = 0
	}
	w.shortest = min(w.shortest, max(h.TTL, s.cfg.TTL/10))
	if len(h.Unconfirmed) > 0 { // no session has that, so it is not ours to judge, nor to look at all the time
		in = max(in, s.cfg.TTL)
	}
	if in > 0 {
		// A few ms apart, so that not all remove it at once, and a few ms late, so that they don't
		// come just before a renewal. An answer that was long on its way makes no difference.
		w.canExpire(asked.Add(in + 2*time.Millisecond + rand.N(4*time.Millisecond)))
		return
	}
	deleting, cancel := s.writeContext(objects.WithLeaseCall(ctx))
	defer cancel()
	err := s.store.DeleteIf(deleting, SessionKey(id), o.Version)
	switch {
	case err == nil:
		w.removed.Add(1)
		s.cfg.Logger.Info("removed expired session", "session", id, "holder", h.Holder)
		delete(w.seen, id)
		w.free(ctx, id, s.tables()...)
	case errors.Is(err, tenure.ErrNotFound): // another was faster, and frees the rows
		delete(w.seen, id)
	default: // it was renewed, perhaps, or something failed
		w.canExpire(time.Now().Add(pace.Retry(s.cfg.RenewInterval, longestRetryPause, 0)))
	}
}

// canExpire notes when a session can expire.
func (w *sweeper) canExpire(at time.Time) {
	if at.Before(w.expiry) {
		w.expiry = at
	}
}

// collect looks at some of the sessions, whether rows name them or not: one that owned nothing
// when its process crashed has left its record.
func (w *sweeper) collect(ctx context.Context, own string) {
	const some = 100
	lister, ok := w.s.store.(tenure.Lister)
	if !ok {
		return
	}
	asked := time.Now()
	listing, cancel := context.WithTimeout(objects.WithLeaseCall(ctx), w.s.limit)
	defer cancel()
	sessions, err := lister.List(listing, objects.SessionType, w.after, some)
	answered := time.Now()
	if err != nil {
		w.failed(ctx, "failed to list sessions; retrying", err)
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

func (w *sweeper) failed(ctx context.Context, msg string, err error) {
	if ctx.Err() == nil {
		w.errors.Add(1)
		w.s.retries.Log(w.s.cfg.Logger, slog.LevelWarn, msg, err)
	}
}
