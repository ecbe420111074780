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
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/reach"
)

// Metrics records the metrics of one replica and one lease. All methods are safe for
// concurrent use.
type Metrics struct {
	lease        metric.MeasurementOption
	registration metric.Registration

	renewalDuration metric.Float64Histogram
	renewalErrors   metric.Int64Counter
	acquireErrors   metric.Int64Counter
	takeoverGap     metric.Float64Histogram
	terms           metric.Int64Counter
	drainDuration   metric.Float64Histogram
	runsEnded       metric.Int64Counter

	mu          sync.Mutex
	term        *tenure.Term    // the last term that began; nil before the first
	predecessor *tenure.Holding // the holder from which an expired lease was taken over; nil if none
	working     bool            // whether its job runs
	stuck       bool            // whether its job did not return in time
	ended       bool            // whether its end was counted
	trust       time.Duration   // the trust that acquiring the lease gave
	margin      *time.Duration  // the least trust left since the last collection; nil if not observed
	runs        map[string]runTimes
}

// runTimes is when the last run of a name began, and when the last one that succeeded ended.
type runTimes struct{ start, success time.Time }

// New returns the metrics of a lease for this replica. They have the given attributes in
// addition to the lease's key. The meter reports them until Close is called. New fails
// only if the meter does, and with [tenure.ErrInvalid] if one of the two is nil.
func New(meter metric.Meter, lease *tenure.Lease, attributes ...attribute.KeyValue) (*Metrics, error) {
	if objects.IsNil(meter) || lease == nil {
		return nil, fmt.Errorf("oteltenure: new: %w: the meter or the lease is nil", tenure.ErrInvalid)
	}
	set := attribute.NewSet(append([]attribute.KeyValue{attribute.String("tenure.lease", lease.Key().String())}, attributes...)...)
	m := &Metrics{lease: metric.WithAttributeSet(set), runs: map[string]runTimes{}}
	var errs [14]error
	var isHolder, token, stuck metric.Int64ObservableGauge
	var margin, duration, lastStart, lastSuccess metric.Float64ObservableGauge
	isHolder, errs[0] = meter.Int64ObservableGauge("tenure.is_holder", metric.WithUnit("{holder}"),
		metric.WithDescription("1 while this replica's job runs and its trust lasts, otherwise 0."))
	token, errs[1] = meter.Int64ObservableGauge("tenure.token", metric.WithUnit("{token}"),
		metric.WithDescription("Fencing token of this replica's last term."))
	margin, errs[2] = meter.Float64ObservableGauge("tenure.trust.margin", metric.WithUnit("s"),
		metric.WithDescription("Least trust left since the last collection."))
	duration, errs[8] = meter.Float64ObservableGauge("tenure.trust.duration", metric.WithUnit("s"),
		metric.WithDescription("Trust that a renewal gives: the TTL minus the Margin."))
	m.renewalDuration, errs[3] = meter.Float64Histogram("tenure.renewal.duration", metric.WithUnit("s"),
		metric.WithDescription("Duration of successful renewals."),
		metric.WithExplicitBucketBoundaries(.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10))
	m.renewalErrors, errs[4] = meter.Int64Counter("tenure.renewal.errors", metric.WithUnit("{error}"),
		metric.WithDescription("Failed renewals; each is retried."))
	m.takeoverGap, errs[5] = meter.Float64Histogram("tenure.takeover.gap", metric.WithUnit("s"),
		metric.WithDescription("Time from the last renewal of a vanished holder until the job began here."),
		metric.WithExplicitBucketBoundaries(.1, .5, 1, 2.5, 5, 10, 20, 30, 35, 40, 60, 120, 300))
	m.terms, errs[6] = meter.Int64Counter("tenure.terms", metric.WithUnit("{term}"),
		metric.WithDescription("Terms of this replica that have ended."))
	m.drainDuration, errs[7] = meter.Float64Histogram("tenure.job.drain.duration", metric.WithUnit("s"),
		metric.WithDescription("Time from telling a job to return until it returned."),
		metric.WithExplicitBucketBoundaries(.01, .05, .1, .5, 1, 2.5, 5, 7.5, 10, 30, 60, 300))
	m.runsEnded, errs[9] = meter.Int64Counter("tenure.runs", metric.WithUnit("{run}"),
		metric.WithDescription("Runs of the job that have ended."))
	lastStart, errs[10] = meter.Float64ObservableGauge("tenure.run.last_start", metric.WithUnit("s"),
		metric.WithDescription("Unix time at which the last run began."))
	lastSuccess, errs[11] = meter.Float64ObservableGauge("tenure.run.last_success", metric.WithUnit("s"),
		metric.WithDescription("Unix time at which the last run that succeeded ended; 0 if none has."))
	m.acquireErrors, errs[12] = meter.Int64Counter("tenure.acquire.errors", metric.WithUnit("{error}"),
		metric.WithDescription("Attempts to acquire the lease that failed, although no other replica was seen to hold it; each is retried."))
	stuck, errs[13] = meter.Int64ObservableGauge("tenure.job.stuck", metric.WithUnit("{job}"),
		metric.WithDescription("1 while this replica's job runs although it should have returned and its lease is no longer renewed, otherwise 0."))
	if err := errors.Join(errs[:]...); err != nil {
		return nil, fmt.Errorf("oteltenure: %w", err)
	}
	for _, end := range ends { // Prometheus doesn't see an increase in a series that begins at 1
		m.terms.Add(context.Background(), 0, m.lease, termEnd(end.name))
	}
	for _, name := range []string{"setup", "conflict", "timeout", other} {
		m.acquireErrors.Add(context.Background(), 0, m.lease, ofType(name))
	}
	registration, err := meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		m.mu.Lock()
		defer m.mu.Unlock()
		held := int64(0)
		if m.working && m.term.Valid() {
			held = 1
		}
		o.ObserveInt64(isHolder, held, m.lease)
		isStuck := int64(0)
		if m.stuck {
			isStuck = 1
		}
		o.ObserveInt64(stuck, isStuck, m.lease)
		for name, run := range m.runs {
			if run.start.IsZero() { // it is a func of the job that has returned an error
				continue
			}
			o.ObserveFloat64(lastStart, unixSeconds(run.start), m.lease, runName(name))
			o.ObserveFloat64(lastSuccess, unixSeconds(run.success), m.lease, runName(name))
		}
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
	}, isHolder, token, stuck, margin, duration, lastStart, lastSuccess)
	if err != nil {
		return nil, fmt.Errorf("oteltenure: %w", err)
	}
	m.registration = registration
	return m, nil
}

