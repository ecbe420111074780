package oteltenure

import (
	"context"
	"errors"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/tenurelib/tenure"
)

// ObserveLease reports the metrics of a lease for this replica, with the given attributes in
// addition to the lease's key. The trace that it returns records them: set it in the
// [tenure.CoordinatorConfig] of this replica. Unregister the registration when the coordinator no
// longer runs. The gauges are then no longer reported, while counters and histograms keep their
// values. ObserveLease fails only if the meter does, and with [tenure.ErrInvalid] if the meter or
// the lease is nil.
func ObserveLease(meter metric.Meter, lease *tenure.Lease, attributes ...attribute.KeyValue) (*tenure.Trace, metric.Registration, error) {
	i, err := instrumentsOf(meter, lease, "lease")
	if err != nil {
		return nil, nil, err
	}
	isHolder := i.gauge("tenure.is_holder", "{holder}", "1 while this replica's job runs and its trust lasts, otherwise 0.")
	token := i.gauge("tenure.token", "{token}", "Fencing token of this replica's last term.")
	margin := i.secondsGauge("tenure.trust.margin", "Least trust left since the last collection.")
	duration := i.secondsGauge("tenure.trust.duration", "Trust that a renewal gives: the TTL minus the Margin.")
	stuck := i.gauge("tenure.job.stuck", "{job}",
		"1 while this replica's job runs although it should have returned and its lease is no longer renewed, otherwise 0.")
	lastStart := i.secondsGauge("tenure.run.last_start", "Unix time at which the last run began.")
	lastSuccess := i.secondsGauge("tenure.run.last_success", "Unix time at which the last run that succeeded ended; 0 if none has.")
	running := i.secondsGauge("tenure.run.running", "How long the oldest run that has not ended has been running; 0 if none is.")
	r := &recorder{
		lease: metric.WithAttributes(append([]attribute.KeyValue{attribute.String("tenure.lease", lease.Key().String())}, attributes...)...),
		renewalDuration: i.secondsHistogram("tenure.renewal.duration", "Duration of successful renewals.",
			.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10),
		renewalErrors: i.counter("tenure.renewal.errors", "{error}", "Failed renewals; each is retried."),
		acquireErrors: i.counter("tenure.acquire.errors", "{error}",
			"Attempts to acquire the lease that failed, although no other replica was seen to hold it; each is retried."),
		takeoverGap: i.secondsHistogram("tenure.takeover.gap", "Time from the last renewal of a vanished holder until the job began here.",
			.1, .5, 1, 2.5, 5, 10, 20, 30, 35, 40, 60, 120, 300),
		failovers: i.counter("tenure.failovers", "{failover}", "Failovers of the database over which a term of this replica went on."),
		terms:     i.counter("tenure.terms", "{term}", "Terms of this replica that have ended."),
		drainDuration: i.secondsHistogram("tenure.job.drain.duration", "Time from telling a job to return until it returned.",
			.01, .05, .1, .5, 1, 2.5, 5, 7.5, 10, 30, 60, 300),
		runsEnded: i.counter("tenure.runs", "{run}", "Runs of the job that have ended."),
		runs:      map[string]runTimes{},
	}
	trust := lease.Config().TTL - lease.Config().Margin
	registration, err := i.observe(func(o metric.Observer) {
		r.mu.Lock()
		defer r.mu.Unlock()
		o.ObserveInt64(isHolder, number(r.working && r.term.Valid()), r.lease)
		o.ObserveInt64(stuck, number(r.stuck), r.lease)
		for name, run := range r.runs {
			if run.start.IsZero() { // it is a func of the job that has returned an error
				continue
			}
			ofRun := with("tenure.run", name)
			o.ObserveFloat64(lastStart, unixSeconds(run.start), r.lease, ofRun)
			o.ObserveFloat64(lastSuccess, unixSeconds(run.success), r.lease, ofRun)
			o.ObserveFloat64(running, run.running().Seconds(), r.lease, ofRun)
		}
		if r.term == nil {
			return
		}
		o.ObserveInt64(token, r.term.Token(), r.lease)
		r.noteMargin(r.term.Remaining())
		if r.margin != nil {
			o.ObserveFloat64(margin, r.margin.Seconds(), r.lease)
			o.ObserveFloat64(duration, trust.Seconds(), r.lease)
			r.margin = nil
		}
	})
	if err != nil {
		return nil, nil, err
	}
	for _, end := range termEnds { // Prometheus doesn't see an increase in a series that begins at 1
		r.countTerms(end.name, 0)
	}
	r.countFailovers(false, 0)
	r.countFailovers(true, 0)
	for _, errorType := range []string{"setup", "conflict", "timeout", other} {
		r.acquireErrors.Add(context.Background(), 0, r.lease, with("error.type", errorType))
	}
	return r.trace(), registration, nil
}

