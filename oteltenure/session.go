package oteltenure

import (
	"context"
	"errors"
	"fmt"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/objects"
)

// ObserveSession reports the metrics of a [claims.Session], with the given attributes, until the
// registration that it returns is unregistered. All are read from the session's status when they
// are collected, so a claim costs nothing more. Two sessions of one process need attributes that
// tell them apart. ObserveSession fails only if the meter does,
// and with [tenure.ErrInvalid] if one of the two is nil.
func ObserveSession(meter metric.Meter, session interface{ Status() claims.Status }, attributes ...attribute.KeyValue) (metric.Registration, error) {
	if objects.IsNil(meter) || objects.IsNil(session) {
		return nil, fmt.Errorf("oteltenure: observe: %w: the meter or the session is nil", tenure.ErrInvalid)
	}
	var errs []error
	gauge := func(name, unit, what string) metric.Int64ObservableGauge {
		g, err := meter.Int64ObservableGauge(name, metric.WithUnit(unit), metric.WithDescription(what))
		errs = append(errs, err)
		return g
	}
	counter := func(name, unit, what string) metric.Int64ObservableCounter {
		c, err := meter.Int64ObservableCounter(name, metric.WithUnit(unit), metric.WithDescription(what))
		errs = append(errs, err)
		return c
	}
	valid := gauge("tenure.session.valid", "{session}", "1 while this process may rely on its claims, otherwise 0.")
	stuck := gauge("tenure.session.stuck", "{session}", "1 while funcs of a session that was lost run although they should have returned, otherwise 0.")
	held := gauge("tenure.claims.held", "{claim}", "Claims that this process holds.")
	running := gauge("tenure.claims.running", "{func}", "Funcs that run for claims in this process.")
	begun := counter("tenure.sessions.begun", "{session}", "Sessions that this process has begun.")
	lost := counter("tenure.sessions.lost", "{session}", "Sessions that this process has lost.")
	buried := counter("tenure.sessions.buried", "{session}", "Expired sessions of other processes that this process has buried.")
	freed := counter("tenure.claims.freed", "{row}", "Rows of sessions that were gone that this process has freed.")
	failed := counter("tenure.sweep.errors", "{error}", "Failed looks for expired sessions and their rows; all are tried again.")
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("oteltenure: %w", err)
	}
	with := metric.WithAttributes(attributes...)
	registration, err := meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		s := session.Status()
		if !s.Closing { // a shutdown is no failure, however long it takes
			o.ObserveInt64(valid, number(s.Valid), with)
		}
		o.ObserveInt64(stuck, number(s.Stuck), with)
		for _, k := range s.Kinds {
			kind := metric.WithAttributes(attribute.String("tenure.kind", k.Kind))
			o.ObserveInt64(held, int64(k.Claims), with, kind)
			o.ObserveInt64(running, int64(k.Running), with, kind)
		}
		o.ObserveInt64(begun, int64(s.Begun), with)
		o.ObserveInt64(lost, int64(s.Lost), with)
		o.ObserveInt64(buried, s.Buried, with)
		o.ObserveInt64(freed, s.Freed, with)
		o.ObserveInt64(failed, s.SweepErrors, with)
		return nil
	}, valid, stuck, held, running, begun, lost, buried, freed, failed)
	if err != nil {
		return nil, fmt.Errorf("oteltenure: %w", err)
	}
	return registration, nil
}

func number(b bool) int64 {
	if b {
		return 1
	}
	return 0
}
