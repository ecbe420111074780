package shards_test

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/reach"
	"github.com/tenurelib/tenure/storetest"
)

// link is a process's way to a database that other processes share, to objects and to claims.
// Everything goes through one hook.
type link struct {
	*storetest.FaultyStore
	Hinted bool // hints can be expected, as on Postgres
	table  objects.ClaimsTable
	hook   atomic.Pointer[storetest.Hook]
}

// newLink returns a link without faults.
func newLink(store tenure.Database) *link {
	l := &link{FaultyStore: storetest.Faulty(store, nil)}
	if _, ok := store.(*tenure.PostgresStore); ok {
		l.table = reach.Postgres(store).Claims()
	} else {
		l.table = reach.SQLite(store).Claims()
	}
	l.SetHook(nil)
	return l
}

// SetHook lets what the process sends go through a hook; nil: nothing happens to it. Ops of
// claims are those of objects.ClaimsTable; "list" is a list of objects, and "claims" one of
// claims.
func (l *link) SetHook(hook storetest.Hook) {
	l.FaultyStore.SetHook(hook)
	l.hook.Store(&hook)
}

// Watch is the store's Watch.
func (l *link) Watch(key tenure.Key) tenure.Subscription {
	watch := l.FaultyStore.Watch(key)
	if l.Hinted {
		watch = liveWatch{watch}
	}
	return watch
}

type liveWatch struct{ tenure.Subscription }

func (liveWatch) Live() bool { return true }

// Claims returns the table, where package claims finds it.
func (l *link) Claims() objects.ClaimsTable { return linkedClaims{l} }

type linkedClaims struct{ l *link }

func through[T any](ctx context.Context, l *link, op string, limit time.Duration, send func(context.Context) (T, error)) (T, error) {
	hook := *l.hook.Load()
	if hook == nil {
		return send(ctx)
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var mu sync.Mutex // an answer may come after the hook has returned
	var answer, none T
	err := hook(ctx, storetest.Call{Op: op}, func(ctx context.Context) error {
		a, err := send(ctx)
		mu.Lock()
		defer mu.Unlock()
		answer = a
		return err
	})
	mu.Lock()
	defer mu.Unlock()
	if err != nil {
		return none, err
	}
	return answer, nil
}

func (c linkedClaims) LongestKey() int { return c.l.table.LongestKey() }

func (c linkedClaims) Look(ctx context.Context, kind string, ids []string, limit time.Duration) ([]objects.Claim, error) {
	return through(ctx, c.l, "look", limit, func(ctx context.Context) ([]objects.Claim, error) {
		return c.l.table.Look(ctx, kind, ids, limit)
	})
}

func (c linkedClaims) Take(ctx context.Context, session, kind string, ids, gone, missing []string, limit time.Duration) ([]objects.Claim, error) {
	return through(ctx, c.l, "take", limit, func(ctx context.Context) ([]objects.Claim, error) {
		return c.l.table.Take(ctx, session, kind, ids, gone, missing, limit)
	})
}

func (c linkedClaims) Free(ctx context.Context, session, kind string, ids []string, tokens []int64, limit time.Duration) ([]objects.Claim, error) {
	return through(ctx, c.l, "free", limit, func(ctx context.Context) ([]objects.Claim, error) {
		return c.l.table.Free(ctx, session, kind, ids, tokens, limit)
	})
}

func (c linkedClaims) Owned(ctx context.Context, session, afterKind, afterID string, n int, limit time.Duration) ([]objects.Claim, error) {
	return through(ctx, c.l, "owned", limit, func(ctx context.Context) ([]objects.Claim, error) {
		return c.l.table.Owned(ctx, session, afterKind, afterID, n, limit)
	})
}

func (c linkedClaims) Request(ctx context.Context, kind string, ids []string, limit time.Duration) ([]objects.Claim, error) {
	return through(ctx, c.l, "request", limit, func(ctx context.Context) ([]objects.Claim, error) {
		return c.l.table.Request(ctx, kind, ids, limit)
	})
}

func (c linkedClaims) Wanted(ctx context.Context, session string, after objects.Claim, n int, limit time.Duration) ([]objects.Claim, error) {
	return through(ctx, c.l, "wanted", limit, func(ctx context.Context) ([]objects.Claim, error) {
		return c.l.table.Wanted(ctx, session, after, n, limit)
	})
}

func (c linkedClaims) Sessions(ctx context.Context, limit time.Duration) ([]objects.Session, error) {
	return through(ctx, c.l, "sessions", limit, func(ctx context.Context) ([]objects.Session, error) { return c.l.table.Sessions(ctx, limit) })
}

func (c linkedClaims) OfKinds(ctx context.Context, kinds []string, limit time.Duration) (claims []objects.Claim, at time.Time, err error) {
	type listing struct {
		claims []objects.Claim
		at     time.Time
	}
	l, err := through(ctx, c.l, "claims", limit, func(ctx context.Context) (listing, error) {
		claims, at, err := c.l.table.OfKinds(ctx, kinds, limit)
		return listing{claims, at}, err
	})
	return l.claims, l.at, err
}

func (c linkedClaims) Forget(ctx context.Context, kind string, limit time.Duration) error {
	_, err := through(ctx, c.l, "forget", limit, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, c.l.table.Forget(ctx, kind, limit)
	})
	return err
}

func (c linkedClaims) Prune(ctx context.Context, after int64, n int, limit time.Duration) (last int64, pruned int, err error) {
	type answer struct {
		last   int64
		pruned int
	}
	a, err := through(ctx, c.l, "prune", limit, func(ctx context.Context) (a answer, err error) {
		a.last, a.pruned, err = c.l.table.Prune(ctx, after, n, limit)
		return a, err
	})
	return a.last, a.pruned, err
}
