package queuehttp

import (
	"testing"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/seconds"
	"github.com/tenurelib/tenure/internal/testkit/golden"
)

func TestTheProtocolStaysAsItIs(t *testing.T) {
	c := claims.Claim{Key: tenure.Key{Type: "jobs", ID: "7"}, Session: "0b9c2f6e-7c39-4f3e-9d4e-2f1f4a5b6c7d", Token: 1767323045678001, Attempt: 2, Row: true}
	s := &session{ID: c.Session, Term: "5e1d0c4b-3a29-4817-8605-f4e3d2c1b0a9", Token: 1767323045678000, TTL: seconds.Duration(30 * time.Second)}
	some, after := []claims.Claim{c}, seconds.Duration(1500*time.Millisecond)
	golden.Compare(t, "protocol", golden.JSON(t,
		request{Holder: "worker-a"}, answer{Session: s},
		request{Session: s, N: 8, Have: some}, answer{Tasks: []Task{{Claim: c, Payload: []byte(`{"url":"https://example.com"}`)}}},
		request{Session: s, Have: some}, answer{Ended: some},
		request{Results: []Result{{c, []byte(`"ok"`)}}},
		request{Claims: some, After: &after},
		answer{Error: "lease lost", Ended: some}))
}
