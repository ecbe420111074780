package tenure

import "time"

// Trace is a set of funcs that a [Coordinator] calls as things happen, once it has
// noted them in its status and log. Any may be nil, and costs nothing then.
//
// Renewed and RenewalFailed are called by the goroutines that renew, one at a time,
// the others by that of [Coordinator.Run]: so two may be called at once. They must not
// panic, and must return quickly: the next renewal waits for the ones, the end of a
// term for the others. They may call the coordinator's methods, but not wait in Resign.
//
// Each term is Acquired once. At its end it is Lost, or Released, or first the one
// and then the other: where it was not renewed in time and could be released after all.
type Trace struct {
	// Attempt is called when an attempt of a standby to acquire has ended, after
	// so long. The error is nil where it has the lease now, and [ErrHeld], as a
	// rule, where another has it.
	Attempt func(took time.Duration, err error)

	// Acquired is called when a term has begun. The predecessor is the holder from
	// whom it was stolen, as it was read last before; nil: nobody held the lease.
	Acquired func(term *Term, predecessor *Holding)

	// Renewed is called when a renewal has succeeded. It took so long, and so much
	// trust had been left when its answer came.
	Renewed func(term *Term, took, trustLeft time.Duration)

	// RenewalFailed is called when a renewal has failed, or was not sent because
	// the replica is not fit to hold ([ErrUnhealthy]), and will be tried again.
	RenewalFailed func(term *Term, err error, trustLeft time.Duration)

	// Lost is called when the lease is another's or gone, when it was not renewed
	// in time, right before the job is told to return; or when it could not be
	// released after the job has returned, and will expire.
	Lost func(term *Term, cause error)

	// Released is called when the lease has been given back.
	Released func(term *Term, cause error)

	// JobStarted is called right before the job's funcs are. JobEnded is called
	// when they have returned, so long after they were told to, or the first of them
	// returned.
	JobStarted func(term *Term)
	JobEnded   func(term *Term, cause error, took time.Duration)

	// JobStuck is called when the job has not returned although its context
	// ended so long ago. The lease is no longer renewed, and will expire.
	JobStuck func(term *Term, since time.Duration)

	// HolderChanged is called when this replica finds that another holds the lease
	// than before, or itself; empty: nobody, as far as it knows.
	HolderChanged func(holder string)
}

// noTrace is what all coordinators without a trace share.
var noTrace Trace
