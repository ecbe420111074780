// Package tenure lets one replica of a service at a time do a job. It keeps a lease in the
// database that the service already uses.
//
// # Concepts
//
// A [Store] keeps objects in a table and writes them by compare-and-swap. A [Lease] is the
// right to do one job; its record is one object. One replica holds the lease, and the others
// are standbys. A [Term] is one unbroken holding, from the write that began it until release
// or loss. The version of that write is the term's fencing token: of two terms of one lease,
// the later always has the greater token. A [Coordinator] acquires, renews and releases the
// lease by itself, and runs the caller's job while its replica holds it:
//
//	            acquire | steal
//	standby ------------------> holding ----> stopping ----> standby, or return on shutdown
//	   ^  try fails: wait           |  lost | deadline | unhealthy | job ended | resign | shutdown
//	   +--------------------+       +-> 1 end the job's context, with its cause
//	                                    2 wait until the job has returned, still renewing
//	                                    3 release
//
// # Where to begin
//
// A program needs ten of the names below. [OpenPostgres] or [OpenSQLite] opens a store, and the
// store's Migrate creates its tables. [NewLease] takes a [LeaseConfig] with a Key;
// [NewCoordinator] takes a [CoordinatorConfig], with a job that [Every] makes from a func; and
// [Coordinator.Run] does the rest. In the job, [TermFromContext] returns the term that the store's
// Fenced checks with each transaction. The first example of the package is such a program.
//
// # Which clock decides
//
// No replica's clock is ever compared with another replica's.
//
//   - Trust: until when may the holder rely on its term? Until attempt + TTL − Margin, where
//     attempt is the instant before it sent the acquire or renewal that last succeeded. The
//     holder goes by its own monotonic and wall clocks, whichever says that less time remains.
//     It never counts from the answer, which may be late, because the store counts from the
//     write. For the same reason, an answer that comes after the trust has ended counts as a
//     refusal.
//   - RenewDeadline: when is the job told to return? RenewDeadline after attempt, by the same
//     clocks, and by a timer that waits for no I/O. [Term.Deadline] is later: it is the end of
//     the trust.
//   - Expiry: when may a standby steal the lease? When the record's age, by the store's clock,
//     has reached the TTL in the record, which is the holder's; or when the standby itself has
//     seen the record unchanged for that long, by its own monotonic clock, counted from the answer
//     that first showed it. The second rule covers a record that was stamped by a wrong clock.
//     [ExpiryObserved] allows only the second. After a failover of the database, [Lineage] adds a wait.
//   - Fencing: what refuses a write of a former term? The record's content and the database's
//     locks, so no clock matters.
//   - Tokens: the database generates them. Each is greater than all earlier ones, and none is
//     below the database's time in microseconds.
//
// # What is guaranteed
//
//   - Jobs of two replicas never overlap, except as listed below.
//   - A lease is released only after its job has returned, and one replica never runs two
//     of its jobs at once.
//   - The fencing tokens of a lease strictly increase, across release, deletion, re-creation
//     and restart.
//   - A fenced write of a term never commits after the next term has begun, whatever pauses,
//     clocks and partitions do.
//   - While the store answers some replica, some replica holds the lease within TTL +
//     AcquireInterval of the last renewal, and after a release as soon as a standby is woken. If
//     the store's clock is set back, that may take two TTLs, because a standby can then go only by
//     what it has seen itself. If a standby was not told that another term began, because the
//     record was changed by hand or a hint was lost, the takeover may take the standby's own TTL
//     if that is longer.
//   - A write that was stored, but whose answer was lost, does not cost the holder its term, if a later renewal is
//     answered in time, and the term was not resumed: see [Lease.Resume].
//
// # What can make two jobs overlap
//
// A lease is not a lock. Two jobs overlap
//
//   - if a job does not return within TTL − Margin − RenewDeadline (9 s by default) of the
//     end of its context. The coordinator reports it, stops renewing, and does not compete
//     again until it has returned;
//   - for a moment, if the process is paused for longer than the TTL: it finds out when it
//     runs again, one instruction too late. [Term.Valid] and [Coordinator.IsHolder] return
//     false by then, but they cannot vouch for the next instant;
//   - until its next renewal is refused, if both clocks of a machine stand still while it is
//     frozen: nothing then shows that time has passed;
//   - if two clocks' rates differ by more than Margin/TTL, or a suspended machine's wall
//     clock is set back;
//   - if the database's clock is set ahead: records look expired. With [ExpiryObserved] they don't;
//   - if the record is deleted, or restored from a backup, or if the database loses committed
//     writes without a failover that it knows of, as by a snapshot of its volume, while replicas run;
//   - if a machine or process that holds the lease is copied, until either copy renews: the
//     other then finds a renewal that is not its own. Fencing can't tell the copies apart,
//     because both have the same term;
//   - if [LeaseConfig].AssumeUniqueHolder is set for a name that two processes have, or if a
//     store wrongly says that this process is alone in it: see [Traits].
//
// Fence anything that a former holder must never do.
//
// # When the database is down
//
// The holder keeps working and keeps trying to renew. If the store answers before the deadline,
// the outage costs nothing. Otherwise the job's context ends with [ErrDeadline]. Once the job has
// returned, the lease is released, if the store answers by then, or left to expire. Each standby
// tries once per AcquireInterval, and when the store answers again, one of them gets the lease. No
// error of a store that may answer again ends [Coordinator.Run] or makes [Coordinator.Healthy]
// return an error. A store that is closed for good does, with [ErrClosed].
//
// # Fencing
//
// [PostgresStore.Fenced] and [SQLiteStore.Fenced] run a func in a transaction that commits
// only if the term is still the lease's; [Fence] makes a [Store] whose writes are fenced in the
// same way. Both work only in the database that stores the lease. Any other resource takes
// [Term.Token] with each request and refuses a token below the greatest it has seen.
//
// Stop all replicas before you restore the table from an older state, because that brings
// back the record of an earlier term. If the database's clock is right, the tokens continue
// above the old ones. If the clock is behind as well, a replica that has seen a greater token
// refuses to begin a term, with [ErrSetup]: set the clock right, or raise resource_version
// above the greatest known token.
//
// # When a standby looks
//
// A standby looks at the record when it is woken, when the record that it saw can expire, and
// at least once per TTL of its own. A release wakes all standbys, and a request wakes the
// holder: on Postgres by a notification, for which each store listens on one connection; on SQLite
// through the store, and in other processes because they watch the file. If no hint can be
// expected, and with [ExpiryObserved], a standby also looks once per AcquireInterval, unless the store
// delivers every change: see [ChangeSubscription]. Hints may be lost: none decides anything by
// itself, and a flood of spurious hints costs no more than polling. To spare the database a
// thundering herd, a standby that came second at the last release, or whose last term failed,
// gives the others a head start of up to 4 ms.
//
// # Handover and takeover
//
// [Lease.RequestRelease] and [Lease.RequestHandover] write a request into the record. That does
// not count as a renewal. The holder finds the request when it is woken, or at its next renewal,
// ends its job and releases the lease. If the request names a replica, the record that remains
// offers the lease to that replica for a while.
//
// A stolen term may have to be confirmed before its job begins: see [CoordinatorConfig]. Until
// then its record names the earlier holders. If this replica crashes or releases the lease
// before that, the next holder also confirms that they are gone, and fences them.
//
// # Concurrency
//
// All types are safe for concurrent use. Besides the job's goroutines, a coordinator has the
// one that called [Coordinator.Run], which owns the term, one that renews, one while a Check
// runs, and one while the Logger or the Trace is called. All have ended when Run returns,
// unless the Logger or the Trace hangs.
package tenure
