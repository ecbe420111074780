package record_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/tenurelib/tenure/internal/record"
	"github.com/tenurelib/tenure/internal/testkit/golden"
)

func TestThePayloadAndTheLabelsOfALeaseStayAsTheyAre(t *testing.T) {
	const term, earlier = "0b9c2f6e-7c39-4f3e-9d4e-2f1f4a5b6c7d", "5e1d0c4b-3a29-4817-8605-f4e3d2c1b0a9"
	at := time.Date(2026, 1, 2, 3, 4, 5, 678e6, time.UTC)
	payload := record.Payload{Holder: "replica-a", AcquiredAtMS: at.UnixMilli(), Term: term, TTLMS: 30000}
	object := record.Object{Payload: payload.Encode(), Version: 12, UpdatedAt: at.Add(time.Minute), Labels: map[string]string{"address": "10.0.0.1:8080"}}
	before := record.Holding{
		Holder: "replica-b", Term: earlier, Version: 7, TTL: 30 * time.Second, AcquiredAt: at.Add(-time.Hour), RenewedAt: at.Add(-time.Minute),
		Labels: map[string]string{"address": "10.0.0.2:8080"},
	}
	offered := record.Payload{Holder: "replica-b", AcquiredAtMS: at.UnixMilli(), Term: term, TTLMS: 5000, Offered: true}
	toAnybody := offered
	toAnybody.Holder = ""

	var got strings.Builder
	line := func(what, text string) { fmt.Fprintf(&got, "%-25s %s\n", what, text) }
	line("payload of a term", string(payload.Encode()))
	byWitness := payload
	byWitness.Witness = "6f1e0d2c3b4a59687786958493a2b1c0"
	line("payload under a witness", string(byWitness.Encode()))
	line("payload of an offer", string(offered.Encode()))
	line("payload of an offer", string(toAnybody.Encode()))
	for _, labels := range []map[string]string{
		object.WithRequest(term, ""), object.WithRequest(term, "replica-b"),
		record.WithUnconfirmed(object.Labels, term, []record.Holding{before}),
		object.AsResumed(term), record.WithSeal(object.Labels, term), record.WithRunning(object.Labels, term, at),
		record.WithLineage(object.Labels, term, "7GQX2LJ4MZVKTWNB5RHDCEYAU3", "1767323040123456"),
	} {
		for name, text := range labels {
			if strings.HasPrefix(name, record.Reserved) {
				line("label "+name, text)
			}
		}
	}
	golden.Compare(t, "lease", got.String())
}
