package storetest

import (
	"context"
	"testing"

	"github.com/tenurelib/tenure"
)

func writeElsewhereIsRefused(t *testing.T, store *watched) {
	on, err := store.Lineage(t.Context())
	if err != nil {
		t.Fatalf("Lineage: %v", err)
	}
	if on == (tenure.Lineage{}) {
		t.Skip("the store has no lineages")
	}
	if on.Server == "" || on.Mark == "" || on.Age < 0 {
		t.Errorf("Lineage returned %+v: Server and Mark must be set", on)
	}
	if again, err := store.Lineage(t.Context()); err != nil || again.Server != on.Server || again.Mark != on.Mark || again.Age < on.Age {
		t.Errorf("Lineage returned %+v and then %+v, %v", on, again, err)
	}
	elsewhere := on.Server + "1"
	putFails(t, store, numbered("a", 1), tenure.IfAbsent().OnServer(elsewhere, 0), tenure.ErrMoved)
	getFails(t, store, widget("a"), tenure.ErrNotFound)

	first := put(t, store, numbered("a", 1), tenure.IfAbsent().OnServer(on.Server, 0))
	putFails(t, store, numbered("a", 2), tenure.IfVersion(first.Version).OnServer(elsewhere, 0), tenure.ErrMoved)
	same(t, "after a write for another server,", get(t, store, first.Key), first)

	least := first.Version + 1_000_000_000
	second := put(t, store, numbered("a", 2), tenure.IfVersion(first.Version).OnServer(on.Server, least))
	if second.Version <= least {
		t.Errorf("PutIf returned version %d, which had to be above %d", second.Version, least)
	}
	same(t, "Get of", get(t, store, first.Key), second)

	deletes := map[string]func(context.Context, tenure.Key, tenure.WriteCondition) error{"DeleteIf": store.DeleteIf}
	if notifier, ok := store.Store.(tenure.Notifier); ok {
		deletes["DeleteAndWake"] = notifier.DeleteAndWake
	}
	for name, remove := range deletes {
		err := remove(t.Context(), first.Key, tenure.IfVersion(second.Version).OnServer(elsewhere, 0))
		wantError(t, name+" on another server", err, tenure.ErrMoved)
		same(t, "after "+name+" on another server,", get(t, store, first.Key), second)
	}
	if err := store.DeleteIf(t.Context(), first.Key, tenure.IfVersion(second.Version).OnServer(on.Server, 0)); err != nil {
		t.Errorf("DeleteIf on this server: got error %q, want none", err)
	}
	getFails(t, store, first.Key, tenure.ErrNotFound)
}
