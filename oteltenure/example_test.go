package oteltenure_test

import (
	"context"
	"fmt"

	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/oteltenure"
)

// The trace that ObserveLease returns goes into the coordinator's config.
func ExampleObserveLease() {
	ctx := context.Background()
	reader := metric.NewManualReader() // in a service: an exporter, and otel.Meter
	meter := metric.NewMeterProvider(metric.WithReader(reader)).Meter("my-service")
	lease, err := tenure.NewLease(tenure.Static(), tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "sweeper"}})
	if err != nil {
		fmt.Println(err)
		return
	}
	trace, registration, err := oteltenure.ObserveLease(meter, lease)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer registration.Unregister()
	run, stop := context.WithCancel(ctx)
	coordinator, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
		Trace: trace,
		Reconcile: func(context.Context) error {
			stop() // for the example's sake
			return nil
		},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	if err := coordinator.Run(run); err != nil {
		fmt.Println(err)
		return
	}
	var metrics metricdata.ResourceMetrics
	if err := reader.Collect(ctx, &metrics); err != nil {
		fmt.Println(err)
		return
	}
	for _, m := range metrics.ScopeMetrics[0].Metrics {
		if m.Name == "tenure.terms" {
			ended := int64(0)
			for _, reason := range m.Data.(metricdata.Sum[int64]).DataPoints {
				ended += reason.Value
			}
			fmt.Println(m.Name, ended)
		}
	}
	// Output: tenure.terms 1
}