// Close stops reporting the gauges; call it when the coordinator no longer runs. Counters
// and histograms keep their values.
func (m *Metrics) Close() error { return m.registration.Unregister() }

// Trace returns the trace to set in the [tenure.CoordinatorConfig] of this replica.
func (m *Metrics) Trace() *tenure.Trace {
	ctx := context.Background()
	return &tenure.Trace{
		Attempt: func(_ time.Duration, err error) {
			if err != nil && !errors.Is(err, tenure.ErrHeld) && !errors.Is(err, context.Canceled) { // which is a shutdown
				m.acquireErrors.Add(ctx, 1, m.lease, ofType(errorType(err)))
			}
		},
		Acquired: func(term *tenure.Term, predecessor *tenure.Holding) {
			m.mu.Lock()
			defer m.mu.Unlock()
			m.during(term)
			m.predecessor = predecessor
		},
		JobStarted: func(term *tenure.Term) {
			m.mu.Lock()
			m.during(term)
			m.working = true
			predecessor := m.predecessor
			m.mu.Unlock()
			if predecessor != nil {
				age := max(0, predecessor.Age) // negative if the store's clock was set back
				m.takeoverGap.Record(ctx, (age + time.Since(term.AcquiredAt())).Seconds(), m.lease)
			}
		},
		Renewed: func(term *tenure.Term, took, trustLeft time.Duration) {
			m.renewalDuration.Record(ctx, took.Seconds(), m.lease)
			m.mu.Lock()
			defer m.mu.Unlock()
			m.during(term)
			m.noteMargin(trustLeft)
		},
		RenewalFailed: func(term *tenure.Term, err error, trustLeft time.Duration) {
			m.renewalErrors.Add(ctx, 1, m.lease, ofType(errorType(err)))
			m.mu.Lock()
			defer m.mu.Unlock()
			m.during(term)
			m.noteMargin(trustLeft)
		},
		Lost:     m.over,
		Released: m.over,
		JobEnded: func(term *tenure.Term, _ error, took time.Duration) {
			m.drainDuration.Record(ctx, took.Seconds(), m.lease)
			m.mu.Lock()
			defer m.mu.Unlock()
			m.during(term)
			m.working, m.stuck = false, false
		},
		JobStuck: func(term *tenure.Term, _ time.Duration) {
			m.mu.Lock()
			defer m.mu.Unlock()
			m.during(term)
			m.stuck = true
		},
		Run: m.ran,
	}
}

