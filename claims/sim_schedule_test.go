package claims_test

import (
	"maps"
	"slices"
	"time"

	"github.com/tenurelib/tenure/internal/testkit"
)

// schedule makes events happen until the arena calms down. Some of the pauses between them are
// long enough for the processes to settle.
func (a *arena) schedule() {
	const settle = 4 // TTLs until no fault is left
	end, all := time.Now().Add((arenaTTLs-settle)*a.ttl), a.events()
	for {
		quiet := a.upTo(4 * a.ttl)
		if time.Until(end) < quiet {
			time.Sleep(time.Until(end) + settle*a.ttl)
			return
		}
		time.Sleep(quiet)
		a.happens(all)
	}
}

func (a *arena) upTo(most time.Duration) time.Duration {
	return testkit.Scale(most, float64(1+a.rng.IntN(1000))/1000/float64(int(1)<<a.rng.IntN(5)))
}

// event is something that can happen in an arena.
type event struct {
	weight int
	do     func(a *arena, h *host) (what string)
}

var events = []event{
	{25, func(a *arena, h *host) string {
		weather := testkit.Weathers[a.rng.IntN(len(testkit.Weathers))]
		h.turn(weather, "", a.upTo(3*a.ttl))
		return string(weather)
	}},
	{15, func(a *arena, h *host) string {
		weather, op := testkit.Weathers[a.rng.IntN(len(testkit.Weathers))], []string{"claims.take", "claims.take", "claims.free", "put", "delete", "claims.owned", "claims.look", "claims.sessions"}[a.rng.IntN(8)]
		h.turn(weather, op, a.upTo(3*a.ttl))
		return string(weather) + " of one kind of statement"
	}},
	{7, func(a *arena, _ *host) string {
		weather, d := testkit.Weathers[a.rng.IntN(len(testkit.Weathers))], a.upTo(2*a.ttl)
		for _, h := range a.hosts {
			h.turn(weather, "", d)
		}
		return string(weather) + " for all"
	}},
	{12, func(a *arena, h *host) string { h.pause(a.upTo(3*a.ttl), false); return "pause" }},
	{12, func(a *arena, h *host) string {
		down := a.upTo(2 * a.ttl)
		h.crash()
		a.later(down, h.start)
		return "crash"
	}},
	{8, func(a *arena, h *host) string { h.stop(2*a.ttl, a.upTo(a.ttl)); return "shutdown" }},
	{8, func(a *arena, _ *host) string {
		until := time.Now().Add(a.upTo(2 * a.ttl))
		a.locked(func() { a.busyUntil = until })
		a.line.Say("store", "its statements are slow for %v", time.Until(until))
		return "slow statements"
	}},
	{8, func(a *arena, _ *host) string { a.refuse(a.upTo(2 * a.ttl)); return "rows refused" }},
}