// recorder records what the trace of one replica and one lease tells it.
type recorder struct {
	lease metric.MeasurementOption

	renewalDuration metric.Float64Histogram
	renewalErrors   metric.Int64Counter
	acquireErrors   metric.Int64Counter
	takeoverGap     metric.Float64Histogram
	terms           metric.Int64Counter
	failovers       metric.Int64Counter
	drainDuration   metric.Float64Histogram
	runsEnded       metric.Int64Counter

	mu        sync.Mutex
	termState                // of the last term that began; zero before the first
	margin    *time.Duration // the least trust left since the last collection; nil if not observed
	runs      map[string]runTimes
}

type termState struct {
	term        *tenure.Term
	predecessor *tenure.Holding // the holder from which an expired lease was taken over; nil if none
	working     bool            // whether its job runs
	stuck       bool            // whether its job did not return in time
	ended       bool            // whether its end was counted
}

// runTimes is when the last run of a name began, and when the last one that succeeded ended.
type runTimes struct {
	start, success time.Time
	oldest         time.Time // when the oldest run that has not ended began; zero: none is running
}

// running returns how long the oldest run that has not ended has been running.
func (r runTimes) running() time.Duration {
	if r.oldest.IsZero() {
		return 0
	}
	return time.Since(r.oldest)
}

func (r *recorder) trace() *tenure.Trace {
	ctx := context.Background()
	return &tenure.Trace{
		Attempt: func(_ time.Duration, err error) {
			if err != nil && !errors.Is(err, tenure.ErrHeld) && !errors.Is(err, context.Canceled) { // a shutdown cancels it
				r.acquireErrors.Add(ctx, 1, r.lease, with("error.type", errorTypes.of(err)))
			}
		},
		Acquired: func(term *tenure.Term, predecessor *tenure.Holding) {
			r.update(term, func() { r.predecessor = predecessor })
		},
		JobStarted: func(term *tenure.Term) {
			var predecessor *tenure.Holding
			r.update(term, func() { r.working, predecessor = true, r.predecessor })
			if predecessor != nil {
				age := max(0, predecessor.Age) // negative if the store's clock was set back
				r.takeoverGap.Record(ctx, (age + time.Since(term.AcquiredAt())).Seconds(), r.lease)
			}
		},
		Renewed: func(term *tenure.Term, took, trustLeft time.Duration) {
			r.renewalDuration.Record(ctx, took.Seconds(), r.lease)
			r.update(term, func() { r.noteMargin(trustLeft) })
		},
		RenewalFailed: func(term *tenure.Term, err error, trustLeft time.Duration) {
			r.renewalErrors.Add(ctx, 1, r.lease, with("error.type", errorTypes.of(err)))
			r.update(term, func() { r.noteMargin(trustLeft) })
		},
		FailedOver: func(_ *tenure.Term, recordLost bool) { r.countFailovers(recordLost, 1) },

		Lost:     r.over,
		Released: r.over,
		JobEnded: func(term *tenure.Term, _ error, took time.Duration) {
			r.drainDuration.Record(ctx, took.Seconds(), r.lease)
			r.update(term, func() {
				r.working, r.stuck = false, false
				for name, run := range r.runs { // the call that reported the end of a run may have been dropped
					run.oldest = time.Time{}
					r.runs[name] = run
				}
			})
		},
		JobStuck: func(term *tenure.Term, _ time.Duration) {
			r.update(term, func() { r.stuck = true })
		},
		JobRun: r.ran,
	}
}

