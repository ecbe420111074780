// Package sim has no code but tests: a simulation of many replicas that compete
// for one lease, under faults that a seed decides, in virtual time.
//
// A world is one bubble of testing/synctest: two to five replicas with the real
// Lease and Coordinator over storetest.Mem and storetest.Faulty, a schedule that
// does things to them, and a judge who sees each write at the instant at which it
// lands. What the judge holds everybody to, and when he excuses an overlap, stands
// in judge_test.go, judge_job_test.go and liveness_test.go.
//
// What it cannot show, because a bubble has one clock and no way to stop a
// goroutine:
//
//   - A paused replica's store calls, checks and job steps stand still until it is
//     resumed, both before a request is sent and before its answer is seen. But
//     its timers fire while it is paused: what they do is seen by nobody until it
//     is resumed, for all that is seen passes those gates. A pause between two
//     instructions with no such gate between them is not modelled.
//   - The clock of a replica whose rate is wrong is the bubble's, with all of its
//     durations scaled, and with what it reads from the store scaled to match.
//     Constants of a few milliseconds in the library are not.
//   - Of a machine that is suspended only the trust goes by its own clocks; its other
//     timers fire in time, as those of a paused replica do.
//   - Mem is one lock: that the databases keep their contract under contention is
//     for storetest.Run and the stress tests to show.
//
// A seed decides the faults and when they come. It does not decide in which order
// goroutines run that are woken at the same instant, nor the library's jitter. So
// a seed that failed may pass: repeat it, as in
//
//	go test ./internal/verify/sim -run TestSimulation -sim.seed=123 -count=50
package sim
