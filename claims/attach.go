package claims

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
)

// A session that attaches to a key asks the key's owner to release it, as RequestRelease does, and also claims a
// key of another kind, which names the owner's claim: its wish. Once the owner's func has returned, the owner looks
// for a wish before it frees the key. If it finds one, it moves the wish to itself, which tells the attaching
// session that the func has returned, and keeps the key for a while. Until then that session may move the key from the
// owner to itself; no other can, because the key is not free. A wish names one claim, so it says
// nothing about a later one. If the attaching session dies, its wish is gone, and the owner frees the key for all.

// ErrNotReady reports that a row that a session wants to attach to is free, and can't be taken: it is done, not due,
// has no attempts left, others with its PerKey are claimed, or another transaction has locked it.
var ErrNotReady = errors.New("the row is free, but can't be taken")

// wishes is the kind of the keys that stand for wishes.
func wishes(kind string) string { return ownKinds + "attach/" + kind }

// wishFor returns the key of the wish for a claim.
func wishFor(r objects.Claim) string {
	return r.Session + "/" + strconv.FormatInt(r.Token, 10) + "/" + r.ID
}

// isOffer reports whether a row of the session is a wish for one of its own claims, which it has moved to itself because it
// offers the key. The caller holds the session's mu.
func (s *Session) isOffer(r objects.Claim) bool {
	kind, isWish := strings.CutPrefix(r.Kind, wishes(""))
	rest, isOwn := strings.CutPrefix(r.ID, r.Session+"/")
	_, id, _ := strings.Cut(rest, "/")
	k := s.kinds[kind]
	return isWish && isOwn && k != nil && k.ledger != nil && k.ledger.freeing[id] > 0
}

// Attach makes this session the owner of a key, and takes it from the session that owns it, if any. The owner's
// func of [Keys.Do] is told to return, with the cause [tenure.ErrResigned]. Once it has returned, the owner offers the key
// to the session that attaches for two seconds, or a sixth of its TTL if that is shorter; no other session gets the key
// meanwhile, and if that session is dead, it is free at once. For a claim without a func
// [SessionConfig.ReleaseRequested] decides. If several sessions attach to a key, they get it one after the other. An owner
// that closes, or whose version of this library is older, frees the key for all; then Attach competes for it, and asks
// the next owner.
//
// Attach waits until the key is this session's, or ctx is done; the owner's func may have been told to return all the
// same. Errors of the store do not end it, except [tenure.ErrSetup] and a constraint or trigger that refuses the key. If
// this session already has the key, or the key has more than 2,500 bytes together with its kind, the error is
// [tenure.ErrInvalid]. A detached claim is not given up, and neither is that of a session which package queuehttp serves:
// Attach waits until it has ended.
func (k *Keys) Attach(ctx context.Context, id string) (Claim, error) {
	c, err := k.claimer.attach(ctx, id)
	return c, opError("attach to "+k.name, err)
}

// Attach makes this session the owner of a row, as [Keys.Attach] does. The attempt of a func that was told to return
// is this session's, and the row's Ready is not looked at: it was claimed all the time. Attach needs
// [QueueConfig.Requested]; without it, the error is [tenure.ErrInvalid]. If there is no such row, the error is
// [tenure.ErrNotFound], and if the row is free but done, not due, out of attempts or locked, it is [ErrNotReady].
func (w *Worker) Attach(ctx context.Context, id string) (Claim, error) {
	var c Claim
	err := w.q.keepsRequests("Attach")
	if err == nil {
		c, err = w.claimer.attach(ctx, id)
	}
	return c, w.q.opError("attach", err)
}

// attach claims one key, from its owner if it has one.
func (c *claimer) attach(ctx context.Context, id string) (Claim, error) {
	k := c.k
	longest := wishFor(objects.Claim{Session: uuid.Nil.String(), Token: math.MaxInt64, ID: id})
	if err := cmp.Or(k.table.validKeys(k.name, []string{id}), k.s.table.fits(wishes(k.name), longest)); err != nil {
		return Claim{}, err
	}
	wished, err := k.s.wishesFor(k.name)
	if err != nil {
		return Claim{}, err
	}
	hints := k.s.watch(keyOf(k.name))
	defer hints.Stop()
	defer k.s.sweeper.addWaiter(hints)()
	for notTaken, tries := 0, 0; ; tries++ { // notTaken counts looks in a row that have found the row free
		row, got, err := c.tryOrLook(ctx, id)
		pause := min(5*time.Millisecond<<min(tries, 10), k.s.attachPoll())
		switch own, uses, runs := k.uses(row); {
		case err != nil:
		case len(got) > 0:
			return got[0], nil
		case uses:
			return Claim{}, fmt.Errorf("%w: this session has it: release it first", tenure.ErrInvalid)
		case row.ID == "" && c.rows:
			return Claim{}, tenure.ErrNotFound
		case row.ID == "" || row.Gone || row.Session == own: // it has changed since, or an answer is on its way
		case runs: // under a claim that has ended: the key could not be kept
		case row.Session != "":
			notTaken, tries = 0, -1
			got, err = c.ask(ctx, wished, hints, row)
			if len(got) > 0 {
				return got[0], nil
			}
			pause = 0 // others may take it now
		case notTaken < 5: // another transaction may have locked it for a moment
			notTaken++
		case c.rows:
			return Claim{}, ErrNotReady
		}
		if err != nil || ctx.Err() != nil {
			if pause, err = c.soon(ctx, err); err != nil {
				return Claim{}, err
			}
		}
		pace.Sleep(ctx, pause)
	}
}

