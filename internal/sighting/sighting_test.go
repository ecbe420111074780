package sighting

import (
	"bytes"
	"encoding/json"
	"maps"
	"math"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/tenurelib/tenure/internal/record"
)

// Whatever a record contains, a standby can act on what it reads, and the lease is not held
// forever.
func FuzzARecordOfAnyBytesIsReadAsOneThatExpires(f *testing.F) {
	mine := record.Payload{Holder: "replica-1", AcquiredAtMS: 1700000000000, Term: "f47ac10b-58cc-4372-a567-0e02b2c3d479", TTLMS: 30000}
	for _, payload := range []string{
		string(mine.Encode()),
		``, `null`, `{}`, `[]`, `"x"`, `7`, "\xff\x00", `{"holder":"a"`, `{"holder":"a"}{"holder":"b"}`, "\xef\xbb\xbf{}",
		`{"holder":"x","acquired_at_ms":1}`,
		`{"holder":7}`, `{"holder":null,"term":null,"ttl_ms":null}`, `{"HOLDER":"a","Term":"t"}`, `{"holder":"a","holder":"b"}`,
		`{"holder":"\ud800","term":"\u0000"}`, "{\"holder\":\"\xff\"}",
		`{"ttl_ms":0}`, `{"ttl_ms":-1}`, `{"ttl_ms":1.5}`, `{"ttl_ms":1e3}`, `{"ttl_ms":"30000"}`, `{"ttl_ms":1}`,
		`{"term":"t","ttl_ms":9223372036854}`, `{"term":"t","ttl_ms":9223372036855}`, `{"ttl_ms":9223372036854775807}`, `{"ttl_ms":9223372036854775808}`,
		`{"acquired_at_ms":-9223372036854775808}`, `{"acquired_at_ms":9223372036854775807}`,
		`{"holder":"a","term":"t","ttl_ms":1500,"offered":true,"shoe_size":{"eu":[44]}}`,
	} {
		f.Add([]byte(payload), int64(30*time.Second), int64(time.Second))
	}
	f.Add([]byte(`{"term":"t","ttl_ms":30000}`), int64(10*time.Millisecond), int64(math.MaxInt64))
	f.Add([]byte(`{"term":"t","ttl_ms":30000}`), int64(10*time.Millisecond), int64(math.MinInt64))
	f.Fuzz(func(t *testing.T, payload []byte, own, age int64) {
		ownTTL := time.Duration(own)
		if ownTTL < 10*time.Millisecond || ownTTL > record.LongestTTL {
			t.Skip("no lease has that TTL")
		}
		before := bytes.Clone(payload)
		obj := record.Object{Labels: map[string]string{"a": "b"}, Payload: payload, Version: 7,
			UpdatedAt: time.UnixMilli(5), Age: time.Duration(age)}
		h, err := record.Read(obj, ownTTL)
		if !bytes.Equal(payload, before) {
			t.Error("the payload was changed")
		}
		if h.Version != obj.Version || h.Age != obj.Age || !h.RenewedAt.Equal(obj.UpdatedAt) || !maps.Equal(h.Labels, obj.Labels) {
			t.Errorf("got %+v, want what the store says of %+v", h, obj)
		}
		if h.Holder == "" && !h.Offered || !utf8.ValidString(h.Holder) || !utf8.ValidString(h.Term) {
			t.Errorf("holder %q, term %q: want text", h.Holder, h.Term)
		}
		if h.TTL <= 0 || h.TTL > max(ownTTL, record.LongestTTL) {
			t.Errorf("TTL %v: want one that a holder can have", h.TTL)
		}
		if err != nil && (h.Holder != record.Unknown || h.Term != "" || h.TTL != ownTTL || !h.AcquiredAt.IsZero()) {
			t.Errorf("cannot be decoded (%v), and is read as %+v all the same", err, h)
		}
		if err == nil && !json.Valid(payload) {
			t.Errorf("read as %+v, and is no JSON", h)
		}

		var none *Sighting
		left, _ := none.CanExpireIn(obj, h, false)
		if left > h.TTL || h.Age <= 0 && left != h.TTL {
			t.Errorf("can expire in %v, its TTL being %v and its age %v", left, h.TTL, h.Age)
		}
		if far := left + time.Hour; left > 0 && far < left {
			t.Errorf("can expire in %v, longer than any timer can wait", left)
		}

		if err == nil && h.TTL%time.Millisecond == 0 {
			again := record.Payload{Holder: h.Holder, Term: h.Term, TTLMS: h.TTL.Milliseconds()}
			if !h.AcquiredAt.IsZero() {
				again.AcquiredAtMS = h.AcquiredAt.UnixMilli()
			}
			obj.Payload = again.Encode()
			got, err := record.Read(obj, ownTTL)
			if err != nil || got.Holder != h.Holder || got.Term != h.Term || got.TTL != h.TTL || !got.AcquiredAt.Equal(h.AcquiredAt) {
				t.Errorf("rewritten as %s, it is read as %+v, %v; want %+v", obj.Payload, got, err, h)
			}
		}
	})
}
