package claims

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
)

// Move makes this session the owner of keys that other sessions own, without asking those sessions or waiting
// for them to expire. seen are the claims that stand on the keys, as returned by [Keys.Standing] or as the
// resource behind the key received them from its owner. Move leaves out a key whose claim has changed since,
// and a key that this session or one of its funcs already has. Use [Keys.TryClaim] for keys that were freed
// meanwhile. If several processes move one claim, one of them gets the key.
//
// Use Move only when the resource that the key stands for says itself that it has left its owner, for example a
// supervisor that has closed its connection there and has connected to this process. From then on the database
// refuses the fenced writes of the old claim, and releasing it has no effect. But the former owner has not been
// asked. Its func is told to return with the cause [tenure.ErrLost] when the owner learns of the move: at once,
// or within a TTL if the hint was lost. Until then the former owner believes its claim to be valid, and two
// funcs may run for the key. To have the former owner stop first, use [Keys.RequestRelease].
//
// Move waits for fenced writes that are about to commit under a claim, until ctx is done. Its other errors are
// those of TryClaim. Like TryClaim, it may return claims together with an error.
func (k *Keys) Move(ctx context.Context, seen ...Claim) ([]Claim, error) {
	err := validClaims(seen)
	for _, c := range seen {
		if err == nil && c.Key.Type != k.name {
			err = fmt.Errorf("%w: %s is not of the kind %q", tenure.ErrInvalid, c, k.name)
		}
	}
	var got []Claim
	if err == nil {
		got, err = k.move(ctx, seen)
	}
	return got, opError("move "+k.name, err)
}

func (k *Keys) move(ctx context.Context, seen []Claim) (got []Claim, err error) {
	for {
		err = k.kind.claiming(ctx, func(ctx context.Context, l *ledger) error {
			more, over, err := k.moveTo(ctx, l, rowsOf(seen))
			if got = append(got, more...); over { // then no claim of this term is valid
				got = nil
			}
			return err
		})
		in := settlesIn(err)
		if in == 0 {
			return got, err
		}
		if !pace.Sleep(ctx, in) {
			return got, context.Cause(ctx)
		}
	}
}

func (k *Keys) moveTo(ctx context.Context, l *ledger, rows []objects.Claim) (got []Claim, isOver bool, err error) {
	ids, err := k.kind.claimable(l, idsOf(rows))
	may := setOf(ids)
	rows = slices.DeleteFunc(rows, func(r objects.Claim) bool { return r.Session == l.term.id || !may[r.ID] })
	for tries := 0; len(rows) > 0 && err == nil; tries++ {
		var moved, locked []objects.Claim
		moved, locked, err = k.writeMove(ctx, l, rows)
		kept, over := k.kind.keep(l, moved)
		if over != nil {
			return nil, true, cmp.Or(err, over)
		}
		got, rows = append(got, kept...), locked
		if err == nil && len(rows) > 0 && !awaitUnlocked(ctx, tries) {
			err = context.Cause(ctx)
		}
	}
	return got, false, err
}

// writeMove sends the statements of move, and wakes the former owners.
func (k *Keys) writeMove(ctx context.Context, l *ledger, seen []objects.Claim) (moved, locked []objects.Claim, err error) {
	var refused error
	err = inGroups(k.s.table.groups, seen, func(seen []objects.Claim) error {
		if err := k.kind.over(l); err != nil { // the statements before this one took long
			return err
		}
		sending, cancel := k.s.writeContext(ctx)
		defer cancel()
		got, left, err := k.s.claims.Move(sending, l.term.id, k.name, seen, k.s.limit)
		if err != nil && !wroteNothing(err) {
			k.kind.lostAnswer(l)
		}
		moved, locked = append(moved, got...), append(locked, left...)
		return err
	}, func(row objects.Claim, err error) {
		refused = cmp.Or(refused, fmt.Errorf("the database refuses the key %q: %w", row.ID, err))
	})
	has := setOf(idsOf(moved))
	k.s.table.wakeOwners(k.s.store, slices.DeleteFunc(slices.Clone(seen), func(r objects.Claim) bool { return !has[r.ID] }))
	return moved, locked, cmp.Or(err, refused)
}

// Standing returns the claims that stand on keys, whichever sessions own them, in no particular order. Keys
// that are free are left out.
func (k *Keys) Standing(ctx context.Context, ids ...string) (stand []Claim, err error) {
	var rows []objects.Claim
	if err = k.s.table.validKeys(k.name, ids); err == nil {
		rows, err = k.s.table.look(ctx, k.name, ids)
	}
	for _, r := range rows {
		if r.Session != "" && !r.Gone {
			stand = append(stand, claimOf(k.name, r.Session, r, false))
		}
	}
	return stand, opError("look at "+k.name, err)
}

// endMoved ends claims that other sessions have moved to themselves. If the answer to the statement that took a
// row is still to come, endMoved waits for it in the background.
func (k *kind) endMoved(l *ledger, moved []objects.Claim) {
	end := func() (ended int) {
		k.s.mu.Lock()
		defer k.s.mu.Unlock()
		for _, r := range moved {
			if l.owns(r) || k.running[r.ID].isFor(l.term.id, r.Token) {
				k.endRow(l, r)
				ended++
			}
		}
		return ended
	}
	if end() < len(moved) {
		k.background(l, func(ctx context.Context) {
			select {
			case k.turn <- struct{}{}:
				<-k.turn
				end()
			case <-ctx.Done():
			}
		})
	}
}
