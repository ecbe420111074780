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
			defer stop()
			var metrics metricdata.ResourceMetrics
			if err := reader.Collect(ctx, &metrics); err != nil {
				return err
			}
			for _, m := range metrics.ScopeMetrics[0].Metrics {
				if m.Name == "tenure.is_holder" {
					fmt.Println(m.Name, m.Data.(metricdata.Gauge[int64]).DataPoints[0].Value)
				}
			}
			return nil
		},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	if err := coordinator.Run(run); err != nil {
		fmt.Println(err)
	}
	// Output: tenure.is_holder 1
}
