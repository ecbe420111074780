package oteltenure_test

import (
	"testing"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/tenurelib/tenure/oteltenure"
	"github.com/tenurelib/tenure/shards"
)

// part has the status that a test gives it.
type part struct{ status shards.Status }

func (p *part) Status() shards.Status { return p.status }

func observeShards(t *testing.T, p *part) (*replica, metric.Registration) {
	t.Helper()
	return observe(t, func(m metric.Meter, zone attribute.KeyValue) (metric.Registration, error) {
		return oteltenure.ObserveShards(m, p, zone)
	})
}

func TestAScrapeReportsShards(t *testing.T) {
	p := &part{shards.Status{Kind: "partition", Count: 64, Share: 3, Shards: make([]shards.ShardStatus, 2), Claimed: 7, GivenUp: 5}}
	endpoint, registration := observeShards(t, p)
	const labels = `\{.*tenure_kind="partition",zone="north"\} `
	expect(t, endpoint, "while it settles", true,
		"tenure_shards_total"+labels+"64", "tenure_shards_owned"+labels+"2", "tenure_shards_stuck"+labels+"0", "tenure_shards_failing"+labels+"0",
		"tenure_shards_claimed_total"+labels+"7", "tenure_shards_given_up_total"+labels+"5")
	expect(t, endpoint, "while it settles", false, "tenure_shards_target.*")
	p.status.Settled, p.status.Stuck, p.status.Failing = true, 1, 4
	expect(t, endpoint, "when it has settled", true,
		"tenure_shards_target"+labels+"3", "tenure_shards_stuck"+labels+"1", "tenure_shards_failing"+labels+"4")
	must(t, registration.Unregister())
	expect(t, endpoint, "at last", false, "tenure_shards.*")
}
