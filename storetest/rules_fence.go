package storetest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/tenurelib/tenure"
)

// fencing returns a lease of the store. It skips the test if the store is not a
// [tenure.Fencer].
func fencing(t *testing.T, store *watched, holder string) *tenure.Lease {
	t.Helper()
	fencer, ok := store.Store.(tenure.Fencer)
	if !ok {
		t.Skipf("%T is not a tenure.Fencer", store.Store)
	}
	lease, err := tenure.NewLease(store.Store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "fence"}, Holder: holder, TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := fencer.Fence(nil); errors.Is(err, errors.ErrUnsupported) {
		t.Skip(err)
	}
	return lease
}

func begin(t *testing.T, lease *tenure.Lease) *tenure.Term {
	t.Helper()
	term, err := lease.AcquireOrSteal(t.Context())
	if err != nil {
		t.Fatalf("acquire: got error %q, want none", err)
	}
	return term
}

// fenced returns the fenced store, whose answers are checked like the store's.
func fenced(t *testing.T, store *watched, term *tenure.Term) *watched {
	t.Helper()
	fenced, err := tenure.Fence(store.Store, term)
	if err != nil {
		t.Fatalf("Fence: got error %q, want none", err)
	}
	return watch(t, fenced)
}

func fenceLetsTermThrough(t *testing.T, store *watched) {
	lease := fencing(t, store, "holder")
	term := begin(t, lease)
	f := fenced(t, store, term)
	got, want := f.Traits(), store.Traits()
	if got.Clockless != want.Clockless || got.Nameless != want.Nameless || got.Alone != want.Alone || (got.Join == nil) != (want.Join == nil) {
		t.Errorf("Traits of the fenced store: got %+v, want %+v", got, want)
	}
	for i := range 3 {
		obj := put(t, f, numbered("a", i), tenure.IfAbsent())
		same(t, "fenced create, then", get(t, f, obj.Key), obj)
		putFails(t, f, numbered("a", i), tenure.IfAbsent(), tenure.ErrExists)
		old := obj
		obj = put(t, f, numbered("a", i+10), tenure.IfVersion(obj.Version))
		putFails(t, f, numbered("a", i), tenure.IfVersion(old.Version), tenure.ErrConflict)
		obj = put(t, f, numbered("a", i+20), tenure.Unconditional())
		deleteFails(t, f, obj.Key, old.Version, tenure.ErrConflict)
		remove(t, f, obj)
		deleteFails(t, f, obj.Key, obj.Version, tenure.ErrNotFound)
		put(t, f, numbered("b", i), tenure.Unconditional())
		if err := lease.Renew(t.Context(), term); err != nil {
			t.Fatalf("renewal: got error %q, want none", err)
		}
	}
}

func fenceRefuses(t *testing.T, store *watched) {
	lease := fencing(t, store, "holder")
	for _, none := range []*tenure.Term{nil, {}} {
		if _, err := store.Store.(tenure.Fencer).Fence(none); !errors.Is(err, tenure.ErrInvalid) {
			t.Errorf("Fence of a nil term: got error %v, want ErrInvalid", err)
		}
	}
	term := begin(t, lease)
	f := fenced(t, store, term)
	if twice, ok := f.Store.(tenure.Fencer); ok {
		if _, err := twice.Fence(term); !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("Fence of a fenced store: got error %v, want ErrUnsupported", err)
		}
	}
	obj := get(t, store, term.Key())
	if _, err := f.PutIf(t.Context(), obj, tenure.IfVersion(obj.Version)); !errors.Is(err, tenure.ErrInvalid) {
		t.Errorf("PutIf of the lease's own object: got error %v, want ErrInvalid", err)
	}
	if err := f.DeleteIf(t.Context(), obj.Key, tenure.IfVersion(obj.Version)); !errors.Is(err, tenure.ErrInvalid) {
		t.Errorf("DeleteIf of the lease's own object: got error %v, want ErrInvalid", err)
	}
	same(t, "after writes through the fence,", get(t, store, obj.Key), obj)
	if !term.Valid() {
		t.Error("the rejected write ended the term")
	}
}

