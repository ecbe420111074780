package storetest

import (
	"errors"
	"testing"

	"github.com/tenurelib/tenure"
)

// needsNames skips the test if the store keeps no names.
func needsNames(t *testing.T, store *watched) {
	t.Helper()
	if store.Traits().Nameless {
		t.Skipf("%T is Nameless", store.Store)
	}
}

func namesAreRefused(t *testing.T, store *watched) {
	if !store.Traits().Nameless {
		t.Skipf("%T keeps names", store.Store)
	}
	a := put(t, store, named(widget("a"), ""), tenure.IfAbsent())
	for _, obj := range []tenure.Object{named(a.Key, "name"), named(widget("b"), "name")} {
		_, err := store.PutIf(t.Context(), obj, tenure.Unconditional())
		if !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("PutIf(%s) with a name: got error %v, want errors.ErrUnsupported", obj.Key, err)
		}
	}
	same(t, "after a write with a name,", get(t, store, a.Key), a)
	getFails(t, store, widget("b"), tenure.ErrNotFound)
}

func nameBelongsToOneObject(t *testing.T, store *watched) {
	needsNames(t, store)
	a := put(t, store, named(widget("a"), "taken"), tenure.IfAbsent())
	b := put(t, store, named(widget("b"), "free"), tenure.IfAbsent())

	for _, cond := range []tenure.WriteCondition{tenure.IfAbsent(), tenure.Unconditional()} {
		putFails(t, store, named(widget("c"), "taken"), cond, tenure.ErrTaken)
		getFails(t, store, widget("c"), tenure.ErrNotFound)
	}
	for _, cond := range []tenure.WriteCondition{tenure.IfVersion(b.Version), tenure.Unconditional()} {
		putFails(t, store, named(b.Key, "taken"), cond, tenure.ErrTaken)
		same(t, "after a rename to a name that is taken,", get(t, store, b.Key), b)
	}
	same(t, "after writes of others under its name,", get(t, store, a.Key), a)
	put(t, store, named(b.Key, "also free"), tenure.IfVersion(b.Version))
}

func nameIsFreeWhenLeft(t *testing.T, store *watched) {
	needsNames(t, store)
	a := put(t, store, named(widget("a"), "first"), tenure.IfAbsent())
	a = put(t, store, named(a.Key, "first"), tenure.IfVersion(a.Version))
	a = put(t, store, named(a.Key, "first"), tenure.Unconditional())

	a = put(t, store, named(a.Key, "second"), tenure.IfVersion(a.Version))
	put(t, store, named(widget("b"), "first"), tenure.IfAbsent())

	remove(t, store, a)
	put(t, store, named(widget("c"), "second"), tenure.IfAbsent())
}

func namesThatNeverCollide(t *testing.T, store *watched) {
	needsNames(t, store)
	for _, obj := range []tenure.Object{
		named(widget("a"), "name"),
		named(tenure.Key{Type: "gadget", ID: "b"}, "name"),
		named(widget("c"), "Name"),
		named(widget("d"), "name "),
		named(widget("e"), ""),
		named(widget("f"), ""),
	} {
		written := put(t, store, obj, tenure.IfAbsent())
		sameContent(t, "PutIf's answer", written, obj)
		same(t, "Get of", get(t, store, obj.Key), written)
	}
}
