package claims

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
)

// A session that attaches to a key asks the key's owner to release it, as RequestRelease does, and also claims a
// key of another kind, which names the owner's claim: its wish. Once the owner's func has returned, the owner looks
// for a wish before it frees the key. If it finds one, it moves the wish to itself, which tells the attaching
// session that the func has returned, and keeps the key for a while. Meanwhile that session moves the key from the
// owner to itself. No other session gets the key, because it is never free. A wish names one claim, so it says
// nothing about a later one. If the attaching session dies, its wish is gone, and the owner frees the key for all.

// ErrNotReady reports that a row that a session wants to attach to is free, and can't be taken: it is done, not due,
// has no attempts left, or another transaction has locked it.
var ErrNotReady = errors.New("the row is free, but can't be taken")

// attachPoll is how often a call of Attach looks again if no hint comes.
const attachPoll = 500 * time.Millisecond

// wishes is the kind of the keys that stand for wishes.
func wishes(kind string) string { return ownKinds + "attach/" + kind }

// wishFor returns the key of the wish for a claim.
func wishFor(r objects.Claim) string {
	return r.Session + "/" + strconv.FormatInt(r.Token, 10) + "/" + r.ID
}

// isOffer reports whether a row of a session is a wish for one of its own claims, which it has moved to itself.
func isOffer(r objects.Claim) bool {
	return strings.HasPrefix(r.Kind, wishes("")) && strings.HasPrefix(r.ID, r.Session+"/")
}

// attachKey is the key that is woken when a claim that others may wish for has ended, or is offered to them.
func attachKey(kind string) tenure.Key {
	return tenure.Key{Type: "tenure.claims", ID: "attach " + kind}
}

// Attach makes this session the owner of a key, and takes it from the session that owns it, if any: the owner's
// func of [Keys.Do] is told to return, with the cause [tenure.ErrResigned], and once it has returned the key goes to
// the session that attaches, and to no other. For a claim without a func [SessionConfig.ReleaseRequested] decides.
// If several sessions attach to a key, they get it one after the other. Attach waits until the owner's func has
// returned or ctx is done; then the owner has been interrupted all the same. Errors of the store do not end it, except
// [tenure.ErrSetup]. If this session already has the key, the error is [tenure.ErrInvalid].
//
// A detached claim is not given up, and neither is that of a session which package queuehttp serves: Attach waits until
// it has ended.
func (k *Keys) Attach(ctx context.Context, id string) (Claim, error) {
	c, err := k.claimer.attach(ctx, id)
	return c, opError("attach to "+k.name, err)
}

// Attach makes this session the owner of a row, as [Keys.Attach] does. The row keeps its attempts: the one of the former
// owner counts for this session. Attach needs [QueueConfig.Requested]; without it, the error is [tenure.ErrInvalid].
// If there is no such row, the error is [tenure.ErrNotFound], and if the row is done or not ready for another reason, it
// is [ErrNotReady].
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
	if err := k.table.validKeys(k.name, []string{id}); err != nil {
		return Claim{}, err
	}
	wished, err := k.s.wishesFor(k.name)
	if err != nil {
		return Claim{}, err
	}
	hints := k.s.watch(attachKey(k.name))
	defer hints.Stop()
	defer k.s.sweeper.addWaiter(nil)()
	for tries := 0; ; tries++ {
		got, err := c.attachOnce(ctx, wished, hints, id, tries)
		if len(got) > 0 {
			return got[0], nil
		}
		pause := 5 * time.Millisecond << min(tries, 6)
		if err != nil || ctx.Err() != nil {
			if pause, err = c.afterFailure(ctx, err); err != nil {
				return Claim{}, err
			}
		}
		pace.Sleep(ctx, pause)
	}
}

// attachOnce claims a key if it is free, and asks the owner for it otherwise. It returns no claim if the key has
// another owner now, or can't be had yet.
func (c *claimer) attachOnce(ctx context.Context, wished *Keys, hints tenure.Subscription, id string, tries int) ([]Claim, error) {
	k := c.k
	got, _, err := c.try(ctx, []string{id}, false)
	if len(got) > 0 || err != nil {
		return got, err
	}
	rows, err := k.table.look(ctx, k.name, []string{id})
	if err != nil {
		return nil, err
	}
	if len(rows) == 0 {
		if c.rows {
			return nil, &unattached{tenure.ErrNotFound}
		}
		return nil, nil
	}
	const often = 4 // another transaction may have locked it for a moment
	own, uses := k.uses(id)
	switch r := rows[0]; {
	case uses:
		return nil, fmt.Errorf("%w: this session has it", tenure.ErrInvalid)
	case r.Session == "" && c.rows && tries >= often:
		return nil, &unattached{ErrNotReady}
	case r.Session == "" || r.Gone || r.Session == own: // an answer may be on its way
		return nil, nil
	default:
		return c.ask(ctx, wished, hints, r)
	}
}

// unattached is an error that ends a call of attach.
type unattached struct{ error }

