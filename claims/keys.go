package claims

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
)

// Keys are the claims of a session on the keys of one kind. Owner, RequestRelease, Watch, Wake and Forget
// work even while [Session.Run] does not run.
//
// All methods are safe for concurrent use.
type Keys struct {
	s    *Session
	name string // of the kind
	kind *kind
}

// NewKeys returns the keys of a kind. A session has at most one Keys for each kind. NewKeys does no I/O.
func NewKeys(s *Session, kind string) (*Keys, error) {
	all, err := NewKeysOf(s, kind)
	if err != nil {
		return nil, err
	}
	return all[0], nil
}

// NewKeysOf is [NewKeys] for several kinds that are used together. It returns the keys of all, in
// their order, or of none.
func NewKeysOf(s *Session, kinds ...string) ([]*Keys, error) {
	all, err := newKeys(s, kinds)
	return all, opError("new keys", err)
}

func newKeys(s *Session, names []string) (all []*Keys, err error) {
	if s == nil {
		return nil, fmt.Errorf("%w: session is nil", tenure.ErrInvalid)
	}
	for _, name := range names {
		if err := s.validKind(name); err != nil {
			return nil, err
		}
	}
	kinds, err := newKinds(s, s.table, nil, names...)
	for _, kind := range kinds {
		all = append(all, &Keys{s, kind.name, kind})
	}
	return all, err
}

func (s *Session) validKind(name string) error {
	if name == "" {
		return fmt.Errorf("%w: the kind is empty", tenure.ErrInvalid)
	}
	if err := objects.ValidText("kind", name); err != nil {
		return err
	}
	return s.table.fits(name)
}

// CheckKeys returns the [tenure.ErrInvalid] with which [NewKeys] refuses a kind or [Keys.TryClaim] its
// keys, for programs that want to fail when they start. It does no I/O.
func (s *Session) CheckKeys(kind string, ids ...string) error {
	return opError("check keys", errors.Join(s.validKind(kind), s.validKeys(kind, ids)))
}

// TryClaim claims the keys that are free, a thousand per statement, and returns the claims in no order. A
// key that this session already has is not free. TryClaim does not wait for keys. While there is no
// session, it waits for one; [ErrClosed] reports that there will be none.
//
// TryClaim may return claims together with an error, and the caller owns these claims. This happens when a
// constraint or a trigger of the table refuses some of the keys. It also happens when ctx ends, because
// TryClaim waits for the answer to a statement that it has sent.
//
// The error is [tenure.ErrInvalid] if no key is given, or if a key is given twice, is not valid text, or
// on Postgres has more than 2,600 bytes together with its kind. Then nothing is claimed.
func (k *Keys) TryClaim(ctx context.Context, ids ...string) ([]Claim, error) {
	var got []Claim
	err := k.s.validKeys(k.name, ids)
	if err == nil {
		got, _, err = k.claim(ctx, ids)
	}
	return got, opError("try to claim "+k.name, err)
}

// validKeys rejects an empty list, keys that can't be claimed, and keys that are given twice.
func (s *Session) validKeys(kind string, ids []string) error {
	if len(ids) == 0 {
		return fmt.Errorf("%w: no keys are given", tenure.ErrInvalid)
	}
	seen := make(map[string]bool, len(ids))
	for _, id := range ids {
		switch err := objects.ValidText("key", id); {
		case err != nil:
			return err
		case id == "":
			return fmt.Errorf("%w: a key is empty", tenure.ErrInvalid)
		case seen[id]:
			return fmt.Errorf("%w: the key %q is given twice", tenure.ErrInvalid, id)
		}
		seen[id] = true
	}
	return s.table.fits(kind, ids...)
}

// claim is TryClaim. It also reports whether another transaction has locked a row that looked free.
func (k *Keys) claim(ctx context.Context, ids []string) (got []Claim, locked bool, err error) {
	l, done, err := k.kind.begin(ctx)
	if err != nil {
		return nil, false, err
	}
	defer done()
	var refused error
	for some := range slices.Chunk(ids, perStatement) {
		if ctx.Err() != nil {
			return got, locked, context.Cause(ctx)
		}
		rows, left, err := k.take(ctx, l, some)
		kept, over := k.kind.keep(l, rows)
		if over != nil { // then no claim of this term is valid
			return nil, locked, cmp.Or(err, over)
		}
		got, locked = append(got, kept...), locked || left
		switch {
		case isRefused(err):
			refused = cmp.Or(refused, err)
		case err != nil:
			return got, locked, err
		}
	}
	return got, locked, refused
}