// soon is afterFailure for a call that must not be late: somebody else would get the key.
func (c *claimer) soon(ctx context.Context, err error) (pause time.Duration, fatal error) {
	if isRefused(err) {
		return 0, err
	}
	pause, fatal = c.afterFailure(ctx, err)
	if settlesIn(err) == 0 {
		pause = min(pause, c.k.s.attachPoll()/4)
	}
	return pause, fatal
}

// attachPoll is how often a call of Attach looks if no hint comes: several times while an offer lasts.
func (s *Session) attachPoll() time.Duration { return min(s.offerLasts()/4, 500*time.Millisecond) }

// offerLasts is how long an owner keeps a key for the session that attaches.
func (s *Session) offerLasts() time.Duration { return min(s.cfg.TTL/6, 2*time.Second) }

// tryOrLook claims a key if it is free, and returns its row otherwise.
func (c *claimer) tryOrLook(ctx context.Context, id string) (row objects.Claim, got []Claim, err error) {
	if got, _, err = c.try(ctx, []string{id}, false); len(got) > 0 || err != nil {
		return row, got, err
	}
	rows, err := c.k.table.look(ctx, c.k.name, []string{id})
	if len(rows) > 0 {
		row = rows[0]
	}
	return row, nil, err
}

// uses returns the present session, and reports whether it holds the claim of a row or has detached it, and whether a func
// runs for the key.
func (k *kind) uses(row objects.Claim) (session string, uses, runs bool) {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	if k.ledger == nil {
		return "", false, false
	}
	return k.ledger.term.id, k.ledger.owns(row), k.running[row.ID] != nil
}

// ask asks the owner of a claim for its key, and takes the key once the owner's func has returned. It returns no claim if
// the owner's claim has ended in another way.
func (c *claimer) ask(ctx context.Context, wished *Keys, hints tenure.Subscription, seen objects.Claim) ([]Claim, error) {
	k, poll := c.k, c.k.s.attachPoll()
	mine, err := wished.claimer.tryNow(ctx, []string{wishFor(seen)})
	if err != nil || len(mine) == 0 { // another call has this wish
		pace.Sleep(ctx, poll)
		return nil, err
	}
	defer func() { _, _ = wished.kind.startRelease(mine) }() // nothing, if the owner has taken it
	var limiter pace.Limiter
	var stored, woken time.Time
	var took time.Duration
	for hinted := false; ; {
		if now := time.Now(); now.Sub(stored) >= k.s.cfg.TTL { // each is a write of the row
			if err = k.table.request(ctx, k.s.store, k.name, []string{seen.ID}); err == nil {
				stored, woken = now, now
			}
		} else if now.Sub(woken) >= 500*time.Millisecond { // the hint may have been lost
			go k.table.wakeOwners(k.s.store, []objects.Claim{seen}) // it ends by its limit, and nothing waits for it
			woken = now
		}
		pause := poll
		if err != nil {
			if pause, err = c.soon(ctx, err); err != nil {
				return nil, err
			}
		}
		var ok bool
		if hinted, ok = pace.Await(ctx, hints.C(), limiter.IgnoreFor(hinted, followed(took)), pause); !ok {
			return nil, context.Cause(ctx)
		}
		var got []Claim
		var over bool
		began := time.Now()
		if got, over, err = c.takeOver(ctx, wished, mine[0], seen); over {
			return got, nil
		}
		took = time.Since(began)
	}
}

// takeOver moves a key to this session if its owner has offered it. It reports whether the owner's claim has ended, or the
// wish has.
func (c *claimer) takeOver(ctx context.Context, wished *Keys, mine Claim, seen objects.Claim) (got []Claim, over bool, err error) {
	row, got, err := c.tryOrLook(ctx, seen.ID)
	if stands := row.Session == seen.Session && row.Token == seen.Token && !row.Gone; err != nil || len(got) > 0 || !stands {
		return got, err == nil, err
	}
	held := wished.Holds(mine) // before the look: it ends when the owner takes it
	offers, err := c.k.s.table.look(ctx, wished.name, []string{mine.Key.ID})
	if err != nil || len(offers) == 0 || offers[0].Session != seen.Session {
		return nil, err == nil && !held, err
	}
	for tries := 0; len(got) == 0 && err == nil && tries < 4; tries++ { // a fenced write of the owner's may have locked it
		if got, err = c.moveFrom(ctx, seen); len(got) == 0 && !awaitUnlocked(ctx, tries) {
			break
		}
	}
	return got, len(got) > 0, err
}

