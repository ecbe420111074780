package storetest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
)

const (
	// becomesLive is how long a watch may take to become live. A store that listens on a connection
	// of its own has to open the connection first.
	becomesLive = 5 * time.Second

	// wakesWithin is how long a hint may take on a busy machine.
	wakesWithin = 10 * time.Second
)

// watcher is a store under test that is also a Watcher, and either a Notifier or a store whose
// subscriptions deliver every change.
type watcher struct {
	*watched
	tenure.Watcher
}

// watching skips the test if the store is not a [tenure.Watcher].
func watching(t *testing.T, store *watched) watcher {
	t.Helper()
	w, ok := asWatcher(store)
	if !ok {
		t.Skipf("%T is not a tenure.Watcher", store.Store)
	}
	if _, ok := store.Store.(tenure.Notifier); !ok {
		w.changes(t, widget("a"))
	}
	return w
}

func asWatcher(store *watched) (watcher, bool) {
	w, ok := store.Store.(tenure.Watcher)
	return watcher{store, w}, ok
}

// DeleteAndWake is the store's, or its DeleteIf if that wakes.
func (w watcher) DeleteAndWake(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
	if notifier, ok := w.Store.(tenure.Notifier); ok {
		return notifier.DeleteAndWake(ctx, key, cond)
	}
	return w.DeleteIf(ctx, key, cond)
}

// changes watches a key until the test ends, and fails the test if the watch does not deliver
// changes.
func (w watcher) changes(t *testing.T, key tenure.Key) tenure.ChangeSubscription {
	t.Helper()
	watch, ok := w.begun(t, key).(tenure.ChangeSubscription)
	if !ok {
		t.Fatalf("%T is a tenure.Watcher but not a tenure.Notifier, and its watches are not tenure.ChangeSubscriptions: nothing wakes them", w.Store)
	}
	return watch
}

// begun watches a key until the test ends.
func (w watcher) begun(t *testing.T, key tenure.Key) tenure.Subscription {
	watch := w.Watch(key)
	t.Cleanup(watch.Stop)
	return watch
}

func (w watcher) removeAndWake(t *testing.T, obj tenure.Object) {
	t.Helper()
	// A store that waits for its watches to receive would wait forever: nothing
	// receives here.
	ctx, cancel := context.WithTimeout(t.Context(), wakesWithin)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- w.DeleteAndWake(ctx, obj.Key, tenure.IfVersion(obj.Version)) }()
	select {
	case err := <-done:
		if err != nil {
			t.Fatalf("DeleteAndWake(%s, version %d): got error %q, want none", obj.Key, obj.Version, err)
		}
	case <-time.After(2 * wakesWithin):
		t.Fatalf("DeleteAndWake(%s) has not returned", obj.Key)
	}
}

