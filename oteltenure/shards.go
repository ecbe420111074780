package oteltenure

import (
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/tenurelib/tenure/shards"
)

// ObserveShards reports the metrics of a [shards.Member], with the given attributes, until the
// registration that it returns is unregistered. Each collection reads the member's status.
// ObserveShards fails only if the meter does, and with [tenure.ErrInvalid] if the meter or the
// member is nil.
func ObserveShards(meter metric.Meter, member interface{ Status() shards.Status }, attributes ...attribute.KeyValue) (metric.Registration, error) {
	const unit = "{shard}"
	i, err := instrumentsOf(meter, member, "member")
	if err != nil {
		return nil, err
	}
	total := i.gauge("tenure.shards.total", unit, "Shards that there are, for all processes.")
	owned := i.gauge("tenure.shards.owned", unit, "Shards that this process has.")
	target := i.gauge("tenure.shards.target", unit, "Shards that this process should have; absent until it has settled.")
	stuck := i.gauge("tenure.shards.stuck", unit, "Shards whose func was told to stop more than 10 s ago and has not returned.")
	failing := i.gauge("tenure.shards.failing", unit, "Shards whose func has returned by itself within the last minute.")
	claimed := i.observedCounter("tenure.shards.claimed", unit, "Shards that this process has claimed.")
	givenUp := i.observedCounter("tenure.shards.given_up", unit, "Shards that this process has freed for others, but not because it stops.")
	ofMember := metric.WithAttributes(attributes...)
	return i.observe(func(o metric.Observer) {
		s := member.Status()
		ofKind := with("tenure.kind", s.Kind)
		report := func(of metric.Int64Observable, n int) { o.ObserveInt64(of, int64(n), ofMember, ofKind) }
		report(total, s.Count)
		report(owned, len(s.Shards))
		if s.Settled {
			report(target, s.Share)
		}
		report(stuck, s.Stuck)
		report(failing, s.Failing)
		report(claimed, s.Claimed)
		report(givenUp, s.GivenUp)
	})
}
