package oteltenure_test

import (
	"testing"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/oteltenure"
	"github.com/tenurelib/tenure/storetest"
)

func observeSchedule(t *testing.T, store tenure.Store) (*replica, metric.Registration) {
	t.Helper()
	return observe(t, func(m metric.Meter, zone attribute.KeyValue) (metric.Registration, error) {
		return oteltenure.ObserveSchedule(m, store, tenure.Key{Type: "schedule", ID: "nightly"}, zone)
	})
}

func TestAScrapeReportsASchedule(t *testing.T) {
	store := storetest.NewMem()
	endpoint, registration := observeSchedule(t, store)
	expect(t, endpoint, "before the first run", false, "tenure_schedule.*")
	state := tenure.Object{Key: tenure.Key{Type: "schedule", ID: "nightly"}}
	for payload, next := range map[string]bool{
		`{"done":"2026-11-28T03:00:00Z","next":"2026-11-29T03:00:00Z"}`: true,
		`{"done":"2026-11-28T03:00:00Z"}`:                               false,
	} {
		state.Payload = []byte(payload)
		_, err := store.PutIf(t.Context(), state, tenure.Unconditional())
		must(t, err)
		const labels = `\{.*tenure_schedule="schedule/nightly",zone="north"\} `
		expect(t, endpoint, payload, true, "tenure_schedule_last_done_seconds"+labels+`1.7958348e\+09`)
		expect(t, endpoint, payload, next, "tenure_schedule_next_seconds"+labels+`1.7959212e\+09`)
	}
	must(t, registration.Unregister())
	expect(t, endpoint, "at last", false, "tenure_schedule.*")
}
