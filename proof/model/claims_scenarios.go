package main

// claimScenarios are those of claims over a failover.
func claimScenarios() (all []scenario) {
	add := func(name string, change func(*claimRules)) {
		r := claimRules{servers: 2, promotions: 1, begins: 3, reassertSession: true}
		change(&r)
		all = append(all, of("claims/"+name, r.model()))
	}
	add("safe/statements are answered at once", func(*claimRules) {})
	add("safe/one statement is slow", func(r *claimRules) { r.slow = 1 })
	add("safe/one statement is given up", func(r *claimRules) { r.slow, r.strays = 1, 1 })
	add("safe/a process crashes", func(r *claimRules) { r.crashes = 1 })
	add("safe/a server restarts", func(r *claimRules) { r.restarts = 1 })
	add("safe/the new primary's clock is behind", func(r *claimRules) { r.behind = 2 })
	add("safe/two promotions of three servers", func(r *claimRules) { r.servers, r.promotions = 3, 2 })
	add("safe/a lost session is not written again", func(r *claimRules) { r.reassertSession = false })

	add("drop/nothing is claimed before the failover has settled", func(r *claimRules) { r.without.wait = true })
	add("drop/a statement that claims names the server", func(r *claimRules) { r.without.takeNamesServer = true })
	add("drop/a renewal counts when the claim was compared", func(r *claimRules) { r.without.compare = true })
	add("drop/the comparison waits for statements that claim", func(r *claimRules) {
		r.without.turn, r.slow, r.onlySlow, r.begins = true, 1, take, 2
	})

	add("drop/a fence names the server", func(r *claimRules) { r.without.fenceNames = true })
	add("drop/what a failover has undone is freed before the renewal counts", func(r *claimRules) { r.without.undone = true })

	add("hole/the old primary goes on", func(r *claimRules) { r.oldGoesOn = true })
	add("hole/the new primary's clock is behind by more than a TTL", func(r *claimRules) { r.behind = 4 })
	return all
}

// allClaimFaults has all faults at once, for random walks.
var allClaimFaults = claimRules{
	servers: 3, promotions: 2, slow: 4, strays: 2, crashes: 1, restarts: 1, begins: 4, reassertSession: true,
}
