package claims

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
)

// Keys are the claims of a session on the keys of one kind. Owner, RequestRelease, Watch, Wake and Forget
// work even while [Session.Run] does not run.
//
// All methods are safe for concurrent use.
type Keys struct {
	s       *Session
	name    string // of the kind
	kind    *kind
	claimer *claimer
}

// NewKeys returns the keys of a kind. A session has at most one Keys for each kind. NewKeys does no I/O.
func NewKeys(s *Session, kind string) (*Keys, error) {
	k, err := newKeys(s, kind)
	return k, opError("new keys", err)
}

func newKeys(s *Session, name string) (*Keys, error) {
	if s == nil {
		return nil, fmt.Errorf("%w: session is nil", tenure.ErrInvalid)
	}
	if err := s.validKind(name); err != nil {
		return nil, err
	}
	return keysOf(s, name)
}

func keysOf(s *Session, name string) (*Keys, error) {
	kind, err := newKind(s, s.table, nil, name)
	if err != nil {
		return nil, err
	}
	k := &Keys{s: s, name: name, kind: kind}
	k.claimer = &claimer{
		k: kind, poll: s.cfg.PollInterval,
		send: func(ctx context.Context, l *ledger, free, gone, missing []string) ([]objects.Claim, error) {
			return s.claims.Take(ctx, l.term.id, name, free, gone, missing, s.limit)
		},
		move: func(ctx context.Context, l *ledger, seen objects.Claim) ([]objects.Claim, error) {
			moved, _, err := s.claims.Move(ctx, l.term.id, name, []objects.Claim{seen}, s.limit)
			return moved, err
		},
		keep: func(l *ledger, rows []objects.Claim, _ time.Time) ([]Claim, error) { return kind.keep(l, rows) },
	}
	return k, nil
}

// ownKinds is how the names of kinds begin that this package uses for itself.
const ownKinds = "tenure."

func isOwnKind(name string) bool { return strings.HasPrefix(name, ownKinds) }

func (s *Session) validKind(name string) error {
	if name == "" {
		return fmt.Errorf("%w: the kind is empty", tenure.ErrInvalid)
	}
	if err := objects.ValidName("kind", name); err != nil {
		return err
	}
	if isOwnKind(name) {
		return fmt.Errorf("%w: the kind %q: names that begin with %q are this library's", tenure.ErrInvalid, name, ownKinds)
	}
	return s.table.fits(name)
}

// CheckKeys returns the [tenure.ErrInvalid] with which [NewKeys] would refuse the kind, or [Keys.TryClaim] the
// keys. Use it to fail at startup. It does no I/O.
func (s *Session) CheckKeys(kind string, ids ...string) error {
	return opError("check keys", errors.Join(s.validKind(kind), s.table.validKeys(kind, ids)))
}

// TryClaim claims the keys that are free, a thousand per statement, or fewer where the database is slow, and
// returns the claims in no particular order. A key that this session already has is not free. TryClaim does not
// wait for keys. While there is no session, it waits for one; [ErrClosed] reports that there will be none.
//
// TryClaim may return claims together with an error, and the caller owns these claims. This happens when a
// constraint or a trigger of the table refuses some of the keys. It also happens when ctx ends, because
// TryClaim waits for the answer to a statement that it has sent.
//
// The error is [tenure.ErrInvalid] if no key is given, or if a key is given twice, is not valid text, or
// on Postgres has more than 2,600 bytes together with its kind. Then nothing is claimed.
func (k *Keys) TryClaim(ctx context.Context, ids ...string) ([]Claim, error) {
	var got []Claim
	err := k.s.table.validKeys(k.name, ids)
	if err == nil {
		got, err = k.claimer.tryNow(ctx, ids)
	}
	return got, opError("try to claim "+k.name, err)
}

