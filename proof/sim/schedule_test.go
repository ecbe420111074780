package sim

import (
	"slices"
	"time"

	"github.com/tenurelib/tenure/internal/testkit"
)

// schedule makes events happen until the world is over. Some of the pauses between
// them are long enough for the replicas to settle.
func (w *world) schedule() {
	end, all := w.began.Add(worldTTLs*w.ttl), w.events()
	for {
		quiet := w.upTo(4 * w.ttl)
		if time.Until(end) < quiet {
			time.Sleep(time.Until(end))
			return
		}
		time.Sleep(quiet)
		w.happens(all)
	}
}

func (w *world) upTo(most time.Duration) time.Duration {
	return testkit.Scale(most, float64(1+w.rng.IntN(1000))/1000/float64(int(1)<<w.rng.IntN(5)))
}

// event is something that can happen in a world.
type event struct {
	weight int
	do     func(w *world, r *replica) (kind string)
}

var events = []event{
	{35, func(w *world, r *replica) string {
		weather := testkit.Weathers[w.rng.IntN(len(testkit.Weathers))]
		r.turn(weather, w.upTo(3*w.ttl))
		return string(weather)
	}},
	{7, func(w *world, _ *replica) string {
		weather, d := testkit.Weathers[w.rng.IntN(len(testkit.Weathers))], w.upTo(2*w.ttl)
		for _, r := range w.replicas {
			r.turn(weather, d)
		}
		return string(weather) + " for all"
	}},
	{7, func(w *world, r *replica) string {
		w.handoverInBadWeather(r)
		return "handover in bad weather, then a partition"
	}},
	{12, func(w *world, r *replica) string { r.pause(w.upTo(3*w.ttl), false); return "pause" }},
	{8, func(w *world, r *replica) string {
		down := w.upTo(2 * w.ttl)
		r.crash()
		w.later(down, r.start)
		return "crash"
	}},
	{8, func(w *world, r *replica) string { r.stop(3*w.ttl, w.upTo(w.ttl)); return "shutdown" }},
	{8, func(w *world, r *replica) string {
		r.resign()
		return "resignation"
	}},
	{6, func(w *world, _ *replica) string {
		to := ""
		if w.rng.IntN(2) == 0 {
			to = w.replicas[w.rng.IntN(len(w.replicas))].name
		}
		w.replicas[w.rng.IntN(len(w.replicas))].ask(to)
		return "request to release"
	}},
}

var (
	unfitEvent = event{10, func(w *world, r *replica) string {
		r.ail([]string{"fails", "hangs", "deaf"}[w.rng.IntN(3)], w.upTo(2*w.ttl))
		return "unfit"
	}}
	// A world has only one of these kinds: a machine whose wall clock is set back while it
	// is suspended has no clock left that shows the time that has passed.
	wallEvent     = event{8, func(w *world, r *replica) string { r.setWall(); return "wall clock of a replica set" }}
	suspendEvents = []event{
		{7, func(w *world, r *replica) string { r.pause(w.upTo(3*w.ttl), true); return "suspend" }},
		{6, func(w *world, r *replica) string { // for less than the TTL, and without a network afterwards
			d := w.upTo(w.ttl)
			r.turn(testkit.WeatherCut, d+w.upTo(2*w.ttl))
			r.pause(d, true)
			return "suspend, then a partition"
		}},
	}
	clockEvent = event{8, func(w *world, _ *replica) string {
		kind, d := "database's clock set ahead", w.upTo([]time.Duration{w.ttl, 3 * w.ttl, 100 * time.Hour}[w.rng.IntN(3)])
		if w.rng.IntN(2) == 0 {
			kind, d = "database's clock set back", -d
		}
		w.line.Say("store", "its clock is set by %v", d)
		w.locked(func() {
			w.journal.clock.Jump(d)
			w.judge.noteRefusals()
		})
		return kind
	}}
	copyEvent    = event{3, func(w *world, _ *replica) string { w.copy(); return "renewals by a copy" }}
	handEvent    = event{4, func(w *world, _ *replica) string { w.meddle(); return "record meddled with by hand" }}
	restoreEvent = event{4, func(w *world, r *replica) string { return w.restore(r) }}
	drainEvents  = []event{
		{12, func(w *world, r *replica) string { r.mark(w.upTo(6 * w.ttl)); return "mark as drained" }},
		{4, func(w *world, _ *replica) string {
			w.replicas[w.rng.IntN(len(w.replicas))].mark(0)
			return "mark removed"
		}},
		{5, func(w *world, r *replica) string { r.drainsItself(w.upTo(3 * w.ttl)); return "drains itself" }},
	}
	hintsEvent = event{4, func(w *world, _ *replica) string {
		d := w.upTo(w.ttl)
		if w.rng.IntN(2) == 0 {
			w.locked(func() { w.journal.loseHints(true) })
			w.later(d, func() { w.locked(func() { w.journal.loseHints(false) }) })
			return "hints lost"
		}
		w.locked(func() { w.judge.floodedUntil = time.Now().Add(d) })
		w.journal.flood(d)
		return "spurious hints"
	}}
)