// awaitHints deletes objects until the watch is live or receives a hint. It skips the
// test if neither happens.
func (w watcher) awaitHints(t *testing.T, key tenure.Key, watch tenure.Subscription) {
	t.Helper()
	for end := time.Now().Add(becomesLive); !watch.Live(); {
		if time.Now().After(end) {
			t.Skipf("the watch was not live within %v, so a program with this store has to poll", becomesLive)
		}
		w.removeAndWake(t, put(t, w.watched, tenure.Object{Key: key}, tenure.Unconditional()))
		select {
		case <-watch.C(): // a hint of the deletion, or of the watch being live now
			return
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// drain takes pending hints. A hint that comes late or twice can still be mistaken for
// the next one, which is why the rules delete several times.
func drain(watches ...tenure.Subscription) {
	for _, watch := range watches {
		select {
		case <-watch.C():
		default:
		}
	}
}

// woken fails the test if a watch receives no hint. Callers delete everything before
// they call it, because a hint has to wait until it is received.
func woken(t *testing.T, what string, watches ...tenure.Subscription) {
	t.Helper()
	timeout := time.After(wakesWithin)
	for i, watch := range watches {
		select {
		case <-watch.C():
		case <-timeout:
			if !watch.Live() {
				t.Skip("the watch is no longer live")
			}
			t.Fatalf("%s: watch %d of %d, which is live, has not received within %v", what, i+1, len(watches), wakesWithin)
		}
	}
}

func deletionWakes(t *testing.T, store *watched) {
	w := watching(t, store)
	keys := append(odd(), widget("a"), widget(strings.Repeat("long 長い ", 40)))
	watches := make([]tenure.Subscription, len(keys))
	for i, key := range keys {
		watches[i] = w.begun(t, key) // before the object exists
	}
	w.awaitHints(t, widget("a"), watches[len(keys)-2])
	var late []tenure.Subscription
	for round := range 3 {
		var objects []tenure.Object
		for i, key := range keys {
			objects = append(objects, put(t, store, tenure.Object{Key: key, Name: store.nameOr(fmt.Sprint(i)), Payload: []byte("1")}, tenure.IfAbsent()))
		}
		for _, key := range keys {
			late = append(late, w.begun(t, key))
		}
		drain(watches...)
		drain(late...)
		for _, obj := range objects {
			w.removeAndWake(t, obj)
		}
		for i, key := range keys {
			woken(t, fmt.Sprintf("round %d, %q", round, key), watches[i])
		}
		woken(t, "begun while the objects were there", late...)
	}
}

func wakeWakes(t *testing.T, store *watched) {
	w := watching(t, store)
	notifier, ok := store.Store.(tenure.Notifier)
	if !ok {
		t.Skipf("%T is not a tenure.Notifier", store.Store)
	}
	watches := []tenure.Subscription{w.begun(t, widget("a")), w.begun(t, widget("a"))}
	w.awaitHints(t, widget("a"), watches[0])
	for _, what := range []string{"of a missing object", "of an object"} {
		for range 3 {
			drain(watches...)
			if err := notifier.Wake(t.Context(), widget("a")); err != nil {
				t.Fatalf("Wake %s: got error %q, want none", what, err)
			}
			woken(t, "Wake "+what, watches...)
		}
		put(t, store, numbered("a", 1), tenure.Unconditional())
	}
	for _, invalid := range []tenure.Key{{}, widget("nul \x00")} {
		wantError(t, "Wake of an invalid key", notifier.Wake(t.Context(), invalid), tenure.ErrInvalid)
	}
}

// isChange reports whether a change is to the state that Get returns.
func isChange(change tenure.Change, obj tenure.Object, err error) bool {
	if errors.Is(err, tenure.ErrNotFound) {
		return change.Deleted
	}
	return err == nil && !change.Deleted && change.Object.Version == obj.Version
}

func changesArrive(t *testing.T, store *watched) {
	began := time.Now()
	w := watching(t, store)
	if _, ok := w.begun(t, widget("a")).(tenure.ChangeSubscription); !ok {
		t.Skipf("the watches of %T are not tenure.ChangeSubscriptions", store.Store)
	}
	arrives := func(what string, watch tenure.ChangeSubscription, key tenure.Key, after time.Time) {
		t.Helper()
		obj, err := store.Get(t.Context(), key)
		for end := time.After(wakesWithin); ; {
			change, ok := watch.Last()
			if ok && isChange(change, obj, err) {
				if change.Arrived.Before(after) || change.Arrived.After(time.Now()) {
					t.Errorf("%s, %s: arrived %v after the call had begun, %v before now", what, key, change.Arrived.Sub(after), time.Since(change.Arrived))
				}
				if change.Object.Key != key {
					t.Errorf("%s: the change is of %s, want %s", what, change.Object.Key, key)
				}
				if err == nil {
					same(t, what, change.Object, obj)
				}
				return
			}
			select {
			case <-watch.C():
			case <-end:
				t.Fatalf("%s, %s: the watch has not delivered the change within %v; it is live: %v; its last change has version %d, deleted %v, any %v", what, key, wakesWithin, watch.Live(), change.Object.Version, change.Deleted, ok)
			}
		}
	}
	keys := append(odd(), widget("a"), widget(strings.Repeat("long 長い ", 40)))
	var watches []tenure.ChangeSubscription
	for _, key := range keys {
		watches = append(watches, w.changes(t, key))
	}
	for i, watch := range watches {
		arrives("there is no object", watch, keys[i], began)
	}
	for round := range 3 {
		began := time.Now()
		var objects []tenure.Object
		for i, key := range keys {
			objects = append(objects, put(t, store, tenure.Object{Key: key, Name: store.nameOr(fmt.Sprint(i)), Labels: map[string]string{"a": "b"}, Payload: []byte("1")}, tenure.IfAbsent()))
			arrives("after a create", watches[i], key, began)
		}
		for i, key := range keys {
			arrives("begun afterwards", w.changes(t, key), key, began)
			objects[i] = put(t, store, tenure.Object{Key: key, Payload: []byte("1")}, tenure.IfVersion(objects[i].Version))
			arrives("after a write of the same payload", watches[i], key, began)
			objects[i] = put(t, store, tenure.Object{Key: key, Payload: fmt.Append(nil, round)}, tenure.Unconditional())
		}
		for i, key := range keys { // only the last of several changes counts
			arrives("after a write", watches[i], key, began)
			remove(t, store, objects[i])
			arrives("after a deletion", watches[i], key, began)
		}
	}
}

func watchIsStoppedTwice(t *testing.T, store *watched) {
	w := watching(t, store)
	stays := []tenure.Subscription{w.begun(t, widget("a"))}
	w.Watch(widget("a")).Stop() // perhaps before it is live
	w.awaitHints(t, widget("a"), stays[0])
	for range 3 {
		stopped := []tenure.Subscription{w.Watch(widget("a")), w.Watch(widget("a"))}
		stays = append(stays, w.begun(t, widget("a")))
		together(8, func(i int) { stopped[i%2].Stop() })
		stopped[0].Stop()
		obj := put(t, store, numbered("a", 1), tenure.IfAbsent())
		drain(stays...)
		w.removeAndWake(t, obj)
		woken(t, "after other watches were stopped", stays...)
		stopped[1].Stop()
		stopped[1].Live()
	}
}

func deleteAndWakeIsDeleteIf(t *testing.T, store *watched) {
	w := watching(t, store)
	deleted := func(ctx context.Context, what string, key tenure.Key, version int64, want error) {
		t.Helper()
		err := w.DeleteAndWake(ctx, key, tenure.IfVersion(version))
		wantError(t, "DeleteAndWake "+what, err, want)
		if err != nil && !strings.Contains(err.Error(), key.String()) {
			t.Errorf("DeleteAndWake %s: got error %q, want %q in it", what, err, key)
		}
	}
	ctx := t.Context()
	deleted(ctx, "of a missing object", widget("none"), 1, tenure.ErrNotFound)
	for _, invalid := range []tenure.Key{{}, {Type: "widget"}, {ID: "a"}, widget("nul \x00"), widget("not UTF-8 \xff")} {
		deleted(ctx, "of an invalid key", invalid, 1, tenure.ErrInvalid)
	}

	var last int64
	for n := range 3 {
		obj := put(t, store, numbered("a", n), tenure.IfAbsent())
		for _, version := range []int64{obj.Version + 1, obj.Version + 1000, last} {
			if version == 0 { // the first round has no previous version
				continue
			}
			deleted(ctx, "at another version", obj.Key, version, &objects.Conflict{ID: objects.ID(obj.Key), Wanted: version, Current: obj.Version})
		}
		for _, version := range []int64{0, -1} {
			deleted(ctx, fmt.Sprint("at version ", version), obj.Key, version, tenure.ErrInvalid)
		}
		for _, ctx := range ended(t) {
			deleted(ctx, "after the end of its context", obj.Key, obj.Version, ctx.Err())
			deleted(ctx, "at version 0 after the end of its context", obj.Key, 0, tenure.ErrInvalid)
		}
		same(t, "after deletions that failed,", get(t, store, obj.Key), obj)

		errs := make([]error, 8)
		together(len(errs), func(i int) { errs[i] = w.DeleteAndWake(ctx, obj.Key, tenure.IfVersion(obj.Version)) })
		first := winner(t, errs)
		for i, err := range errs {
			if i != first && !errors.Is(err, tenure.ErrNotFound) && !errors.Is(err, tenure.ErrConflict) {
				t.Errorf("DeleteAndWake of an object that another call deletes: got error %q, want ErrNotFound or ErrConflict", err)
			}
		}
		getFails(t, store, obj.Key, tenure.ErrNotFound)
		deleted(ctx, "once more", obj.Key, obj.Version, tenure.ErrNotFound)
		last = obj.Version // the watched store checks that the next one's version is greater
	}
}

// fencedWatcher returns the fenced store, which must still be able to wake.
func fencedWatcher(t *testing.T, store *watched, term *tenure.Term) watcher {
	t.Helper()
	fence := fenced(t, store, term)
	w, ok := asWatcher(fence)
	_, notifies := store.Store.(tenure.Notifier)
	if _, still := fence.Store.(tenure.Notifier); !ok || notifies && !still {
		t.Fatalf("%T is a tenure.Watcher and perhaps a tenure.Notifier, but its fenced store %T is not: deletions through it wake no watch", store.Store, fence.Store)
	}
	return w
}

func fencedDeletionWakes(t *testing.T, store *watched) {
	lease := fencing(t, store, "holder")
	watches := []tenure.Subscription{watching(t, store).begun(t, widget("a"))}

	term := begin(t, lease)
	f := fencedWatcher(t, store, term)
	watches = append(watches, f.begun(t, widget("a")))
	obj := put(t, f, numbered("a", 1), tenure.IfAbsent())
	version := obj.Version + 1
	wantError(t, "DeleteAndWake at another version", f.DeleteAndWake(t.Context(), obj.Key, tenure.IfVersion(version)),
		&objects.Conflict{ID: objects.ID(obj.Key), Wanted: version, Current: obj.Version})
	f.removeAndWake(t, obj)
	getFails(t, store, obj.Key, tenure.ErrNotFound)

	record := get(t, store, term.Key())
	if err := f.DeleteAndWake(t.Context(), record.Key, tenure.IfVersion(record.Version)); !errors.Is(err, tenure.ErrInvalid) {
		t.Errorf("DeleteAndWake of the lease's own object: got error %v, want ErrInvalid", err)
	}
	same(t, "after a deletion through the fence,", get(t, store, record.Key), record)

	obj = put(t, f, numbered("a", 2), tenure.IfAbsent())
	if err := lease.Release(t.Context(), term); err != nil {
		t.Fatalf("release: got error %q, want none", err)
	}
	for _, version := range []int64{obj.Version, obj.Version + 1} {
		if err := f.DeleteAndWake(t.Context(), obj.Key, tenure.IfVersion(version)); !errors.Is(err, tenure.ErrLost) {
			t.Errorf("DeleteAndWake(version %d) after the term: got error %v, want ErrLost", version, err)
		}
	}
	same(t, "after the term,", get(t, store, obj.Key), obj)

	f = fencedWatcher(t, store, begin(t, lease))
	f.awaitHints(t, obj.Key, watches[0])
	for n := range 3 {
		obj := put(t, f, numbered("a", n), tenure.Unconditional())
		drain(watches...)
		f.removeAndWake(t, obj)
		woken(t, "deleted through a fence", watches...)
	}
}
