// Package tenure gives one replica of a service at a time the right to do a job,
// by a lease kept in the database that the service already runs.
//
// # Concepts
//
// A [Store] keeps objects in a table and writes them by compare-and-swap. A
// [Lease] is the right to do one job; its record is one object. One replica, the
// holder, has it; the others stand by. A [Term] is one unbroken holding, from
// the write that began it, by acquire or steal, until release or loss. The
// version of that write is the term's fencing token: of two terms of one lease
// the later has the greater token, for ever. A [Coordinator] does all of this by
// itself, and runs the caller's job while its replica holds the lease:
//
//	            acquire | steal
//	standby ------------------> holding ----> stopping ----> standby, or return on shutdown
//	   ^  try fails: wait           |  lost | deadline | unhealthy | job ended | resign | shutdown
//	   +--------------------+       +-> 1 end the job's context, with its cause
//	                                    2 wait until the job has returned, still renewing
//	                                    3 release
//
// # Who judges what, by which clock
//
// The trust rule. A holder trusts its term until attempt + TTL − Margin, where
// attempt is the instant, on its own monotonic clock, before it sent the acquire
// or renewal that last succeeded. It never counts from the answer: that may come
// late, and the store counts from when it wrote. For the same reason an answer
// that comes after the term was over is a no.
//
// The expiry rule. A standby may steal when the record's age, measured by the
// store's clock, has reached the TTL that the record names, which is its
// holder's; or when it has itself watched the record stand unchanged for that
// long, on its monotonic clock, from the answer that first showed it so. The
// second heals a record that a wrong clock stamped; [Observed] allows only it.
//
// No clock of one replica is ever compared with that of another.
//
// # When a standby looks
//
// A standby looks when it is woken, and when the record can expire. A release
// wakes all standbys, and a request the holder: on Postgres by a notification,
// which one connection per store listens for; on SQLite through the store, or for
// another process by a poll of the file. Where no hint can be expected, because the
// store gives none, the connection is down, or the record is another program's, and
// with [Observed], a standby looks once in an AcquireInterval as well. One that came
// second at the last release, or whose own last term has failed, leaves others a head
// start of up to 4 ms, and looks before it writes: of many standbys few write, and it
// is not always the same that win. Hints may be lost: nothing is decided by one.
// Whoever gets many for nothing is deaf for a while: a flood of them costs no more
// than polling does.
//
// A replica that stays away or is not fit does not compete, but looks once in a TTL,
// so that its status tells who holds; a lease that is left to it by name brings the
// former back.
//
// # Handover by request
//
// [Lease.RequestRelease] and [Lease.RequestHandover] write into the record that its
// holder is asked to go. That is no renewal: readers still go by the age of the last
// one. The holder finds it at its next renewal, which a hint brings forward, ends
// its job and gives the lease back; if a replica was named, by a record that leaves
// the lease to that one for a while.
//
// # Takeovers
//
// A term that was taken over from a holder that has not released it may have to be
// confirmed, see [CoordinatorConfig]. Until it is, its record says from whom it was
// taken. So nobody is forgotten where the confirming replica crashes too, or gives
// the lease back: the next one confirms, and fences, for both.
//
// # What is guaranteed
//
//   - Jobs of two replicas never overlap, while the rates of their clocks differ
//     by less than Margin/TTL and a job returns within TTL − Margin −
//     RenewDeadline of being told (9 s by default).
//   - A lease is released only after its job has returned, and one replica never
//     runs two of its jobs at once.
//   - Fencing tokens of one lease strictly increase, over release, deletion,
//     re-creation and restart.
//   - While the store answers some replica, some replica holds the lease within
//     TTL + AcquireInterval of the last renewal; after a release, as soon as a
//     standby is woken. Where the store's clock is set back meanwhile it may be
//     two TTLs, for then only what a standby has watched counts.
//   - A write that landed although its answer was lost costs no term. Errors of
//     the store cost none either, until the renew deadline.
//   - The end of the job's context stands behind no I/O.
//
// # What is not
//
// A lease is not a lock. A process that is paused by its host for longer than
// the TTL finds out only when it runs again, and the instruction that it was
// about to execute comes first. [Term.Valid] and [Coordinator.IsHolder] turn
// false by themselves at once, but nothing can vouch for the next instant. What
// must never be done by a holder of the past is to be fenced.
//
// A machine or process that is copied while it holds, as by restoring a snapshot of it
// while the original runs on, works twice until either copy renews next: then the other
// finds a renewal that is not its own, and ends its term. Its fenced writes are not told
// apart, for both have the same term. A suspended machine finds out by its wall clock; one
// whose wall clock is set back while it is suspended has no clock left that tells.
//
// A job that does not return when its context ends may overlap with another
// replica's: the coordinator reports it, stops renewing the lease, and does not
// compete again until it has returned.
//
// # Fencing
//
// [PostgresStore.Fenced] and [SQLiteStore.Fenced] run a func in a transaction that
// commits only if the term is still the lease's; [Fence] makes of a [Store] one
// whose writes are fenced in the same way. A fenced write of one term never
// commits after the next term began, whatever the pauses, clocks and partitions.
// That is for writes to the database that has the lease. Another resource takes
// [Term.Token] with each request and admits none that is below the greatest it
// has seen, as a [Gate] does.
//
// Tokens increase as long as the database keeps what it has committed. Stop all
// replicas before the table is restored from an older state, for with it comes
// the record of an earlier term. Tokens go on above the old ones while the
// database's clock is right: none is below the time in microseconds. If both
// go back, a replica that has seen a greater token refuses to begin a term, with
// [ErrSetup]: set the clock right, or raise resource_version above the greatest
// token known.
//
// # Concurrency
//
// All types are safe for concurrent use. A coordinator uses two goroutines
// beside the job's: the one that called [Coordinator.Run], which owns the term,
// and one that renews, so that nothing waits for a renewal that hangs; and one
// more while a Check runs. When Run has returned, none is left.
package tenure
