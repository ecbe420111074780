package main

import "github.com/tenurelib/tenure/proof/model/lease"

// leaseScenarios are those of the lease itself.
func leaseScenarios() (all []scenario) {
	add := func(name string, change func(*leaseRules)) {
		r := leaseRules{processes: 2}
		change(&r)
		all = append(all, of("lease/"+name, r.model()))
	}
	add("safe/statements are answered at once", func(r *leaseRules) { r.fences = true })
	add("safe/only what a process has seen counts", func(r *leaseRules) { r.Observed, r.jumps = true, 1 })
	add("safe/the TTLs differ", func(r *leaseRules) { r.ttls[1] = leaseIs + 1 })
	add("safe/a statement is slow, and a clock loses a tick", func(r *leaseRules) { r.slow, r.drifts = 1, 1 })
	add("safe/two statements are slow, and one is lost or given up", func(r *leaseRules) { r.slow, r.lost = 2, 1 })
	add("safe/a process crashes", func(r *leaseRules) { r.slow, r.crashes = 1, 1 })
	add("safe/the lease is handed over by request", func(r *leaseRules) { r.handover, r.asks = true, 1 })
	add("safe/a handover is slow, and its answer lost", func(r *leaseRules) { r.handover, r.asks, r.slow, r.lost = true, 1, 1, 1 })
	add("safe/a job returns late", func(r *leaseRules) { r.fences, r.lates, r.slow = true, 1, 1 })
	add("safe/the table is made anew", func(r *leaseRules) { r.resets = 1 })
	add("safe/three processes", func(r *leaseRules) { r.processes = 3 })

	add("drop/L1: the trust ends a margin before the TTL", func(r *leaseRules) { r.TrustForTTL, r.drifts = true, 1 })
	add("drop/L1: the trust counts from before the statement was sent", func(r *leaseRules) { r.TrustFromAnswer, r.slow = true, 1 })
	add("drop/L2: a standby waits for the TTL", func(r *leaseRules) { r.StealAtOnce = true })
	add("drop/L2: the TTL is the one in the record", func(r *leaseRules) { r.StealByOwnTTL, r.ttls[1] = true, leaseIs+2 })
	add("drop/L2: a record is seen from the answer on", func(r *leaseRules) { r.SinceSent, r.Observed, r.slow = true, true, 1 })
	add("drop/L2: a record that has changed is seen anew", func(r *leaseRules) { r.SinceEver, r.Observed = true, true })
	add("drop/L2: an offer is for the one that it names", func(r *leaseRules) { r.TakeAnyOffer, r.handover, r.processes = true, true, 3 })
	add("drop/L3: the release follows the job", func(r *leaseRules) { r.ReleaseEarly = true })
	add("drop/L4: only the term's own record counts as its own", func(r *leaseRules) { r.TakeForOwn, r.slow, r.lost = true, 1, 1 })
	add("drop/L5: a token is above all that were seen", func(r *leaseRules) { r.RepeatTokens, r.resets = true, 1 })
	add("drop/a begin compares the version", func(r *leaseRules) { r.BlindBegin, r.slow = true, 1 })
	add("drop/a renewal compares the version", func(r *leaseRules) {
		r.BlindRenew, r.slow, r.onlySlow, r.lates, r.fences = true, 1, lease.Renew, 1, true
	})
	add("drop/a release compares the version", func(r *leaseRules) { r.BlindRelease, r.slow, r.lost = true, 1, 1 })
	add("drop/a deletion leaves its version behind", func(r *leaseRules) { r.NoTombstone = true })
	add("drop/a fenced write compares the payload", func(r *leaseRules) { r.FenceNothing, r.fences, r.lates = true, true, 1 })
	add("drop/a fenced write locks the record", func(r *leaseRules) { r.FenceWithoutLock, r.fences = true, true })

	add("hole/a clock loses more than the margin", func(r *leaseRules) { r.drifts = 2 })
	add("hole/the database's clock jumps ahead", func(r *leaseRules) { r.jumps = 1 })
	return all
}

// allLeaseFaults has all faults at once, for random walks.
var allLeaseFaults = leaseRules{processes: 3, handover: true, fences: true, leaseFaults: leaseFaults{slow: 6, lost: 4, crashes: 2, drifts: 1, lates: 1, asks: 2}}