// events returns the events that can happen in this world.
func (w *world) events() []event {
	all := slices.Clone(events)
	if w.setsWalls {
		all = append(all, wallEvent)
	} else {
		all = append(all, suspendEvents...)
	}
	if w.drains {
		all = append(all, drainEvents...)
	}
	for _, more := range []struct {
		on bool
		event
	}{{w.checks, unfitEvent}, {w.clockJumps, clockEvent}, {w.operator, handEvent}, {w.wakes, hintsEvent}, {w.restores, restoreEvent}, {w.copies, copyEvent}} {
		if more.on {
			all = append(all, more.event)
		}
	}
	return all
}

func (w *world) happens(all []event) {
	r := w.replicas[w.rng.IntN(len(w.replicas))]
	w.locked(func() { // faults of the holder matter most
		if t := w.judge.standing; t != nil && t.life != nil && w.rng.IntN(3) > 0 {
			r = t.life.r
		}
	})
	sum := 0
	for _, e := range all {
		sum += e.weight
	}
	n := w.rng.IntN(sum)
	for _, e := range all {
		if n -= e.weight; n < 0 {
			kind := e.do(w, r)
			w.locked(func() { testkit.Count(&w.judge.faults, kind) })
			return
		}
	}
}

// handoverInBadWeather lets a term begin with a late answer, and then cuts its holder
// off before a renewal.
func (w *world) handoverInBadWeather(r *replica) {
	weather := []testkit.Weather{testkit.WeatherSlow, testkit.WeatherLate}[w.rng.IntN(2)]
	for _, r := range w.replicas {
		r.turn(weather, w.ttl/4)
	}
	r.resign()
	w.later(w.ttl/4, func() {
		var next *replica
		w.locked(func() {
			if t := w.judge.standing; t != nil && t.life != nil {
				next = t.life.r
			}
		})
		if next != nil {
			next.turn(testkit.WeatherCut, 2*w.ttl)
		}
	})
}

// turn changes the weather of a replica's link for a while.
func (r *replica) turn(to testkit.Weather, d time.Duration) {
	r.w.line.Say(r.name, "link: %s for %v", to, d)
	r.spell(&r.links, d, func() { r.link = to }, func() {
		r.link = testkit.WeatherClear
		r.w.line.Say(r.name, "link: clear")
	})
}

// ail makes a replica's checks fail for a while.
func (r *replica) ail(how string, d time.Duration) {
	r.w.line.Say(r.name, "is unfit for %v: its check %s", d, how)
	r.spell(&r.ailments, d, func() { r.unfit = how }, func() {
		r.unfit = ""
		r.w.line.Say(r.name, "is fit again")
	})
}

// spell does something to a replica and undoes it after a while, unless it was done
// again meanwhile; n counts how often it was.
func (r *replica) spell(n *int, d time.Duration, do, undo func()) {
	mine := 0
	r.change(func() {
		do()
		*n++
		mine = *n
	})
	r.w.later(d, func() {
		r.change(func() {
			if *n == mine {
				undo()
			}
		})
	})
}
