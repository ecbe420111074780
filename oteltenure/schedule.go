package oteltenure

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/schedule"
)

// ObserveSchedule reports the metrics of the schedule with a key, with the given attributes, until the registration that
// it returns is unregistered. Each collection reads the schedule's state in the store, so every replica reports the
// same, and so can a program that does not run the schedule. A collection that can't read it within 5 s reports nothing
// of it. ObserveSchedule fails only if the meter does, and with [tenure.ErrInvalid] if the meter or the store is nil.
func ObserveSchedule(meter metric.Meter, store tenure.Store, key tenure.Key, attributes ...attribute.KeyValue) (metric.Registration, error) {
	i, err := instrumentsOf(meter, store, "store")
	if err != nil {
		return nil, err
	}
	lastDone := i.secondsGauge("tenure.schedule.last_done", "Unix time of the last slot that is done; before the first one, the time when the schedule was first run.")
	next := i.secondsGauge("tenure.schedule.next", "Unix time of the first slot that is not done; absent if none follows.")
	with := metric.WithAttributes(append(attributes, attribute.String("tenure.schedule", key.String()))...)
	return i.observe(func(o metric.Observer) {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		state, err := schedule.ReadState(ctx, store, key)
		if err != nil {
			return
		}
		o.ObserveFloat64(lastDone, unixSeconds(state.Done), with)
		if !state.Next.IsZero() {
			o.ObserveFloat64(next, unixSeconds(state.Next), with)
		}
	})
}
