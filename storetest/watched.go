package storetest

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
)

// watched passes calls on to a store and checks what must hold under any
// interleaving of callers: a version is greater than those that were known
// before its write was sent, is assigned once, and is replaced or deleted once.
type watched struct {
	tenure.Store
	t *testing.T

	mu     sync.Mutex
	newest map[tenure.Key]int64 // the greatest version that a call has returned
	given  map[versionOf]bool   // by a write
	spent  map[versionOf]bool   // by a write or a deletion that was conditional on it
	faults int
}

// versionOf is a version of one object.
type versionOf struct {
	key     tenure.Key
	version int64
}

func watch(t *testing.T, store tenure.Store) *watched {
	return &watched{
		Store:  store,
		t:      t,
		newest: make(map[tenure.Key]int64),
		given:  make(map[versionOf]bool),
		spent:  make(map[versionOf]bool),
	}
}

// nameOr returns the name, or none for a store without names.
func (w *watched) nameOr(name string) string {
	if w.Traits().Nameless {
		return ""
	}
	return name
}

func (w *watched) Get(ctx context.Context, key tenure.Key) (tenure.Object, error) {
	before := w.known(key)
	obj, err := w.Store.Get(ctx, key)
	if err != nil {
		return obj, err
	}
	if obj.Key != key {
		w.fault("Get(%s) returned the object %s", key, obj.Key)
	}
	if obj.Version < before {
		w.fault("Get(%s) returned version %d, although version %d was known before the call", key, obj.Version, before)
	}
	w.learn(key, obj.Version)
	return obj, nil
}

func (w *watched) PutIf(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
	before := w.known(obj.Key)
	written, err := w.Store.PutIf(ctx, obj, cond)
	if err != nil {
		return written, err
	}
	if written.Version <= before {
		w.fault("PutIf(%s, %s) returned version %d, although version %d was known before the call", obj.Key, cond, written.Version, before)
	}
	if !w.first(w.given, versionOf{obj.Key, written.Version}) {
		w.fault("PutIf(%s, %s) returned version %d, which another write already had", obj.Key, cond, written.Version)
	}
	w.spends("PutIf", obj.Key, cond)
	w.learn(obj.Key, written.Version)
	return written, nil
}

func (w *watched) DeleteIf(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
	err := w.Store.DeleteIf(ctx, key, cond)
	if err == nil {
		w.spends("DeleteIf", key, cond)
	}
	return err
}

// spends notes that a write has replaced or deleted the version that its condition names, on whichever server.
func (w *watched) spends(op string, key tenure.Key, cond tenure.WriteCondition) {
	var conflict *objects.Conflict
	if errors.As(cond.Check(key, -1), &conflict) && !w.first(w.spent, versionOf{key, conflict.Wanted}) {
		w.fault("%s(%s, %s) succeeded, although that version had been replaced or deleted", op, key, cond)
	}
}

// fault reports a broken rule, but only the first few times; later ones are usually
// consequences.
func (w *watched) fault(format string, args ...any) {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.faults++; w.faults <= 3 {
		w.t.Errorf(format, args...)
	}
}

func (w *watched) known(key tenure.Key) int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.newest[key]
}

func (w *watched) learn(key tenure.Key, version int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.newest[key] = max(w.newest[key], version)
}

// first adds v to the set and reports whether it was not there before.
func (w *watched) first(set map[versionOf]bool, v versionOf) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	was := set[v]
	set[v] = true
	return !was
}
