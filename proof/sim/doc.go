// Package sim contains only tests: a simulation, in virtual time, of several replicas
// that compete for one lease under faults that are derived from a seed.
//
// A world is one bubble of testing/synctest: two to five replicas with the real
// Lease and Coordinator over storetest.Mem and storetest.Faulty, a schedule of
// faults and other events, and a judge that sees each write at the instant at which
// it lands. In some worlds the store has no clock, and every change is an event; in half of
// them the log and the trace of a replica block now and then, some for good. The
// judge checks these invariants:
//
//   - exclusion: no two valid terms and no two jobs at the same time; judge_test.go
//     says which overlaps are excused. A job is told to return while it still has the
//     time that it was promised.
//   - fencing: no fenced write lands after its term is over.
//   - tokens: they only rise, and a term never comes back.
//   - release: no record is released while its term's job runs.
//   - one job: a process runs one job at a time.
//   - liveness: if a replica can hold the lease, then within a bounded time one holds
//     it and works; a release wakes standbys promptly.
//   - stability: a term is neither lost nor left unrenewed while its replica is well,
//     and a replica reclaims its own orphaned record.
//   - drain: a replica that is drained ends its term as soon as its job has returned,
//     and takes nothing until it takes part again; drain_test.go says it in full.
//   - check, confirmations, fence predecessor, handover, copy, cause: the options and
//     the reported causes do what their documentation says.
//
// The simulation has limits, because a bubble has one clock and no way to stop a
// goroutine:
//
//   - A paused replica's store calls, checks and job steps block until it is
//     resumed, both before a request is sent and before its answer is seen. Its
//     timers, however, fire while it is paused. Their effects are invisible until it is
//     resumed, because everything visible passes one of those points. A pause
//     between two instructions without such a point between them is not modelled.
//   - A replica whose clock runs at a wrong rate uses the bubble's clock with all of its
//     durations scaled, and what it reads from the store is scaled to match. The
//     library's constants of a few milliseconds are not scaled.
//   - On a suspended machine only trust goes by the machine's own clocks; its other
//     timers fire on time, like those of a paused replica.
//   - Mem is a single lock. That the databases keep their contract under contention is
//     tested by storetest.Run and the stress tests.
//
// A seed determines the faults and their times. It does not determine the order of
// goroutines that are woken at the same instant, nor the library's jitter. A seed that
// failed may therefore pass: repeat it by the command in the last line of the output, as in
//
//	go -C proof test ./sim -run TestSimulation -sim.seed=123 -count=50
package sim
