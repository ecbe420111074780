// Package oteltenure makes OpenTelemetry metrics of what a [tenure.Trace] is told.
//
//	lease, err := tenure.NewLease(store, tenure.LeaseConfig{})
//	metrics, err := oteltenure.New(otel.Meter("my-service"), lease)
//	coordinator, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Trace: metrics.Trace(), …})
//
// All metrics have the attribute tenure.lease, the key's type and ID with a slash
// between. Which replica they are of is told, as for all metrics of a process, by the
// resource (service.instance.id), which Prometheus calls instance.
//
//	name                       kind       unit      attribute        what
//	tenure.is_holder           gauge      {holder}                   1 while this replica's job runs and its trust lasts, else 0
//	tenure.token               gauge      {token}                    fencing token of this replica's last term; from its first term on
//	tenure.trust.margin        gauge      s                          least trust that was left since the last collection; while it holds
//	tenure.trust.duration      gauge      s                          trust that a renewal gives: the TTL less the Margin; while it holds
//	tenure.renewal.duration    histogram  s                          of renewals that succeeded
//	tenure.renewal.errors      counter    {error}   error.type       renewals that failed, and were tried again
//	tenure.takeover.gap        histogram  s                          from the last renewal of a holder that vanished until the job began here
//	tenure.terms               counter    {term}    tenure.term.end  terms that are over, by reason
//	tenure.job.drain.duration  histogram  s                          from when a job was told to return until it had
//
// error.type is one of timeout, conflict, unhealthy, setup, _OTHER; tenure.term.end
// one of shutdown, resigned, job_ended, unhealthy, deadline, lost, _OTHER. A term
// that ended by its deadline was not renewed in time; one that was lost is another's.
//
// In the exporter for Prometheus dots are underscores, and units and _total are
// appended. alerts.yaml, beside this file, has rules for what to be woken by.
package oteltenure
