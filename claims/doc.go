// Package claims gives each of many things, such as tenants, sandboxes or accounts, one owner. A process renews
// one lease, however many things it owns.
//
// # Concepts
//
// A [Session] stands for a live process. Its record is a lease like any other, which the process renews. A
// [Claim] is the right of a session to one thing. It is a row with the session's ID and a fencing token. A
// claim is never renewed: it is valid until it is released or the session's term ends. [Keys] are the claims of
// one kind, by key. A [Queue] is a table of the application whose rows sessions claim, and a [Worker] takes its
// rows for one session.
//
// # What is guaranteed
//
//   - At any moment at most one session's claim on a key is valid, under the conditions that package tenure
//     states for the terms of a lease. After [Keys.Move], the former owner believes its claim to be valid until
//     it learns of the move.
//   - A write that is fenced by a claim never commits after the key's next claim began,
//     whatever pauses, clocks and partitions do: see [Claim.Fence].
//   - The tokens of one key strictly increase.
//   - A key is freed only after the func that [Keys.Do] runs for it has returned. One [Session]
//     never runs two funcs for one key, even if it was lost and has begun anew. Two sessions of
//     one process are as independent as the sessions of two processes.
//   - The keys of a crashed process can be claimed once its session expires: at most one TTL after
//     its last renewal if a caller is waiting. If the database's clock is set ahead, sessions look
//     expired, as leases do.
//
// # How it works
//
// A session begins with its record, under an ID that is never used again. A row changes owner only when it is
// free or its session no longer has a record, except by [Keys.Move]. A session loses its record in two ways: it
// ends, after everything that it owned has stopped, or another session removes it, under the rule by which a
// lease expires. A session that is removed while its process is paused does no harm. The trust in it has ended
// by then, and rows that it writes late name a session without a record.
//
// If the answer to a statement that took rows is lost, the session frees them once the statement must have ended.
//
// Another process may take a session over, with [tenure.Lease.Resume]. The process that began the session
// seals the record before it closes, and frees nothing if the session continues elsewhere.
//
// A failover of the database may lose claims. Those have ended: a session compares its claims with their rows before its
// first renewal after the failover counts. It claims nothing new before the failover has settled: see [tenure.Lineage].
//
// A session compares its claims with their rows once an hour, and whenever a statement was refused or not
// answered, or the database may have gone back in time, as after a failover. It frees rows that name it but
// that it does not know, and ends claims that their rows contradict. Comparing a million keys takes a thousand
// statements of a few milliseconds each, with a pause of the same length after each.
//
// Once per TTL, each session looks for sessions that have expired, removes them, and frees their rows. It also frees
// rows that name a session without a record. While a caller waits for a key, the session looks three times per TTL,
// and whenever a session can expire. No other process is needed for that. Callers that wait in the process that
// removes a session take its keys at once; those in other processes are woken when the first rows are free.
package claims
