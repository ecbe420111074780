package oteltenure

import (
	"context"
	"errors"
	"fmt"
	"reflect"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/tenurelib/tenure"
)

// instruments creates the instruments of a meter. It keeps the errors for observe.
type instruments struct {
	meter    metric.Meter
	observed []metric.Observable // what observe reports
	errs     []error
}

// instrumentsOf refuses a meter or a subject that is nil.
func instrumentsOf(meter metric.Meter, subject any, name string) (*instruments, error) {
	if isNil(meter) || isNil(subject) {
		return nil, fmt.Errorf("oteltenure: observe %s: %w: the meter or the %s is nil", name, tenure.ErrInvalid, name)
	}
	return &instruments{meter: meter}, nil
}

func isNil(v any) bool {
	value := reflect.ValueOf(v)
	return !value.IsValid() || value.Kind() == reflect.Pointer && value.IsNil()
}

func (i *instruments) gauge(name, unit, description string) metric.Int64ObservableGauge {
	gauge, err := i.meter.Int64ObservableGauge(name, metric.WithUnit(unit), metric.WithDescription(description))
	i.observed, i.errs = append(i.observed, gauge), append(i.errs, err)
	return gauge
}

func (i *instruments) secondsGauge(name, description string) metric.Float64ObservableGauge {
	gauge, err := i.meter.Float64ObservableGauge(name, metric.WithUnit("s"), metric.WithDescription(description))
	i.observed, i.errs = append(i.observed, gauge), append(i.errs, err)
	return gauge
}

func (i *instruments) observedCounter(name, unit, description string) metric.Int64ObservableCounter {
	counter, err := i.meter.Int64ObservableCounter(name, metric.WithUnit(unit), metric.WithDescription(description))
	i.observed, i.errs = append(i.observed, counter), append(i.errs, err)
	return counter
}

func (i *instruments) counter(name, unit, description string) metric.Int64Counter {
	counter, err := i.meter.Int64Counter(name, metric.WithUnit(unit), metric.WithDescription(description))
	i.errs = append(i.errs, err)
	return counter
}

func (i *instruments) secondsHistogram(name, description string, boundaries ...float64) metric.Float64Histogram {
	histogram, err := i.meter.Float64Histogram(name, metric.WithUnit("s"), metric.WithDescription(description),
		metric.WithExplicitBucketBoundaries(boundaries...))
	i.errs = append(i.errs, err)
	return histogram
}

// observe calls report at each collection, until the registration is unregistered.
func (i *instruments) observe(report func(metric.Observer)) (metric.Registration, error) {
	err := errors.Join(i.errs...)
	var registration metric.Registration
	if err == nil {
		registration, err = i.meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
			report(o)
			return nil
		}, i.observed...)
	}
	if err != nil {
		return nil, fmt.Errorf("oteltenure: %w", err)
	}
	return registration, nil
}

// with returns the option that adds an attribute to a measurement.
func with(key, value string) metric.MeasurementOption {
	return metric.WithAttributes(attribute.String(key, value))
}

func number(b bool) int64 {
	if b {
		return 1
	}
	return 0
}