func (u *unattached) Unwrap() error { return u.error }

// uses returns the present session, and reports whether it holds or has detached a claim on a key, or runs a func for it.
func (k *kind) uses(id string) (session string, uses bool) {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	_, held := k.ledger.held[id]
	_, detached := k.ledger.detached[id]
	return k.ledger.term.id, held || detached || k.running[id] != nil
}

// ask asks the owner of a claim for its key, and takes the key once the owner's func has returned. It returns no claim if
// the owner's claim has ended in another way.
func (c *claimer) ask(ctx context.Context, wished *Keys, hints tenure.Subscription, seen objects.Claim) ([]Claim, error) {
	k, wish := c.k, wishFor(seen)
	mine, err := wished.claimer.tryNow(ctx, []string{wish})
	if err != nil {
		return nil, err
	}
	defer func() { _ = wished.Release(context.WithoutCancel(ctx), mine...) }() // the owner may have taken it
	var asked time.Time
	for {
		if len(mine) > 0 && time.Since(asked) >= attachPoll { // the hint for the owner may have been lost
			if err := k.table.request(ctx, k.s.store, k.name, []string{seen.ID}); err != nil {
				return nil, err
			}
			asked = time.Now()
		}
		if _, ok := pace.Await(ctx, hints.C(), 0, attachPoll); !ok {
			return nil, context.Cause(ctx)
		}
		if len(mine) == 0 { // another call has this wish
			return nil, nil
		}
		ended, _, err := k.table.standing(ctx, k.name, []objects.Claim{seen})
		if err != nil || len(ended) > 0 {
			return nil, err
		}
		if rows, err := k.s.table.look(ctx, wished.name, []string{wish}); err != nil {
			return nil, err
		} else if len(rows) > 0 && rows[0].Session == seen.Session {
			return c.takeOver(ctx, seen)
		}
	}
}

// takeOver moves a key from its owner, whose func has returned, to this session. It tries again while another transaction
// has locked the key.
func (c *claimer) takeOver(ctx context.Context, seen objects.Claim) (got []Claim, err error) {
	k := c.k
	for tries := 0; len(got) == 0 && err == nil; tries++ {
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
		if len(got) > 0 || err != nil {
			break
		}
		ended, _, looked := k.table.standing(ctx, k.name, []objects.Claim{seen})
		if looked != nil || len(ended) > 0 {
			return nil, looked
		}
		if !awaitUnlocked(ctx, tries) {
			err = context.Cause(ctx)
		}
	}
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

// offer frees a row that others have asked for. If one of them attaches to it, that one gets the row, or has had the time
// to take it.
func (k *kind) offer(l *ledger, b *batch) {
	row := b.rows[0]
	row.Session = l.term.id
	wish, wished, err := k.takeWish(l, row)
	if err != nil && l.term.ctx.Err() == nil {
		k.s.retries.Log(k.s.cfg.Logger, slog.LevelWarn, "failed to look for a session that attaches; freeing the key for all", err, "kind", k.name, "key", row.ID)
	}
	if wished {
		k.s.wake(attachKey(k.name))
		began, lasts := time.Now(), min(k.s.cfg.TTL/6, 2*time.Second)
		for tries := 0; time.Since(began) < lasts && awaitUnlocked(l.term.ctx, min(tries, 4)); tries++ {
			if ended, _, err := k.table.standing(l.term.ctx, k.name, []objects.Claim{row}); err == nil && len(ended) > 0 {
				break
			}
		}
	}
	locked := k.freeBatch(l, b.rows, b.how)
	k.s.mu.Lock()
	l.freed(objects.Subtract(b.rows, locked))
	k.s.mu.Unlock()
	k.freeLocked(l, b, locked)
	k.s.wake(attachKey(k.name))
	for failures := 0; wished && l.term.ctx.Err() == nil; failures++ {
		locked, _, err := k.s.free(l.term.ctx, k.s.table, l.term.id, wish.Kind, []objects.Claim{wish}, objects.Freeing{})
		if err == nil && len(locked) == 0 {
			return
		}
		pace.Sleep(l.term.ctx, pace.Retry(k.s.cfg.RenewInterval, longestRetryPause, failures))
	}
}

// takeWish moves the wish for a claim to the session that has had the claim. It returns false if no live session has
// that wish.
func (k *kind) takeWish(l *ledger, r objects.Claim) (wish objects.Claim, wished bool, err error) {
	kind := wishes(k.name)
	rows, err := k.s.table.look(l.term.ctx, kind, []string{wishFor(r)})
	if err != nil || len(rows) == 0 || rows[0].Session == "" || rows[0].Gone {
		return wish, false, err
	}
	sending, cancel := k.s.writeContext(l.term.ctx)
	defer cancel()
	moved, _, err := k.s.claims.Move(sending, l.term.id, kind, rows, k.s.limit)
	if err != nil || len(moved) == 0 {
		return wish, false, err
	}
	return moved[0], true, nil
}
