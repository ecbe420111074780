package oteltenure

import (
	"context"
	"errors"
	"fmt"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/shards"
)

// ObserveShards reports the metrics of a [shards.Shards], with the given attributes, until the
// registration that it returns is unregistered. All are read from its status when they are
// collected. ObserveShards fails only if the meter does,
// and with [tenure.ErrInvalid] if one of the two is nil.
func ObserveShards(meter metric.Meter, part interface{ Status() shards.Status }, attributes ...attribute.KeyValue) (metric.Registration, error) {
	if objects.IsNil(meter) || objects.IsNil(part) {
		return nil, fmt.Errorf("oteltenure: observe: %w: the meter or the part is nil", tenure.ErrInvalid)
	}
	var errs []error
	gauge := func(name, what string) metric.Int64ObservableGauge {
		g, err := meter.Int64ObservableGauge(name, metric.WithUnit("{shard}"), metric.WithDescription(what))
		errs = append(errs, err)
		return g
	}
	counter := func(name, what string) metric.Int64ObservableCounter {
		c, err := meter.Int64ObservableCounter(name, metric.WithUnit("{shard}"), metric.WithDescription(what))
		errs = append(errs, err)
		return c
	}
	total := gauge("tenure.shards.total", "Shards that there are, for all processes.")
	owned := gauge("tenure.shards.owned", "Shards that this process has.")
	target := gauge("tenure.shards.target", "Shards that this process should have; absent until it has settled.")
	stuck := gauge("tenure.shards.stuck", "Shards whose func was told to stop more than 10 s ago and has not returned.")
	failing := gauge("tenure.shards.failing", "Shards whose func has returned by itself within the last minute.")
	claimed := counter("tenure.shards.claimed", "Shards that this process has claimed.")
	givenUp := counter("tenure.shards.given_up", "Shards that this process has freed for others, but not because it stops.")
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("oteltenure: %w", err)
	}
	with := metric.WithAttributes(attributes...)
	registration, err := meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		s := part.Status()
		kind := metric.WithAttributes(attribute.String("tenure.kind", s.Kind))
		o.ObserveInt64(total, int64(s.Count), with, kind)
		o.ObserveInt64(owned, int64(len(s.Shards)), with, kind)
		if s.Settled {
			o.ObserveInt64(target, int64(s.Share), with, kind)
		}
		o.ObserveInt64(stuck, int64(s.Stuck), with, kind)
		o.ObserveInt64(failing, int64(s.Failing), with, kind)
		o.ObserveInt64(claimed, int64(s.Claimed), with, kind)
		o.ObserveInt64(givenUp, int64(s.GivenUp), with, kind)
		return nil
	}, total, owned, target, stuck, failing, claimed, givenUp)
	if err != nil {
		return nil, fmt.Errorf("oteltenure: %w", err)
	}
	return registration, nil
}
