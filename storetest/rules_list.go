package storetest

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/tenurelib/tenure"
)

// lister returns the store as a [tenure.Lister], or skips the test if it is not one.
func lister(t *testing.T, store *watched) tenure.Lister {
	t.Helper()
	l, ok := store.Store.(tenure.Lister)
	if !ok {
		t.Skipf("%T is not a tenure.Lister", store.Store)
	}
	if _, err := l.List(t.Context(), "widget", "", 1); errors.Is(err, errors.ErrUnsupported) {
		t.Skip(err)
	}
	return l
}

func listIsSortedAndCut(t *testing.T, store *watched) {
	l := lister(t, store)
	const n = 9
	all := make([]tenure.Object, n)
	for i := range n {
		id := i * 5 % n // not created in sorted order
		// All collations agree on the order of digits.
		all[id] = put(t, store, numbered(fmt.Sprint(id), i), tenure.IfAbsent())
	}
	put(t, store, named(tenure.Key{Type: "gadget", ID: "10"}, ""), tenure.IfAbsent())
	put(t, store, named(tenure.Key{Type: "widgets", ID: "11"}, ""), tenure.IfAbsent())

	want := func(after string, limit int, want []tenure.Object) {
		t.Helper()
		got, err := l.List(t.Context(), "widget", after, limit)
		call := fmt.Sprintf("List(widget, after %q, limit %d)", after, limit)
		if err != nil {
			t.Fatalf("%s: got error %q, want none", call, err)
		}
		if len(got) != len(want) {
			t.Fatalf("%s: got %d objects, want %d", call, len(got), len(want))
		}
		for i := range want {
			same(t, fmt.Sprintf("%s, object %d,", call, i), got[i], want[i])
		}
	}
	want("", 100, all)
	want("", n, all)
	want("", 2, all[:2])
	want("1", 3, all[2:5])
	want("8", 3, nil)
	remove(t, store, all[4])
	want("4", 100, all[5:])
	want("3", 1, all[5:6])
	if got, err := l.List(t.Context(), "nothing", "", 100); err != nil || len(got) != 0 {
		t.Errorf("List of a type without objects: got %d objects, error %v; want none", len(got), err)
	}
}

func pagesFitTogether(t *testing.T, store *watched) {
	l := lister(t, store)
	want := make(map[tenure.Key]bool)
	for _, key := range odd() {
		put(t, store, named(key, ""), tenure.IfAbsent())
		want[key] = key.Type == "widget"
	}
	after := ""
	for range odd() {
		page, err := l.List(t.Context(), "widget", after, 1)
		if err != nil {
			t.Fatalf("List(widget, after %q, limit 1): got error %q, want none", after, err)
		}
		if len(page) == 0 {
			break
		}
		after = page[0].Key.ID
		if !want[page[0].Key] {
			t.Errorf("a list in pages of one object yielded %q twice, or although it is not of the type", page[0].Key)
		}
		delete(want, page[0].Key)
	}
	for key, missing := range want {
		if missing {
			t.Errorf("a list in pages of one object skipped %q", key)
		}
	}
}

func listYieldsEveryObject(t *testing.T, store *watched) {
	lister(t, store)
	const n = 300
	want := make(map[tenure.Key]tenure.Object)
	for i := range n {
		obj := put(t, store, numbered(fmt.Sprintf("%03d", i), i), tenure.IfAbsent())
		want[obj.Key] = obj
	}
	for obj, err := range tenure.List(t.Context(), store.Store, "widget") {
		if err != nil {
			t.Fatalf("tenure.List(widget): got error %q, want none", err)
		}
		written, ok := want[obj.Key]
		if !ok {
			t.Fatalf("tenure.List(widget) yielded %s twice, or although it does not exist", obj.Key)
		}
		same(t, "tenure.List's", obj, written)
		delete(want, obj.Key)
	}
	if len(want) != 0 {
		t.Errorf("tenure.List(widget) left out %d of %d objects", len(want), n)
	}
}

func listWithEndedContext(t *testing.T, store *watched) {
	l := lister(t, store)
	for _, ctx := range ended(t) {
		_, err := l.List(ctx, "widget", "", 10)
		wantError(t, "List after the end of its context", err, ctx.Err())
		if err != nil && !strings.Contains(err.Error(), "widget") {
			t.Errorf("List after the end of its context: got error %q, want the type in it", err)
		}
	}
}

func invalidListIsRefused(t *testing.T, store *watched) {
	l := lister(t, store)
	put(t, store, numbered("a", 1), tenure.IfAbsent())
	for _, call := range []struct {
		objectType, after string
		limit             int
	}{
		{"widget", "", 0}, {"widget", "", -1}, {"", "", 1}, {"wid\x00get", "", 1}, {"wid\xffget", "", 1}, {"widget", "a\x00", 1}, {"widget", "a\xff", 1},
	} {
		if _, err := l.List(t.Context(), call.objectType, call.after, call.limit); !errors.Is(err, tenure.ErrInvalid) {
			t.Errorf("List(%q, after %q, limit %d): got error %v, want ErrInvalid", call.objectType, call.after, call.limit, err)
		}
	}
}