func fenceHoldsBack(t *testing.T, store *watched) {
	for how, lose := range map[string]func(lease *tenure.Lease, term *tenure.Term) error{
		"released": func(lease *tenure.Lease, term *tenure.Term) error {
			return lease.Release(context.Background(), term)
		},
		"released and acquired by another": func(lease *tenure.Lease, term *tenure.Term) error {
			if err := lease.Release(context.Background(), term); err != nil {
				return err
			}
			_, err := fencing(t, store, "another").AcquireOrSteal(context.Background())
			return err
		},
		"stolen": func(_ *tenure.Lease, term *tenure.Term) error {
			obj, err := store.Get(context.Background(), term.Key())
			if err != nil {
				return err
			}
			obj.Payload = []byte(`{"holder":"thief","term":"another","ttl_ms":1000}`)
			_, err = store.PutIf(context.Background(), obj, tenure.IfVersion(obj.Version))
			return err
		},
	} {
		lease := fencing(t, store, "holder")
		term := begin(t, lease)
		f := fenced(t, store, term)
		obj := put(t, f, numbered("a", 1), tenure.Unconditional())
		if err := lose(lease, term); err != nil {
			t.Fatalf("%s: got error %q, want none", how, err)
		}
		for _, cond := range []tenure.WriteCondition{
			tenure.IfAbsent(), tenure.IfVersion(obj.Version), tenure.IfVersion(obj.Version + 1), tenure.Unconditional(),
		} {
			if _, err := f.PutIf(t.Context(), numbered("a", 2), cond); !errors.Is(err, tenure.ErrLost) {
				t.Errorf("%s: PutIf(%s) of an object that exists: got error %v, want ErrLost", how, cond, err)
			}
			if _, err := f.PutIf(t.Context(), numbered("none", 2), cond); !errors.Is(err, tenure.ErrLost) {
				t.Errorf("%s: PutIf(%s) of an object that does not: got error %v, want ErrLost", how, cond, err)
			}
		}
		for _, version := range []int64{obj.Version, obj.Version + 1} {
			if err := f.DeleteIf(t.Context(), obj.Key, tenure.IfVersion(version)); !errors.Is(err, tenure.ErrLost) {
				t.Errorf("%s: DeleteIf(version %d): got error %v, want ErrLost", how, version, err)
			}
		}
		same(t, how+", then", get(t, store, obj.Key), obj)
		getFails(t, store, widget("none"), tenure.ErrNotFound)
		if now, err := store.Get(t.Context(), term.Key()); err == nil {
			remove(t, store, now)
		}
	}
}

func fenceIsAtomic(t *testing.T, store *watched) {
	lease := fencing(t, store, "holder")
	for round := range 20 {
		fencedRound(t, store, lease, fmt.Sprint("round", round))
	}
}

// fencedRound releases a lease while writers use its term, and checks that none of
// their writes lands afterwards.
func fencedRound(t *testing.T, store *watched, lease *tenure.Lease, name string) {
	const writers, writes = 4, 25
	term := begin(t, lease)
	f := fenced(t, store, term)
	keyOf := func(w int) tenure.Key { return widget(fmt.Sprint(name, ".", w)) }
	ctx, cancel := context.WithCancel(t.Context())
	var all, first sync.WaitGroup
	defer all.Wait()
	defer cancel()
	first.Add(writers)
	for w := range writers {
		all.Go(func() {
			begun := sync.OnceFunc(first.Done)
			defer begun()
			for n := range writes {
				_, err := f.PutIf(ctx, numbered(keyOf(w).ID, n), tenure.Unconditional())
				begun()
				switch {
				case errors.Is(err, tenure.ErrLost) || ctx.Err() != nil:
					return
				case err != nil:
					t.Errorf("fenced write: got error %q, want none or ErrLost", err)
					return
				}
			}
		})
	}
	first.Wait()
	if err := lease.Release(t.Context(), term); err != nil {
		t.Fatalf("release: got error %q, want none", err)
	}
	// From here on no write of the term may land.
	before := make([]tenure.Object, writers)
	for w := range writers {
		before[w] = get(t, store, keyOf(w))
	}
	all.Wait()
	for _, obj := range before {
		if now := get(t, store, obj.Key); now.Version != obj.Version {
			t.Fatalf("a write of the term landed after its release: %s went from version %d to %d", obj.Key, obj.Version, now.Version)
		}
	}
}
