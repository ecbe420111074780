package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tenurelib/tenure"
)

// ended returns a context that was cancelled and one whose deadline passed.
func ended(t *testing.T) []context.Context {
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	late, cancel := context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
	t.Cleanup(cancel)
	return []context.Context{cancelled, late}
}

func endedContextIsTheCause(t *testing.T, store *watched) {
	obj := put(t, store, numbered("a", 1), tenure.IfAbsent())
	for _, ctx := range ended(t) {
		_, err := store.Get(ctx, obj.Key)
		wantError(t, "Get after the end of its context", err, ctx.Err())
		for _, cond := range []tenure.WriteCondition{tenure.IfAbsent(), tenure.IfVersion(obj.Version), tenure.Unconditional()} {
			_, err := store.PutIf(ctx, numbered("b", 1), cond)
			wantError(t, fmt.Sprintf("PutIf(%s) after the end of its context", cond), err, ctx.Err())
		}
		err = store.DeleteIf(ctx, obj.Key, tenure.IfVersion(obj.Version))
		wantError(t, "DeleteIf after the end of its context", err, ctx.Err())

		written := put(t, store, numbered("c", 1), tenure.Unconditional())
		same(t, "Get after calls whose context had ended,", get(t, store, written.Key), written)
	}
}

func cancelledWriteIsNotHalf(t *testing.T, store *watched) {
	// The type is one that no other rule uses: the last write may still land while the
	// next rule is tested on the same database.
	key := tenure.Key{Type: "cancelled widget", ID: "a"}
	long := func(n int) tenure.Object {
		obj := numbered("a", n)
		obj.Key = key
		obj.Name = store.nameOr(obj.Labels["n"])
		obj.Payload = bytes.Repeat(obj.Payload, 1000)
		return obj
	}
	put(t, store, long(0), tenure.IfAbsent())
	for n := range 40 {
		ctx, cancel := context.WithCancel(t.Context())
		timer := time.AfterFunc(rand.N(time.Millisecond), cancel)
		if _, err := store.PutIf(ctx, long(n), tenure.Unconditional()); err != nil {
			wantError(t, "PutIf that is cancelled midway", err, context.Canceled)
		}
		timer.Stop()
		cancel()
		// It may be any of the writes: a cancelled one may land later.
		got := get(t, store, key)
		var whose int
		if _, err := fmt.Sscan(got.Labels["n"], &whose); err != nil {
			t.Fatalf("the label after a cancelled write: got %q, want a number", got.Labels["n"])
		}
		sameContent(t, "after a cancelled write,", got, long(whose))
		if t.Failed() {
			return
		}
	}
}

func errorNamesOperationAndKey(t *testing.T, store *watched) {
	names := func(call string, key tenure.Key, err error) {
		t.Helper()
		if err == nil {
			t.Errorf("%s: got no error, want one", call)
		} else if !strings.Contains(err.Error(), key.String()) {
			t.Errorf("%s: got error %q, want %q in it", call, err, key)
		}
	}
	putOf := func(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) error {
		_, err := store.PutIf(ctx, obj, cond)
		return err
	}
	ctx := t.Context()
	a, b, none := put(t, store, named(widget("a"), store.nameOr("name")), tenure.IfAbsent()), widget("b"), widget("none")
	_, err := store.Get(ctx, none)
	names("Get of a missing object", none, err)
	names("DeleteIf of a missing object", none, store.DeleteIf(ctx, none, tenure.IfVersion(1)))
	names("IfVersion of a missing object", none, putOf(ctx, named(none, ""), tenure.IfVersion(1)))
	names("IfAbsent of an object that exists", a.Key, putOf(ctx, a, tenure.IfAbsent()))
	names("IfVersion at another version", a.Key, putOf(ctx, a, tenure.IfVersion(a.Version+1)))
	names("DeleteIf at another version", a.Key, store.DeleteIf(ctx, a.Key, tenure.IfVersion(a.Version+1)))
	names("PutIf under a taken name", b, putOf(ctx, named(b, "name"), tenure.IfAbsent()))

	// The key and the cause are the same, so only the operation distinguishes the texts.
	for _, ctx := range ended(t) {
		_, err := store.Get(ctx, a.Key)
		texts := make(map[string]bool)
		for call, err := range map[string]error{
			"Get":      err,
			"PutIf":    putOf(ctx, a, tenure.Unconditional()),
			"DeleteIf": store.DeleteIf(ctx, a.Key, tenure.IfVersion(a.Version)),
		} {
			names(call+" after the end of its context", a.Key, err)
			texts[fmt.Sprint(err)] = true
		}
		if len(texts) != 3 {
			t.Errorf("errors of Get, PutIf and DeleteIf after the end of their context: got %q, want three texts", slices.Collect(maps.Keys(texts)))
		}
	}
}

