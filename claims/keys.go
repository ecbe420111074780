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

// Keys are the claims of a session on the keys of one kind. All methods are safe for
// concurrent use. Owner, RequestRelease, Watch, Wake and Forget work whether [Session.Run] runs or not.
type Keys struct {
	s    *Session
	name string // of the kind
	kind *kind
}

// NewKeys returns the keys of a kind. A session has at most one for each kind. It does no I/O.
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
	kinds, err := newKinds(s, s.table, names...)
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

// TryClaim claims those of the keys that are free, a thousand in a statement, and returns its claims,
// in no order. A key that this session has already is not free. It does not wait for keys, only for a
// session while there is none; [ErrClosed] reports that there will be none.
//
// A statement that was sent is waited for even if ctx is done: beside an error, TryClaim may return
// claims, which the caller owns nevertheless. The same holds if a constraint or a trigger of the table
// refuses a key. No keys, a key twice, or one that is not valid text is [tenure.ErrInvalid], and then
// nothing is claimed. The same holds for a key on Postgres that has more than 2,600 bytes together with
// its kind.
func (k *Keys) TryClaim(ctx context.Context, ids ...string) ([]Claim, error) {
	var got []Claim
	err := k.s.validKeys(k.name, ids)
	if err == nil {
		got, _, err = k.claim(ctx, ids)
	}
	return got, opError("try to claim "+k.name, err)
}

// validKeys rejects no keys, keys that can't be claimed, and keys that are given twice.
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

// claim also reports whether another transaction has locked a row that was free when it was read.
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
		if over != nil { // then none of this term is valid
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

// take makes the term the owner of those rows that it may take. It reads them first, in a separate
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

// write sends the statement of take. If the database refuses rows, it takes the others, and returns
// why besides.
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
			if sending.Err() != nil { // the next time it may be fast enough
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

// Claim is [Keys.TryClaim], except that it waits until it gets at least one of the keys. Errors of
// the store do not end it, except [tenure.ErrSetup]. Keys that this session holds or has detached
// count as taken; Claim waits until they are released. A caller that would have to release them
// itself waits until ctx is done.
func (k *Keys) Claim(ctx context.Context, ids ...string) ([]Claim, error) {
	if err := k.s.validKeys(k.name, ids); err != nil {
		return nil, opError("claim "+k.name, err)
	}
	hints := k.s.watch(keyOf(k.name)) // before the first look, so that no hint is missed
	defer hints.Stop()
	defer k.s.sweeper.addWaiter()()
	var spurious pace.Limiter
	flood := coalesce * time.Duration(1+len(ids)/perStatement) // hints may be about others
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
		if locked { // by a write that is about to commit, and that sends no hint
			longest = min(k.s.cfg.PollInterval, 10*time.Millisecond<<min(tries, 10))
			tries++
		}
		woken, _ = pace.Await(ctx, hints.C(), spurious.IgnoreFor(woken, min(flood, k.s.cfg.PollInterval)), longest)
	}
}

// Owner returns who owns a key: the holder of its session, with the labels, so that a request
// can be sent there. It returns [tenure.ErrNotFound] if no session does. A process that has crashed
// is returned until its session has expired and was removed.
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

// Do calls fn with a context that ends when the claim does, frees the key when fn has returned, and
// returns the error of fn. [context.Cause] says why the claim ended: [tenure.ErrLost] or
// [tenure.ErrDeadline], if the session was lost, or the key's row no longer names it as after a
// failover that has lost commits, which is then an error of Do as well;
// [tenure.ErrResigned] by [Keys.Release] and [Keys.RequestRelease]; [tenure.ErrShutdown] when the
// session closes. The context also ends with ctx. Whatever the reason, the key is kept until fn has
// returned.
//
// A claim that this session does not hold is [tenure.ErrLost], and one for which a func runs
// already is [tenure.ErrInvalid]; then fn is not called.
func (k *Keys) Do(ctx context.Context, c Claim, fn func(context.Context) error) error {
	return k.kind.do(ctx, c, fn)
}

// Holds reports whether this session holds the claim, and may rely on it: see
// [tenure.Term.Valid]. It does no I/O.
func (k *Keys) Holds(c Claim) bool { return k.kind.holds(c) }

// Len returns how many claims the session holds.
func (k *Keys) Len() int { return k.kind.size() }

// Release frees keys. If a func of [Keys.Do] runs for one, Release tells it to return, with
// the cause [tenure.ErrResigned], and waits until it has, also while the session closes; a func that
// releases its own claim passes its own context. If ctx is done before all are free, Release returns its cause, and
// they become free all the same.
//
// If one of the claims is not held by this session, [tenure.ErrLost], or is given twice,
// [tenure.ErrInvalid], none is released.
func (k *Keys) Release(ctx context.Context, claims ...Claim) error {
	return k.kind.release(ctx, claims)
}

// Detach ends this session's own use of claims without freeing their keys, so that another process
// can use them. That process may write under them, see [Claim.Fence], and frees the keys with
// [ReleaseDetached]. Until then no session gets them, not even this one: it holds them no more, but
// they are valid only as long as it lives, and it frees them when it closes. The process that a claim
// is handed to must therefore fence what it writes.
//
// If one of the claims is not held by this session, [tenure.ErrLost], or is given twice or has a
// func that runs, [tenure.ErrInvalid], none is detached. It does no I/O.
func (k *Keys) Detach(claims ...Claim) error { return k.kind.detach(claims) }

// Watch subscribes to the keys of this kind: it receives when some were freed, and when
// [Keys.Wake] was called. Until it is stopped, the session looks for others as soon as one of
// them can expire, as it does during [Keys.Claim]. It does no I/O.
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

// Wake wakes those that watch or wait for keys of this kind, in other processes too. Errors
// don't matter: a hint may be lost in any case.
func (k *Keys) Wake() { k.s.wake(keyOf(k.name)) }

// Forget deletes the rows of keys of this kind that are free, which would be deleted a day after
// their last claim anyway. It is for keys that are never claimed again, so that no token can repeat.
func (k *Keys) Forget(ctx context.Context) error {
	return opError("forget "+k.name, k.s.claims.Forget(ctx, k.name, k.s.limit))
}
