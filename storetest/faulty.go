package storetest

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
)

// Call is one call of a store's method, as a [Hook] sees it.
//
// Statements of package claims are calls, too. Those on the table of claims are "claims.take",
// "claims.free", "claims.look", "claims.owned", "claims.sessions", "claims.request", "claims.requested",
// "claims.list", "claims.forget", "claims.prune", "claims.count" and "claims.migrate". Those of a queue are "queue.take",
// "queue.ready", "queue.end", "queue.finish" (the transaction of FinishPostgres or FinishSQLite),
// "queue.free", "queue.look", "queue.owned", "queue.sessions", "queue.expired", "queue.expire",
// "queue.canceled", "queue.cancel" and "queue.check".
type Call struct {
	Op        string                // "get", "put", "delete", "list" or "wake", or one that the comment on Call names
	Key       tenure.Key            // only the Type for a list; for claims, the Type is the kind or the queue's table
	IDs       []string              // of the keys or rows that a call of claims names
	Session   string                // for which a call of claims takes, frees or reads rows
	Object    tenure.Object         // set for a put
	Condition tenure.WriteCondition // set for a put and a delete
}

// Hook is called in place of the store for each call. It decides what happens to the call, and
// returns the error that the caller gets. do passes the call on to the store and returns the
// store's error. If the hook returns nil, the caller gets the store's answer, error or not.
//
//	return do(ctx)                                    // no fault
//	return errors.New("connection refused")           // the request was lost
//	do(ctx); return errors.New("connection reset")    // the answer was lost
//	time.Sleep(d); return do(ctx)                     // the request was slow
//	err := do(ctx); time.Sleep(d); return err         // the answer was slow
//	<-ctx.Done(); return ctx.Err()                    // the store hangs
//
// For a write that lands after its caller has given up, call do in a goroutine with
// [context.WithoutCancel]. A hook may call do at most once, and must have called it
// if it returns nil; otherwise the call panics. A hook must be safe for concurrent
// use: it is called by every goroutine that uses the store.
type Hook func(ctx context.Context, call Call, do func(context.Context) error) error

// FaultyStore is a store whose calls go through a [Hook], so that a test can delay calls, make them
// fail or let them hang. It is safe for concurrent use.
type FaultyStore struct {
	store tenure.Store
	hook  *atomic.Pointer[Hook] // shared with the fenced stores made from this one
}

// Faulty returns a store that sends each call to store through hook; a nil hook
// injects no faults. It panics if store is nil. The Job example uses it to test a job
// in virtual time.
func Faulty(store tenure.Store, hook Hook) *FaultyStore {
	if objects.IsNil(store) {
		panic("storetest: Faulty: store is nil")
	}
	f := &FaultyStore{store: store, hook: new(atomic.Pointer[Hook])}
	f.SetHook(hook)
	return f
}

// SetHook replaces the hook for calls that begin afterwards; a nil hook injects no
// faults.
func (f *FaultyStore) SetHook(hook Hook) {
	if hook == nil {
		f.hook.Store(nil)
		return
	}
	f.hook.Store(&hook)
}

// Get is the store's Get.
func (f *FaultyStore) Get(ctx context.Context, key tenure.Key) (tenure.Object, error) {
	return through(ctx, f, Call{Op: "get", Key: key}, func(ctx context.Context) (tenure.Object, error) {
		return f.store.Get(ctx, key)
	})
}

// PutIf is the store's PutIf.
func (f *FaultyStore) PutIf(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
	obj = clone(obj) // a write may land after PutIf has returned and the caller has changed its object
	return through(ctx, f, Call{Op: "put", Key: obj.Key, Object: obj, Condition: cond}, func(ctx context.Context) (tenure.Object, error) {
		return f.store.PutIf(ctx, obj, cond)
	})
}

// DeleteIf is the store's DeleteIf.
func (f *FaultyStore) DeleteIf(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
	return f.delete(ctx, key, cond, f.store.DeleteIf)
}

// DeleteAndWake is the store's DeleteAndWake, or its DeleteIf and [tenure.Wake] if the store itself is
// not a [tenure.Notifier].
func (f *FaultyStore) DeleteAndWake(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
	if notifier, ok := f.store.(tenure.Notifier); ok {
		return f.delete(ctx, key, cond, notifier.DeleteAndWake)
	}
	err := f.DeleteIf(ctx, key, cond)
	if err == nil {
		err = tenure.Wake(ctx, f.store, key)
	}
	return err
}

func (f *FaultyStore) delete(ctx context.Context, key tenure.Key, cond tenure.WriteCondition, send func(context.Context, tenure.Key, tenure.WriteCondition) error) error {
	_, err := through(ctx, f, Call{Op: "delete", Key: key, Condition: cond}, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, send(ctx, key, cond)
	})
	return err
}

// Watch is [tenure.Watch] of the store, and bypasses the hook.
func (f *FaultyStore) Watch(key tenure.Key) tenure.Subscription { return tenure.Watch(f.store, key) }

// Wake is the store's Wake. It does nothing if the store is not a [tenure.Notifier].
func (f *FaultyStore) Wake(ctx context.Context, key tenure.Key) error {
	notifier, ok := objects.As[tenure.Notifier](f.store)
	if !ok {
		return nil
	}
	_, err := through(ctx, f, Call{Op: "wake", Key: key}, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, notifier.Wake(ctx, key)
	})
	return err
}

// List is the store's List. It returns [errors.ErrUnsupported] if the store has none.
func (f *FaultyStore) List(ctx context.Context, objectType, after string, limit int) ([]tenure.Object, error) {
	lister, ok := objects.As[tenure.Lister](f.store)
	if !ok {
		return nil, fmt.Errorf("storetest: list %s: %T: %w", objectType, f.store, errors.ErrUnsupported)
	}
	return through(ctx, f, Call{Op: "list", Key: tenure.Key{Type: objectType}}, func(ctx context.Context) ([]tenure.Object, error) {
		return lister.List(ctx, objectType, after, limit)
	})
}

// Fence is the store's Fence, behind the same hook. It returns
// [errors.ErrUnsupported] if the store has none.
func (f *FaultyStore) Fence(guard tenure.Guard) (tenure.Store, error) {
	fenced, err := tenure.Fence(f.store, guard)
	if err != nil {
		return nil, err
	}
	return &FaultyStore{store: fenced, hook: f.hook}, nil
}

// Lineage is the store's Lineage and bypasses the hook, because most of its calls do no I/O.
func (f *FaultyStore) Lineage(ctx context.Context) (tenure.Lineage, error) {
	return f.store.Lineage(ctx)
}

// Traits are the store's.
func (f *FaultyStore) Traits() tenure.Traits { return f.store.Traits() }

// through passes a call through the hook.
func through[T any](ctx context.Context, f *FaultyStore, call Call, send func(context.Context) (T, error)) (T, error) {
	hook := f.hook.Load()
	if hook == nil {
		return send(ctx)
	}
	type answer struct {
		value T
		err   error
	}
	var sent atomic.Bool
	answers := make(chan answer, 1) // buffered: an answer may come after the hook has returned
	err := (*hook)(ctx, call, func(ctx context.Context) error {
		if sent.Swap(true) {
			panic("storetest: a hook called do twice")
		}
		value, err := send(ctx)
		answers <- answer{value, err}
		return err
	})
	var none T
	if err != nil {
		return none, err
	}
	select {
	case a := <-answers:
		return a.value, a.err
	default:
		panic("storetest: a hook returned nil before do had")
	}
}
