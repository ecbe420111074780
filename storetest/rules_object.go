package storetest

import (
	"bytes"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/tenurelib/tenure"
)

func missingIsNotFound(t *testing.T, store *watched) {
	getFails(t, store, widget("none"), tenure.ErrNotFound)
	deleteFails(t, store, widget("none"), 1, tenure.ErrNotFound)

	gone := put(t, store, numbered("gone", 1), tenure.IfAbsent())
	remove(t, store, gone)
	getFails(t, store, gone.Key, tenure.ErrNotFound)
	deleteFails(t, store, gone.Key, gone.Version, tenure.ErrNotFound)
}

func readsBackAsWritten(t *testing.T, store *watched) {
	obj := tenure.Object{
		Key:     widget("a"),
		Name:    store.nameOr("the first"),
		Labels:  map[string]string{"colour": "red", "size": "10"},
		Payload: []byte("a payload"),
	}
	created := put(t, store, obj, tenure.IfAbsent())
	sameContent(t, "PutIf's answer", created, obj)
	if created.Version <= 0 {
		t.Errorf("version: got %d, want more than 0", created.Version)
	}
	if created.CreatedAt.IsZero() || created.UpdatedAt.Before(created.CreatedAt) {
		t.Errorf("times: got created %v, updated %v; want both, in this order", created.CreatedAt, created.UpdatedAt)
	}
	same(t, "Get after the create of", get(t, store, obj.Key), created)

	obj.Name, obj.Labels, obj.Payload = store.nameOr("renamed"), map[string]string{"colour": "blue"}, []byte("another")
	replaced := put(t, store, obj, tenure.IfVersion(created.Version))
	sameContent(t, "PutIf's answer", replaced, obj)
	same(t, "Get after the replacement of", get(t, store, obj.Key), replaced)
}

func versionsAndTimesAreTheStores(t *testing.T, store *watched) {
	obj := numbered("a", 1)
	obj.Version = 1 << 62
	obj.CreatedAt = time.Date(1999, 12, 31, 23, 59, 59, 0, time.UTC)
	obj.UpdatedAt = obj.CreatedAt.AddDate(500, 0, 0)
	obj.Age = time.Hour
	for _, cond := range []tenure.WriteCondition{tenure.IfAbsent(), tenure.Unconditional()} {
		put(t, store, obj, cond)
		got := get(t, store, obj.Key)
		if got.Version >= obj.Version || got.CreatedAt.Equal(obj.CreatedAt) || got.UpdatedAt.Equal(obj.UpdatedAt) || got.Age >= obj.Age {
			t.Errorf("after PutIf(%s, %s) the object has the caller's version or times: version %d, created %v, updated %v, age %v",
				obj.Key, cond, got.Version, got.CreatedAt, got.UpdatedAt, got.Age)
		}
	}
}

func ageCountsFromTheLastWrite(t *testing.T, store *watched) {
	const resolution = 2 * time.Millisecond
	if store.Traits().Clockless {
		written := put(t, store, numbered("a", 0), tenure.IfAbsent())
		time.Sleep(3 * time.Millisecond) // so that it has an age
		if got := get(t, store, written.Key).Age; written.Age != 0 || got != 0 {
			t.Errorf("age in a store that is Clockless: got %v from the write and %v later, want 0", written.Age, got)
		}
		return
	}
	cond := tenure.IfAbsent()
	for n := range 3 {
		sent := time.Now()
		written := put(t, store, numbered("a", n), cond)
		answered := time.Now()
		if most := answered.Sub(sent); written.Age < -resolution || written.Age > most {
			t.Errorf("age in the answer of a write: got %v, want 0 to %v", written.Age, most)
		}
		for range 3 {
			time.Sleep(3 * time.Millisecond) // so that the age grows
			asked := time.Now()
			got := get(t, store, written.Key)
			least, most := asked.Sub(answered)-resolution, time.Since(sent)
			if got.Age < least || got.Age > most {
				t.Errorf("age of an object that was written %v to %v ago: got %v", least+resolution, most, got.Age)
			}
		}
		cond = tenure.IfVersion(written.Version)
	}
}

func replacedKeepsCreatedAt(t *testing.T, store *watched) {
	created := put(t, store, numbered("a", 0), tenure.IfAbsent())
	time.Sleep(3 * time.Millisecond) // otherwise the times would be equal anyway
	last := created
	for n, cond := range []tenure.WriteCondition{tenure.IfVersion(created.Version), tenure.Unconditional()} {
		put(t, store, numbered("a", n), cond)
		got := get(t, store, created.Key)
		if !got.CreatedAt.Equal(created.CreatedAt) {
			t.Errorf("CreatedAt after PutIf(%s, %s): got %v, want %v", got.Key, cond, got.CreatedAt, created.CreatedAt)
		}
		if got.UpdatedAt.Before(last.UpdatedAt) {
			t.Errorf("UpdatedAt after PutIf(%s, %s): got %v, want no earlier than %v", got.Key, cond, got.UpdatedAt, last.UpdatedAt)
		}
		last = got
	}
	if !last.UpdatedAt.After(created.UpdatedAt) {
		t.Errorf("UpdatedAt 3 ms after the create: got %v, want later than %v", last.UpdatedAt, created.UpdatedAt)
	}
}

