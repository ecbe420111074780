package testkit

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
)

// RunKeysAreListed lists objects whose keys are long and contain characters that are special in
// some databases.
func RunKeysAreListed(t *testing.T, store tenure.Store) {
	t.Helper()
	kind, want := strings.Repeat("> ", 600), []string{"a", "b." + strings.Repeat("長い", 1000), "c" + strings.Repeat("*", 900), "d"}
	for _, id := range want {
		_, err := store.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: kind, ID: id}, Name: id}, tenure.IfAbsent())
		require.NoError(t, err)
	}
	for range 2 {
		var got []string
		for obj, err := range tenure.List(t.Context(), store, kind) {
			require.NoError(t, err)
			got = append(got, obj.Key.ID)
		}
		require.Equal(t, want, got)
	}
}

// RunNamesMove moves names between objects. An object must not get a name that another one has.
func RunNamesMove(t *testing.T, store FencingStore) {
	t.Helper()
	ctx := t.Context()
	a, b := tenure.Object{Key: tenure.Key{Type: "widget", ID: "a"}}, tenure.Object{Key: tenure.Key{Type: "widget", ID: "b"}}
	put := func(obj tenure.Object, name string) (tenure.Object, error) {
		obj.Name = name
		return store.PutIf(ctx, obj, tenure.Unconditional())
	}
	remove := func(obj tenure.Object) {
		t.Helper()
		is, err := store.Get(ctx, obj.Key)
		require.NoError(t, err)
		require.NoError(t, store.DeleteIf(ctx, obj.Key, tenure.IfVersion(is.Version)))
	}
	wantTaken := func(obj tenure.Object, name string) {
		t.Helper()
		_, err := put(obj, name)
		require.ErrorIs(t, err, tenure.ErrTaken)
	}
	want := func(obj tenure.Object, name string) {
		t.Helper()
		is, err := put(obj, name)
		require.NoError(t, err)
		require.Equal(t, name, is.Name)
	}
	for range 3 {
		want(a, "x")
		remove(a)
		want(a, "x") // again, by one message
		wantTaken(b, "x")
		remove(a)
		want(b, "x")
		wantTaken(a, "x") // although it had that name before its deletion
		want(a, "y")
		want(b, "z")
		want(a, "x")
		wantTaken(b, "x")
		remove(a)
		remove(b)
		want(b, "x")
		wantTaken(a, "x")
		remove(b)
	}
}

// RunNamesAreGivenOnce makes several writers give a few names to a few objects. No two objects may
// ever have the same name.
func RunNamesAreGivenOnce[S FencingStore](t *testing.T, open func() S) {
	t.Helper()
	const writers, rounds = 4, 40
	var stores []FencingStore
	for range writers { // each learns of the others' writes only from the server
		stores = append(stores, open())
	}
	ctx := t.Context()
	written := 0
	for round := range rounds {
		var all sync.WaitGroup
		for _, store := range stores {
			all.Go(func() {
				for range 3 {
					key := tenure.Key{Type: "widget", ID: fmt.Sprint(rand.N(3))}
					if rand.N(2) == 0 {
						if is, err := store.Get(ctx, key); err == nil {
							_ = store.DeleteIf(ctx, key, tenure.IfVersion(is.Version))
						}
						continue
					}
					_, _ = store.PutIf(ctx, tenure.Object{Key: key, Name: fmt.Sprint("name", rand.N(2))}, tenure.Unconditional())
				}
			})
		}
		all.Wait()
		owner := make(map[string]tenure.Key)
		for obj, err := range tenure.List(ctx, stores[0], "widget") {
			require.NoError(t, err)
			require.NotContains(t, owner, obj.Name, "round %d: %s", round, obj.Key)
			owner[obj.Name] = obj.Key
			written++
		}
	}
	require.Greater(t, written, rounds/4)
}

// RunConcurrentUpdates makes several writers, each with its own store, count in one object. No
// count may be lost.
func RunConcurrentUpdates[S FencingStore](t *testing.T, open func(i int) S) {
	t.Helper()
	key := tenure.Key{Type: "widget", ID: "a"}
	const writers, writes = 8, 25
	var all sync.WaitGroup
	var stores []FencingStore
	for i := range writers {
		stores = append(stores, open(i))
	}
	_, err := stores[0].PutIf(t.Context(), tenure.Object{Key: key, Payload: []byte("0")}, tenure.IfAbsent())
	require.NoError(t, err)
	for _, store := range stores {
		all.Go(func() {
			for range writes {
				err := Update(t.Context(), store, key, func(obj tenure.Object) (tenure.Object, error) {
					var n int
					fmt.Sscan(string(obj.Payload), &n)
					obj.Payload = fmt.Append(nil, n+1)
					return obj, nil
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	obj, err := stores[0].Get(t.Context(), key)
	require.NoError(t, err)
	require.Equal(t, fmt.Sprint(writers*writes), string(obj.Payload))
}

// Update changes an object, and starts again if another writer was faster.
func Update(ctx context.Context, store tenure.Store, key tenure.Key, change func(tenure.Object) (tenure.Object, error)) error {
	for {
		obj, err := store.Get(ctx, key)
		if err != nil {
			return err
		}
		changed, err := change(obj)
		if err != nil {
			return err
		}
		_, err = store.PutIf(ctx, changed, tenure.IfVersion(obj.Version))
		if !errors.Is(err, tenure.ErrConflict) {
			return err
		}
	}
}

// IsFailing reports whether a run has failed and none has succeeded since.
func IsFailing(r tenure.RunStats) bool { return r.LastFailure.After(r.LastSuccess) }
