package claims_test

import (
	"testing"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/testkit/golden"
)

const formatSession = "0b9c2f6e-7c39-4f3e-9d4e-2f1f4a5b6c7d"

func TestAClaimInJSONStaysAsItIs(t *testing.T) {
	golden.Compare(t, "claim", golden.JSON(t,
		claims.Claim{Key: tenure.Key{Type: "tenant", ID: "acme"}, Session: formatSession, Token: 1767323045678000},
		claims.Claim{Key: tenure.Key{Type: "jobs", ID: "7"}, Session: formatSession, Token: 1767323045678001, Attempt: 2, Row: true},
		claims.Claim{Key: tenure.Key{Type: "a/b%", ID: "c/d%"}, Session: formatSession, Token: 1}))
}

func TestTheKeyOfASessionStaysAsItIs(t *testing.T) {
	golden.Compare(t, "session", tenure.Key{Type: objects.SessionType, ID: formatSession}.String()+"\n")
}

func TestTheStatusInJSONStaysAsItIs(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 678e6, time.UTC)
	golden.Compare(t, "status", golden.JSON(t,
		claims.Status{
			ID: formatSession, Holder: "replica-a", Labels: map[string]string{"address": "10.0.0.1:8080"}, Valid: true, Closing: true,
			Since: at, RenewedAt: at.Add(time.Minute), TTL: 30 * time.Second, TrustLeft: 24500 * time.Millisecond, Stuck: true, LastError: "connection refused",
			Kinds: []claims.KindStatus{{Kind: "tenant", Claims: 3, Running: 1}}, Begun: 2, Lost: 1, Removed: 4, Freed: 500, SweepErrors: 6,
		},
		claims.Status{Holder: "replica-b", TTL: 30 * time.Second, Kinds: []claims.KindStatus{}}))
}