// Claim is like [Keys.TryClaim], but waits until it gets at least one of the keys. Errors of the store do
// not end it, except [tenure.ErrSetup]. Keys that this session holds or has detached count as taken;
// Claim waits until they are released. A caller that would have to release them itself waits until ctx
// is done.
func (k *Keys) Claim(ctx context.Context, ids ...string) ([]Claim, error) {
	var got []Claim
	err := k.s.table.validKeys(k.name, ids)
	if err == nil {
		got, err = k.claimer.wait(ctx, func() []string { return ids })
	}
	return got, opError("claim "+k.name, err)
}

// Owner returns the holder of the session that owns a key, with its labels, so that a request can be sent
// there. If no session owns the key, the error is [tenure.ErrNotFound]. A crashed process counts as the owner
// until its session has expired and been removed.
func (k *Keys) Owner(ctx context.Context, id string) (tenure.Holding, error) {
	holding, err := k.s.table.owner(ctx, k.s.store, k.s.cfg.Logger, k.name, id)
	return holding, opError("owner of "+k.name+"/"+id, err)
}

// Owners is [Keys.Owner] for many keys. It returns the holders by key, and leaves out keys that no session
// owns. It reads the keys' rows a thousand per statement, and then the record of each session. If it can't
// read some of these records, it returns the other holders together with an error. If it can't read the rows,
// it returns no map.
func (k *Keys) Owners(ctx context.Context, ids ...string) (map[string]tenure.Holding, error) {
	owners, err := k.s.table.owners(ctx, k.s.store, k.s.cfg.Logger, k.name, ids)
	return owners, opError("owners of "+k.name, err)
}

// Do calls fn with a context that ends when the claim or ctx does. When fn has returned, Do frees the key
// and returns the error of fn. Whatever ends the context, the key is kept until fn has returned.
// [context.Cause] says why the claim has ended:
//
//   - [tenure.ErrLost] or [tenure.ErrDeadline]: the session was lost, or the key's row no longer names it,
//     as after a failover that has lost commits. Do returns this error too.
//   - [tenure.ErrResigned]: [Keys.Release] or [Keys.RequestRelease] was called for the key, or the replica is
//     drained.
//   - [tenure.ErrShutdown]: the session closes.
//
// If this session does not hold the claim, Do returns [tenure.ErrLost]. If a func already runs for the
// claim, it returns [tenure.ErrInvalid]. In both cases fn is not called.
//
// [ClaimFromContext] returns the claim from fn's context.
func (k *Keys) Do(ctx context.Context, c Claim, fn func(context.Context) error) error {
	return k.kind.do(ctx, c, fn)
}

// Holds reports whether this session holds the claim and may rely on it, see [tenure.Term.Valid]. It
// does no I/O.
func (k *Keys) Holds(c Claim) bool { return k.kind.holds(c) }

// Keeps is like [Keys.Holds], for a func of [Keys.Do] that was told to return: it reports whether the func runs
// and its claim still stands, even while the session closes. It does no I/O.
func (k *Keys) Keeps(c Claim) bool { return k.kind.keeps(c) }

// Release frees keys. If a func of [Keys.Do] runs for a key, Release tells it to return, with the cause
// [tenure.ErrResigned], and waits until it has returned, even while the session closes. A func that releases
// its own claim must pass its own context. If ctx is done before all keys are free, Release returns the cause
// of ctx, and the keys become free all the same.
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

// Session returns the session of the keys.
func (k *Keys) Session() *Session { return k.s }

// Kind returns the kind of the keys.
func (k *Keys) Kind() string { return k.name }

// Watch subscribes to the keys of this kind. The subscription receives when keys are freed, and when
// [Keys.Wake] is called. Until it is stopped, the session checks on other sessions whenever one can expire, as
// during [Keys.Claim]. Watch does no I/O.
func (k *Keys) Watch() tenure.Subscription {
	hints := k.s.watch(keyOf(k.name))
	return &watch{Subscription: hints, done: sync.OnceFunc(k.s.sweeper.addWaiter(hints))}
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
