package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
)

// widget returns the key of an object of the type that most rules use.
func widget(id string) tenure.Key { return tenure.Key{Type: "widget", ID: id} }

// numbered returns an object whose content, except for the name, is derived from n.
func numbered(id string, n int) tenure.Object {
	text := fmt.Sprint(n)
	return tenure.Object{
		Key:     widget(id),
		Labels:  map[string]string{"n": text},
		Payload: []byte(text),
	}
}

// named returns an object with a name.
func named(key tenure.Key, name string) tenure.Object {
	return tenure.Object{Key: key, Name: name, Payload: []byte("of " + key.ID)}
}

func get(t *testing.T, store tenure.Store, key tenure.Key) tenure.Object {
	t.Helper()
	obj, err := store.Get(t.Context(), key)
	if err != nil {
		t.Fatalf("Get(%s): got error %q, want none", key, err)
	}
	return obj
}

func put(t *testing.T, store tenure.Store, obj tenure.Object, cond tenure.WriteCondition) tenure.Object {
	t.Helper()
	written, err := store.PutIf(t.Context(), obj, cond)
	if err != nil {
		t.Fatalf("PutIf(%s, %s): got error %q, want none", obj.Key, cond, err)
	}
	return written
}

func remove(t *testing.T, store tenure.Store, obj tenure.Object) {
	t.Helper()
	if err := store.DeleteIf(t.Context(), obj.Key, tenure.IfVersion(obj.Version)); err != nil {
		t.Fatalf("DeleteIf(%s, version %d): got error %q, want none", obj.Key, obj.Version, err)
	}
}

func getFails(t *testing.T, store tenure.Store, key tenure.Key, want error) {
	t.Helper()
	_, err := store.Get(t.Context(), key)
	wantError(t, fmt.Sprintf("Get(%s)", key), err, want)
}

func putFails(t *testing.T, store tenure.Store, obj tenure.Object, cond tenure.WriteCondition, want error) {
	t.Helper()
	_, err := store.PutIf(t.Context(), obj, cond)
	wantError(t, fmt.Sprintf("PutIf(%s, %s)", obj.Key, cond), err, want)
}

func deleteFails(t *testing.T, store tenure.Store, key tenure.Key, version int64, want error) {
	t.Helper()
	err := store.DeleteIf(t.Context(), key, tenure.IfVersion(version))
	wantError(t, fmt.Sprintf("DeleteIf(%s, version %d)", key, version), err, want)
}

// kinds are the errors that a caller may test for.
var kinds = []struct {
	err  error
	name string
}{
	{tenure.ErrNotFound, "tenure.ErrNotFound"},
	{tenure.ErrExists, "tenure.ErrExists"},
	{tenure.ErrConflict, "tenure.ErrConflict"},
	{tenure.ErrTaken, "tenure.ErrTaken"},
	{tenure.ErrInvalid, "tenure.ErrInvalid"},
	{tenure.ErrSetup, "tenure.ErrSetup"},
	{context.Canceled, "context.Canceled"},
	{context.DeadlineExceeded, "context.DeadlineExceeded"},
}

// kind names the errors that err is, according to [errors.Is].
func kind(err error) string {
	var names []string
	for _, k := range kinds {
		if errors.Is(err, k.err) {
			names = append(names, k.name)
		}
	}
	if names == nil {
		return "none of the contract's"
	}
	return strings.Join(names, " and ")
}

// wantError fails the test if err is not of the wanted kind or is of another kind as
// well; if an [*objects.Conflict] is wanted, err must also be equal to it.
func wantError(t *testing.T, call string, err, want error) {
	t.Helper()
	if err == nil {
		t.Errorf("%s: got no error, want %s", call, kind(want))
		return
	}
	if kind(err) != kind(want) {
		t.Errorf("%s: got error %q, by errors.Is %s; want %s", call, err, kind(err), kind(want))
		return
	}
	var got, conflict *objects.Conflict
	if !errors.As(want, &conflict) {
		return
	}
	if !errors.As(err, &got) {
		t.Errorf("%s: got error %q, which has no *objects.Conflict: use WriteCondition.Check; want %+v", call, err, *conflict)
	} else if *got != *conflict {
		t.Errorf("%s: got *objects.Conflict %+v, want %+v", call, *got, *conflict)
	}
}

// same fails the test if the object differs from the wanted one. It ignores the age,
// which always differs.
func same(t *testing.T, what string, got, want tenure.Object) {
	t.Helper()
	if got.Version != want.Version || !got.CreatedAt.Equal(want.CreatedAt) || !got.UpdatedAt.Equal(want.UpdatedAt) {
		t.Errorf("%s %s:\n got version %d, created %v, updated %v\nwant version %d, created %v, updated %v", what, want.Key,
			got.Version, got.CreatedAt, got.UpdatedAt, want.Version, want.CreatedAt, want.UpdatedAt)
	}
	sameContent(t, what, got, want)
}

// sameContent fails the test if the parts of the object that a caller writes differ.
func sameContent(t *testing.T, what string, got, want tenure.Object) {
	t.Helper()
	if got.Key != want.Key || got.Name != want.Name || !maps.Equal(got.Labels, want.Labels) || !bytes.Equal(got.Payload, want.Payload) {
		t.Errorf("%s %s:\n got %s\nwant %s", what, want.Key, content(got), content(want))
	}
}

// content formats the parts of an object that a caller writes. It abbreviates a long
// payload to its beginning and end.
func content(obj tenure.Object) string {
	payload := fmt.Sprintf("%q", obj.Payload)
	if n := len(obj.Payload); n > 64 {
		payload = fmt.Sprintf("%q...%q", obj.Payload[:32], obj.Payload[n-32:])
	}
	return fmt.Sprintf("%q named %q, labels %q, payload %s (%d bytes)", obj.Key, obj.Name, obj.Labels, payload, len(obj.Payload))
}

// together calls do concurrently with 0 to n-1 and returns when all calls have returned.
func together(n int, do func(i int)) {
	var wg sync.WaitGroup
	start := make(chan struct{})
	for i := range n {
		wg.Go(func() {
			<-start
			do(i)
		})
	}
	close(start)
	wg.Wait()
}

// winner returns which one of the concurrent calls succeeded.
func winner(t *testing.T, errs []error) int {
	t.Helper()
	var winners []int
	for i, err := range errs {
		if err == nil {
			winners = append(winners, i)
		}
	}
	if len(winners) != 1 {
		t.Fatalf("of %d concurrent calls %d succeeded, want 1; the errors of the others:\n%v", len(errs), len(winners), errors.Join(errs...))
	}
	return winners[0]
}
