package oteltenure

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/tenurelib/tenure"
)

// Metrics are those of one replica and one lease. All methods are safe for
// concurrent use.
type Metrics struct {
	lease        metric.MeasurementOption
	registration metric.Registration

	renewalDuration metric.Float64Histogram
	renewalErrors   metric.Int64Counter
	takeoverGap     metric.Float64Histogram
	terms           metric.Int64Counter
	drainDuration   metric.Float64Histogram

	mu          sync.Mutex
	term        *tenure.Term    // the last that began; nil: there was none
	predecessor *tenure.Holding // whose expired lease was taken over
	working     bool            // its job runs
	ended       bool            // it was counted
	trust       time.Duration   // that its acquire gave
	margin      *time.Duration  // the least trust left since the last collection; nil: no word of it
}

// New returns the metrics of a lease for this replica, with attributes of the
// caller's choice beside the lease's key. The meter reports them until Close. An
// error is the meter's.
func New(meter metric.Meter, lease *tenure.Lease, attributes ...attribute.KeyValue) (*Metrics, error) {
	set := attribute.NewSet(append([]attribute.KeyValue{attribute.String("tenure.lease", lease.Key().String())}, attributes...)...)
	m := &Metrics{lease: metric.WithAttributeSet(set)}
	var errs [9]error
	var isHolder, token metric.Int64ObservableGauge
	var margin, duration metric.Float64ObservableGauge
	isHolder, errs[0] = meter.Int64ObservableGauge("tenure.is_holder", metric.WithUnit("{holder}"),
		metric.WithDescription("1 while this replica's job runs and its trust lasts, else 0."))
	token, errs[1] = meter.Int64ObservableGauge("tenure.token", metric.WithUnit("{token}"),
		metric.WithDescription("Fencing token of this replica's last term."))
	margin, errs[2] = meter.Float64ObservableGauge("tenure.trust.margin", metric.WithUnit("s"),
		metric.WithDescription("Least trust that was left since the last collection."))
	duration, errs[8] = meter.Float64ObservableGauge("tenure.trust.duration", metric.WithUnit("s"),
		metric.WithDescription("Trust that a renewal gives: the TTL less the Margin."))
	m.renewalDuration, errs[3] = meter.Float64Histogram("tenure.renewal.duration", metric.WithUnit("s"),
		metric.WithDescription("Duration of renewals that succeeded."),
		metric.WithExplicitBucketBoundaries(.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10))
	m.renewalErrors, errs[4] = meter.Int64Counter("tenure.renewal.errors", metric.WithUnit("{error}"),
		metric.WithDescription("Renewals that failed, and were tried again."))
	m.takeoverGap, errs[5] = meter.Float64Histogram("tenure.takeover.gap", metric.WithUnit("s"),
		metric.WithDescription("Time from the last renewal of a holder that vanished until the job began here."),
		metric.WithExplicitBucketBoundaries(.1, .5, 1, 2.5, 5, 10, 20, 30, 35, 40, 60, 120, 300))
	m.terms, errs[6] = meter.Int64Counter("tenure.terms", metric.WithUnit("{term}"),
		metric.WithDescription("Terms of this replica that are over."))
	m.drainDuration, errs[7] = meter.Float64Histogram("tenure.job.drain.duration", metric.WithUnit("s"),
		metric.WithDescription("Time from when a job was told to return until it had."),
		metric.WithExplicitBucketBoundaries(.01, .05, .1, .5, 1, 2.5, 5, 7.5, 10, 30, 60, 300))
	if err := errors.Join(errs[:]...); err != nil {
		return nil, fmt.Errorf("oteltenure: %w", err)
	}
	for _, end := range ends { // a series that begins at 1 is no increase to Prometheus
		m.terms.Add(context.Background(), 0, m.lease, termEnd(end.name))
	}
	registration, err := meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		m.mu.Lock()
		defer m.mu.Unlock()
		held := int64(0)
		if m.working && m.term.Valid() {
			held = 1
		}
		o.ObserveInt64(isHolder, held, m.lease)
		if m.term == nil {
			return nil
		}
		o.ObserveInt64(token, m.term.Token(), m.lease)
		m.noteMargin(m.term.Remaining())
		if m.margin != nil {
			o.ObserveFloat64(margin, m.margin.Seconds(), m.lease)
			o.ObserveFloat64(duration, m.trust.Seconds(), m.lease)
			m.margin = nil
		}
		return nil
	}, isHolder, token, margin, duration)
	if err != nil {
		return nil, fmt.Errorf("oteltenure: %w", err)
	}
	m.registration = registration
	return m, nil
}

