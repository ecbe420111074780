package oteltenure

import (
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/tenurelib/tenure/claims"
)

// ObserveSession reports the metrics of a [claims.Session], with the given attributes, until the
// registration that it returns is unregistered. Each collection reads the session's status, so a
// claim costs nothing more. Two sessions of one process need attributes that tell them apart.
// ObserveSession fails only if the meter does, and with [tenure.ErrInvalid] if the meter or the
// session is nil.
func ObserveSession(meter metric.Meter, session interface{ Status() claims.Status }, attributes ...attribute.KeyValue) (metric.Registration, error) {
	i, err := instrumentsOf(meter, session, "session")
	if err != nil {
		return nil, err
	}
	valid := i.gauge("tenure.session.valid", "{session}", "1 while this process may rely on its claims, otherwise 0.")
	stuck := i.gauge("tenure.session.stuck", "{session}", "1 while funcs of a session that was lost run although they should have returned, otherwise 0.")
	held := i.gauge("tenure.claims.held", "{claim}", "Claims that this process holds.")
	running := i.gauge("tenure.claims.running", "{func}", "Funcs that run for claims in this process.")
	begun := i.observedCounter("tenure.sessions.begun", "{session}", "Sessions that this process has begun.")
	lost := i.observedCounter("tenure.sessions.lost", "{session}", "Sessions that this process has lost.")
	removed := i.observedCounter("tenure.sessions.removed", "{session}", "Expired sessions of other processes that this process has removed.")
	freed := i.observedCounter("tenure.claims.freed", "{row}", "Rows that this process has freed because their sessions were gone.")
	failed := i.observedCounter("tenure.sweep.errors", "{error}", "Failed looks for expired sessions and their rows; each is retried.")
	ofSession := metric.WithAttributes(attributes...)
	return i.observe(func(o metric.Observer) {
		s := session.Status()
		if !s.Closing { // a shutdown is no failure, however long it takes
			o.ObserveInt64(valid, number(s.Valid), ofSession)
		}
		o.ObserveInt64(stuck, number(s.Stuck), ofSession)
		for _, kind := range s.Kinds {
			ofKind := with("tenure.kind", kind.Kind)
			o.ObserveInt64(held, int64(kind.Claims), ofSession, ofKind)
			o.ObserveInt64(running, int64(kind.Running), ofSession, ofKind)
		}
		o.ObserveInt64(begun, int64(s.Begun), ofSession)
		o.ObserveInt64(lost, int64(s.Lost), ofSession)
		o.ObserveInt64(removed, s.Removed, ofSession)
		o.ObserveInt64(freed, s.Freed, ofSession)
		o.ObserveInt64(failed, s.SweepErrors, ofSession)
	})
}
