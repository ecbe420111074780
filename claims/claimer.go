package claims

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
)

// claimer claims keys for [Keys], rows for a [Worker], or any one of several keys for [Slots].
type claimer struct {
	k    *kind
	poll time.Duration // the longest time between two looks of a call that waits
	rows bool          // the keys are rows, which exist already, and may be free but not ready
	one  bool          // any one of the keys will do

	looked time.Time // when a look last found a row for each key; guarded by the kind's turn

	// send sends the statement that takes keys or rows. free includes those whose sessions are gone.
	send func(ctx context.Context, l *ledger, free, gone, missing []string) ([]objects.Claim, error)
	// move takes a key from its owner, if the owner's claim is still the one that was seen.
	move func(ctx context.Context, l *ledger, seen objects.Claim) ([]objects.Claim, error)
	// keep turns what was taken by a statement into claims.
	keep func(l *ledger, rows []objects.Claim, sent time.Time) ([]Claim, error)
}

// try claims what is free, without waiting. It also reports whether a row that looked free was locked by
// another transaction, or was not ready. hinted says that a hint has led to this try.
func (c *claimer) try(ctx context.Context, ids []string, hinted bool) (got []Claim, locked bool, err error) {
	err = c.k.claiming(ctx, func(ctx context.Context, l *ledger) error {
		var refused error
		for some := range slices.Chunk(ids, perStatement) {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			sent := time.Now()
			rows, left, err := c.take(ctx, l, some, hinted)
			kept, over := c.keep(l, rows, sent)
			if over != nil { // then no claim of this term is valid
				got = nil
				return cmp.Or(err, over)
			}
			got, locked = append(got, kept...), locked || left
			switch {
			case isRefused(err):
				refused = cmp.Or(refused, err)
			case err != nil:
				return err
			}
		}
		return refused
	})
	return got, locked, err
}

// tryNow is try for a caller that does not wait: before a failover has settled, no key counts as free.
func (c *claimer) tryNow(ctx context.Context, ids []string) ([]Claim, error) {
	got, _, err := c.try(ctx, ids, false)
	if settlesIn(err) > 0 { // some may have been claimed before
		err = nil
	}
	return got, err
}

// take makes the term the owner of the rows that it may take. It reads them first, in a separate statement;
// [objects.Claim] explains why. If any one will do, it first tries to take one that was freed. After a hint,
// which says that one was, it looks no further if its last look is less than half a TTL ago.
func (c *claimer) take(ctx context.Context, l *ledger, ids []string, hinted bool) (taken []objects.Claim, locked bool, err error) {
	k := c.k
	ids, err = k.claimable(l, ids)
	if err != nil || len(ids) == 0 {
		return nil, false, err
	}
	if c.one {
		hinted = hinted && time.Since(c.looked) < k.s.cfg.TTL/2
		if taken, err = c.write(ctx, l, ids, nil, nil); err != nil && !isRefused(err) || len(taken) > 0 || hinted {
			return taken, false, err
		}
	}
	rows, err := k.table.look(ctx, k.name, ids)
	if err != nil {
		return nil, false, err
	}
	var free, gone []string
	var unknown []objects.Claim
	known := make(map[string]bool, len(rows))
	for _, r := range rows {
		known[r.ID] = true
		switch {
		case r.Session == l.term.id:
			unknown = append(unknown, r)
		case r.Gone:
			gone = append(gone, r.Session)
			free = append(free, r.ID)
		case r.Session == "":
			free = append(free, r.ID)
		default:
			k.s.sweeper.noteOwner(r.Session)
		}
	}
	missing := slices.DeleteFunc(ids, func(id string) bool { return known[id] || c.rows })
	if len(missing) == 0 {
		c.looked = time.Now()
	}
	k.s.mu.Lock()
	unknown = k.unknown(l, unknown)
	k.s.mu.Unlock()
	more, err := k.reclaim(l, unknown)
	if c.one && len(more) > 1 { // other callers wait for the ones that are not taken
		l.term.busy.Go(func() { k.s.wake(keyOf(k.name)) })
	}
	if free = append(free, more...); err != nil || len(free) == 0 && len(missing) == 0 {
		return nil, false, err
	}
	slices.Sort(gone)
	rows, err = c.write(ctx, l, free, slices.Compact(gone), missing)
	return rows, err == nil && len(rows) < len(free)+len(missing), err
}