func invalidIsRefused(t *testing.T, store *watched) {
	valid := numbered("a", 1)
	big := valid
	big.Payload = make([]byte, tenure.MaxPayload+1)

	type call struct {
		what string
		do   func(ctx context.Context) error
	}
	putOf := func(obj tenure.Object, cond tenure.WriteCondition) func(ctx context.Context) error {
		return func(ctx context.Context) error {
			_, err := store.PutIf(ctx, obj, cond)
			return err
		}
	}
	deleteOf := func(key tenure.Key, version int64) func(ctx context.Context) error {
		return func(ctx context.Context) error { return store.DeleteIf(ctx, key, tenure.IfVersion(version)) }
	}
	calls := []call{
		{"PutIf of a payload of MaxPayload+1 bytes", putOf(big, tenure.IfAbsent())},
		{"PutIf with IfVersion(0)", putOf(valid, tenure.IfVersion(0))},
		{"PutIf with IfVersion(-1)", putOf(valid, tenure.IfVersion(-1))},
		{"DeleteIf at version 0", deleteOf(valid.Key, 0)},
		{"DeleteIf at version -1", deleteOf(valid.Key, -1)},
	}
	for _, text := range []string{"nul \x00", "not UTF-8 \xff"} {
		withName, withLabel, withValue := valid, valid, valid
		withName.Name = text
		withLabel.Labels = map[string]string{text: "value"}
		withValue.Labels = map[string]string{"label": text}
		calls = append(calls,
			call{fmt.Sprintf("PutIf of the name %q", text), putOf(withName, tenure.IfAbsent())},
			call{fmt.Sprintf("PutIf of a label %q", text), putOf(withLabel, tenure.IfAbsent())},
			call{fmt.Sprintf("PutIf of a label with value %q", text), putOf(withValue, tenure.IfAbsent())})
	}
	for _, key := range []tenure.Key{
		{Type: "", ID: "a"}, {Type: "widget", ID: ""}, {},
		{Type: "nul \x00", ID: "a"}, {Type: "widget", ID: "nul \x00"},
		{Type: "not UTF-8 \xff", ID: "a"}, {Type: "widget", ID: "not UTF-8 \xff"},
	} {
		calls = append(calls,
			call{fmt.Sprintf("Get(%q)", key), func(ctx context.Context) error { _, err := store.Get(ctx, key); return err }},
			call{fmt.Sprintf("PutIf(%q)", key), putOf(tenure.Object{Key: key}, tenure.IfAbsent())},
			call{fmt.Sprintf("DeleteIf(%q)", key), deleteOf(key, 1)})
	}

	for _, call := range calls {
		wantError(t, call.what, call.do(t.Context()), tenure.ErrInvalid)
		for _, ctx := range ended(t) {
			wantError(t, call.what+" after the end of its context", call.do(ctx), tenure.ErrInvalid)
		}
	}
	if _, err := store.Get(t.Context(), valid.Key); !errors.Is(err, tenure.ErrNotFound) {
		t.Errorf("Get(%s) after invalid writes of it: got error %v, want ErrNotFound", valid.Key, err)
	}
}