// take makes the term the owner of the rows that it may take. It reads them first, in a separate
// statement; [objects.Claim] explains why.
func (k *Keys) take(ctx context.Context, l *ledger, ids []string) (taken []objects.Claim, locked bool, err error) {
	ids, err = k.kind.claimable(l, ids)
	if err != nil || len(ids) == 0 {
		return nil, false, err
	}
	rows, err := k.s.table.look(ctx, k.name, ids)
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
	missing := slices.DeleteFunc(ids, func(id string) bool { return known[id] })
	more, err := k.kind.reclaim(l, unknown)
	if free = append(free, more...); err != nil || len(free) == 0 && len(missing) == 0 {
		return nil, false, err
	}
	slices.Sort(gone)
	rows, err = k.write(ctx, l, free, slices.Compact(gone), missing)
	return rows, err == nil && len(rows) < len(free)+len(missing), err
}

// write sends the statement of take. If the database refuses some rows, write takes the others, and also
// returns the reason.
func (k *Keys) write(ctx context.Context, l *ledger, free, gone, missing []string) (rows []objects.Claim, err error) {
	isMissing := make(map[string]bool, len(missing))
	for _, id := range missing {
		isMissing[id] = true
	}
	var refused error
	err = inGroups(k.s.table.groups, slices.Concat(free, missing), func(ids []string) error {
		if err := k.kind.over(l); err != nil { // the statements before this one took long
			return err
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
		taken, err := k.s.claims.Take(sending, l.term.id, k.name, free, gone, missing, k.s.limit)
		if err != nil && !wroteNothing(err) {
			if sending.Err() != nil { // a smaller group may be fast enough the next time
				k.s.table.groups.tooSlow(len(ids))
			}
			k.kind.lostAnswer(l, ids...)
		}
		rows = append(rows, taken...)
		return err
	}, func(id string, err error) {
		refused = cmp.Or(refused, fmt.Errorf("the database refuses the key %q: %w", id, err))
	})
	return rows, cmp.Or(err, refused)
}

// Claim is like [Keys.TryClaim], but waits until it gets at least one of the keys. Errors of the store do
// not end it, except [tenure.ErrSetup]. Keys that this session holds or has detached count as taken;
// Claim waits until they are released. A caller that would have to release them itself waits until ctx
// is done.
func (k *Keys) Claim(ctx context.Context, ids ...string) ([]Claim, error) {
	if err := k.s.validKeys(k.name, ids); err != nil {
		return nil, opError("claim "+k.name, err)
	}
	hints := k.s.watch(keyOf(k.name)) // before the first look, so that no hint is missed
	defer hints.Stop()
	defer k.s.sweeper.addWaiter()()
	var spurious pace.Limiter
	flood := coalesce * time.Duration(1+len(ids)/perStatement) // many hints may be about other keys
	for woken, tries := false, 0; ; {
		got, locked, err := k.claim(ctx, ids)
		switch {
		case len(got) > 0:
			return got, nil
		case ctx.Err() != nil:
			err = context.Cause(ctx)
			fallthrough
		case errors.Is(err, ErrClosed), errors.Is(err, tenure.ErrSetup):
			return nil, opError("claim "+k.name, err)
		case err != nil:
			k.s.retries.Log(k.s.cfg.Logger, slog.LevelWarn, "failed to claim keys; retrying", err, "kind", k.name)
		}
		longest := pace.Jitter(k.s.cfg.PollInterval)
		if hints.Live() && err == nil {
			longest = k.s.cfg.TTL
		}
		if locked { // by a write that is about to commit, and sends no hint
			longest = min(k.s.cfg.PollInterval, 10*time.Millisecond<<min(tries, 10))
			tries++
		}
		woken, _ = pace.Await(ctx, hints.C(), spurious.IgnoreFor(woken, min(flood, k.s.cfg.PollInterval)), longest)
	}
}

// Owner returns the holder of the session that owns a key, with its labels, so that a request can be sent
// there. If no session owns the key, the error is [tenure.ErrNotFound]. A crashed process counts as the
// owner until its session has expired and was removed.
func (k *Keys) Owner(ctx context.Context, id string) (tenure.Holding, error) {
	holding, err := k.owner(ctx, id)
	return holding, opError("owner of "+k.name+"/"+id, err)
}

func (k *Keys) owner(ctx context.Context, id string) (tenure.Holding, error) {
	if err := k.s.validKeys(k.name, []string{id}); err != nil {
		return tenure.Holding{}, err
	}
	rows, err := k.s.table.look(ctx, k.name, []string{id})
	if err != nil {
		return tenure.Holding{}, err
	}
	if len(rows) == 0 || rows[0].Session == "" || rows[0].Gone {
		return tenure.Holding{}, tenure.ErrNotFound
	}
	lease, err := tenure.NewLease(k.s.store, tenure.LeaseConfig{Key: SessionKey(rows[0].Session), Logger: k.s.cfg.Logger})
	if err != nil {
		return tenure.Holding{}, err
	}
	return lease.Read(ctx)
}

// Do calls fn with a context that ends when the claim or ctx does. When fn has returned, Do frees the key
// and returns the error of fn. Whatever ends the context, the key is kept until fn has returned.
// [context.Cause] says why the claim has ended:
//
//   - [tenure.ErrLost] or [tenure.ErrDeadline]: the session was lost, or the key's row no longer names it,
//     as after a failover that has lost commits. Do returns this error too.
//   - [tenure.ErrResigned]: [Keys.Release] or [Keys.RequestRelease] was called for the key.
//   - [tenure.ErrShutdown]: the session closes.
//
// If this session does not hold the claim, Do returns [tenure.ErrLost]. If a func already runs for the
// claim, it returns [tenure.ErrInvalid]. In both cases fn is not called.
func (k *Keys) Do(ctx context.Context, c Claim, fn func(context.Context) error) error {
	return k.kind.do(ctx, c, fn)
}

// Holds reports whether this session holds the claim and may rely on it, see [tenure.Term.Valid]. It
// does no I/O.
func (k *Keys) Holds(c Claim) bool { return k.kind.holds(c) }

// Len returns how many claims the session holds.
func (k *Keys) Len() int { return k.kind.size() }

// Release frees keys. If a func of [Keys.Do] runs for a key, Release tells it to return, with the cause
// [tenure.ErrResigned], and waits until it has returned, also while the session closes. A func that
// releases its own claim must pass its own context. If ctx is done before all keys are free, Release
// returns the cause of ctx, and the keys become free all the same.
//
// If this session does not hold one of the claims, the error is [tenure.ErrLost]. If a claim is given
// twice, it is [tenure.ErrInvalid]. In both cases none is released.
func (k *Keys) Release(ctx context.Context, claims ...Claim) error {
	return k.kind.release(ctx, claims)
}

// Detach ends this session's own use of claims without freeing their keys, so that another process can use
// them. That process may write under the claims, see [Claim.Fence], and frees the keys with
// [ReleaseDetached]. Until then no session gets the keys, not even this one. The claims are valid only
// while this session lives, and it frees their keys when it closes. The process that receives a claim must
// therefore fence its writes.
//
// If this session does not hold one of the claims, the error is [tenure.ErrLost]. If a claim is given
// twice, or a func runs for it, the error is [tenure.ErrInvalid]. In both cases none is detached. Detach
// does no I/O.
func (k *Keys) Detach(claims ...Claim) error { return k.kind.detach(claims) }

// Watch subscribes to the keys of this kind. The subscription receives when keys were freed, and when
// [Keys.Wake] was called. Until it is stopped, the session checks on other sessions whenever one can
// expire, as during [Keys.Claim]. Watch does no I/O.
func (k *Keys) Watch() tenure.Subscription {
	return &watch{Subscription: k.s.watch(keyOf(k.name)), done: sync.OnceFunc(k.s.sweeper.addWaiter())}
}

type watch struct {
	tenure.Subscription
	done func()
}

func (w *watch) Stop() {
	w.Subscription.Stop()
	w.done()
}

// Wake wakes the callers that watch or wait for keys of this kind, in other processes too. It reports no
// errors, because a hint may be lost in any case.
func (k *Keys) Wake() { k.s.wake(keyOf(k.name)) }

// Forget deletes the rows of this kind's free keys, which would otherwise be deleted a day after their last
// claim. Use it only for keys that are never claimed again: the token of a later claim could repeat.
func (k *Keys) Forget(ctx context.Context) error {
	return opError("forget "+k.name, k.s.claims.Forget(ctx, k.name, k.s.limit))
}
