package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
)

const (
	actors    = 60       // keys that have a func
	actor     = "actor-" // what their names begin with
	slots     = 6        // of one name
	lateOnes  = 2        // late writes at the same time: they use the application's pool
	claimSize = 2000     // keys that one call claims
)

// claim owns keys, in a session of its own. The replicas compete for a few keys that have a func
// each, and for very many that have none.
func (r *replica) claim(ctx context.Context) error {
	session, err := claims.NewSession(r.backend.store(), claims.SessionConfig{TTL: r.TTL, Holder: r.birth, Expiry: r.Expiry, Drain: r.drain})
	if err != nil {
		return err
	}
	keys, err := claims.NewKeys(session, "key")
	if err != nil {
		return err
	}
	some, err := claims.NewSlots(session, "slot", slots)
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { r.hoard(ctx, keys) })
	wg.Go(func() { r.act(ctx, keys) })
	var running sync.Map
	for range slots / 2 { // so that somebody always waits
		wg.Go(func() { r.useSlots(ctx, some, &running) })
	}
	return session.Run(ctx)
}

// useSlots takes one slot after another and runs a func for it.
func (r *replica) useSlots(ctx context.Context, some *claims.Slots, running *sync.Map) {
	for ctx.Err() == nil {
		c, err := some.Take(ctx)
		if err != nil {
			r.tellSetUp(err)
			slog.Debug("take a slot", "error", err)
			continue
		}
		err = some.Do(ctx, c, func(ctx context.Context) error {
			return r.serve(ctx, some.Holds, c, rand.N(20), running)
		})
		slog.Debug("serve", "slot", c.Key.ID, "error", err)
	}
}

// hoard claims whichever of the many keys are free, and sometimes releases some. It rests for nine times as
// long as a call took: otherwise all hoards together would want more of a small machine than it has, and no
// limit of time could be judged. A call that a fault held up for long costs it two TTLs at most.
func (r *replica) hoard(ctx context.Context, keys *claims.Keys) {
	var held []claims.Claim
	rest := 10 * r.Pace
	for first := rand.N(r.Keys); pause(ctx, about(rest)); first += claimSize {
		var ids []string
		for i := range claimSize {
			ids = append(ids, fmt.Sprintf("key-%06d", (first+i)%r.Keys))
		}
		began := time.Now()
		got, err := keys.TryClaim(ctx, ids...)
		rest = min(max(10*r.Pace, 9*time.Since(began)), 2*r.TTL)
		if err != nil {
			r.tellSetUp(err)
			slog.Debug("claim", "error", err)
		}
		held = append(held, got...)
		if rand.IntN(20) > 0 {
			continue
		}
		held = slices.DeleteFunc(held, func(c claims.Claim) bool { return !keys.Holds(c) })
		if some := held[:min(len(held), rand.N(claimSize)+1)]; len(some) > 0 {
			if err := keys.Release(ctx, some...); err != nil {
				slog.Debug("release", "error", err)
			}
		}
	}
}

// act runs a func for each of the few keys that it gets.
func (r *replica) act(ctx context.Context, keys *claims.Keys) {
	ids := actorIDs()
	var running sync.Map
	var wg sync.WaitGroup
	defer wg.Wait()
	for ctx.Err() == nil {
		rand.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
		var got []claims.Claim
		var err error
		if rand.N(2) == 0 {
			got, err = attach(ctx, keys, ids[0], 2*r.TTL)
		} else {
			got, err = keys.Claim(ctx, ids...)
		}
		if err != nil {
			r.tellSetUp(err)
			slog.Debug("wait", "error", err)
		}
		for _, c := range got {
			wg.Go(func() {
				err := keys.Do(ctx, c, func(ctx context.Context) error {
					return r.serve(ctx, keys.Holds, c, rand.N(200), &running) // not all end at once
				})
				slog.Debug("serve", "key", c.Key.ID, "error", err)
			})
		}
	}
}

// attach attaches to a key, and gives up after a while.
func attach(ctx context.Context, keys *claims.Keys, id string, after time.Duration) ([]claims.Claim, error) {
	ctx, cancel := context.WithTimeout(ctx, after)
	defer cancel()
	c, err := keys.Attach(ctx, id)
	if err != nil {
		return nil, err
	}
	return []claims.Claim{c}, nil
}

// actorIDs returns the keys that have a func.
func actorIDs() (ids []string) {
	for i := range actors {
		ids = append(ids, fmt.Sprint(actor, i))
	}
	return ids
}

// serve is the func of a key: it writes to the ledger, under its claim, until it is told to
// return, or has written that often.
func (r *replica) serve(ctx context.Context, holds func(claims.Claim) bool, c claims.Claim, life int, running *sync.Map) error {
	if _, twice := running.LoadOrStore(c.Key.ID, true); twice {
		r.events.write(event{Kind: claimTwice, Token: c.Token, Note: c.Key.ID})
	}
	defer running.Delete(c.Key.ID)
	r.tellIfOut(ctx, c.Key.ID)
	r.events.write(event{Kind: claimBegun, Term: claimTerm(c), Token: c.Token, Note: c.Key.ID})
	tell := event{Kind: claimEnded, From: monotonic(), Term: claimTerm(c), Token: c.Token, Note: c.Key.ID}
	tell.At = tell.From
	defer func() { tell.Until = monotonic(); r.events.write(tell) }()
	r.late.Go(func() { r.writeLateByClaim(c) })
	look := func() {
		if now := monotonic(); holds(c) {
			tell.At = now
		}
	}
	for n := 0; n < life; n++ {
		for range rand.N(int(20*r.Pace/crowdTick)) + 1 {
			if !pause(ctx, crowdTick) {
				break
			}
			look()
		}
		if ctx.Err() != nil {
			break
		}
		e := claimEntry(ledgerClaimFenced, c, fmt.Sprintf("%s.%s.%d.%d", r.birth, c.Key.ID, c.Token, r.notes.Add(1)))
		limited, cancel := context.WithTimeout(ctx, r.TTL)
		r.acknowledged(e, r.backend.fenced(limited, c, e, 0))
		cancel()
	}
	for range 10 { // until the very end of its trust
		look()
		time.Sleep(rand.N(r.TTL / 100))
	}
	return nil
}

// writeLateByClaim is [replica.writeLate] for a claim. It begins at a random moment, and ends
// when the claim does.
func (r *replica) writeLateByClaim(c claims.Claim) {
	for r.ending.Err() == nil {
		if !pause(r.ending, about(r.TTL)) {
			return
		}
		e := claimEntry(ledgerClaimFenced, c, fmt.Sprintf("%s.%s.%d.late.%d", r.birth, c.Key.ID, c.Token, r.notes.Add(1)))
		if !r.lateTurn() {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), 2*r.TTL)
		err := r.backend.fenced(ctx, c, e, rand.N(200*time.Millisecond))
		cancel()
		<-r.lateTurns
		if errors.Is(err, tenure.ErrLost) {
			return
		}
		r.acknowledged(e, err)
	}
}

// lateTurn waits for a turn in lateTurns, which the caller gives back. It returns false if the replica ends before.
func (r *replica) lateTurn() bool {
	select {
	case r.lateTurns <- struct{}{}:
		return true
	case <-r.ending.Done():
		return false
	}
}

func claimEntry(kind string, c claims.Claim, note string) entry {
	return entry{kind: kind, term: claimTerm(c), token: c.Token, note: note}
}

// claimTerm names a claim in the ledger.
func claimTerm(c claims.Claim) string { return fmt.Sprint(c.Session, ".", c.Token, ".", c.Key.ID) }
