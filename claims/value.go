package claims

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
)

// valueLimit is the limit of a statement that no session sends.
const valueLimit = 10 * time.Second

// PassOn ends this session's own use of claims, without freeing their keys, so that they can be
// passed on to another process. That process may write under them, see [FencedPostgres], and
// frees the keys with [ReleasePassedOn]. Until then nobody else gets them, nor does this session: it
// holds them no more, but they are valid only as long as it lives, and it frees them when it
// closes. So the process that a claim was passed on to fences what it writes.
//
// If one of the claims is not held by this session, [tenure.ErrLost], or is given twice or has a
// func that runs, [tenure.ErrInvalid], none is passed on. It does no I/O.
func (k *Keys) PassOn(claims ...Claim) error {
	if err := k.passOn(claims); err != nil {
		return fmt.Errorf("tenure: pass on %s: %w", k.kind, err)
	}
	return nil
}

func (k *Keys) passOn(claims []Claim) error {
	if err := validIDs(keysOf(claims)); err != nil {
		return err
	}
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	for _, c := range claims {
		if err := k.holds(c); err != nil {
			return fmt.Errorf("%s: %w", c, err)
		}
		if k.running[c.Key.ID] != nil {
			return fmt.Errorf("%s: %w: a func runs for it", c, tenure.ErrInvalid)
		}
	}
	k.now.passOn(k, claims)
	return nil
}

func keysOf(claims []Claim) (ids []string) {
	for _, c := range claims {
		ids = append(ids, c.Key.ID)
	}
	return ids
}

// ReleasePassedOn frees the keys of claims that another process has passed on to this one, see
// [Keys.PassOn]. It needs no session. What a process has claimed itself it releases with
// [Keys.Release]: its session would not know that the keys are free, and a func that runs for
// one would go on while another process has it.
//
// If one of the claims has ended, [tenure.ErrLost], or is given twice, [tenure.ErrInvalid], none
// is released. After any other error they may have been released or not.
func ReleasePassedOn(ctx context.Context, store tenure.Store, claims ...Claim) error {
	table, err := tableOf(store)
	if err == nil {
		err = releaseValues(ctx, store, table, claims)
	}
	if err != nil {
		return fmt.Errorf("tenure: release claims that were passed on: %w", err)
	}
	return nil
}

func releaseValues(ctx context.Context, store tenure.Store, table table, claims []Claim) error {
	type owner struct{ kind, session string }
	owners := make(map[owner][]objects.Claim)
	seen := make(map[tenure.Key]bool)
	errs := make([]error, 0, len(claims))
	for _, c := range claims {
		switch {
		case c.Session == "" || c.Token <= 0:
			errs = append(errs, fmt.Errorf("%w: no claim is given", tenure.ErrInvalid))
		case seen[c.Key]:
			errs = append(errs, fmt.Errorf("%w: the claim of %s is given twice", tenure.ErrInvalid, c))
		}
		errs = append(errs, c.Key.Validate(), objects.ValidText("session", c.Session))
		seen[c.Key] = true
		o := owner{c.Key.Type, c.Session}
		owners[o] = append(owners[o], c.row())
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if len(claims) == 0 {
		return fmt.Errorf("%w: no claims are given", tenure.ErrInvalid)
	}
	for o, rows := range owners {
		stand, err := table.Look(ctx, o.kind, idsOf(rows), valueLimit)
		if err != nil {
			return err
		}
		tokens := make(map[string]int64)
		for _, r := range stand {
			if r.Session == o.session {
				tokens[r.ID] = r.Token
			}
		}
		for _, r := range rows {
			if tokens[r.ID] != r.Token {
				return fmt.Errorf("%w: %s/%s was freed, or another has claimed it", tenure.ErrLost, r.Kind, r.ID)
			}
		}
	}
	for o, rows := range owners {
		for tries := 0; len(rows) > 0; tries++ {
			var err error
			if rows, err = table.Free(ctx, o.session, o.kind, idsOf(rows), tokensOf(rows), valueLimit); err != nil {
				return err
			}
			if len(rows) > 0 && !pace.Sleep(ctx, 5*time.Millisecond<<min(tries, 7)) { // by a write that is about to commit
				return context.Cause(ctx)
			}
		}
		hint(store, keyOf(o.kind), valueLimit)
	}
	return nil
}