func storedIsNobodysMemory(t *testing.T, store *watched) {
	want := numbered("a", 1)
	spoil := func(obj tenure.Object) {
		obj.Payload[0] = 'X'
		obj.Labels["n"] = "spoilt"
	}
	input := clone(want)
	answer := put(t, store, input, tenure.IfAbsent())
	spoil(input)
	sameContent(t, "after a change of PutIf's argument,", get(t, store, want.Key), want)
	spoil(answer)
	sameContent(t, "after a change of PutIf's answer,", get(t, store, want.Key), want)
	spoil(get(t, store, want.Key))
	sameContent(t, "after a change of Get's answer,", get(t, store, want.Key), want)
}

// leastPayload is the length that the payloads of every store may have.
const leastPayload = 64 << 10

func payloadIsKept(t *testing.T, store *watched) {
	every := make([]byte, 256)
	for i := range every {
		every[i] = byte(i)
	}
	for i, payload := range [][]byte{
		nil,
		{},
		{0},
		[]byte(`{"json": "\u0000 \\ '' %s $1"}`),
		[]byte(`\x00`), // looks like a bytea
		every,
		bytes.Repeat(every, leastPayload/len(every)),
		bytes.Repeat(every, tenure.MaxPayload/len(every)),
	} {
		obj := tenure.Object{Key: widget(fmt.Sprintf("payload-%d", i)), Payload: payload}
		written, err := store.PutIf(t.Context(), obj, tenure.IfAbsent())
		if len(payload) > leastPayload && errors.Is(err, tenure.ErrInvalid) { // the server's limit is lower
			getFails(t, store, obj.Key, tenure.ErrNotFound)
			continue
		}
		if err != nil {
			t.Fatalf("PutIf of a payload of %d bytes: got error %q, want none", len(payload), err)
		}
		sameContent(t, "PutIf's answer", written, obj)
		sameContent(t, "Get of", get(t, store, obj.Key), obj)
	}
}

func labelsAreKept(t *testing.T, store *watched) {
	for i, labels := range []map[string]string{
		nil,
		{},
		{"empty": ""},
		{"quotes": `it's "quoted"`, `"`: `'`},
		{"escapes": "a\\b\tc\nd", "json": `{"a": [1]}`, "html": "<a href='x'>&amp;</a>"},
		{"unicode": "grüße 日本 🙂 \u2028", "键": "值"},
		{"case": "lower", "Case": "upper", "space ": "trailing"},
	} {
		obj := tenure.Object{Key: widget(fmt.Sprintf("labels-%d", i)), Labels: labels}
		sameContent(t, "PutIf's answer", put(t, store, obj, tenure.IfAbsent()), obj)
		sameContent(t, "Get of", get(t, store, obj.Key), obj)
	}
}

// odd returns keys that a careless store confuses. No two have the same ID, because
// a store may require IDs alone to be unique.
func odd() []tenure.Key {
	keys := []tenure.Key{
		{Type: "a", ID: "b/c"},
		{Type: "a/b", ID: "c"},
		{Type: `wid"get`, ID: "of a quoted type"},
		{Type: "Widget", ID: "of an upper-case type"},
	}
	for _, id := range []string{
		"id", "ID", " id", "id ", "%", "_", "i_", "'", `"`, "'; DROP TABLE objects; --", `\`, `\n`, "\n", "$1", "?",
		"\u00e9", "e\u0301", "日本", "🙂", "NULL", "0", "00", "0x30", ".", "..",
	} {
		keys = append(keys, widget(id))
	}
	return keys
}

func keysStayApart(t *testing.T, store *watched) {
	var objects []tenure.Object
	for _, key := range odd() {
		objects = append(objects, put(t, store, tenure.Object{Key: key, Name: store.nameOr(key.ID), Payload: []byte(key.String())}, tenure.IfAbsent()))
	}
	for _, obj := range objects {
		same(t, "Get of", get(t, store, obj.Key), obj)
	}
	for _, obj := range objects {
		remove(t, store, obj)
		getFails(t, store, obj.Key, tenure.ErrNotFound)
	}
}

func sameIDOfAnotherType(t *testing.T, store *watched) {
	one := put(t, store, tenure.Object{Key: tenure.Key{Type: "widget", ID: "a"}, Payload: []byte("one")}, tenure.IfAbsent())
	key := tenure.Key{Type: "gadget", ID: "a"}
	other, err := store.PutIf(t.Context(), tenure.Object{Key: key, Payload: []byte("other")}, tenure.IfAbsent())
	switch {
	case errors.Is(err, tenure.ErrTaken):
		getFails(t, store, key, tenure.ErrNotFound)
	case err != nil:
		t.Errorf("PutIf(%s, %s) beside %s: got error %q, want none", key, tenure.IfAbsent(), one.Key, err)
	default:
		same(t, "Get of", get(t, store, key), other)
	}
	same(t, "Get of", get(t, store, one.Key), one)
}