// write sends the statement of take. If the database refuses some rows, write takes the others, and also
// returns the reason.
func (c *claimer) write(ctx context.Context, l *ledger, free, gone, missing []string) (rows []objects.Claim, err error) {
	k := c.k
	isMissing := setOf(missing)
	var refused error
	err = inGroups(k.table.groups, slices.Concat(free, missing), func(ids []string) error {
		if err := k.over(l); err != nil { // the statements before this one took long
			return err
		}
		if c.one && len(rows) > 0 {
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		sending, cancel := k.s.writeContext(ctx)
		defer cancel()
		var free, missing []string
		for _, id := range ids {
			if isMissing[id] {
				missing = append(missing, id)
			} else {
				free = append(free, id)
			}
		}
		taken, err := c.send(sending, l, free, gone, missing)
		if err != nil && !wroteNothing(err) {
			if sending.Err() != nil { // a smaller group may be fast enough the next time
				k.table.groups.tooSlow(len(ids))
			}
			k.lostAnswer(l)
		}
		rows = append(rows, taken...)
		return err
	}, func(id string, err error) {
		refused = cmp.Or(refused, fmt.Errorf("the database refuses the key %q: %w", id, err))
	})
	return rows, cmp.Or(err, refused)
}

// wait is try, but waits until it gets at least one claim. Each try is for the keys that ids returns then.
func (c *claimer) wait(ctx context.Context, ids func() []string) ([]Claim, error) {
	s := c.k.s
	hints := s.watch(keyOf(c.k.name)) // before the first look, so that no hint is missed
	defer hints.Stop()
	defer s.sweeper.addWaiter(hints)()
	var spurious pace.Limiter
	for woken, tries := false, 0; ; {
		ids := ids()
		got, locked, err := c.try(ctx, ids, woken)
		if len(got) > 0 {
			return got, nil
		}
		longest := pace.Jitter(c.poll)
		if err != nil || ctx.Err() != nil {
			if longest, err = c.afterFailure(ctx, err); err != nil {
				return nil, err
			}
			if longest == 0 {
				woken = false
				continue
			}
		} else if hints.Live() && !c.rows { // no hint announces a row that becomes ready with time
			longest = s.cfg.TTL
		}
		if locked { // a write that is about to commit has locked a row, and sends no hint
			longest = min(c.poll, 10*time.Millisecond<<min(tries, 10))
			tries++
		}
		flood := coalesce * time.Duration(1+len(ids)/perStatement) // many hints may be about other keys
		if c.one {                                                 // one hint wakes all waiting callers, and one of them gets the free slot
			flood = 5 * mostSpread
		}
		woken, _ = pace.Await(ctx, hints.C(), spurious.IgnoreFor(woken, min(flood, c.poll)), longest)
		if woken && c.one {
			pace.Sleep(ctx, rand.N(mostSpread))
		}
	}
}

// afterFailure returns for how long a call that waits pauses after an error, or the error that ends it.
func (c *claimer) afterFailure(ctx context.Context, err error) (pause time.Duration, fatal error) {
	s := c.k.s
	switch {
	case ctx.Err() != nil:
		return 0, context.Cause(ctx)
	case errors.Is(err, ErrClosed), errors.Is(err, tenure.ErrSetup), errors.Is(err, tenure.ErrInvalid):
		return 0, err
	case errors.Is(err, objects.ErrDrained):
		return 0, s.untilUndrained(ctx)
	case settlesIn(err) > 0: // settling has logged it
		return settlesIn(err), nil
	case c.rows:
		s.retries.Log(s.cfg.Logger, slog.LevelWarn, "failed to claim rows; retrying", err, "table", c.k.name)
	default:
		s.retries.Log(s.cfg.Logger, slog.LevelWarn, "failed to claim keys; retrying", err, "kind", c.k.name)
	}
	return pace.Jitter(c.poll), nil
}
