// Package oteltenure records OpenTelemetry metrics: of a lease, with [ObserveLease]; of a session of package claims, with
// [ObserveSession]; of a member of package shards, with [ObserveShards]; of a schedule, with [ObserveSchedule]; and of a route
// of package route, with [ObserveRoute].
//
//	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "sweeper"}})
//	trace, registration, err := oteltenure.ObserveLease(otel.Meter("my-service"), lease)
//	coordinator, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Trace: trace, …})
//
// All metrics of a lease have the attribute tenure.lease: the key's type and ID, separated by a
// slash. As with all metrics of a process, the resource identifies the replica
// (service.instance.id, which Prometheus calls instance).
//
//	name                       kind       unit      attribute        what
//	tenure.is_holder           gauge      {holder}                   1 while this replica's job runs and its trust lasts, otherwise 0
//	tenure.token               gauge      {token}                    fencing token of this replica's last term; absent before its first term
//	tenure.trust.margin        gauge      s                          least trust left since the last collection; only while it holds
//	tenure.trust.duration      gauge      s                          trust that a renewal gives (TTL minus Margin); only while it holds
//	tenure.renewal.duration    histogram  s                          duration of successful renewals
//	tenure.renewal.errors      counter    {error}   error.type       failed renewals; each is retried
//	tenure.acquire.errors      counter    {error}   error.type       failed attempts of a standby to acquire the lease; each is retried
//	tenure.takeover.gap        histogram  s                          from the last renewal of a vanished holder until the job began here
//	tenure.terms               counter    {term}    tenure.term.end  terms that have ended, by reason
//	tenure.failovers           counter    {failover}  tenure.record_lost  failovers of the database over which a term of this replica went on; true if they have lost its record
//	tenure.job.drain.duration  histogram  s                          from telling a job to return until it returned
//	tenure.job.stuck           gauge      {job}                      1 while the job runs although it should have returned and its lease is no longer renewed, otherwise 0
//	tenure.runs                counter    {run}     tenure.run, tenure.run.outcome  runs of the job that have ended
//	tenure.run.last_start      gauge      s         tenure.run       Unix time at which the last run of this replica began; absent before the first
//	tenure.run.last_success    gauge      s         tenure.run       Unix time at which the last run that succeeded ended; 0 if none has; absent before the first run
//	tenure.run.running         gauge      s         tenure.run       how long the oldest run that has not ended has been running; 0 if none is; absent before the first
//
// error.type is one of timeout, conflict, unhealthy, setup, _OTHER; tenure.term.end is
// one of shutdown, resigned, job_ended, unhealthy, deadline, lost, _OTHER. A term that
// ended with deadline was not renewed in time; after lost, another replica may hold the
// lease.
//
// tenure.run is the name of a run, see [tenure.RecordRun]: watch or reconcile for the sweeps
// of [tenure.Every] and for a func of the job that returns an error by itself, and the key
// for those of a schedule. tenure.run.outcome is one of succeeded, failed, interrupted.
//
// The metrics of a session have the attributes that [ObserveSession] is given.
//
//	name                     kind     unit       attribute    what
//	tenure.session.valid     gauge    {session}               1 while this process may rely on its claims, otherwise 0; absent when it shuts down
//	tenure.session.stuck     gauge    {session}               1 while funcs of a session that was lost run although they should have returned, otherwise 0
//	tenure.claims.held       gauge    {claim}    tenure.kind  claims that this process holds
//	tenure.claims.running    gauge    {func}     tenure.kind  funcs that run for claims
//	tenure.sessions.begun    counter  {session}               sessions that this process has begun
//	tenure.sessions.lost     counter  {session}               sessions that this process has lost
//	tenure.sessions.removed  counter  {session}               expired sessions of other processes that this process has removed
//	tenure.claims.freed      counter  {row}                   rows that this process has freed because their sessions were gone
//	tenure.sweep.errors      counter  {error}                 failed looks for expired sessions and their rows; each is retried
//
// The metrics of shards have the attributes that [ObserveShards] is given, and tenure.kind.
//
//	name                    kind     unit     what
//	tenure.shards.total     gauge    {shard}  shards that there are, for all processes
//	tenure.shards.owned     gauge    {shard}  shards that this process has
//	tenure.shards.target    gauge    {shard}  shards that it should have; absent until it has settled
//	tenure.shards.stuck     gauge    {shard}  shards whose func was told to stop more than 10 s ago and has not returned
//	tenure.shards.failing   gauge    {shard}  shards whose func has returned by itself within the last minute
//	tenure.shards.claimed   counter  {shard}  shards that this process has claimed
//	tenure.shards.given_up  counter  {shard}  those of them that it has freed for others, but not because it stops
//
// Those of a schedule have the attributes that [ObserveSchedule] is given, and tenure.schedule, which is its key.
//
//	name                       kind   unit  what
//	tenure.schedule.last_done  gauge  s     Unix time of the last slot that is done; before the first one, the time when the schedule was first run
//	tenure.schedule.next       gauge  s     Unix time of the first slot that is not done, which is late if it has passed, or was skipped (MissedSkip); absent if none follows
//
// Those of a route have the attributes that [ObserveRoute] is given. Its counters and histograms are of the requests that
// clients have sent to this process; a forwarded request counts in the process that forwards it.
//
//	name                        kind       unit       attribute       what
//	tenure.route.requests       counter    {request}  tenure.outcome  requests, by outcome: answered, refused or unknown
//	tenure.route.sends          counter    {send}                     how often this process has sent a request to another one
//	tenure.route.wait.duration  histogram  s                          time until a request was answered here, or sent to the process that answered it
//	tenure.route.duration       histogram  s                          time until a request was answered
//	tenure.route.waiting        gauge      {request}                  requests that wait for an owner, or for an owner's answer
//	tenure.route.running        gauge      {request}                  requests that a handler answers in this process
//	tenure.route.keys           gauge      {key}                      keys that this process remembers
//
// The Prometheus exporter turns dots into underscores, and appends units and _total. The
// file alerts.yaml in this directory has alerting rules, and dashboard.json is a dashboard for Grafana.
package oteltenure