// moveFrom moves a key from its owner, whose func has returned, to this session.
func (c *claimer) moveFrom(ctx context.Context, seen objects.Claim) (got []Claim, err error) {
	k := c.k
	err = k.claiming(ctx, func(ctx context.Context, l *ledger) error {
		if err := k.over(l); err != nil {
			return err
		}
		sending, cancel := k.s.writeContext(ctx)
		defer cancel()
		sent := time.Now()
		rows, err := c.move(sending, l, seen)
		if err != nil && !wroteNothing(err) {
			k.lostAnswer(l)
		}
		if len(rows) > 0 {
			got, err = c.keep(l, rows, sent)
		}
		return err
	})
	return got, err
}

// wishesFor returns the keys that stand for the session's wishes.
func (s *Session) wishesFor(kind string) (*Keys, error) {
	s.joining.Lock()
	defer s.joining.Unlock()
	if s.wishes[kind] == nil {
		keys, err := keysOf(s, wishes(kind))
		if err != nil {
			return nil, err
		}
		if s.wishes == nil {
			s.wishes = make(map[string]*Keys)
		}
		s.wishes[kind] = keys
	}
	return s.wishes[kind], nil
}

// offer is the rows that a session offers to those that attach to them, and the wishes for them, which it has taken.
type offer struct{ rows, wishes []objects.Claim }

// offer offers those of the rows to which other sessions attach. They are not free.
func (k *kind) offer(l *ledger, rows []objects.Claim) (o offer) {
	var err error
	const often = 3 // others wait for the rows
	for failures := range often {
		if o.wishes, err = k.takeWishes(l, rows); err == nil {
			break
		}
		pace.Sleep(l.term.ctx, 5*time.Millisecond<<failures)
	}
	if err != nil && l.term.ctx.Err() == nil {
		k.s.retries.Log(k.s.cfg.Logger, slog.LevelWarn, "failed to look for sessions that attach; freeing the keys for all", err, "kind", k.name)
	}
	wished := setOf(idsOf(o.wishes))
	for _, r := range rows {
		if r.Session = l.term.id; wished[wishFor(r)] {
			o.rows = append(o.rows, r)
		}
	}
	if len(o.rows) > 0 {
		l.term.busy.Go(func() { k.s.wake(keyOf(k.name)) })
	}
	return o
}

// awaitTaken returns once all offered rows were taken, or have been offered for long enough.
func (k *kind) awaitTaken(l *ledger, rows []objects.Claim) {
	began := time.Now()
	for tries := 0; len(rows) > 0 && time.Since(began) < k.s.offerLasts() && awaitUnlocked(l.term.ctx, min(tries, 4)); tries++ {
		if _, stand, err := k.table.standing(l.term.ctx, k.name, rows); err == nil {
			rows = stand
		}
	}
}

// withdraw frees wishes that the session has taken.
func (k *kind) withdraw(l *ledger, wishes []objects.Claim) {
	for failures := 0; len(wishes) > 0 && l.term.ctx.Err() == nil; failures++ {
		locked, _, err := k.s.free(l.term.ctx, k.s.table, l.term.id, wishes[0].Kind, wishes, objects.Freeing{})
		if err == nil {
			wishes = locked
		}
		if len(wishes) > 0 {
			pace.Sleep(l.term.ctx, pace.Retry(k.s.cfg.RenewInterval, longestRetryPause, failures))
		}
	}
}

// takeWishes moves the wishes for claims to the session that has had the claims. It returns those of live sessions.
func (k *kind) takeWishes(l *ledger, rows []objects.Claim) (taken []objects.Claim, err error) {
	kind, limit := wishes(k.name), min(k.s.limit, 2*time.Second)
	var ids []string
	for _, r := range rows {
		r.Session = l.term.id
		ids = append(ids, wishFor(r))
	}
	found, err := k.s.claims.Look(l.term.ctx, kind, ids, limit)
	if err != nil {
		return nil, err
	}
	found = slices.DeleteFunc(found, func(r objects.Claim) bool {
		if r.Session == l.term.id { // the answer to an earlier statement was lost
			taken = append(taken, r)
		}
		return r.Session == l.term.id || r.Session == "" || r.Gone
	})
	if len(found) == 0 {
		return taken, nil
	}
	sending, cancel := k.s.writeContext(l.term.ctx)
	defer cancel()
	moved, _, err := k.s.claims.Move(sending, l.term.id, kind, found, limit)
	return append(taken, moved...), err
}