// during notes which term it is, because calls of a trace may be dropped: that it was acquired may
// be one of them, or that the job of the term before has ended. The caller holds the mutex.
func (m *Metrics) during(term *tenure.Term) {
	if m.term == term {
		return
	}
	m.term, m.predecessor, m.ended, m.working, m.stuck = term, nil, false, false, false
	m.trust = reach.Trust(term) // its Deadline may have moved since
}

// ran notes that a run has begun or ended.
func (m *Metrics) ran(run tenure.Run) {
	count := func(outcome tenure.RunOutcome, n int64) {
		m.runsEnded.Add(context.Background(), n, m.lease, runName(run.Name),
			metric.WithAttributes(attribute.String("tenure.run.outcome", string(outcome))))
	}
	if run.Outcome != tenure.RunBegan {
		count(run.Outcome, 1)
	}
	m.mu.Lock()
	times, known := m.runs[run.Name]
	switch run.Outcome {
	case tenure.RunBegan:
		times.start = run.Began
	case tenure.RunSucceeded:
		times.success = run.Ended
	}
	m.runs[run.Name] = times
	m.mu.Unlock()
	if !known { // as for terms
		for _, outcome := range []tenure.RunOutcome{tenure.RunSucceeded, tenure.RunFailed, tenure.RunInterrupted} {
			count(outcome, 0)
		}
	}
}

func runName(name string) metric.MeasurementOption {
	return metric.WithAttributes(attribute.String("tenure.run", name))
}

func unixSeconds(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return float64(t.UnixMilli()) / 1000
}

// noteMargin notes how much trust is left; the caller holds the mutex. A term that has
// ended has no margin, and neither has a local term, which has no lease to lose.
func (m *Metrics) noteMargin(left time.Duration) {
	if m.ended || m.term.Deadline().IsZero() {
		return
	}
	if m.margin == nil || left < *m.margin {
		m.margin = &left
	}
}

// over counts the end of a term, once: a term that was not renewed in time is reported as
// lost, and may be reported again as released.
func (m *Metrics) over(term *tenure.Term, cause error) {
	m.mu.Lock()
	m.during(term)
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

// other is OpenTelemetry's value for everything that has no name.
const other = "_OTHER"

// ends lists why a term can end. The first match wins, because the error of a job or a
// check may wrap any of the others.
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

func ofType(name string) metric.MeasurementOption {
	return metric.WithAttributes(attribute.String("error.type", name))
}

func errorType(err error) string {
	switch {
	case errors.Is(err, tenure.ErrUnhealthy):
		return "unhealthy"
	case errors.Is(err, tenure.ErrSetup):
		return "setup"
	case errors.Is(err, tenure.ErrConflict):
		return "conflict"
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, tenure.ErrDeadline):
		return "timeout"
	default:
		return other
	}
}