// Close ends the reports of what is asked at each collection: of a coordinator that
// runs no more. What was counted stays.
func (m *Metrics) Close() error { return m.registration.Unregister() }

// Trace returns what the coordinator of this replica is to be given.
func (m *Metrics) Trace() *tenure.Trace {
	ctx := context.Background()
	return &tenure.Trace{
		Acquired: func(term *tenure.Term, predecessor *tenure.Holding) {
			m.mu.Lock()
			defer m.mu.Unlock()
			m.term, m.predecessor, m.ended = term, predecessor, false
			m.trust = term.Deadline().Sub(term.AcquiredAt())
		},
		JobStarted: func(term *tenure.Term) {
			m.mu.Lock()
			m.working = true
			predecessor := m.predecessor
			m.mu.Unlock()
			if predecessor != nil {
				age := max(0, predecessor.Age) // less than 0 where the store's clock was set back
				m.takeoverGap.Record(ctx, (age + time.Since(term.AcquiredAt())).Seconds(), m.lease)
			}
		},
		Renewed: func(_ *tenure.Term, took, trustLeft time.Duration) {
			m.renewalDuration.Record(ctx, took.Seconds(), m.lease)
			m.mu.Lock()
			defer m.mu.Unlock()
			m.noteMargin(trustLeft)
		},
		RenewalFailed: func(_ *tenure.Term, err error, trustLeft time.Duration) {
			m.renewalErrors.Add(ctx, 1, m.lease, metric.WithAttributes(attribute.String("error.type", errorType(err))))
			m.mu.Lock()
			defer m.mu.Unlock()
			m.noteMargin(trustLeft)
		},
		Lost:     m.over,
		Released: m.over,
		JobEnded: func(_ *tenure.Term, _ error, took time.Duration) {
			m.drainDuration.Record(ctx, took.Seconds(), m.lease)
			m.mu.Lock()
			defer m.mu.Unlock()
			m.working = false
		},
	}
}

// noteMargin needs the mutex. Of a term that is over, or one without a lease to
// lose, there is no margin.
func (m *Metrics) noteMargin(left time.Duration) {
	if m.ended || m.term.Deadline().IsZero() {
		return
	}
	if m.margin == nil || left < *m.margin {
		m.margin = &left
	}
}

// over counts a term, once: one that was not renewed in time may be released
// after all.
func (m *Metrics) over(_ *tenure.Term, cause error) {
	m.mu.Lock()
	counted := m.ended
	m.ended = true
	m.mu.Unlock()
	if !counted {
		m.terms.Add(context.Background(), 1, m.lease, termEnd(reason(cause)))
	}
}

func termEnd(reason string) metric.MeasurementOption {
	return metric.WithAttributes(attribute.String("tenure.term.end", reason))
}

// other is what OpenTelemetry calls that for which there is no name.
const other = "_OTHER"

// ends are the reasons of a term's end. The first that fits counts: what ended a
// job or failed a check may wrap any error.
var ends = []struct {
	cause error
	name  string
}{
	{tenure.ErrJobEnded, "job_ended"},
	{tenure.ErrUnhealthy, "unhealthy"},
	{tenure.ErrResigned, "resigned"},
	{tenure.ErrShutdown, "shutdown"},
	{tenure.ErrDeadline, "deadline"},
	{tenure.ErrLost, "lost"},
}

func reason(cause error) string {
	for _, end := range ends {
		if errors.Is(cause, end.cause) {
			return end.name
		}
	}
	return other
}

func errorType(err error) string {
	switch {
	case errors.Is(err, tenure.ErrUnhealthy):
		return "unhealthy"
	case errors.Is(err, tenure.ErrSetup):
		return "setup"
	case errors.Is(err, tenure.ErrConflict):
		return "conflict"
	case errors.Is(err, context.DeadlineExceeded):
		return "timeout"
	default:
		return other
	}
}
