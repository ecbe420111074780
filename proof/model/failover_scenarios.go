package main

// failoverScenarios are those of a lease over failovers.
func failoverScenarios() (all []scenario) {
	add := func(name string, change func(*failoverRules)) {
		r := failoverRules{processes: 2, servers: 2, failoverFaults: failoverFaults{promotions: 1, begins: 3, slow: 1, strays: 1}}
		change(&r)
		all = append(all, of("failover/"+name, r.model()))
	}
	atOnce := func(r *failoverRules) { r.slow, r.strays = 0, 0 }
	three := func(r *failoverRules) { r.servers, r.promotions, r.slow, r.strays = 3, 2, 0, 0 }
	add("safe/statements are answered at once", atOnce)
	add("safe/one statement is slow or given up", func(*failoverRules) {})
	add("safe/a clock loses a tick", func(r *failoverRules) { r.drifts, r.strays = 1, 0 })
	add("safe/a process crashes", func(r *failoverRules) { r.crashes = 1 })
	add("safe/a server restarts", func(r *failoverRules) { r.restarts = 1 })
	add("safe/the new primary's clock is behind", func(r *failoverRules) { r.behind = 2 })
	add("safe/the new primary's clock is ahead", func(r *failoverRules) { r.behind = -2 })
	add("safe/only what a process has seen counts", func(r *failoverRules) { r.observed, r.crashes = true, 1 })
	add("safe/the release is requested", func(r *failoverRules) { r.asks = 1 })
	add("safe/the old primary comes back", func(r *failoverRules) { r.promotions, r.rejoins, r.strays = 2, 1, 0 })
	add("safe/two promotions of three servers", three)
	add("safe/three processes", func(r *failoverRules) { r.processes, r.strays = 3, 0 })

	add("drop/F1: a begin names the server", func(r *failoverRules) { r.without.beginNames = true })
	add("drop/F1: a renewal names the server", func(r *failoverRules) { r.without.renewNames = true })
	add("drop/F1: a server in recovery tells nothing", func(r *failoverRules) { r.without.recovery = true })
	add("drop/F1: what a process knows holds for one start of a server", func(r *failoverRules) { three(r); r.without.start = true })
	add("drop/F2: a process waits until the failover has settled", func(r *failoverRules) { r.without.wait = true })
	add("drop/F2: it waits also where there is no record", func(r *failoverRules) { r.without.waitForMissing = true })
	add("drop/F2: it waits also where an old record stands", func(r *failoverRules) { r.without.waitForOld = true })
	add("drop/F2: it waits from the mark on", func(r *failoverRules) { r.without.waitFromMark = true })
	add("drop/F2: a process that has just started waits as well", func(r *failoverRules) { r.without.markAge, r.crashes = true, 1 })
	add("drop/F3: a record is written again above all versions of its term", func(r *failoverRules) { three(r); r.without.aboveOwn = true })
	add("drop/F3: only a trusted term makes a record current", func(r *failoverRules) { r.without.validVouches = true })
	add("drop/F3: a request does not", func(r *failoverRules) { r.without.requestProves, r.asks = true, 1 })
	add("drop/F4: a fence names the server", func(r *failoverRules) { r.without.fenceNames = true })

	add("hole/the old primary goes on", func(r *failoverRules) { r.oldGoesOn = true })
	add("hole/a process has an older library", func(r *failoverRules) { r.olderLibrary = true })
	add("hole/the term that was lost had a longer TTL", func(r *failoverRules) { r.longTTL = true })
	add("hole/the new primary's clock is behind by more than a TTL", func(r *failoverRules) { atOnce(r); r.behind = 4 })
	add("hole/versions are ahead of the clock", func(r *failoverRules) { atOnce(r); r.ahead = 200 })
	return all
}

// allFailoverFaults has all faults at once, for random walks.
var allFailoverFaults = failoverRules{processes: 3, servers: 3, failoverFaults: failoverFaults{
	slow: 4, strays: 2, crashes: 2, drifts: 1, promotions: 3, restarts: 1, rejoins: 2, asks: 2, begins: 12,
}}