// update changes the state of a term, under the mutex. It begins a new state if the term has
// changed, because the calls of the trace that report the new term, or the end of the former one's
// job, may have been dropped.
func (r *recorder) update(term *tenure.Term, change func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.term != term {
		r.termState = termState{term: term}
	}
	change()
}

// noteMargin notes how much trust is left; the caller holds the mutex. A term that has
// ended has no margin, and neither has a local term, which has no lease to lose.
func (r *recorder) noteMargin(left time.Duration) {
	if r.ended || r.term.Deadline().IsZero() {
		return
	}
	if r.margin == nil || left < *r.margin {
		r.margin = &left
	}
}

// over counts the end of a term, once: a term that was not renewed in time is reported as
// lost, and may be reported again as released.
func (r *recorder) over(term *tenure.Term, cause error) {
	var counted bool
	r.update(term, func() { counted, r.ended = r.ended, true })
	if !counted {
		r.countTerms(termEnds.of(cause), 1)
	}
}

func (r *recorder) countTerms(end string, n int64) {
	r.terms.Add(context.Background(), n, r.lease, with("tenure.term.end", end))
}

func (r *recorder) countFailovers(recordLost bool, n int64) {
	r.failovers.Add(context.Background(), n, r.lease, metric.WithAttributes(attribute.Bool("tenure.record_lost", recordLost)))
}

// ran records that a run has begun or ended.
func (r *recorder) ran(run tenure.JobRun) {
	r.mu.Lock()
	times, known := r.runs[run.Name]
	switch run.Outcome {
	case tenure.RunBegan:
		times.start = run.Began
	case tenure.RunSucceeded:
		times.success = run.Ended
	}
	times.oldest = run.Oldest
	r.runs[run.Name] = times
	r.mu.Unlock()
	for _, outcome := range []tenure.RunOutcome{tenure.RunSucceeded, tenure.RunFailed, tenure.RunInterrupted} {
		switch {
		case outcome == run.Outcome:
			r.countRuns(run.Name, outcome, 1)
		case !known: // as for terms
			r.countRuns(run.Name, outcome, 0)
		}
	}
}

func (r *recorder) countRuns(name string, outcome tenure.RunOutcome, n int64) {
	r.runsEnded.Add(context.Background(), n, r.lease, with("tenure.run", name), with("tenure.run.outcome", string(outcome)))
}

func unixSeconds(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return float64(t.UnixMilli()) / 1000
}

// other is OpenTelemetry's value for an error without a name.
const other = "_OTHER"

// names are values of an attribute for errors. The first match wins, because an error may wrap others.
type names []struct {
	err  error
	name string
}

func (n names) of(err error) string {
	for _, known := range n {
		if errors.Is(err, known.err) {
			return known.name
		}
	}
	return other
}

// termEnds has why a term can end. The error of a job or a check may wrap any of the others.
var termEnds = names{
	{tenure.ErrJobEnded, "job_ended"},
	{tenure.ErrUnhealthy, "unhealthy"},
	{tenure.ErrResigned, "resigned"},
	{tenure.ErrShutdown, "shutdown"},
	{tenure.ErrDeadline, "deadline"},
	{tenure.ErrLost, "lost"},
}

var errorTypes = names{
	{tenure.ErrUnhealthy, "unhealthy"},
	{tenure.ErrSetup, "setup"},
	{tenure.ErrConflict, "conflict"},
	{context.DeadlineExceeded, "timeout"},
	{tenure.ErrDeadline, "timeout"},
}