var (
	// An arena has only one of these kinds: a machine whose wall clock is set back while it is
	// suspended has no clock left that shows the time that has passed.
	wallEvent     = event{8, func(a *arena, h *host) string { h.setWall(); return "wall clock of a host set" }}
	suspendEvents = []event{
		{7, func(a *arena, h *host) string { h.pause(a.upTo(3*a.ttl), true); return "suspend" }},
		{6, func(a *arena, h *host) string { // for less than the TTL, and without a network afterwards
			d := a.upTo(a.ttl)
			h.turn(testkit.WeatherCut, "", d+a.upTo(2*a.ttl))
			h.pause(d, true)
			return "suspend, then a partition"
		}},
	}
	// Rows that are free for a day are deleted, so the clock must not go back as far.
	clockEvent = event{8, func(a *arena, _ *host) string {
		what, d := "database's clock set ahead", a.upTo([]time.Duration{a.ttl, 3 * a.ttl, 100 * time.Hour}[a.rng.IntN(3)])
		if a.rng.IntN(2) == 0 {
			what, d = "database's clock set back", -min(d, 20*time.Hour-a.judge.back)
		}
		a.line.Say("store", "its clock is set by %v", d)
		a.locked(func() { a.judge.back = max(0, a.judge.back-d) })
		a.clock.Jump(d)
		return what
	}}
	workerEvents = []event{
		{10, func(a *arena, _ *host) string {
			weather, h := testkit.Weathers[a.rng.IntN(len(testkit.Weathers))], a.remotes[a.rng.IntN(len(a.remotes))]
			h.turn(weather, "", a.upTo(3*a.ttl))
			return "worker's link: " + string(weather)
		}},
		{8, func(a *arena, _ *host) string {
			a.remotes[a.rng.IntN(len(a.remotes))].pause(a.upTo(3*a.ttl), false)
			return "pause of a worker"
		}},
		{6, func(a *arena, _ *host) string {
			a.remotes[a.rng.IntN(len(a.remotes))].crash()
			return "crash of a worker"
		}},
	}
	drainEvent   = event{15, func(a *arena, h *host) string { h.drainFor(a.upTo(6 * a.ttl)); return "drain" }}
	restoreEvent = event{6, func(a *arena, _ *host) string { a.restore(); return "tables restored" }}
	hintsEvent   = event{5, func(a *arena, _ *host) string {
		d := a.upTo(a.ttl)
		if a.rng.IntN(2) == 0 {
			a.locked(func() { a.db.hintsLost = true })
			a.later(d, func() { a.locked(func() { a.db.hintsLost = false }) })
			return "hints lost"
		}
		a.running.Go(func() { // as any client with the right to notify could
			for end := time.Now().Add(d); time.Now().Before(end) && a.sleep(d/50); {
				for _, key := range a.db.hub.Keys() {
					a.db.hub.Wake(key)
				}
			}
		})
		return "spurious hints"
	}}
)

// events returns the events that can happen in this arena.
func (a *arena) events() []event {
	all := slices.Clone(events)
	if a.setsWalls {
		all = append(all, wallEvent)
	} else {
		all = append(all, suspendEvents...)
	}
	if a.workers > 0 {
		all = append(all, workerEvents...)
	}
	for _, more := range []struct {
		on bool
		event
	}{{a.clockJumps, clockEvent}, {a.wakes, hintsEvent}, {a.restores, restoreEvent}, {a.drains, drainEvent}} {
		if more.on {
			all = append(all, more.event)
		}
	}
	return all
}

func (a *arena) happens(all []event) {
	h := a.hosts[a.rng.IntN(len(a.hosts))]
	sum := 0
	for _, e := range all {
		sum += e.weight
	}
	n := a.rng.IntN(sum)
	for _, e := range all {
		if n -= e.weight; n < 0 {
			what := e.do(a, h)
			a.locked(func() { testkit.Count(&a.judge.faults, what) })
			return
		}
	}
}

// refuse makes a trigger refuse to have some rows updated, or all, for a while.
func (a *arena) refuse(d time.Duration) {
	refused := make(map[string]bool)
	for _, id := range a.keys {
		refused[id] = a.rng.IntN(2) == 0
	}
	a.line.Say("store", "it refuses updates of some rows for %v", d)
	a.locked(func() { a.db.refused = refused })
	a.later(d, func() {
		a.locked(func() {
			if maps.Equal(a.db.refused, refused) {
				a.db.refused = nil
			}
		})
	})
}

// restore restores the tables to the state of some time ago.
func (a *arena) restore() {
	a.locked(func() {
		a.line.Say("store", "the tables are restored, with %d sessions and %d rows", len(a.saved.records), len(a.saved.rows))
		a.db.restore(a.saved)
		a.judge.restored()
	})
	a.later(a.upTo(2*a.ttl), func() { a.locked(func() { a.saved = a.db.backUp() }) })
}

// turn changes the weather of a host's link for a while, unless it has changed again meanwhile.
func (h *host) turn(to testkit.Weather, op string, d time.Duration) {
	if to != testkit.WeatherClear {
		h.a.line.Say(h.name, "link: %s for %v %s", to, d, op)
	}
	mine := 0
	h.change(func() {
		h.link, h.only = to, op
		h.links++
		mine = h.links
	})
	if to == testkit.WeatherClear {
		return
	}
	h.a.later(d, func() {
		h.change(func() {
			if h.links == mine {
				h.link = testkit.WeatherClear
				h.a.line.Say(h.name, "link: clear")
			}
		})
	})
}
