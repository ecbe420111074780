package storetest

import (
	"fmt"
	"testing"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
)

func mustCreateOverwritesNothing(t *testing.T, store *watched) {
	created := put(t, store, numbered("a", 1), tenure.IfAbsent())
	putFails(t, store, numbered("a", 2), tenure.IfAbsent(), tenure.ErrExists)
	same(t, "after a failed IfAbsent,", get(t, store, created.Key), created)
	putFails(t, store, numbered("a", 1), tenure.IfAbsent(), tenure.ErrExists) // even with the same content
	same(t, "after a failed IfAbsent,", get(t, store, created.Key), created)
}

func matchVersionWritesAtThatVersion(t *testing.T, store *watched) {
	first := put(t, store, numbered("a", 1), tenure.IfAbsent())
	second := put(t, store, numbered("a", 2), tenure.IfVersion(first.Version))
	same(t, "Get of", get(t, store, first.Key), second)

	for _, version := range []int64{first.Version, second.Version + 1} {
		putFails(t, store, numbered("a", 3), tenure.IfVersion(version),
			&objects.Conflict{ID: objects.ID(first.Key), Wanted: version, Current: second.Version})
		same(t, "after a failed IfVersion,", get(t, store, first.Key), second)
	}
	put(t, store, numbered("a", 3), tenure.IfVersion(second.Version))
}

func matchVersionCreatesNothing(t *testing.T, store *watched) {
	putFails(t, store, numbered("never", 1), tenure.IfVersion(7),
		&objects.Conflict{ID: objects.ID(widget("never")), Wanted: 7, Current: 0})
	getFails(t, store, widget("never"), tenure.ErrNotFound)

	gone := put(t, store, numbered("gone", 1), tenure.IfAbsent())
	remove(t, store, gone)
	putFails(t, store, numbered("gone", 2), tenure.IfVersion(gone.Version),
		&objects.Conflict{ID: objects.ID(gone.Key), Wanted: gone.Version, Current: 0})
	getFails(t, store, gone.Key, tenure.ErrNotFound)
}

func unconditionalCreatesAndReplaces(t *testing.T, store *watched) {
	for n := range 3 {
		written := put(t, store, numbered("a", n), tenure.Unconditional())
		sameContent(t, "PutIf's answer", written, numbered("a", n))
		same(t, "Get of", get(t, store, written.Key), written)
	}
}

func deleteIfDeletesAtThatVersion(t *testing.T, store *watched) {
	bystander := put(t, store, numbered("bystander", 1), tenure.IfAbsent())
	first := put(t, store, numbered("a", 1), tenure.IfAbsent())
	second := put(t, store, numbered("a", 2), tenure.IfVersion(first.Version))
	for _, version := range []int64{first.Version, second.Version + 1} {
		deleteFails(t, store, first.Key, version,
			&objects.Conflict{ID: objects.ID(first.Key), Wanted: version, Current: second.Version})
		same(t, "after a failed DeleteIf,", get(t, store, first.Key), second)
	}
	for _, cond := range []tenure.WriteCondition{tenure.IfAbsent(), tenure.Unconditional(), {}} {
		err := store.DeleteIf(t.Context(), first.Key, cond)
		wantError(t, fmt.Sprintf("DeleteIf(%s, %s)", first.Key, cond), err, tenure.ErrInvalid)
		same(t, "after a DeleteIf without a version,", get(t, store, first.Key), second)
	}
	remove(t, store, second)
	getFails(t, store, first.Key, tenure.ErrNotFound)
	same(t, "after the deletion of another object,", get(t, store, bystander.Key), bystander)
}

func versionsGoOnAfterDeletion(t *testing.T, store *watched) {
	// watched checks that the versions rise.
	conds := []tenure.WriteCondition{tenure.IfAbsent(), tenure.Unconditional()}
	for n := range 40 {
		created := put(t, store, numbered("a", n), conds[n%len(conds)])
		replaced := put(t, store, numbered("a", n), tenure.IfVersion(created.Version))
		remove(t, store, replaced)
	}
}

func staleVersionFails(t *testing.T, store *watched) {
	first := put(t, store, numbered("a", 1), tenure.IfAbsent())
	second := put(t, store, numbered("a", 2), tenure.IfVersion(first.Version))
	remove(t, store, second)
	life := put(t, store, numbered("a", 3), tenure.IfAbsent())
	for _, old := range []tenure.Object{first, second} {
		conflict := &objects.Conflict{ID: objects.ID(life.Key), Wanted: old.Version, Current: life.Version}
		putFails(t, store, numbered("a", 4), tenure.IfVersion(old.Version), conflict)
		deleteFails(t, store, life.Key, old.Version, conflict)
		same(t, "after a stale write,", get(t, store, life.Key), life)
	}
}
