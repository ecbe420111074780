package oteltenure

import (
	"context"
	"sync/atomic"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/tenurelib/tenure/route"
)

// ObserveRoute reports the metrics of a [route.Route], with the given attributes. They are recorded by the trace that it
// returns: set it in the [route.Config] of one route. Unregister the registration when the route is no longer used: then the
// gauges are no longer reported, while counters and histograms keep their values. Two routes of one process need attributes
// that tell them apart. ObserveRoute fails only if the meter does, and with [tenure.ErrInvalid] if the meter is nil.
func ObserveRoute(meter metric.Meter, attributes ...attribute.KeyValue) (*route.Trace, metric.Registration, error) {
	i, err := instrumentsOf(meter, true, "route")
	if err != nil {
		return nil, nil, err
	}
	boundaries := []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30}
	requests := i.counter("tenure.route.requests", "{request}", "Requests that clients have sent to this process, by outcome.")
	sends := i.counter("tenure.route.sends", "{send}", "How often this process has sent a request to another one.")
	waited := i.secondsHistogram("tenure.route.wait.duration", "Time until a request was answered here, or sent to the process that answered it.", boundaries...)
	took := i.secondsHistogram("tenure.route.duration", "Time until a request was answered.", boundaries...)
	waiting := i.gauge("tenure.route.waiting", "{request}", "Requests that wait for an owner, or for an owner's answer.")
	running := i.gauge("tenure.route.running", "{request}", "Requests that a handler answers in this process.")
	keys := i.gauge("tenure.route.keys", "{key}", "Keys that this process remembers.")
	ofRoute := metric.WithAttributes(attributes...)
	var created atomic.Pointer[route.Route]
	registration, err := i.observe(func(o metric.Observer) {
		if rt := created.Load(); rt != nil {
			s := rt.Status()
			o.ObserveInt64(waiting, int64(s.Waiting), ofRoute)
			o.ObserveInt64(running, int64(s.Running), ofRoute)
			o.ObserveInt64(keys, int64(s.Keys), ofRoute)
		}
	})
	if err != nil {
		return nil, nil, err
	}
	ctx := context.Background()
	for _, outcome := range []string{"answered", "refused", "unknown"} { // Prometheus doesn't see an increase in a series that begins at 1
		requests.Add(ctx, 0, ofRoute, with("tenure.outcome", outcome))
	}
	return &route.Trace{Created: created.Store, Request: func(r route.Request) {
		requests.Add(ctx, 1, ofRoute, with("tenure.outcome", r.Outcome))
		sends.Add(ctx, int64(r.Sends), ofRoute)
		waited.Record(ctx, r.Waited.Seconds(), ofRoute)
		took.Record(ctx, r.Took.Seconds(), ofRoute)
	}}, registration, nil
}
