package oteltenure_test

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/oteltenure"
	"github.com/tenurelib/tenure/route"
	"github.com/tenurelib/tenure/storetest"
)

// routed returns the endpoint of a process whose route to a lease that no replica holds has refused a request.
func routed(t *testing.T) *replica {
	t.Helper()
	endpoint, _ := observeRoute(t)
	return endpoint
}

func observeRoute(t *testing.T) (*replica, metric.Registration) {
	t.Helper()
	var trace *route.Trace
	endpoint, registration := observe(t, func(m metric.Meter, zone attribute.KeyValue) (r metric.Registration, err error) {
		trace, r, err = oteltenure.ObserveRoute(m, zone)
		return r, err
	})
	lease, err := tenure.NewLease(storetest.NewMem(), tenure.LeaseConfig{
		Key: tenure.Key{Type: "lease", ID: "api"}, Labels: map[string]string{"address": "127.0.0.1:1"},
	})
	must(t, err)
	rt, err := route.Lease(lease, route.Config{Trace: trace, MaxWait: 10 * time.Millisecond})
	must(t, err)
	w := httptest.NewRecorder()
	if rt.ServeHTTP(w, httptest.NewRequest("POST", "/", nil)); w.Code != http.StatusServiceUnavailable {
		t.Errorf("got status %d", w.Code)
	}
	must(t, rt.Shutdown(t.Context(), &http.Server{}))
	return endpoint, registration
}

func TestAScrapeReportsARoute(t *testing.T) {
	endpoint, registration := observeRoute(t)
	const zone = `\{.*zone="north"\} `
	outcome := func(name string) string {
		return `tenure_route_requests_total\{.*tenure_outcome="` + name + `",zone="north"\} `
	}
	expect(t, endpoint, "after a refusal", true,
		outcome("refused")+"1", outcome("answered")+"0", outcome("unknown")+"0", "tenure_route_sends_total"+zone+"0",
		"tenure_route_duration_seconds_count"+zone+"1", "tenure_route_wait_duration_seconds_count"+zone+"1",
		"tenure_route_waiting"+zone+"0", "tenure_route_running"+zone+"0", "tenure_route_keys"+zone+"1")
	must(t, registration.Unregister())
	expect(t, endpoint, "at last", false, "tenure_route_keys.*")
}
