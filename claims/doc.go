// Package claims gives each of many things one owner: a tenant, a sandbox, an account. It
// costs one renewal per process, however many things the process owns.
//
// # Concepts
//
// A [Session] says that a process is alive. Its record is a lease like any other, which the
// process renews. A [Claim] is the right to one thing: a row that names the session that owns
// it, and a fencing token. A claim is never renewed; it is valid as long as the session's term
// is, unless it is released. [Keys] are the claims of one kind, by key. A [Queue] is a table of the
// application on whose rows sessions have claims, and a [Worker] takes its rows for one session.
//
// # What is guaranteed
//
//   - At any moment at most one session's claim on a key is valid, under the conditions that
//     package tenure names for the terms of a lease.
//   - A write that is fenced by a claim never commits after the key's next claim began,
//     whatever the pauses, clocks and partitions: see [Claim.Fence].
//   - The tokens of one key strictly increase.
//   - A key is freed only after the func that [Keys.Do] runs for it has returned. One [Session]
//     never runs two funcs for one key, even if it was lost and has begun anew. Two sessions of
//     one process are to each other like those of two processes.
//   - The keys of a crashed process can be claimed once its session expires: at most one TTL after
//     its last renewal if a caller is waiting. If the database's clock is set ahead, sessions look
//     expired, as leases do.
//
// # How it works
//
// A session begins with its record, under an ID that is never used again. A row changes owner
// only when it is free or its session no longer has a record. A session loses its record when it
// ends, after everything that it owned has stopped, or when another session removes it, under the
// rule by which a lease expires. A session that was removed while its process was paused is
// harmless: its trust had ended before, and rows that it writes late name a session without a record.
//
// Another process may go on with a session, by [tenure.Lease.Resume]. The process that began it
// seals the record before it closes, and frees nothing if the session goes on elsewhere.
//
// A session compares its claims with their rows once an hour, and whenever a statement was not
// answered or was refused, or the database may have gone back in time, as after a failover. It frees
// rows that name it and that it does not know, and ends claims whose rows say otherwise.
//
// Each session looks once per TTL for sessions that have expired, removes them and frees their
// rows, and for rows whose session has no record. While a caller waits for a key, it looks
// three times per TTL and when a session can expire. It needs no other process for that.
package claims
