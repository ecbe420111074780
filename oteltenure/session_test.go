package oteltenure_test

import (
	"errors"
	"regexp"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel/attribute"
	otelprometheus "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/metric"
	sdk "go.opentelemetry.io/otel/sdk/metric"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/oteltenure"
	"github.com/tenurelib/tenure/shards"
)

// session has the status that a test gives it.
type session struct{ status claims.Status }

func (s *session) Status() claims.Status { return s.status }

// observe returns the endpoint of a process whose metrics begin registers.
func observe(t *testing.T, begin func(metric.Meter, attribute.KeyValue) (metric.Registration, error)) (*replica, metric.Registration) {
	t.Helper()
	registry := prometheus.NewRegistry()
	exporter, err := otelprometheus.New(otelprometheus.WithRegisterer(registry))
	must(t, err)
	registration, err := begin(sdk.NewMeterProvider(sdk.WithReader(exporter)).Meter("test"), attribute.String("zone", "north"))
	must(t, err)
	return &replica{endpoint: promhttp.HandlerFor(registry, promhttp.HandlerOpts{ErrorHandling: promhttp.HTTPErrorOnError})}, registration
}

func observeSession(t *testing.T, s *session) (*replica, metric.Registration) {
	t.Helper()
	return observe(t, func(m metric.Meter, zone attribute.KeyValue) (metric.Registration, error) {
		return oteltenure.ObserveSession(m, s, zone)
	})
}

func TestAScrapeReportsASession(t *testing.T) {
	s := &session{status: claims.Status{
		Valid: true, Begun: 3, Lost: 2, Removed: 4, Freed: 500, SweepErrors: 6,
		Kinds: []claims.KindStatus{{Kind: "account", Claims: 7}, {Kind: "tenant", Claims: 1_000_000, Running: 8}},
	}}
	endpoint, registration := observeSession(t, s)
	expect := func(when string, present bool, samples ...string) {
		t.Helper()
		expect(t, endpoint, when, present, samples...)
	}
	const zone = `\{.*zone="north"\} `
	kind := func(name string) string { return `\{.*tenure_kind="` + name + `",zone="north"\} ` }
	expect("while it is valid", true,
		"tenure_session_valid"+zone+"1", "tenure_session_stuck"+zone+"0",
		"tenure_claims_held"+kind("account")+"7", "tenure_claims_held"+kind("tenant")+`1e\+06`,
		"tenure_claims_running"+kind("account")+"0", "tenure_claims_running"+kind("tenant")+"8",
		"tenure_sessions_begun_total"+zone+"3", "tenure_sessions_lost_total"+zone+"2", "tenure_sessions_removed_total"+zone+"4",
		"tenure_claims_freed_total"+zone+"500", "tenure_sweep_errors_total"+zone+"6")
	s.status.Valid, s.status.Stuck = false, true
	expect("after a loss", true, "tenure_session_valid"+zone+"0", "tenure_session_stuck"+zone+"1")
	s.status.Closing = true
	expect("while it closes", false, "tenure_session_valid.*")
	expect("while it closes", true, "tenure_sessions_lost_total"+zone+"2")
	must(t, registration.Unregister())
	expect("at last", false, "tenure_session.*", "tenure_claims.*")
}

// expect checks that a scrape has samples, or has none that match.
func expect(t *testing.T, endpoint *replica, when string, present bool, samples ...string) {
	t.Helper()
	text := endpoint.exposition(t)
	for _, sample := range samples {
		// The exporter adds the meter as labels of its own.
		if regexp.MustCompile(`(?m)^`+sample+`$`).MatchString(text) != present {
			t.Errorf("%s: exported %v, want %v: %s\n%s", when, !present, present, sample, text)
		}
	}
}

func TestWhatIsNilHasNoMetrics(t *testing.T) {
	meter := sdk.NewMeterProvider().Meter("")
	_, _, ofLease := oteltenure.ObserveLease(meter, nil)
	_, ofSession := oteltenure.ObserveSession(meter, (*claims.Session)(nil))
	_, ofShards := oteltenure.ObserveShards(meter, (*shards.Member)(nil))
	_, without := oteltenure.ObserveShards(nil, nil)
	for _, err := range []error{ofLease, ofSession, ofShards, without} {
		if !errors.Is(err, tenure.ErrInvalid) {
			t.Errorf("got %v", err)
		}
	}
}
